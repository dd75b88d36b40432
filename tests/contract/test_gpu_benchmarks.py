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


WITHOUT_NUMBA = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numba":
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
import gpu_attention, gpu_check, gpu_encoder, gpu_growth, gpu_predict, gpu_step, packed_tokens
"""


def test_the_benchmarks_can_be_imported_where_numba_is_missing():
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])

    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMBA],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
    )

    assert done.returncode == 0, done.stderr


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


def test_the_encoder_has_times_operations_and_kernels_of_each_variant(tmp_path):
    options = ("--variants", "bfloat16", "float8-row", "--loops", "both", "--shapes", "tiny")
    lines, entries = run("gpu_encoder", tmp_path, *options)

    for variant in ("bfloat16", "float8-row"):
        entry = entries[f"tiny {variant} both"]
        assert min(entry[key] for key in ("ms", "step_ms", "tflop_per_s")) > 0
        assert entry["classes_ms"]["matrix products"] > 0
        assert entries[f"tiny {variant} errors"]["output"] < 0.01
        assert sum(line[:3] == ["tiny", variant, "both"] for line in lines) == 2


def test_packed_texts_are_compared_with_padded_ones(tmp_path):
    sizes = ("--texts", "16", "16", "--longest", "32", "64", "--batches", "2")
    lines, entries = run("packed_tokens", tmp_path, "--shape", "tiny", *sizes)

    for corpus in ("short", "mixed"):
        packed, in_order, at_random = (
            entries[f"{corpus}, {layout}"]
            for layout in ("packed", "padded, sorted", "padded, unsorted")
        )
        assert packed["tokens"] == in_order["tokens"] == at_random["tokens"]
        assert packed["padding"] < at_random["padding"]
        assert sum(line[:1] == [corpus] for line in lines) == 3


def test_the_candidate_of_the_attention_kernels_is_exact_and_has_a_row_for_each_case(tmp_path):
    # the interpreter of older versions fails with numpy 2.4
    pytest.importorskip("triton", minversion="3.7", reason="Triton is not installed, or too old")

    lines, entries = run("gpu_attention", tmp_path)

    one_tile, several = (entries[f"float32, head 16, to {n} tokens"] for n in (40, 150))
    assert one_tile["longest"] <= one_tile["tile"]
    assert several["longest"] > 2 * several["tile"]
    for errors in (one_tile, several):
        assert max(errors[part] for part in ("result", "by query", "by key", "by value")) < 1e-5
    for case in ("short", "mixed"):
        assert entries["backward 64/1/1"][f"head 16, {case}"] > 0
        assert lines[-1 if case == "mixed" else -2][:3] == ["head", "16,", case]


@pytest.fixture
def float8(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import float8_linear

    return float8_linear


@pytest.mark.parametrize("scales", ["row", "tensor"])
@pytest.mark.parametrize("n_rows", [32, 7])  # 7 is no multiple of 16: bfloat16
def test_a_float8_layer_and_its_gradients_are_near_those_of_a_linear_layer(float8, scales, n_rows):
    torch.manual_seed(0)
    layer = torch.nn.Linear(48, 64)
    low = float8.Float8Linear(48, 64) if scales == "row" else float8.TensorFloat8Linear(48, 64)
    low.load_state_dict(layer.state_dict())
    x, by_output = torch.randn(n_rows, 48, requires_grad=True), torch.randn(n_rows, 64)

    expected, actual = layer(x), low(x)
    references = torch.autograd.grad(expected, [x, *layer.parameters()], by_output)
    gradients = torch.autograd.grad(actual, [x, *low.parameters()], by_output.to(actual.dtype))

    for value, reference in zip((actual, *gradients), (expected, *references), strict=True):
        assert (value - reference).norm() < 0.08 * reference.norm()


def test_a_float8_layer_predicts_as_a_linear_layer(float8):
    layer = float8.Float8Linear(16, 16)
    x = torch.randn(4, 16)

    with torch.no_grad():
        predicted = layer(x)

    assert torch.equal(predicted, torch.nn.functional.linear(x, layer.weight, layer.bias))


@pytest.fixture
def trains(tmp_path):
    """Return a function that trains the runs of a TOML file, and returns its lines and rows."""
    for split, n_points in (("train", 80), ("test", 20)):
        points = [{"text": f"word{i % 7} text", "labels": [f"l{i % 7}"]} for i in range(n_points)]
        lines = "".join(json.dumps(point) + "\n" for point in points)
        (tmp_path / f"{split}.jsonl").write_text(lines, encoding="utf8")
    file, out = tmp_path / "runs.toml", tmp_path / "rows.jsonl"

    def train(toml, *options):
        file.write_text(toml, encoding="utf8")
        command = [sys.executable, ROOT / "benchmarks" / "train_many.py", file, "--device", "cpu"]
        done = subprocess.run(
            [*command, "--runs", tmp_path / "runs", "--out", out, *options],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        return done.stdout, [json.loads(line) for line in out.read_text("utf8").splitlines()]

    return train


def test_runs_are_trained_once_and_their_components_are_written(trains):
    toml = '[defaults]\ndata = "."\nset = ["stages.one-vs-all.epochs=1"]\n'
    toml += '[good]\nseeds = [0, 1]\nfiltered = "."\n'
    toml += '[bad]\ndata = "missing"\n'

    _, first = trains(toml, "--jobs", "3", "--threads", "1")
    table, second = trains(toml, "--only", "good")

    assert second == first
    whole = {(row["run"], row["seed"]): row["status"] for row in first if "status" in row}
    assert whole == {("good", 0): "finished", ("good", 1): "finished", ("bad", 0): "failed"}
    component = next(row for row in first if row.get("component") == "one-vs-all")
    assert component["held_out"]["P@1"] >= 0
    assert component["test"]["P@1"] >= 0
    filtered = [row for row in first if row.get("component") == "one-vs-all, filtered"]
    # nothing is filtered here, so it is the same measurement
    assert [row["test"]["P@1"] for row in filtered] == [
        row["test"]["P@1"] for row in first if row.get("component") == "one-vs-all"
    ]
    assert "| good | one-vs-all | 2 |" in table


def test_a_run_over_its_limit_is_stopped(trains):
    _, rows = trains('[slow]\ndata = "."\nlimit = 0.5\n')

    assert [row["status"] for row in rows] == ["stopped"]
