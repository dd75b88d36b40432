"""The rows of W_L in checkpoints: each process writes its own, any number of them reads them again.

With P processes label ℓ is row ℓ div P in the file of process ℓ mod P
(`elias.distributed.sharded_linear`). A
checkpoint of one process has all rows in the file of everything else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor


logger = logging.getLogger(__name__)

SHARDS = "rows-*.safetensors"
_PIECE_ROWS = 2**16
_POLL_SECONDS = 0.05
_LONGEST_WAIT = 1800.0  # seconds, for the slowest disk


def _nobody() -> bool:
    return False


class Share(NamedTuple):
    """Which rows are this process's, and whether the processes with the others are there."""

    rank: int = 0
    size: int = 1
    lost: Callable[[], bool] = _nobody
    """Says whether a process is gone, so that nothing of it is to be waited for."""

    @property
    def file(self) -> str:
        """Return the name of this process's file."""
        return _file(self.rank, self.size)


def _file(rank: int, size: int) -> str:
    return f"rows-{rank:05d}-of-{size:05d}.safetensors"


def is_row(name: str) -> bool:
    """Say whether a tensor of a checkpoint has a row for each label.

    >>> [is_row(name) for name in ("model.labels.bias", "model.clusters.bias")]
    [True, False]
    """
    return ".labels." in name and ".gradient." not in name


def write_shard(folder: Path, share: Share, tensors: Mapping[str, Tensor], problem: str) -> None:
    """Write this process's rows, then a note of what was written, or of what is wrong with it.

    A note is small enough for a disk that has no room for rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / share.file
    if problem:
        _write_note(path, {"problem": problem})
        return
    try:
        save_file(dict(tensors), path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, SafetensorError) as error:
        path.unlink(missing_ok=True)
        _write_note(path, {"problem": str(error)})
        raise
    _write_note(path, {"bytes": path.stat().st_size, "sha256": digest})


def _write_note(path: Path, note: Mapping[str, Any]) -> None:
    hidden = path.with_name(f".{path.name}.json")
    hidden.write_text(json.dumps(note), encoding="utf8")
    hidden.rename(path.with_name(f"{path.name}.json"))


def take_shards(folder: Path, share: Share, into: Path) -> dict[str, dict[str, Any]]:
    """Move the rows of all processes into a checkpoint once they are written; return their notes.

    Raises:
        DataError: If a process is gone, could not write its own, or takes too long.
    """
    notes = {}
    end = time.monotonic() + _LONGEST_WAIT
    for rank in range(share.size):
        name = _file(rank, share.size)
        note = folder / f"{name}.json"
        while not note.exists():
            if share.lost() or time.monotonic() > end:
                raise DataError(f"the rows of rank {rank} are missing")
            time.sleep(_POLL_SECONDS)
        said = json.loads(note.read_text(encoding="utf8"))
        if said.get("problem"):
            raise DataError(f"rank {rank}: {said['problem']}")
        (folder / name).rename(into / name)
        notes[name] = said
    return notes


def read_share(place: Path, tensors_file: str, share: Share) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, of those with a row for each label this process's."""
    found: dict[str, Tensor] = {}
    with safe_open(place / tensors_file, framework="pt") as file:
        names: list[str] = file.keys()
        for name in names:
            if is_row(name) and share.size > 1:
                found[name] = _own_rows([file], name, share)
            else:
                found[name] = file.get_tensor(name)
    files = [safe_open(path, framework="pt") for path in sorted(place.glob(SHARDS))]
    names = files[0].keys() if files else []  # type: ignore[no-untyped-call]
    found |= {name: _own_rows(files, name, share) for name in names}
    return found if share.size == 1 else _with_own_gradients(found, share)


def _own_rows(files: list[Any], name: str, share: Share) -> Tensor:
    """Return this process's rows of a table, read a piece at a time."""
    slices = [file.get_slice(name) for file in files]
    shapes = [part.get_shape() for part in slices]
    total = sum(shape[0] for shape in shapes)
    n_own = len(range(share.rank, total, share.size))
    found = torch.empty((n_own, *shapes[0][1:]), dtype=slices[0][0:0].dtype)
    for number, (part, shape) in enumerate(zip(slices, shapes, strict=True)):
        for first in range(0, shape[0], _PIECE_ROWS):
            piece = part[first : first + _PIECE_ROWS]
            labels = torch.arange(first, first + len(piece)) * len(files) + number
            own = labels % share.size == share.rank
            found[labels[own] // share.size] = piece[own]
    return found


def _with_own_gradients(tensors: dict[str, Tensor], share: Share) -> dict[str, Tensor]:
    """Leave of the gradients that wait in a checkpoint what is this process's to add.

    Those that all processes add up are the first one's. One process alone wrote them: several keep
    nothing while a gradient waits.
    """
    n_own = len(tensors["model.labels.bias"])
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        before, waits, after = name.partition(".gradient.")
        if waits and after.startswith("labels."):
            key = f"{before}{waits}{after.rpartition('.')[0]}"
            found[name] = _own_entries(tensors, key, name, share)
        elif waits or ".index.gradients." in name:
            found |= _first_ones(name, tensor, share, n_own)
        else:
            found[name] = tensor
    return found


def _own_entries(tensors: Mapping[str, Tensor], key: str, name: str, share: Share) -> Tensor:
    labels = tensors[f"{key}.indices"]
    own = labels[0] % share.size == share.rank
    if name.endswith(".indices"):
        return labels[:, own] // share.size
    return tensors[name][own] if name.endswith(".values") else tensors[name]


def _first_ones(name: str, tensor: Tensor, share: Share, n_own: int) -> dict[str, Tensor]:
    """Return a gradient that waits, for the process that adds it."""
    if ".pairs." in name:
        if name.endswith(".0"):  # labels: other processes' are padding
            own = tensor % share.size == share.rank
            tensor = torch.where(own, tensor // share.size, n_own)
        return {name: tensor}
    if share.rank == 0:
        return {name: tensor}
    return {name: torch.zeros_like(tensor)} if ".index." in name else {}
