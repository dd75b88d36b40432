"""The arithmetic of memory, held against tensors that are really there."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from elias import EliasConfig, train
from elias.config.resolve import reasons
from elias.data.corpus import resolve_config
from elias.data.synthetic import synthetic_corpus
from elias.errors import RunError
from elias.text.tokens import Tokens
from elias.training import memory
from elias.training.dry_run import build_stage_model
from elias.training.memory import (
    Capacity,
    MemoryEstimate,
    Sizes,
    estimate_memory,
    fit_batches,
    gib,
    host_capacity,
)
from elias.training.optimizer import Optimizer
from tiny_bert import save_tiny_bert

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config(**changes):
    tiny = {"encoder.dim": 16, "encoder.hidden_dim": 24, "rerank.enabled": False}
    for name in ("stage1", "stage2"):
        tiny |= {f"stages.{name}.epochs": 1, f"stages.{name}.batch_size": 32}
        tiny |= {f"stages.{name}.score_all": False, f"stages.{name}.average_from": 1.0}
        tiny |= {f"stages.{name}.index_every": 1}
    return EliasConfig().override(tiny | changes)


def sizes(**changes):
    usual = {
        "n_points": 10_000,
        "n_setup": 10_000,
        "n_labels": 5_000,
        "n_entries": 30_000,
        "most_labels": 7,
        "dim": 16,
        "dense_weights": 1000,
        "table_rows": 300,
        "tokens_per_text": 8.0,
    }
    return Sizes(**usual | changes)


def n_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_weights_edges_and_moments_are_counted_to_the_byte(stage):
    n_labels = 500
    corpus = synthetic_corpus(n_points=300, n_labels=n_labels)
    resolved = config().resolve(300, n_labels)
    chosen = next(s for s in resolved.stages if s.name == stage)
    from elias.model.encoder import build_encoder

    encoder = build_encoder(resolved.encoder, corpus.train.texts, None)
    model = build_stage_model(resolved, chosen, encoder, n_labels)
    optimizer = Optimizer(model, chosen)
    for parameter in model.parameters():  # so that torch's AdamW makes its moments
        tables = {"encoder.vectors", "labels.weight", "labels.bias"}
        name = next(n for n, p in model.named_parameters() if p is parameter)
        if parameter.requires_grad and name not in tables:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1.0)
    tokens = Tokens.from_csr(csr_matrix(np.ones((4, 3), dtype=np.float32)))
    run = {"keeps_checkpoints": False, "validates": False}
    measured = Sizes.measure(
        encoder, corpus.train.labels, tokens, resolved, 300, 5.0, 0, None, **run
    )

    only = replace(resolved, stages=resolved.stages[:1])
    parts = estimate_memory(measured, resolved if stage == "stage2" else only, CPU).on_host

    weights = n_bytes(p for n, p in model.named_parameters() if not n.startswith("graph."))
    predicted = (
        parts["label weights"] + parts["other weights"] + parts["copy of the initial encoder"]
    )
    assert predicted == weights
    assert parts["edges"] == n_bytes([model.graph.edge_labels, model.graph.edge_logits])
    state = optimizer.state()
    counters = {n for n in state if n.endswith((".step", "steps", "waited"))}
    moments = n_bytes(t for n, t in state.items() if n not in counters and "gradient" not in n)
    assert parts["optimizer"] == pytest.approx(moments, rel=0.001)


def test_every_size_makes_a_run_larger():
    resolved = config().resolve(10_000, 5_000)

    def total(run_sizes, given=resolved, device=CPU):
        expected = estimate_memory(run_sizes, given, device)
        return expected.host_total + expected.device_total

    base = total(sizes())
    for larger in ("n_labels", "n_points", "most_labels", "dim", "dense_weights", "table_rows"):
        change = {larger: 10 * getattr(sizes(), larger)}
        if larger == "n_points":
            change |= {"n_setup": 100_000, "words_per_text": 5.0}
        assert total(sizes(**change)) > base, larger
    wide = config(**{"stages.stage2.batch_size": 320}).resolve(10_000, 5_000)
    assert total(sizes(), wide) > base
    averaged = config(**{"stages.stage2.average_from": 0.5}).resolve(10_000, 5_000)
    assert total(sizes(), averaged) > base


def test_compact_storage_and_more_processes_take_less_of_a_gpu():
    full = config().resolve(10_000, 5_000)
    compact = config(**{"index.label_storage": "compact"}).resolve(10_000, 5_000)

    def labels(given, **changes):
        parts = estimate_memory(sizes(**changes), given, CUDA).on_device
        return parts["label weights"] + parts["optimizer"]

    assert labels(compact) < labels(full)
    assert labels(full, n_processes=4) < labels(full)


def test_a_transformer_in_bfloat16_and_with_checkpoints_keeps_less():
    def activations(**changes):
        changes = {f"encoder.{key}": value for key, value in changes.items()}
        given = config(**{"encoder.model": "minilm", **changes}).resolve(10_000, 5_000)
        bert = sizes(layers=12, width=768, longest_text=128, table_rows=0)
        return estimate_memory(bert, given, CUDA).on_device["encoder activations"]

    assert (
        activations(gradient_checkpointing=True) < activations() < activations(precision="float32")
    )


def expecting(host=0, resident=0, **parts):
    on_host = {"program and corpus": resident, "others": host - resident, **parts}
    return MemoryEstimate(sizes(), config().resolve(10_000, 5_000), CPU, on_host, {})


def check(estimate, monkeypatch, capacity, **options):
    monkeypatch.setattr(memory, "host_capacity", lambda: capacity)
    estimate.check(**options)


def test_a_run_that_cannot_fit_is_refused_with_remedies(monkeypatch):
    expected = expecting(10, **{"label weights": 60 << 30, "optimizer": 120 << 30})

    with pytest.raises(
        RunError, match=r"needs about 180\.0 GiB of memory, but there is only 16\.0 GiB"
    ) as e:
        check(expected, monkeypatch, Capacity(16 << 30, 8 << 30))

    assert "\n" not in str(e.value)
    assert "ignore_memory=True" in str(e.value)
    assert "torchrun" in str(e.value)


def test_a_run_that_fits_only_in_total_memory_starts_with_a_warning(monkeypatch, caplog):
    check(expecting(10 << 30), monkeypatch, Capacity(16 << 30, 8 << 30))

    assert "10.0 GiB of memory, of which 8.0 GiB is free now" in caplog.text


def test_the_check_can_be_ignored(monkeypatch, caplog):
    check(expecting(20 << 30), monkeypatch, Capacity(16 << 30, 8 << 30), ignore=True)

    assert "needs about 20.0 GiB of memory, but there is only 16.0 GiB" in caplog.text


def test_memory_in_use_by_the_run_counts_as_free(monkeypatch, caplog):
    room = Capacity(16 << 30, 8 << 30)
    check(expecting(10 << 30, resident=4 << 30), monkeypatch, room)

    assert not caplog.text


def test_a_point_with_a_million_labels_is_named():
    resolved = config().resolve(10_000, 2_000_000)
    many = sizes(n_labels=2_000_000, most_labels=1_000_000)

    expected = estimate_memory(many, resolved, CPU)

    assert expected.on_host["index activations"] > 32 * 1_000_000 * 8
    assert "the point with 1,000,000 labels" in expected.remedies()[0]


def test_remedies_depend_on_what_is_large():
    resolved = config(**{"encoder.model": "minilm"}).resolve(10_000, 5_000)
    bert = sizes(layers=12, width=768, longest_text=512, table_rows=0, dim=768)
    wide = {"encoder activations": 90, "label weights": 5, "optimizer": 5}
    deep = {"encoder activations": 5, "label weights": 40, "optimizer": 55}

    remedies = MemoryEstimate(bert, resolved, CUDA, {}, wide).remedies()
    assert "set encoder.gradient_checkpointing=true" in remedies
    assert any("batch_size from 32 to 16" in line for line in remedies)
    remedies = MemoryEstimate(bert, resolved, CUDA, {}, deep).remedies()
    assert remedies[0] == "set encoder.bottleneck=384"
    assert "set index.label_storage=compact (bfloat16)" in remedies


def test_a_run_that_is_too_large_leaves_nothing(tmp_path, monkeypatch):
    corpus = synthetic_corpus(n_points=200, n_labels=20)
    monkeypatch.setattr(memory, "host_capacity", lambda: Capacity(1 << 20, 1 << 20))

    with pytest.raises(RunError, match="needs about"):
        train(corpus, config(), out=tmp_path / "run", device="cpu")

    assert not (tmp_path / "run").exists()
    model = train(corpus, config(), out=tmp_path / "run", device="cpu", ignore_memory=True)
    assert model.metadata["metrics"]


def test_a_batch_larger_than_the_corpus_needs_no_more_memory_than_the_corpus():
    huge, whole = (
        config(**{f"stages.{name}.batch_size": size for name in ("stage1", "stage2")})
        for size in (100_000_000, 10_000)
    )

    capped, largest = (
        estimate_memory(sizes(), given.resolve(10_000, 5_000), CPU) for given in (huge, whole)
    )

    assert capped.on_host == largest.on_host


def test_the_batch_that_is_advised_fits():
    names = ("stage1", "stage2")
    given = config(**{f"stages.{name}.batch_size": 8192 for name in names}).resolve(10_000, 5_000)
    smaller = config(**{f"stages.{name}.batch_size": 64 for name in names}).resolve(10_000, 5_000)
    room = estimate_memory(sizes(), smaller, CPU).host_total
    expected = estimate_memory(sizes(), given, CPU)
    there = [memory.MemoryCheck("memory", expected.host_total, Capacity(2 * room, room))]

    remedies = expected.remedies(there)

    assert "lower stages.*.batch_size from 8192 to 64" in remedies


def launched(monkeypatch, size, here):
    torchrun = {"RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": here}
    for name, value in (torchrun | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, str(value))


def test_the_processes_of_a_machine_share_its_memory(monkeypatch, caplog):
    room = Capacity(16 << 30, 16 << 30)
    monkeypatch.setattr(memory, "shared_bytes", lambda: 1 << 30)
    check(expecting(5 << 30), monkeypatch, room)
    launched(monkeypatch, size=8, here=4)

    with pytest.raises(RunError, match=r"needs about 17\.0 GiB of memory"):  # 5 + 3 · (5 - 1)
        check(expecting(5 << 30), monkeypatch, room)

    check(expecting(4 << 30, resident=4 << 30), monkeypatch, Capacity(16 << 30, 4 << 30))
    assert not caplog.text  # all that is not free is theirs


def test_a_container_has_the_memory_of_its_limit(monkeypatch):
    meminfo = {"MemTotal": 64 << 30, "MemAvailable": 32 << 30}
    monkeypatch.setattr(memory, "_read_kilobytes", lambda _: meminfo)
    cgroup = {"memory.max": 8 << 30, "memory.current": 3 << 30}
    monkeypatch.setattr(memory, "_read_number", lambda path: cgroup.get(path.name))

    assert host_capacity() == Capacity(8 << 30, 5 << 30)
    cgroup["memory.max"] = None
    assert host_capacity() == Capacity(64 << 30, 32 << 30)


def test_a_machine_of_unknown_memory_refuses_no_run(monkeypatch):
    monkeypatch.setattr(memory, "host_capacity", lambda: None)

    assert expecting(1 << 60).fits() == []


def test_bytes_are_formatted_as_mib_or_gib():
    assert (gib(5 << 20), gib(200 << 20)) == ("5 MiB", "0.2 GiB")


def test_the_memory_of_the_training_gpu_is_checked(monkeypatch):
    cuda = SimpleNamespace(mem_get_info=lambda _: (3, 10), memory_reserved=lambda _: 2)
    monkeypatch.setattr(memory.torch, "cuda", cuda)

    assert memory.device_capacity(CUDA) == Capacity(10, 5)
    assert memory.device_capacity(CPU) is None


def test_a_derived_batch_of_a_transformer_is_halved_until_the_run_fits(tmp_path, monkeypatch):
    corpus = synthetic_corpus(n_points=100_000, n_labels=2000)
    save_tiny_bert(tmp_path)
    config = EliasConfig().with_encoder(str(tmp_path))
    resolved = resolve_config(config, corpus)
    sizes = {f"stages.{stage.name}.batch_size": stage.batch_size for stage in resolved.stages}
    given = config.override(sizes)
    needed = estimate_memory(Sizes.expected(resolved, corpus), resolved, CPU)
    less = needed.host_total - needed.on_host["encoder activations"] // 2
    monkeypatch.setattr(memory, "resident_bytes", lambda: 0)

    monkeypatch.setattr(memory, "host_capacity", lambda: Capacity(less, less))
    fitting = fit_batches(config, resolved, corpus, CPU)
    unchanged = fit_batches(given, resolved, corpus, CPU)
    monkeypatch.setattr(memory, "host_capacity", lambda: Capacity(1, 1))
    hopeless = fit_batches(config, resolved, corpus, CPU)

    assert [stage.batch_size for stage in fitting.stages] == [128, 128]
    assert set(sizes.values()) == {256}
    why = reasons(config, fitting, len(corpus.train), corpus.n_labels)
    assert why["stages.stage1.batch_size"].endswith(" points, limited by the memory")
    assert unchanged == hopeless == resolved
