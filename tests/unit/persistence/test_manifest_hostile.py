"""Saved models made to do harm: refused in one line, without running, or reading, too much."""

import json
import os
import struct
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers

from elias.config import EliasConfig
from elias.errors import ModelError
from elias.model.elias import EliasModel
from elias.model.encoder import build_encoder
from elias.model.graph import LabelGraph, partition_edges
from elias.persistence.manifest import manifest_digest
from saved_models import as_old_format, load, reseal, save
from tiny_bert import save_tiny_bert

N_LABELS = 6
MEBIBYTE = 1 << 20


def saved_model(folder, **encoder):
    changes = {f"encoder.{key}": value for key, value in encoder.items()}
    sizes = {"encoder.dim": 8, "encoder.hidden_dim": 8, "index.n_clusters": 2}
    config = EliasConfig().override(sizes | changes).resolve(100, N_LABELS)
    model = EliasModel(
        build_encoder(config.encoder, ["red cod", "red tape"], None),
        LabelGraph(partition_edges(torch.arange(N_LABELS) % 2, 2), N_LABELS, 2.0),
        3.0,
    )
    names = [f"label {i}" for i in range(N_LABELS)]
    return save(folder, model, config, names)


@pytest.fixture
def bag(tmp_path):
    folder = saved_model(tmp_path / "model")
    load(folder)  # what torch imports on the way is not to be counted below
    return folder


@pytest.fixture
def bert(tmp_path):
    return saved_model(tmp_path / "model", model=save_tiny_bert(tmp_path / "bert"))


def refusal(folder):
    """Return the refusal of a folder whose checksums fit its files."""
    reseal(folder)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError) as caught:
            load(folder)
        assert tracemalloc.get_traced_memory()[1] < 64 * MEBIBYTE
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change(path, **changes):
    tree = json.loads(path.read_text(encoding="utf8")) | changes
    if "sha256" in tree:
        tree["sha256"] = manifest_digest(tree)
    path.write_text(json.dumps(tree), encoding="utf8")


def weights(header, data=b"\0" * 64, length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def tensor(shape=(4,), begin=0, end=16, dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        weights({}, length=2**63),
        weights({}, length=10**9),
        weights({"a": tensor(end=10**12)}),
        weights({"a": tensor(begin=48, end=64), "b": tensor(begin=0, end=16)}),
        weights({"a": tensor(), "b": tensor()}),
        weights({"a": tensor(shape=(2**62, 2**62))}),
        weights({"a": tensor(shape=(-4,))}),
        weights({"a": tensor(begin=16, end=0)}),
        weights({"a": tensor(dtype="PICKLE")}),
        weights(b'{"a": ' * 10_000 + b"1" + b"}" * 10_000),
        weights(b'{"__metadata__": {"x": ' + b'"' + b"y" * 1000 + b'"'),
        weights([1, 2]),
        b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    ],
)
def test_weights_with_a_wrong_header_are_refused(bag, content):
    (bag / "model.safetensors").write_bytes(content)

    assert "model.safetensors" in refusal(bag)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_labels": 10**18},
        {"n_clusters": 10**18},
        {"n_clusters": 10**30},
        {"n_edges": 10**18},
        {"n_edges": 10**12},
        {"alpha": 1e400},
        {"beta": -1.0},
    ],
)
def test_sizes_that_no_model_has_are_refused(bag, changes):
    change(bag / "config.json", **changes)

    refusal(bag)


@pytest.mark.parametrize("key", ["dim", "hidden_dim"])
@pytest.mark.parametrize("value", [10**9, 10**18, 10**30])
def test_an_encoder_of_absurd_width_is_refused(bag, key, value):
    path = bag / "config.json"
    tree = json.loads(path.read_text(encoding="utf8"))
    tree["config"]["encoder"][key] = value
    path.write_text(json.dumps(tree), encoding="utf8")

    refusal(bag)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": -1},
        {"hidden_size": 10**12},
        {"hidden_size": 0},
        {"hidden_size": "wide"},
        {"vocab_size": 10**12},
        {"vocab_size": -5},
        {"max_position_embeddings": 10**12},
        {"num_attention_heads": 0},
        {"model_type": "../../etc/passwd"},
        {"model_type": None},
        {"hidden_act": "__import__('os').abort"},
    ],
)
def test_an_absurd_transformer_is_refused(bert, changes):
    change(bert / "encoder" / "config.json", **changes)

    refusal(bert)


