import json
import logging

import numpy as np
import pytest

from elias.config import EliasConfig
from elias.errors import RunError
from elias.training.run import (
    CONFIG_FILE,
    LOCK_FILE,
    LOG_FILE,
    METRICS_FILE,
    MODEL_FOLDER,
    PARTITION_FILE,
    REPORT_FILE,
    Run,
    check_folder,
    open_run,
    write_text,
)

CONFIG = EliasConfig()


def begin(folder, *, overwrite=False, epochs=0, error=None):
    """Begin a run, finish some epochs, and let it fail if it should."""
    with open_run(folder, CONFIG, overwrite=overwrite) as run:
        run.record("data", points=3)
        for epoch in range(epochs):
            run.record("epoch", epoch=epoch)
        if error is not None:
            raise error


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("error", [RunError("no such device"), ValueError(), KeyboardInterrupt()])
def test_a_failed_start_leaves_no_files(tmp_path, error):
    with pytest.raises(type(error)):
        begin(tmp_path / "runs" / "first", error=error)

    assert names(tmp_path) == set()


def test_a_failed_start_keeps_other_files_in_the_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(RunError):
        begin(tmp_path, error=RunError("no such device"))

    assert names(tmp_path) == {"notes.txt"}


def test_after_a_failed_start_another_configuration_may_start(tmp_path):
    with pytest.raises(RunError):
        begin(tmp_path / "run", error=RunError("no such model"))

    with open_run(tmp_path / "run", CONFIG.override({"seed": 1}), overwrite=False):
        held = names(tmp_path / "run")

    assert held == {"config.json", "train.log", LOCK_FILE}


@pytest.mark.parametrize("error", [RunError("the loss is nan"), KeyboardInterrupt()])
def test_a_run_that_fails_after_an_epoch_stays(tmp_path, error):
    with pytest.raises(type(error)):
        begin(tmp_path / "run", epochs=1, error=error)

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert names(tmp_path / "run") == {"config.json", "metrics.jsonl", "train.log"}
    assert [json.loads(line)["event"] for line in lines] == ["data", "epoch"]


def test_the_log_is_in_the_folder_and_logging_is_restored(tmp_path):
    ours = logging.getLogger("elias")
    before = (ours.level, list(ours.handlers))

    with open_run(tmp_path / "run", CONFIG, overwrite=False):
        logging.getLogger("elias.somewhere").info("a step")

    assert "a step" in (tmp_path / "run" / "train.log").read_text()
    assert (ours.level, list(ours.handlers)) == before


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    begin(None, epochs=1)

    assert names(tmp_path) == set()


def test_a_replaced_run_is_restored_if_the_new_one_fails_before_its_first_epoch(tmp_path):
    with open_run(tmp_path / "run", EliasConfig(), overwrite=False) as run:
        run.record("epoch", epoch=1)
    (tmp_path / "run" / MODEL_FOLDER).mkdir()
    before = (tmp_path / "run" / METRICS_FILE).read_text()

    with (
        pytest.raises(RuntimeError, match="no encoder"),
        open_run(tmp_path / "run", EliasConfig(seed=1), overwrite=True),
    ):
        raise RuntimeError("no encoder")

    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == sorted([CONFIG_FILE, LOG_FILE, METRICS_FILE, MODEL_FOLDER])
    assert (tmp_path / "run" / METRICS_FILE).read_text() == before


def test_a_replaced_run_is_removed_once_the_new_one_has_trained(tmp_path):
    with open_run(tmp_path / "run", EliasConfig(), overwrite=False) as run:
        run.record("epoch", epoch=1)
    (tmp_path / "run" / MODEL_FOLDER).mkdir()

    with open_run(tmp_path / "run", EliasConfig(seed=1), overwrite=True) as run:
        run.record("epoch", epoch=7)

    assert "7" in (tmp_path / "run" / METRICS_FILE).read_text()
    assert not (tmp_path / "run" / MODEL_FOLDER).exists()
    assert not (tmp_path / "run" / ".replaced").exists()


def test_a_finished_run_is_restored_if_the_new_one_is_interrupted(tmp_path):
    with open_run(tmp_path / "run", EliasConfig(), overwrite=False) as run:
        run.record("epoch", epoch=1)
    (tmp_path / "run" / MODEL_FOLDER).mkdir()

    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "run", overwrite=True, epochs=8, error=KeyboardInterrupt())

    assert (tmp_path / "run" / MODEL_FOLDER).is_dir()
    assert "7" not in (tmp_path / "run" / METRICS_FILE).read_text()


