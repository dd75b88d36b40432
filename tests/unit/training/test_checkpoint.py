"""Checkpoints on disk: whole or not there, checked when read, the last few kept."""

import errno
import json
import logging
import resource
import threading

import pytest
import torch

from elias.config import CheckpointConfig
from elias.training import checkpoint as module
from elias.training.checkpoint import FORMAT_VERSION, Checkpoint, Checkpoints, find_damage


def some(number):
    weights = torch.arange(4.0) + number
    return Checkpoint({"number": number}, {"model.weight": weights, "step": torch.tensor(number)})


def save(checkpoints, checkpoint):
    """Write a checkpoint, and return whether that succeeded."""
    checkpoints.save(checkpoint, checkpoints.next_attempt())
    return checkpoints.written()


@pytest.fixture
def checkpoints(tmp_path):
    """Three checkpoints written, two of them kept."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    for number in (1, 2, 3):
        assert save(checkpoints, some(number))
    return checkpoints


def newest(checkpoints):
    path = checkpoints.newest(lambda _: True)
    return None if path is None else checkpoints.read(path)


def flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def test_the_newest_checkpoint_is_restored_exactly(checkpoints):
    metadata, tensors = newest(checkpoints)

    assert metadata == {"number": 3}
    assert tensors["model.weight"].tolist() == [3, 4, 5, 6]
    assert int(tensors["step"]) == 3


def test_only_the_last_checkpoints_are_kept(checkpoints):
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["00000002", "00000003"]


def test_the_manifest_has_the_checksum_of_every_other_file(checkpoints):
    checkpoint = checkpoints.folder / "00000003"

    files = json.loads((checkpoint / "manifest.json").read_text())["files"]

    assert {*files, "manifest.json"} == {path.name for path in checkpoint.iterdir()}
    assert all(len(file["sha256"]) == 64 for file in files.values())


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", [flip, cut, lambda path: path.unlink()])
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(
    checkpoints, caplog, name, harm
):
    harm(checkpoints.folder / "00000003" / name)

    checkpoint = newest(checkpoints)

    assert checkpoint.metadata == {"number": 2}
    assert "00000003" in caplog.text
    assert "using the previous one" in caplog.text


def test_without_an_intact_checkpoint_there_is_none(checkpoints):
    for checkpoint in checkpoints.folder.iterdir():
        cut(checkpoint / "state.json")

    assert newest(checkpoints) is None


def test_a_killed_writer_leaves_no_valid_checkpoint(checkpoints):
    (checkpoints.folder / ".00000004.abcd.partial").mkdir()

    assert newest(checkpoints).metadata == {"number": 3}
    checkpoints.remove_partial()
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["00000002", "00000003"]


def test_a_full_disk_gives_a_warning_and_keeps_earlier_checkpoints(
    checkpoints, monkeypatch, caplog
):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)

    assert not save(checkpoints, some(4))
    assert newest(checkpoints).metadata == {"number": 3}
    assert "No space left on device" in caplog.text
    assert "training continues" in caplog.text
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["00000002", "00000003"]


def test_a_file_too_large_for_the_disk_gives_a_warning(checkpoints, caplog):
    large = Checkpoint({}, {"model.weight": torch.zeros(10_000)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, before[1]))
    try:
        written = save(checkpoints, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert not written
    assert "training continues" in caplog.text
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["00000002", "00000003"]


def test_weights_that_are_not_finite_are_never_saved(checkpoints, caplog):
    broken = some(4)
    broken.tensors["model.weight"][2] = float("nan")

    assert not save(checkpoints, broken)
    assert newest(checkpoints).metadata == {"number": 3}
    assert "not finite" in caplog.text


def test_a_bug_while_writing_is_raised(checkpoints, monkeypatch):
    def wrong(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(module, "save_file", wrong)

    with pytest.raises(ZeroDivisionError):
        save(checkpoints, some(4))


def test_no_checkpoint_is_due_while_one_is_written(tmp_path, monkeypatch):
    held, real = threading.Event(), module.save_file

    def slow(*args, **options):
        held.wait(10)
        real(*args, **options)

    monkeypatch.setattr(module, "save_file", slow)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(minutes=1e-9))

    assert checkpoints.due()
    checkpoints.save(some(1), checkpoints.next_attempt())
    assert not checkpoints.due()
    held.set()
    checkpoints.written()
    assert checkpoints.due()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CheckpointConfig(minutes=1e-9), [True, True, True]),
        (CheckpointConfig(minutes=0), [False, False, False]),
    ],
)
def test_one_is_due_after_some_minutes(tmp_path, config, expected):
    checkpoints = Checkpoints(tmp_path, config)

    assert [checkpoints.due() for _ in range(3)] == expected


def test_a_checkpoint_of_another_format_is_not_read(checkpoints):
    manifest = checkpoints.folder / "00000003" / "manifest.json"
    manifest.write_text(json.dumps({"format_version": 99, "files": {}}))

    assert (
        find_damage(checkpoints.folder / "00000003", FORMAT_VERSION)
        == f"has format 99, not {FORMAT_VERSION}"
    )


def test_checkpoints_write_nothing_to_the_log_of_a_user_who_did_not_ask(checkpoints, caplog):
    with caplog.at_level(logging.INFO):
        save(checkpoints, some(4))

    assert caplog.text == ""