def test_code_beside_a_model_is_never_run(bert, tmp_path):
    witness = tmp_path / "was-run"
    code = f"open({str(witness)!r}, 'w').close()\nclass Model: pass\nclass Config: pass\n"
    (bert / "encoder" / "modeling_evil.py").write_text(code)
    (bert / "encoder" / "configuration_evil.py").write_text(code)
    change(
        bert / "encoder" / "config.json",
        auto_map={
            "AutoConfig": "configuration_evil.Config",
            "AutoModel": "modeling_evil.Model",
        },
    )

    reseal(bert)
    load(bert)

    assert not witness.exists()
    change(bert / "encoder" / "config.json", model_type="evil")
    refusal(bert)
    assert not witness.exists()
    assert not any("evil" in name for name in sys.modules)


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}',
        '{"version": "9.9"}',
        '{"version": "1.0", "model": {"type": "WordPiece", "vocab": {"a": -1}}}',
        '{"version": "1.0", "model": {"type": "WordPiece", "vocab": {"a": 99999999}}}',
        "null",
        "\0",
    ],
)
def test_an_absurd_tokenizer_is_refused(bert, content):
    (bert / "encoder" / "tokenizer.json").write_text(content)

    refusal(bert)


def test_a_tokenizer_that_fails_on_a_text_is_reported_in_one_line(bert):
    path = bert / "encoder" / "tokenizer.json"
    tree = json.loads(path.read_text(encoding="utf8"))
    tree["model"]["unk_token"] = "[NONE]"
    path.write_text(json.dumps(tree), encoding="utf8")
    reseal(bert)
    encoder = load(bert).model.encoder

    with pytest.raises(ModelError, match="tokenizer cannot read a text"):
        encoder.tokenize(["\u4e2d\u4e2d unheard-of \U0001f600"])


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_kernel_from_elsewhere_is_refused(bert, key):
    change(bert / "encoder" / "config.json", **{key: "kernels-community/flash-attn"})

    assert "'kernels-community/flash-attn', not one of eager, sdpa" in refusal(bert)


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Sequence([normalizers.Replace("a", "a" * 10)] * 999),
        normalizers.Sequence([normalizers.Sequence([normalizers.Replace(Regex("x*"), "aa")])] * 9),
        normalizers.Replace(Regex("(?~ab)"), "x" * 200),
        normalizers.Prepend("a" * 200),
    ],
)
def test_a_tokenizer_that_blows_up_texts_is_refused(bert, normalizer):
    path = str(bert / "encoder" / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.normalizer = normalizer
    tokenizer.save(path)

    assert "or more times longer" in refusal(bert)


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Sequence([normalizers.Replace(Regex(r"\s+"), " ")] * 20),
        normalizers.Sequence([normalizers.Replace("``", '"'), normalizers.Replace(" ", "▁")]),
        normalizers.Sequence([normalizers.NFKD(), normalizers.Prepend("▁")]),
    ],
)
def test_the_normalizers_of_published_tokenizers_are_accepted(bert, normalizer):
    path = str(bert / "encoder" / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.normalizer = normalizer
    tokenizer.save(path)
    reseal(bert)

    load(bert)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", ["labels.tsv", "config.json", "vocabulary.txt"])
def test_a_pipe_or_device_in_a_model_is_refused_at_once(bag, name, old):
    if old:
        as_old_format(bag)
        name = name.replace("tsv", "txt")
    (bag / name).unlink()
    os.mkfifo(bag / name)

    with pytest.raises(ModelError, match=f"{name}"):
        load(bag)
    (bag / name).unlink()
    (bag / name).symlink_to("/dev/zero")
    with pytest.raises(ModelError, match=f"{name}"):
        load(bag)


@pytest.mark.parametrize("changes", [{"word_ngrams": 10**9}, {"char_ngrams": [3, 10**9]}])
def test_an_n_gram_of_absurd_length_is_refused(bag, changes):
    tree = json.loads((bag / "config.json").read_text(encoding="utf8"))
    change(bag / "config.json", encoder=tree["encoder"] | changes)

    assert f"{next(iter(changes))} is" in refusal(bag)


@pytest.mark.parametrize(
    "files",
    [
        None,
        [],
        {"model.safetensors": None},
        {"model.safetensors": {}},
        {"../model/model.safetensors": {"size": 1, "sha256": ""}},
        {"/etc/passwd": {"size": 1, "sha256": ""}},
    ],
)
def test_a_list_of_files_that_makes_no_sense_is_refused(bag, files):
    change(bag / "config.json", files=files)

    with pytest.raises(ModelError, match=r"files is|damaged|not listed"):
        load(bag)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "labels.txt"])
@settings(max_examples=40)
@given(position=st.floats(0, 1), new=st.binary(min_size=1, max_size=4))
def test_a_model_with_some_bytes_changed_is_loaded_or_refused(
    tmp_path_factory, name, position, new
):
    root = tmp_path_factory.getbasetemp() / "fuzzed-model"
    if not root.exists():
        as_old_format(saved_model(root))  # no checksums: the checks behind them are tested
    path = root / name
    whole = path.read_bytes()
    at = int(position * len(whole))
    path.write_bytes(whole[:at] + new + whole[at + len(new) :])
    message = ""
    try:
        loaded = load(root)
        assert np.isfinite(loaded.model.labels.weight.detach().numpy()).all()
    except ModelError as error:
        message = str(error)
    finally:
        path.write_bytes(whole)

    assert "\n" not in message
