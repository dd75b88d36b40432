"""Several processes train what one does, stop together, and go on in any number."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from e2e.commands import SOURCE, free_port
from elias.distributed.world import EXIT_CODE

TESTS = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{SOURCE}{os.pathsep}{TESTS}",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "error::UserWarning",
}


def made_by(script, path):
    """The folder that one interpreter filled with all that tests ask about."""
    command = [sys.executable, str(Path(__file__).with_name(script)), str(path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made_by("train_worker.py", tmp_path_factory.mktemp("processes"))


@pytest.fixture(scope="module")
def results(folder):
    return json.loads((folder / "results.json").read_text())


def records(run, event):
    """The events of one kind without what they took, one level deep."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [flat(line) for line in lines if line["event"] == event]


def flat(tree):
    results = {}
    for key, value in tree.items():
        nested = value if isinstance(value, dict) else {"": value}
        results |= {f"{key} {name}": number for name, number in nested.items()}
    for name in ("seconds ", "event "):
        results.pop(name, None)
    return results


def assert_same_run(run, other, tolerance=1e-5, weights=1e-4):
    """The same losses, metrics and model, but for rounding."""
    for event in ("epoch", "stage"):
        for ours, theirs in zip(records(run, event), records(other, event), strict=True):
            assert ours.pop("stage ") == theirs.pop("stage ")
            assert ours == pytest.approx(theirs, rel=tolerance), event
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (run, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        difference = (tensor.float() - theirs[name].float()).abs()
        assert difference.mean() < weights / 10, name
        assert difference.max() < 50 * weights, name  # AdamW enlarges rounding of tiny gradients
    assert files(run) == files(other)


def files(run):
    return sorted(p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file())


@pytest.mark.parametrize("n_labels", ["11", "3", "pairs"], ids=["uneven", "empty shard", "Triton"])
def test_sharded_rows_score_and_learn_like_whole_rows(results, n_labels):
    for result in results["scores"]:
        same, differences = result["scores"][n_labels]
        assert same
        assert max(differences) < 1e-6


def test_only_touched_rows_of_a_large_gradient_are_sent(results):
    whole = 1000 * 5000 * 4

    for result in results["scores"]:
        same, received = result["sums"]
        assert same == [True, True]
        assert 1.5 * whole < received < 1.6 * whole  # the one with many rows, there and back


def test_an_array_is_broadcast_unchanged(results):
    assert [result["broadcast"] for result in results["scores"]] == [
        ["int32", [[0, 1, 2], [3, 4, 5]]]
    ] * 4


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_model_does_not_depend_on_the_number_of_processes(folder, results, size):
    assert not any("failed" in result for result in results["several"][str(size)])

    assert_same_run(folder / f"several-{size}", folder / "plain")


def test_one_vs_all_is_sharded_too(folder):
    assert_same_run(folder / "all-2", folder / "all-plain")


def test_dropout_is_keyed_by_point_even_where_a_batch_is_smaller_than_the_world(folder, results):
    assert not any("failed" in result for result in results["dropping"]["4"])

    # AdamW enlarges rounding where gradients are tiny
    assert_same_run(folder / "dropping-4", folder / "dropping-1", 1e-4, weights=1e-3)


def test_windows_of_a_text_are_dropped_alike_in_any_number_of_processes(folder, results):
    assert not any("failed" in result for result in results["windows-3"])

    assert_same_run(folder / "windows-3", folder / "windows-1", 1e-4, weights=1e-3)


@pytest.mark.parametrize("run", ["eager", "captured", "half captured"])
def test_each_process_may_capture_the_passes_of_its_encoder(results, run):
    (expected,) = results["captured"]["one, eager"]

    n_replays = [result.pop("replays") for result in results["captured"][run]]

    assert [n > 0 for n in n_replays] == {
        "eager": [False, False],
        "captured": [True, True],
        "half captured": [False, True],
    }[run]
    for result in results["captured"][run]:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert result["encoder"] == pytest.approx(expected["encoder"], abs=1e-3)


def test_no_label_row_is_sent_in_training(results):
    received = results["several"]["2"][0]["received"]

    assert set(received) >= {"embeddings and labels", "scores", "gradients by embedding"}
    # 25 steps of up to 64 points, D = 16 and K = 41, four bytes each, half of them here already
    most = 25 * 64 * 4 / 2
    assert received["gradients by score"] <= most * 41
    assert received["gradients by embedding"] <= most * 16
    assert received["scores"] < 4 * most * (16 + 41)  # searches of held-out points among them


def test_a_run_resumes_with_any_number_of_processes(folder, results):
    stops = [{result["failed"] for result in step} for step in results["chain"][:-1]]

    assert stops == [
        {"stopped after stage2 epoch 1 step 3"},  # at the next update of the index
        {"stopped after stage2 epoch 2 step 4"},  # an update after the signal
        {"stopped after stage2 epoch 3 step 5"},
    ]
    assert_same_run(folder / "chain", folder / "plain")


def test_a_killed_process_is_named_by_the_others_and_the_run_resumes(folder, results):
    first, killed, other = results["lost"][0]

    assert killed == {"killed": -signal.SIGKILL}
    for result in (first, other):
        assert result["failed"].startswith("rank 1 (process ")
        assert "died without an error message" in result["failed"]
        assert "run the same command again to resume" in result["failed"]
    assert ": resumed " in (folder / "lost" / "train.log").read_text()
    assert_same_run(folder / "lost", folder / "plain")


def test_a_process_that_hangs_is_named_after_a_time(results):
    first, _, other = results["hanging"]

    for result in (first, other):
        assert result["failed"].startswith("rank 1 (process "), result["failed"]
        assert "did not answer in 3 s" in result["failed"]


def test_a_process_that_waits_for_a_dead_one_is_stopped(results):
    assert results["asleep"] == [{"killed": EXIT_CODE}, {"killed": -signal.SIGKILL}]


def test_a_folder_that_not_all_processes_see_is_refused(results):
    first, other = results["different"]

    assert "rank 1 cannot see the files of rank 0" in other["failed"]
    assert first["failed"].startswith("rank 1 (process ")


def test_processes_that_read_different_files_are_refused(results):
    first, other = results["reading"]

    assert "the corpus is of 1, but on rank 0 it is of 0" in other["failed"]
    assert first == {"killed": EXIT_CODE}  # it had gone on, and was ended


def test_local_rank_0_prepares_files_for_its_machine(folder, results):
    """However long that takes the other machine: here, longer than an exchange may."""
    assert results["machines"] == [{"written": 3}, {"written": 0}] * 2
    assert_same_run(folder / "machines" / "run", folder / "plain")


def test_a_local_rank_0_that_dies_while_preparing_is_named(results):
    first, other, killed, last = results["machine lost"]

    assert killed == {"killed": -signal.SIGKILL}
    for result in (first, other, last):
        assert result["failed"].startswith("rank 2 (process ")
        assert "died without an error message" in result["failed"]


def test_other_processes_exit_before_the_ranker(folder, results):
    """But for one of each other machine, which `torchrun` would not outlive."""
    saved = [result["saved"] for result in results["ranking"]["left alone"]]

    assert saved == [True, False, True]
    assert_same_run(folder / "left alone" / "run", folder / "ranked")


def test_the_model_is_saved_though_another_process_is_killed_in_the_ranker(folder, results):
    first, ended, killed = results["ranking"]["killed"]

    assert (first, ended) == ({"saved": True}, {"saved": False})
    assert killed == {"killed": -signal.SIGKILL}
    assert_same_run(folder / "killed" / "run", folder / "ranked")


def test_a_failure_in_the_ranker_is_reported_to_waiting_processes(results):
    first, ended, waiting = results["ranking"]["failing"]

    assert first == {"failed": "the ranker has failed"}
    assert ended == {"saved": False}
    assert waiting["failed"].startswith("rank 0 (process ")
    assert waiting["failed"].endswith("failed: the ranker has failed")


def test_the_command_trains_and_only_rank_0_prints(results):
    (first, other), _ = results["commands"]

    assert first["code"] == other["code"] == 0
    assert first["out"].rstrip().endswith("trained on corpus/model")
    assert "stage2" in first["err"]
    assert other["out"] == other["err"] == ""


def test_a_model_is_evaluated_by_several_processes_as_by_one(results):
    alone, first, other = (result["out"] for result in results["evaluate"])

    assert json.loads(first) == pytest.approx(json.loads(alone), abs=1e-3)
    assert other == ""


def test_a_mistake_is_one_line_of_each_process(results):
    _, (first, other) = results["commands"]

    assert first["code"] == other["code"] == 2
    assert first["err"].splitlines()[-1].endswith("nothing: no such file or folder")
    assert other["err"].startswith("error: rank 0 (process ")
    assert other["err"].endswith("nothing: no such file or folder\n")


def test_a_mistake_ends_each_process_with_its_exit_code(tmp_path):
    """Not with a signal, from what still waits for the other one."""
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ("train", tmp_path / "nothing", "--out", tmp_path / "run", "--device", "cpu")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "elias", *map(str, command)],
            env={**ENVIRONMENT, **where, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    result = [process.communicate()[1].splitlines() for process in processes]

    assert [process.returncode for process in processes] == [2, 2], result
    for lines in result:
        errors = [line for line in lines if line.startswith("error: ")]
        assert len(errors) == 1
        assert errors[0].endswith("nothing: no such file or folder")
        assert lines[-1] == errors[0]


def test_processes_that_diverge_stop_with_the_same_error(results):
    for result in results["diverged"]:
        errors = [line for line in result["err"].splitlines() if line.startswith("error: ")]
        assert result["code"] == 2
        assert len(errors) == 1, result["err"]
        assert "stage1 epoch 1 step 2: the loss is nan" in errors[0]
        assert "lower stages.stage1.bag_lr (now 1e+20)" in errors[0]


def test_a_run_restarted_by_torchrun_resumes(folder, tmp_path):
    """`torchrun --max-restarts`: a process is killed in the first attempt, not in the second."""
    script = Path(__file__).with_name("train_worker.py")
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.2")
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(tmp_path)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )

    assert ended.returncode == 0, ended.stderr
    log = (tmp_path / "run" / "train.log").read_text()
    assert ": resumed " in log
    assert_same_run(tmp_path / "run", folder / "plain")
