"""The GPU benchmarks run from a checkout, here at a tiny shape on a CPU, and print what is due."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PARTS = ["encoder", "search", "classifier", "loss", "backward", "update"]


def run(script, out, *options, written=None):
    """Run a script at the tiny shape and return the lines it prints and the JSON it writes."""
    command = [sys.executable, ROOT / "benchmarks" / f"{script}.py", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--repeat", "2", "--out", out, *options],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    assert done.returncode == 0, done.stderr
    entries = json.loads((out / f"{written or script}.json").read_text(encoding="utf8"))
    assert not [key for key, entry in entries.items() if "error" in entry], done.stdout
    return [line.split() for line in done.stdout.splitlines()], entries


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    return run("gpu_step", tmp_path_factory.mktemp("step"), "--shapes", "tiny")


def test_a_step_has_a_row_for_each_side_and_its_time(stepped):
    lines, entries = stepped

    rows = {"head full", "encoder", "whole full", "naive head", "naive whole"}
    assert {key.removeprefix("tiny ") for key in entries} == rows | {"torch", "device"}
    for name in rows - {"encoder"}:
        assert entries[f"tiny {name}"]["step_ms"] > 0
        assert any(line[: 1 + len(name.split())] == ["tiny", *name.split()] for line in lines)


def test_both_sides_of_a_step_have_the_same_data(stepped):
    _, entries = stepped

    data = [entry["data"] for entry in entries.values() if "data" in entry]

    assert len(data) == 4
    assert all(one == data[0] for one in data)


@pytest.mark.parametrize("what", ["head", "whole"])
def test_both_sides_of_a_step_are_split_into_the_six_parts(stepped, what):
    lines, _ = stepped

    rows = [line[3:] for line in lines if line[:3] == ["tiny", what, "full"] and len(line) == 7]

    assert [row[0] for row in rows] == PARTS
    assert all(float(own) >= 0 and float(naive) >= 0 for _, own, naive, _ in rows)


def test_prediction_has_a_row_for_each_batch_beside_the_naive_one(tmp_path):
    lines, entries = run("gpu_predict", tmp_path, "--shapes", "tiny", "--batches", "1")

    for batch in ("1", "4"):  # that asked for, and the shape's own
        entry = entries[f"tiny batch {batch}"]
        assert min(entry[key] for key in ("ms", "encoder_ms", "search_ms", "naive_ms")) > 0
        row = next(line for line in lines if line[:2] == ["tiny", batch])
        assert row[-1].endswith("x")


def test_what_users_call_has_a_row_for_each_batch(tmp_path):
    options = ("--as-users", "--shapes", "tiny", "--batches", "1")
    lines, entries = run("gpu_predict", tmp_path, *options, written="gpu_predict_as_users")

    for batch in ("1", "4"):
        entry = entries[f"tiny batch {batch}"]
        assert min(entry[key] for key in ("ms", "ms_per_point", "bulk_ms_per_point")) > 0
        assert any(line[:2] == ["tiny", batch] for line in lines)


@pytest.fixture
def problem(monkeypatch):
    """A shape, its model and batches, and the naive step of that model."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu_setup
    from naive_step import NaiveStep

    device = torch.device("cpu")
    encoder = gpu_setup.Rows(gpu_setup.TINY.batch, gpu_setup.TINY.dim)
    model, batches = gpu_setup.make_problem(gpu_setup.TINY, encoder, device, compact=False)
    return gpu_setup.TINY, model, batches, NaiveStep(gpu_setup.TINY, model)


def test_the_naive_search_ranks_as_ours(problem):
    from elias.model.elias import SearchSizes

    shape, model, batches, naive = problem
    embedding = model.encoder(batches[0].tokens).detach()
    sizes = SearchSizes(shape.beam_size, shape.shortlist_size)

    labels, p = model.eval().rank(embedding, sizes, 10)
    naive_labels, naive_p = naive.rank(embedding, 10)

    torch.testing.assert_close(p, naive_p)
    assert torch.equal(labels, naive_labels)


def test_the_naive_loss_and_its_gradients_are_ours(problem):
    from elias.model.elias import SearchSizes

    shape, model, batches, naive = problem
    batch = batches[0]
    # ours leaves labels out that no path leads to: all points get the positives of one with none
    whole = int((batch.parents < shape.n_clusters).all(dim=1).nonzero()[0])
    positives, parents = (part[whole].expand_as(part) for part in batch[1:])
    sizes = SearchSizes(shape.train_clusters, shape.shortlist_size)
    ours, theirs = (model.encoder(batch.tokens).detach().requires_grad_() for _ in range(2))

    loss = model.losses(ours, positives, parents, sizes, shortlist_weight=0.05, mean=True).total
    loss.backward()
    actual = naive.search(theirs, parents)
    naive_loss = naive.loss(actual, naive.classify(theirs, actual[2]), positives)
    naive_loss.backward()

    torch.testing.assert_close(loss, naive_loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)
