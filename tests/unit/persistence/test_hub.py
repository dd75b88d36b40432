"""The model card."""

from pathlib import Path

import numpy as np

from elias.config import EliasConfig
from elias.persistence.hub import model_card

METADATA = {
    "source": "fish.csv",
    "metrics": {"stage2": {"test": {"P@1": 71.5, "PSP@1": np.float64(3), "R@10": float("nan")}}},
    "data": {
        "labels": np.int64(12),
        "splits": {
            "train": {"points": 1000, "words_mean": 7.25, "near_duplicate_groups": 3},
            "test": {"points": 200, "words_mean": None, "near_duplicate_groups": 1},
        },
    },
    "probabilities": {
        "at_threshold": {"validation": {"micro-F1": 55.23}, "test": {"micro-F1": 56.55}},
        "errors": {"test": {"before": 7.24, "after": 0.5}},
        "f1": {"threshold": 0.28, "keep_best": True, "F1": 55.23},
    },
}


def test_the_card_shows_metrics_data_and_how_to_use_the_model():
    card = model_card(EliasConfig().resolve(1000, 3), ["cod", "a `tick`|", "x"], METADATA)

    front = card.split("---\n")[1]
    assert "library_name: elias" in front
    assert "out of 3:" in card
    assert "such as `cod`, `a 'tick'|`, `x`" in card
    assert "- Trained on: `fish.csv`\n" in card
    assert "|  | P@1 | PSP@1 |" in card
    assert "| stage2, test | 71.50 | 3.00 |" in card
    assert "Elias.from_pretrained" in card
    assert "- torch 2." in card


def test_the_card_says_in_plain_words_what_readers_need_of_each_split():
    card = model_card(EliasConfig().resolve(1000, 1), ["cod"], METADATA)

    data = "|  | train | test |\n| --- | --- | --- |\n| points | 1,000 | 200 |\n"
    assert f"## Data\n\n{data}| words per text, mean | 7.25 |  |\n\n" in card
    assert "|  | validation | test |\n" in card
    assert "| F1 at this threshold | 55.23 | 56.55 |\n" in card
    assert "| calibration error of the best five labels |  | 0.50 |\n" in card
    assert not [key for key in ("at_threshold", "near", "micro", "count") if key in card]


def test_a_card_without_metadata_has_no_empty_tables():
    card = model_card(EliasConfig().resolve(1000, 1), ["cod"], {})

    assert "Trained on" not in card
    assert "Results" not in card
    assert "## Data" not in card


def test_the_card_names_the_transformer_it_was_fine_tuned_from():
    transformer = {"encoder.model": str(Path("some") / "bert")}
    config = EliasConfig().override(transformer).resolve(1000, 1)

    card = model_card(config, ["cod"], {})

    assert "transformer `some/bert`, fine-tuned, mean pooling" in card
    assert "licences of the training texts and of `some/bert`." in card
