"""A dry run estimates the memory and the time of training, and changes nothing."""

from dataclasses import replace

import pytest
import torch

from elias import EliasConfig, load_corpus
from elias.data.synthetic import synthetic_corpus
from elias.training import contrastive, dry_run, memory
from elias.training.dry_run import _words_per_text, estimate_run
from elias.training.memory import Capacity, resident_bytes

CPU = torch.device("cpu")
STAGES = ("stage1", "stage2")


def config(batch_size=32):
    tiny = {"encoder.dim": 16, "encoder.hidden_dim": 24, "rerank.enabled": False}
    for name in STAGES:
        tiny |= {f"stages.{name}.epochs": 1, f"stages.{name}.batch_size": batch_size}
        tiny |= {f"stages.{name}.score_all": False}
    return EliasConfig().override(tiny)


def test_a_dry_run_estimates_memory_and_time_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    corpus = synthetic_corpus(n_points=200, n_labels=20)

    estimate = estimate_run(config().resolve(len(corpus.train), 20), corpus, CPU)

    assert set(estimate.epoch_seconds) == set(STAGES)
    assert all(seconds > 0 for seconds in estimate.epoch_seconds.values())
    assert estimate.n_steps["stage1"] >= 5
    assert estimate.total_seconds >= sum(estimate.epoch_seconds.values())
    assert estimate.memory.host_total > resident_bytes() // 2
    assert not (tmp_path / "cache").exists()


def test_the_time_of_stage_0_is_estimated_where_names_share_words_with_texts():
    texts = [f"notes on {name} number {i}" for i in range(50) for name in ("cod", "oil", "gas")]
    corpus = load_corpus(texts=texts, labels=[["cod"], ["oil"], ["gas"]] * 50, test_size=0)
    graph = config().override({"index.kind": "graph"})
    resolved = graph.resolve(len(corpus.train), 3)

    with_names = estimate_run(resolved, corpus, CPU)
    codes = replace(corpus, label_names=["x1.5", "x2.5", "x3.5"])
    without = estimate_run(resolved, codes, CPU)

    epochs = sum(with_names.epoch_seconds.values())
    assert with_names.contrast_seconds > 0
    assert with_names.total_seconds == pytest.approx(with_names.contrast_seconds + epochs)
    assert without.contrast_seconds == 0


@pytest.mark.parametrize(("n_paired", "is_trained"), [(20, True), (4, False)])
def test_a_dry_run_counts_the_points_of_a_label_beyond_its_sample(
    n_paired, is_trained, monkeypatch
):
    monkeypatch.setattr(dry_run, "_MIN_TEXTS", 40)
    monkeypatch.setattr(contrastive, "MAX_SCORED_LABELS", 99)
    texts = [f"text {i}" for i in range(600)]
    # two texts share each label, or a fifth of the labels; few of both are among 128 texts
    labels = [[str(i // 2 if i % 20 < n_paired else 1000 + i)] for i in range(600)]
    corpus = load_corpus(texts=texts, labels=labels, test_size=0)
    one_vs_all = config().override({"eval.validation_size": 0})

    estimate = estimate_run(one_vs_all.resolve(600, corpus.n_labels), corpus, CPU)

    assert (estimate.contrast_seconds > 0) == is_trained


def test_a_dry_run_does_not_count_what_is_compiled_in_the_warm_up(monkeypatch):
    corpus = synthetic_corpus(n_points=200, n_labels=20)
    loops, clock = [], [0.0]

    class Loop:
        def __init__(self, *, points, **_):
            self.n_points = len(points.tokens)

        def run(self):
            clock[0] += 0 if loops else 500  # compilation
            clock[0] += self.n_points
            loops.append(self.n_points)

    monkeypatch.setattr(dry_run, "StageLoop", Loop)
    monkeypatch.setattr(dry_run.time, "monotonic", lambda: clock[0])
    resolved = config().resolve(len(corpus.train), 20)

    estimate = estimate_run(resolved, corpus, CPU)

    sizes = {stage.name: min(stage.batch_size, 200) for stage in resolved.stages}
    assert estimate.epoch_seconds == {
        name: estimate.n_steps[name] * size for name, size in sizes.items()
    }
    assert len(loops) == 4


def test_a_dry_run_of_what_does_not_fit_times_nothing(monkeypatch):
    corpus = synthetic_corpus(n_points=200, n_labels=20)
    monkeypatch.setattr(memory, "host_capacity", lambda: Capacity(1 << 20, 1 << 20))

    estimate = estimate_run(config().resolve(len(corpus.train), 20), corpus, CPU)

    assert estimate.epoch_seconds == {}
    assert estimate.remedies
    assert not estimate.fits[0].possible


def test_a_batch_larger_than_the_corpus_is_the_corpus(monkeypatch):
    corpus = synthetic_corpus(n_points=200, n_labels=20)
    huge = config(batch_size=100_000_000)
    sample_sizes = []
    monkeypatch.setattr(
        dry_run,
        "_words_per_text",
        lambda sample: sample_sizes.append(len(sample)) or _words_per_text(sample),
    )

    estimate = estimate_run(huge.resolve(len(corpus.train), 20), corpus, CPU)

    assert estimate.n_steps == {"stage1": 1, "stage2": 1}
    assert set(estimate.epoch_seconds) == set(STAGES)
    assert sample_sizes[0] <= len(corpus.train)


def test_a_dry_run_under_torchrun_estimates_the_share_of_a_process(monkeypatch):
    corpus = synthetic_corpus(n_points=200, n_labels=20)
    given = config().resolve(len(corpus.train), 20)
    alone = estimate_run(given, corpus, CPU)
    torchrun = {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
    for name, value in (torchrun | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}).items():
        monkeypatch.setenv(name, str(value))

    estimate = estimate_run(given, corpus, CPU)

    assert estimate.memory.on_host["label weights"] * 4 == alone.memory.on_host["label weights"]
    assert estimate.fits[0].n_processes == 2
    assert estimate.fits[0].needed > estimate.memory.host_total
    assert estimate.epoch_seconds == {}