def test_a_folder_can_be_checked_before_there_is_a_configuration(tmp_path):
    (tmp_path / "done" / MODEL_FOLDER).mkdir(parents=True)
    (tmp_path / "file").write_text("")

    for name, problem in (("done", "holds a finished run"), ("file", "is a file")):
        with pytest.raises(RunError, match=problem):
            check_folder(tmp_path / name, overwrite=False)

    check_folder(tmp_path / "done", overwrite=True)
    check_folder(tmp_path / "new", overwrite=False)
    assert names(tmp_path) == {"done", "file"}


def test_a_finished_run_is_restored_after_the_new_one_was_killed(tmp_path):
    run_folder, aside = tmp_path / "run", tmp_path / "run" / ".replaced"
    (aside / MODEL_FOLDER).mkdir(parents=True)  # what kill -9 leaves
    (aside / METRICS_FILE).write_text("old")
    (run_folder / METRICS_FILE).write_text("new, unfinished")

    with (
        pytest.raises(RunError, match="holds a finished run"),
        open_run(run_folder, EliasConfig(), overwrite=False),
    ):
        pass

    assert (run_folder / MODEL_FOLDER).is_dir()
    assert (run_folder / METRICS_FILE).read_text() == "old"


def test_a_run_keeps_the_partition_of_its_labels(tmp_path):
    with open_run(tmp_path / "run", CONFIG, overwrite=False) as run:
        run.save_partition(np.array([2, 0, 1]))

    assert np.load(tmp_path / "run" / PARTITION_FILE).tolist() == [2, 0, 1]
    assert names(tmp_path / "run") == {CONFIG_FILE, LOG_FILE, PARTITION_FILE}


def test_a_report_is_moved_together_with_its_run(tmp_path):
    begin(tmp_path / "run", epochs=1)
    (tmp_path / "run" / REPORT_FILE).write_text("old")

    begin(tmp_path / "run", overwrite=True, epochs=1)

    assert names(tmp_path / "run") == {CONFIG_FILE, LOG_FILE, METRICS_FILE}


def test_a_resumed_run_drops_records_after_its_checkpoint(tmp_path):
    with open_run(tmp_path / "run", CONFIG, overwrite=False) as run:
        run.record("epoch", epoch=1)
        state = json.loads(json.dumps(run.state()))
        run.record("epoch", epoch=2)

        run.restore(state)
        run.record("epoch", epoch=2)

    lines = (tmp_path / "run" / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2]


def test_repeated_steps_are_not_recorded_again():
    run = Run()

    with run.replaying(True), run.timed("tokens"):
        run.record("data", points=3)

    assert (run.records, run.timings) == ([], {})


def test_the_time_of_a_resumed_step_includes_both_parts(monkeypatch):
    now = iter([10.0, 13.0, 14.0, 100.0, 102.0])
    monkeypatch.setattr("elias.training.run.time.monotonic", lambda: next(now))
    first, second = Run(), Run()

    with first.timed("stage1"):  # at 10
        state = first.state()  # at 13
    second.restore(state)
    with second.timed("stage1"):  # from 100 to 102
        pass

    assert second.timings == {"stage1": 5.0}


def test_an_active_run_is_not_changed(tmp_path):
    with open_run(tmp_path / "run", CONFIG, overwrite=False):
        for overwrite in (False, True):
            with pytest.raises(RunError, match="a run is active here"):
                check_folder(tmp_path / "run", overwrite=overwrite)
            with pytest.raises(RunError, match="a run is active here"):
                begin(tmp_path / "run", overwrite=overwrite)

        assert CONFIG_FILE in names(tmp_path / "run")


def test_leftovers_of_a_killed_save_are_removed_on_restart(tmp_path):
    (tmp_path / "run" / ".model.abcd.partial").mkdir(parents=True)

    begin(tmp_path / "run", epochs=1)

    assert names(tmp_path / "run") == {CONFIG_FILE, LOG_FILE, METRICS_FILE}


def test_a_text_that_cannot_be_written_leaves_no_temporary_file(tmp_path):
    (tmp_path / "taken").mkdir()

    with pytest.raises(RunError, match="taken: cannot be written"):
        write_text(tmp_path / "taken", "text")

    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
