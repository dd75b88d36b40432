"""Write and read the rows of W_L in checkpoints of several processes.

Each process writes its own rows; any number of processes can read them. With P processes, label ℓ
is row ℓ div P in the file of process ℓ mod P (`elias.distributed.sharded_linear`). A checkpoint of
a single process has all rows in its main file.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from elias.data.atomic import digest
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from elias.distributed import World


SHARDS = "rows-*.safetensors"
_CHUNK_ROWS = 2**16
_POLL_SECONDS = 0.05
_MAX_WAIT = 1800.0  # seconds, for the slowest disk


def _shard_name(rank: int, size: int) -> str:
    return f"rows-{rank:05d}-of-{size:05d}.safetensors"


def is_row(name: str) -> bool:
    """Return whether a tensor of a checkpoint, given by name, has one row per label.

    >>> [is_row(name) for name in ("model.labels.bias", "model.clusters.bias")]
    [True, False]
    """
    return ".labels." in name and ".gradient." not in name


def write_shard(folder: Path, world: World, tensors: Mapping[str, Tensor], problem: str) -> None:
    """Write this process's rows, then a JSON note with their checksum or a problem.

    If the disk is too full for the rows, the note usually still fits and reports the problem.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _shard_name(world.rank, world.size)
    if problem:
        _write_note(path, {"problem": problem})
        return
    try:
        save_file(dict(tensors), path)
        note = {"bytes": path.stat().st_size, "sha256": digest(path)}
    except (OSError, SafetensorError) as error:
        path.unlink(missing_ok=True)
        _write_note(path, {"problem": str(error)})
        raise
    _write_note(path, note)


def _write_note(path: Path, note: Mapping[str, Any]) -> None:
    hidden = path.with_name(f".{path.name}.json")
    hidden.write_text(json.dumps(note), encoding="utf8")
    hidden.rename(path.with_name(f"{path.name}.json"))


def collect_shards(folder: Path, world: World, target: Path) -> dict[str, dict[str, Any]]:
    """Wait for the rows of all processes, move them to ``target``, and return their checksums.

    Raises:
        DataError: If a process died, could not write its rows, or takes too long.
    """
    notes = {}
    end = time.monotonic() + _MAX_WAIT
    for rank in range(world.size):
        name = _shard_name(rank, world.size)
        path = folder / f"{name}.json"
        while not path.exists():
            if world.has_lost_process() or time.monotonic() > end:
                raise DataError(f"the rows of rank {rank} are missing")
            time.sleep(_POLL_SECONDS)
        note = json.loads(path.read_text(encoding="utf8"))
        if note.get("problem"):
            raise DataError(f"rank {rank}: {note['problem']}")
        (folder / name).rename(target / name)
        notes[name] = note
    return notes


def read_tensors(folder: Path, tensors_file: str, world: World) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint; of tensors with one row per label, only the local rows."""
    tensors: dict[str, Tensor] = {}
    with safe_open(folder / tensors_file, framework="pt") as file:
        names: list[str] = file.keys()
        for name in names:
            is_split = is_row(name) and world.size > 1
            tensors[name] = _own_rows([file], name, world) if is_split else file.get_tensor(name)
    shards = [safe_open(path, framework="pt") for path in sorted(folder.glob(SHARDS))]
    names = shards[0].keys() if shards else []  # type: ignore[no-untyped-call]
    tensors |= {name: _own_rows(shards, name, world) for name in names}
    return tensors if world.size == 1 else _split_gradients(tensors, world)


def _own_rows(files: list[Any], name: str, world: World) -> Tensor:
    """Read this process's rows of the table ``name`` from ``files``, in chunks."""
    slices = [file.get_slice(name) for file in files]
    shapes = [part.get_shape() for part in slices]
    n_rows = len(range(world.rank, sum(shape[0] for shape in shapes), world.size))
    rows = torch.empty((n_rows, *shapes[0][1:]), dtype=slices[0][0:0].dtype)
    for number, (part, shape) in enumerate(zip(slices, shapes, strict=True)):
        for first in range(0, shape[0], _CHUNK_ROWS):
            chunk = part[first : first + _CHUNK_ROWS]
            labels = torch.arange(first, first + len(chunk)) * len(files) + number
            is_own = labels % world.size == world.rank
            rows[labels[is_own] // world.size] = chunk[is_own]
    return rows


def _split_gradients(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Keep only this process's part of the pending gradients of a checkpoint.

    Gradients of W_L are split by label. All other gradients are later summed over processes, so
    only rank 0 keeps them. Pending gradients occur only in checkpoints of a single process,
    because several processes write no checkpoint while a gradient is pending.
    """
    n_rows = len(tensors["model.labels.bias"])
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        _, is_gradient, parameter = name.partition(".gradient.")
        if is_gradient and parameter.startswith("labels."):
            key, _, part = name.rpartition(".")
            labels = tensors[f"{key}.indices"]
            is_own = labels[0] % world.size == world.rank
            parts = {"indices": labels[:, is_own] // world.size}
            result[name] = parts.get(part, tensor[is_own] if part == "values" else tensor)
        elif ".index.gradients." in name and ".pairs." in name:
            if name.endswith(".0"):  # label ids: those of other processes become padding
                is_own = tensor % world.size == world.rank
                tensor = torch.where(is_own, tensor // world.size, n_rows)
            result[name] = tensor
        elif not (is_gradient or ".index.gradients." in name) or world.rank == 0:
            result[name] = tensor
        elif ".index." in name:
            result[name] = torch.zeros_like(tensor)
    return result
