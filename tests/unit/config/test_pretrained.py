import json

import huggingface_hub
import pytest

from elias import load_corpus
from elias.config import EliasConfig, pretrained
from elias.config.pretrained import count_tokens, pretrained_sizes
from elias.data.corpus import resolve_config
from elias.errors import ModelError
from tiny_bert import MOST_TOKENS, save_tiny_bert

BERT = {"model_type": "bert", "max_position_embeddings": 40, "pad_token_id": 0}


def save(folder, settings=None, pooling=None):
    """Write the files of a model that the configuration reads."""
    (folder / "1_Pooling").mkdir()
    if settings is not None:
        (folder / "config.json").write_text(json.dumps(settings))
    if pooling is not None:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return str(folder)


def resolved_encoder(model, *, n_bytes=10_000, **changes):
    config = EliasConfig().with_encoder(model).override(changes)
    return config.resolve(1000, 50, n_bytes).encoder


@pytest.mark.parametrize(
    ("written", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "mean"),
        ([], "mean"),
        (None, "mean"),
    ],
)
def test_pooling_is_that_of_the_models_files(written, pooling, tmp_path):
    assert resolved_encoder(save(tmp_path, BERT, written)).pooling == pooling


@pytest.mark.parametrize(
    ("written", "pooling"), [(None, "cls"), ({"pooling_mode": "mean"}, "mean")]
)
def test_without_a_pooling_file_the_pooling_is_that_of_the_models_classifier(
    written, pooling, tmp_path
):
    model = save(tmp_path, BERT | {"classifier_pooling": "cls"}, written)

    assert resolved_encoder(model).pooling == pooling


def test_a_given_pooling_wins_over_the_models_files(tmp_path):
    model = save(tmp_path, BERT, {"pooling_mode": "cls"})

    assert resolved_encoder(model, **{"encoder.pooling": "mean"}).pooling == "mean"


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        (BERT, 40),
        (BERT | {"model_type": "xlm-roberta", "pad_token_id": 1}, 38),
        (BERT | {"max_position_embeddings": 512}, 256),
        ({"model_type": "bert"}, 256),
        (None, 256),
    ],
)
def test_a_derived_length_is_at_most_what_the_model_reads(settings, length, tmp_path):
    assert resolved_encoder(save(tmp_path, settings)).max_length == length


def test_a_given_length_is_not_changed(tmp_path):
    encoder = resolved_encoder(save(tmp_path, BERT), **{"encoder.max_length": 64})

    assert encoder.max_length == 64  # refused when the model is loaded


def test_tokens_are_counted_by_the_tokenizer_of_the_model(tmp_path):
    texts = ["red cod", "herring in the north sea " * 10, "incomprehensibilities " * 10]
    model = save_tiny_bert(tmp_path / "bert")
    corpus = load_corpus(texts=[texts[2]] * 50, labels=[["a"], ["b"]] * 25, test_size=0)

    assert count_tokens(model, texts) == [4, 62, 12]
    by_tokens = resolve_config(EliasConfig().with_encoder(model), corpus)
    assert by_tokens.encoder.max_length == 32
    (tmp_path / "bert" / "tokenizer.json").write_text("{")
    assert count_tokens(model, texts) is None
    by_bytes = resolve_config(EliasConfig().with_encoder(model), corpus)
    assert by_bytes.encoder.max_length == MOST_TOKENS


def test_the_sizes_of_a_model_are_those_of_its_files(tmp_path):
    named = {"n_layers": 6, "dim": 768, "vocab_size": 30_522, "model_type": "distilbert"}

    sizes = pretrained_sizes(save(tmp_path, named))

    assert sizes is not None
    assert sizes == (6, 768, pytest.approx(66_000_000, rel=0.01))


def test_a_damaged_file_is_named(tmp_path):
    model = save(tmp_path, BERT)
    (tmp_path / "1_Pooling" / "config.json").write_text("{")

    with pytest.raises(ModelError, match=r"1_Pooling/config.json: cannot be read \("):
        resolved_encoder(model)


def test_a_folder_that_is_missing_is_refused():
    with pytest.raises(ModelError, match="no such folder"):
        resolved_encoder("./none")


def test_a_file_in_the_cache_of_the_hub_is_not_downloaded_again(tmp_path, monkeypatch):
    folder = save(tmp_path, BERT, {"pooling_mode": "cls"})
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda _, name: f"{folder}/{name}"
    )
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: "none")

    encoder = resolved_encoder("user/model")

    assert (encoder.pooling, encoder.max_length) == ("cls", 40)


def test_a_file_that_is_not_in_the_cache_is_downloaded(tmp_path, monkeypatch):
    folder = save(tmp_path, BERT, {"pooling_mode": "cls"})
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda _: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, name: f"{folder}/{name}")

    assert resolved_encoder("user/model").pooling == "cls"


def test_a_hub_that_cannot_be_reached_leaves_the_defaults(monkeypatch):
    def refuse(_):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)

    encoder = resolved_encoder("nobody/nothing-such")

    assert (encoder.pooling, encoder.max_length) == ("mean", 256)


def test_a_bag_asks_for_no_files(monkeypatch):
    monkeypatch.delattr(pretrained, "_read")

    assert EliasConfig().resolve(1000, 50).encoder.pooling == "mean"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"hidden_size": 384}, 2e-4), ({"dim": 768}, 1e-4), ({"d_model": 96}, 2e-4), ({}, 2e-4)],
)
def test_wider_models_have_lower_learning_rates(tmp_path, settings, expected):
    (tmp_path / "config.json").write_text(json.dumps(BERT | settings))
    config = EliasConfig().with_encoder(f"{tmp_path}/")

    stage = config.resolve(n_points=10_000, n_labels=5_000).stages[0]

    assert stage.encoder_lr == pytest.approx(expected)
