"""`train` takes a corpus, a table, or lists, and warns of corpora that teach nothing."""

import logging
import re
from pathlib import Path

import pytest
import torch

from elias import EliasConfig, load_corpus, train
from elias.distributed import SingleProcess
from elias.errors import ConfigError
from elias.training.train import check_world, encoder_hint

CONFIG = EliasConfig().override(
    {"encoder.dim": 8, "stages.stage1.epochs": 1, "stages.stage2.epochs": 1}
)
TEXTS = [f"{word} number {i}" for i in range(20) for word in ("cod", "wine")]
LABELS = [["fish"], ["drink", "law"]] * 20


def scores(model):
    return model.predict(["cod and wine"]).scores.tolist()


def test_a_corpus_lists_and_columns_give_the_same_model():
    corpus = load_corpus(texts=TEXTS, labels=LABELS, test_size=0)

    expected = scores(train(corpus, CONFIG))

    assert scores(train(texts=TEXTS, labels=LABELS, config=CONFIG)) == expected
    with pytest.warns(DeprecationWarning, match=r"is now train\(corpus, config\)"):
        assert scores(train(CONFIG, corpus)) == expected


def test_a_table_is_loaded_and_the_configuration_is_optional(tmp_path):
    run = tmp_path / "run"

    model = train({"text": TEXTS, "tags": LABELS}, out=run, overwrite=True)
    again = train({"text": TEXTS, "tags": LABELS}, None, run, overwrite=True)

    assert model.label_names == ["drink", "fish", "law"]
    assert scores(again) == scores(model)


def test_a_call_without_data_or_with_another_configuration_is_refused():
    with pytest.raises(ConfigError, match="either a corpus, or texts= and labels="):
        train(config=CONFIG)
    with pytest.raises(ConfigError, match="config is 'mesh-titles'; give an EliasConfig"):
        train({"text": TEXTS, "tags": LABELS}, "mesh-titles")


def test_compact_labels_with_a_graph_are_refused_without_a_gpu():
    compact = CONFIG.override({"index.label_storage": "compact"})

    with pytest.raises(ConfigError, match=r"index\.label_storage is 'compact', which needs a GPU"):
        check_world(compact, SingleProcess())


@pytest.mark.parametrize(
    ("texts", "labels", "warning"),
    [
        (["a cod", "a wine"], [["x"], ["x"]], "only one label"),
        (["a cod"], [["x", "y"]], "only one training point"),
        (["a cod"] * 4, [["x"], ["y"]] * 2, "all training texts are the same"),
        (["a cod", " "] * 2, [["x"], ["y"]] * 2, "50% of the training texts are empty"),
    ],
)
def test_a_corpus_that_teaches_nothing_is_trained_with_a_warning(caplog, texts, labels, warning):
    with caplog.at_level(logging.WARNING):
        model = train(texts=texts, labels=labels, config=CONFIG)

    assert warning in caplog.text
    assert model.predict("a cod").labels[0] in {"x", "y"}


def test_on_a_gpu_the_gain_of_a_pretrained_encoder_is_that_of_the_results():
    corpus = load_corpus(texts=TEXTS, labels=LABELS, test_size=0)
    bag = CONFIG.resolve(40, 3)
    results = (Path(__file__).parents[3] / "docs/reference/results.md").read_text(encoding="utf8")
    rows = re.findall(r"\| \*\*\+ label names\*\* \|.*", results)[:2]
    (bag_mesh, bag_eurlex), (mesh, eurlex) = (
        re.findall(r"\*\*([\d.]+) / ", row)[:2] for row in rows
    )

    hint = encoder_hint(bag, corpus, torch.device("cuda"))

    assert hint is not None
    assert f"P@1 {float(mesh):.1f} instead of {float(bag_mesh):.1f} on mesh-titles" in hint
    assert f"{float(eurlex):.1f} instead of {float(bag_eurlex):.1f} on eurlex-mini" in hint
    assert encoder_hint(bag, corpus, torch.device("cpu")) is None
