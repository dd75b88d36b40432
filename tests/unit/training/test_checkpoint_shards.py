"""Rows of labels in checkpoints: written by some processes, read by as many as there are then."""

import json
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from elias.config import CheckpointConfig
from elias.distributed import SingleProcess
from elias.errors import DataError
from elias.training.checkpoint import (
    FORMAT_VERSION,
    Checkpoint,
    Checkpoints,
    collect_shards,
    find_damage,
    read_tensors,
    write_shard,
)

ROWS = (
    "model.labels.weight",
    "model.labels.bias",
    "best.labels.bias",
    "optimizer.part.1.table.labels.weight.last_step",
)
ONCE = "00000001.once"


class Process(SingleProcess):
    """One of several processes that exchange nothing."""

    def __init__(self, rank=0, size=1, lost=lambda: False):
        super().__init__()
        self.rank, self.size, self.has_lost_process = rank, size, lost


def tables(n_labels):
    values = torch.arange(n_labels * 3.0).view(n_labels, 3)
    columns = (values, *(values[:, i].clone() for i in range(3)))
    return dict(zip(ROWS, columns, strict=True))


def of_step(step):
    return Checkpoint({"step": step}, {name: torch.full((2,), step) for name in ROWS})


def save_all(folder, size, tensors):
    """Write a checkpoint with ``size`` processes, and return its path."""
    processes = [
        Checkpoints(folder, CheckpointConfig(), Process(rank, size)) for rank in range(size)
    ]
    for rank in reversed(range(size)):
        rows = {name: t[rank::size].clone() for name, t in tensors.items()}
        shared = {"model.encoder.x": torch.tensor(4.0)} if rank == 0 else {}
        processes[rank].save(Checkpoint({"step": 3}, rows | shared), ONCE)
    assert all(each.written() for each in processes)
    return processes[0].newest(lambda metadata: metadata["step"] == 3)


@settings(max_examples=15)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4))
def test_any_number_of_processes_reads_what_any_other_wrote(n_labels, size, readers):
    with TemporaryDirectory() as folder:
        wanted = tables(n_labels)
        path = save_all(Path(folder), size, wanted)
        assert find_damage(path, FORMAT_VERSION) == ""

        for rank in range(readers):
            tensors = read_tensors(path, Process(rank, readers))

            assert tensors.pop("model.encoder.x") == 4
            assert tensors.keys() == wanted.keys()
            for name, tensor in tensors.items():
                assert torch.equal(tensor, wanted[name][rank::readers]), name


def test_a_checkpoint_is_whole_only_with_the_rows_of_all(tmp_path):
    path = save_all(tmp_path, 3, tables(7))

    (path / "rows-00001-of-00003.safetensors").write_bytes(b"")

    assert "rows-00001-of-00003.safetensors has 0 bytes" in find_damage(path, FORMAT_VERSION)


def test_rows_that_are_missing_or_refused_make_no_checkpoint(tmp_path):
    rows = {"model.labels.bias": torch.zeros(2)}
    write_shard(tmp_path / "shards", Process(0, 3), rows, "")
    write_shard(tmp_path / "shards", Process(1, 3), {}, "a weight is not finite")
    (tmp_path / "into").mkdir()

    with pytest.raises(DataError, match="rank 1: a weight is not finite"):
        collect_shards(tmp_path / "shards", Process(0, 3), tmp_path / "into")
    (tmp_path / "shards" / "rows-00001-of-00003.safetensors.json").unlink()
    write_shard(tmp_path / "shards", Process(0, 3), rows, "")
    with pytest.raises(DataError, match="rank 1 did not write its rows"):
        collect_shards(tmp_path / "shards", Process(0, 3, lambda: True), tmp_path / "into")


def test_rows_that_do_not_fit_on_the_disk_are_reported_and_removed(tmp_path, monkeypatch, caplog):
    def full(_, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("elias.training.checkpoint.save_file", full)
    first, second = (Checkpoints(tmp_path, CheckpointConfig(), Process(r, 2)) for r in (0, 1))

    second.save(Checkpoint({}, tables(4)), ONCE)
    assert not second.written()
    monkeypatch.undo()
    first.save(Checkpoint({}, tables(4)), ONCE)

    assert not first.written()
    assert "rank 1: [Errno 28] No space left on device" in caplog.text
    assert first.newest(lambda _: True) is None
    assert not list(tmp_path.glob("*/rows-00001*safetensors"))


@pytest.mark.parametrize("late", [False, True], ids=["before the failure", "after the failure"])
def test_rows_of_an_attempt_that_failed_are_in_no_later_checkpoint(tmp_path, monkeypatch, late):
    def full(tensors, path):
        if "rows-00000" in path.name:
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    def slow(tensors, path):
        if "rows-00001" in path.name:
            first_waits.wait(10)
        save_file(tensors, path)

    def is_waiting():
        first_waits.set()
        return False

    first_waits = threading.Event()
    first = Checkpoints(tmp_path, CheckpointConfig(), Process(0, 2, is_waiting))
    second = Checkpoints(tmp_path, CheckpointConfig(), Process(1, 2))
    monkeypatch.setattr("elias.training.checkpoint.save_file", full)
    failing = first.next_attempt()
    for each in (first, second) if late else (second, first):
        each.save(of_step(1.0), failing)
        each.written()
    assert not first.written()
    assert bool(list(tmp_path.iterdir())) == late
    monkeypatch.setattr("elias.training.checkpoint.save_file", slow)

    attempt = first.next_attempt()
    second.save(of_step(2.0), attempt)
    first.save(of_step(2.0), attempt)
    assert first.written()
    assert second.written()

    assert attempt.partition(".")[0] == failing.partition(".")[0]
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]
    path = first.newest(lambda metadata: metadata["step"] == 2)
    assert find_damage(path, FORMAT_VERSION) == ""
    for tensor in read_tensors(path, Process()).values():
        assert tensor.tolist() == [2.0] * 4


def test_the_first_process_waits_for_the_others_rows(tmp_path):
    for rank in (0, 1):
        write_shard(tmp_path / "shards", Process(rank, 3), {"model.labels.bias": torch.ones(1)}, "")
    (tmp_path / "into").mkdir()
    late = threading.Timer(
        0.2,
        write_shard,
        (tmp_path / "shards", Process(2, 3), {"model.labels.bias": torch.ones(1)}, ""),
    )
    late.start()

    notes = collect_shards(tmp_path / "shards", Process(0, 3), tmp_path / "into")

    late.join()
    assert len(notes) == len(list((tmp_path / "into").iterdir())) == 3
    assert json.dumps(notes)
