"""Training from disk: the same model, and what is set up from a sample of the points."""

import numpy as np
import pytest
import torch

from elias import EliasConfig, load_corpus, train
from elias.data import convert
from elias.data.splits import sample_setup_points
from elias.data.synthetic import synthetic_corpus


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "corpus.jsonl"
    convert(synthetic_corpus(n_points=300, n_labels=30), path, "jsonl")
    return path


def config(**changes):
    tiny = {
        "encoder.dim": 16,
        "encoder.hidden_dim": 16,
        "index.kind": "graph",
        "stages.stage1.epochs": 1,
        "stages.stage2.epochs": 1,
        "rerank.enabled": False,
    }
    return EliasConfig().override(tiny | changes)


def test_a_corpus_on_disk_trains_the_same_model(table):
    memory = train(load_corpus(table, on_disk="off"), config(), device="cpu")
    disk = train(load_corpus(table, on_disk="on"), config(), device="cpu")

    assert disk.metadata["corpus"] == memory.metadata["corpus"]
    assert disk.metadata["data"] == memory.metadata["data"]
    weights = disk.model.state_dict()
    for name, weight in memory.model.state_dict().items():
        assert torch.equal(weights[name], weight), name


def test_features_on_disk_train_the_same_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "data.txt"
    rows = [f"{i % 9} {i % 9}:1 {9 + i % 5}:0.5 {14 + i % 4}:0.2" for i in range(200)]
    path.write_text("\n".join(["200 18 9", *rows]) + "\n")
    read = {how: load_corpus(path, on_disk=how) for how in ("off", "on")}
    models = {how: train(corpus, config(), device="cpu") for how, corpus in read.items()}

    assert read["on"].train.on_disk
    weights = models["on"].model.state_dict()
    for name, weight in models["off"].model.state_dict().items():
        assert torch.equal(weights[name], weight), name


def test_initialisation_can_use_a_sample_of_the_points(table):
    corpus = load_corpus(table, on_disk="on")
    some = config(**{"data.setup_points": 50})

    chosen = sample_setup_points(corpus.train, some)
    model = train(corpus, some, device="cpu")

    assert 50 <= len(chosen) < 100
    assert set(corpus.train.labels[chosen].indices) == set(corpus.train.labels.indices)
    whole = train(corpus, config(), device="cpu")
    assert len(model.model.encoder.vectors) < len(whole.model.encoder.vectors)
    assert np.isfinite(model.metadata["metrics"]["stage2"]["test"]["P@1"])


def test_initialisation_of_a_corpus_in_memory_uses_all_points(table):
    corpus = load_corpus(table, on_disk="off")

    assert sample_setup_points(corpus.train, config()) is None
    assert sample_setup_points(corpus.train, config(**{"data.setup_points": 10**9})) is None
