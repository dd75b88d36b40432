"""Write, find and read checkpoints.

A checkpoint is a folder of numbers (safetensors), facts (JSON), and a manifest that is written
last and names the size and the SHA-256 of every other file. It is filled under a hidden name,
flushed and renamed. What a checkpoint says is no business of this module.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

import elias
from elias.data.atomic import staged_folder
from elias.distributed import SingleProcess
from elias.errors import DataError, Interrupted
from elias.persistence.manifest import all_finite
from elias.training.checkpoint_shards import Share, is_row, read_share, take_shards, write_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from elias.config import CheckpointConfig
    from elias.distributed import World
    from elias.training.run import Interruption


logger = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
FACTS_FILE = "state.json"
TENSORS_FILE = "state.safetensors"
FORMAT_VERSION = 2
WEIGHTS = "model."
"""What the names of the model's own weights begin with: these must be finite."""
_SHARDS = ".shards"


class Checkpoint(NamedTuple):
    """What a checkpoint holds."""

    facts: dict[str, Any]
    """What JSON can hold."""
    tensors: dict[str, Tensor]
    """On the CPU."""


class Attempt(NamedTuple):
    """One try at writing a checkpoint, which all processes that write its parts must know."""

    number: int
    """What the checkpoint is called."""
    token: str
    """Its own: the next try may have the same number, and must not take what this one left."""


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with their names put under a prefix.

    >>> from torch import zeros
    >>> list(prefixed("model.", {"bias": zeros(1)}))
    ['model.bias']
    """
    return {prefix + name: tensor for name, tensor in tensors.items()}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names are under a prefix, without it; `prefixed` undone."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


class Checkpoints:
    """The checkpoints of one run: when the next is due, the last few on disk."""

    def __init__(self, folder: Path, config: CheckpointConfig, share: Share | None = None) -> None:
        self.folder = folder
        self.config = config
        self.share = share or Share()
        self._steps = 0
        self._saved_at = time.monotonic()
        self._writer: threading.Thread | None = None
        self._written = False
        self._failure: BaseException | None = None

    @property
    def enabled(self) -> bool:
        """Say whether any are written."""
        return self.config.keep > 0

    def any(self) -> bool:
        """Say whether there is anything to go on from, whole or not."""
        return next(self.folder.glob("[!.]*"), None) is not None

    def due(self) -> bool:
        """Count a step, and say whether a checkpoint should follow it."""
        self._steps += 1
        if not self.enabled or self._is_writing():
            return False
        if self.config.steps is not None and self._steps >= self.config.steps:
            return True
        waited = time.monotonic() - self._saved_at
        return 0 < self.config.minutes * 60 <= waited

    def next_attempt(self) -> Attempt:
        """Return what the next one is called, and what the parts of it are known by."""
        places = self._places()
        return Attempt(int(places[-1].name) + 1 if places else 1, secrets.token_hex(4))

    def save(
        self, checkpoint: Checkpoint, *, wait: bool = False, attempt: Attempt | None = None
    ) -> bool:
        """Write a checkpoint in a thread; its tensors must be nobody else's.

        One under way is waited for. A disk that is full, or gone, is told and no more: training
        goes on. With ``wait``, says whether it was written; else whether that was begun. Several
        processes agree on the ``attempt``.
        """
        if not self.enabled:
            return False
        self.join()
        self._written = False
        self._steps, self._saved_at = 0, time.monotonic()
        attempt = attempt or self.next_attempt()
        self._writer = threading.Thread(
            target=self._write, args=(checkpoint, attempt), name="elias-checkpoint", daemon=True
        )
        self._writer.start()
        return self.written() if wait else True

    def written(self) -> bool:
        """Wait for the checkpoint that was begun last, and say whether it was written."""
        self.join()
        return self._written

    def join(self) -> None:
        """Wait for the checkpoint that is being written, if one is."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def newest(self, wanted: Callable[[Mapping[str, Any]], bool]) -> Path | None:
        """Return the place of the newest checkpoint that is whole and whose facts are wanted.

        One that is damaged is told, and the one before it is taken.
        """
        for place in reversed(self._places()):
            problem = damage(place)
            if problem:
                logger.warning("checkpoint %s: %s; the one before it is used", place, problem)
                _remove(place)
                continue
            if wanted(_facts(place)):
                return place
        return None

    def read(self, place: Path) -> Checkpoint:
        """Return the checkpoint at a place, of the rows of W_L this process's."""
        return Checkpoint(_facts(place), read_share(place, TENSORS_FILE, self.share))

    def clear(self) -> None:
        """Remove the checkpoints; what else is in the folder stays."""
        self.join()
        for place in self._places():
            _remove(place)

    def sweep(self) -> None:
        """Remove what writers that were killed have left."""
        for place in self.folder.glob(".*"):
            shutil.rmtree(place, ignore_errors=True)

    def _is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def _places(self) -> list[Path]:
        return sorted(place for place in self.folder.glob("[0-9]*") if place.is_dir())

    def _write(self, checkpoint: Checkpoint, attempt: Attempt) -> None:
        place = self.folder / f"{attempt.number:08d}"
        shards = self.folder / f".{place.name}.{attempt.token}{_SHARDS}"
        try:
            self._written = self._write_parts(checkpoint, place, shards)
        except (OSError, SafetensorError, DataError) as error:
            logger.warning(
                "no checkpoint could be written to %s (%s); training goes on", self.folder, error
            )
        except BaseException as error:  # a bug of ours: raised where it is seen
            self._failure = error
        finally:
            if self.share.rank == 0 and self.share.size > 1:
                shutil.rmtree(shards, ignore_errors=True)

    def _write_parts(self, checkpoint: Checkpoint, place: Path, shards: Path) -> bool:
        """Write what is this process's to write, and say whether it could be."""
        problem, tensors = "", checkpoint.tensors
        if not all(map(all_finite, under(WEIGHTS, tensors).values())):
            problem = "a weight is not finite"
            logger.warning("no checkpoint is written: %s", problem)
        if self.share.size > 1:
            if self.share.rank == 0:
                self._remove_shards(but=shards)
            rows = {name: tensor for name, tensor in tensors.items() if is_row(name)}
            tensors = {name: t for name, t in tensors.items() if name not in rows}
            write_shard(shards, self.share, rows, problem)
        if problem or self.share.rank > 0:
            return not problem
        places = self._places()
        with staged_folder(place) as staging:
            notes = {}
            if self.share.size > 1:
                notes = take_shards(shards, self.share, staging)
            save_file(tensors, staging / TENSORS_FILE)
            write_facts(staging / FACTS_FILE, checkpoint.facts)
            seal(staging, notes)
        for old in [*places, place][: -self.config.keep]:
            _remove(old)
        logger.debug("checkpoint %s written", place)
        return True

    def _remove_shards(self, but: Path) -> None:
        """Remove what processes have written after the first one gave an attempt up."""
        for shards in self.folder.glob(f".*{_SHARDS}"):
            if shards != but:
                shutil.rmtree(shards, ignore_errors=True)


def write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Write JSON."""
    path.write_text(json.dumps(facts, ensure_ascii=False), encoding="utf8")


def seal(folder: Path, known: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Write the manifest of a folder that is otherwise complete.

    ``known`` are what it says of files that others wrote, and need not be read again for it.
    """
    names = [path.relative_to(folder).as_posix() for path in _files(folder)]
    files = dict(known or {})
    for name in names:
        if name not in files:
            path = folder / name
            files[name] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    about = {"format_version": FORMAT_VERSION, "elias_version": elias.__version__}
    write_facts(folder / MANIFEST_FILE, {**about, "files": files})


def damage(folder: Path) -> str:
    """Return what is wrong with a sealed folder, in a few words; empty where nothing is."""
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf8"))
        version, files = manifest["format_version"], manifest["files"]
        if version != FORMAT_VERSION:
            return f"is of format {version}, not {FORMAT_VERSION}"
        for name, wanted in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != wanted["bytes"]:
                return f"{name} has {path.stat().st_size} bytes, not {wanted['bytes']}"
            if _digest(path) != wanted["sha256"]:
                return f"{name} is not what was written (its SHA-256 differs)"
    except FileNotFoundError:
        return f"{MANIFEST_FILE} is missing"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{MANIFEST_FILE} cannot be read ({error})"
    return ""


def _facts(place: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((place / FACTS_FILE).read_text(encoding="utf8"))
    return facts


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(place: Path) -> None:
    """Remove a checkpoint, hidden first: what is left of it half-way is no checkpoint."""
    hidden = place.with_name(f".{place.name}.old")
    try:
        place.rename(hidden)
    except OSError as error:
        logger.warning("checkpoint %s could not be removed: %s", place, error)
    shutil.rmtree(hidden, ignore_errors=True)


@dataclass
class Keeper:
    """Writes the checkpoints of a member's training."""

    checkpoints: Checkpoints
    interruption: Interruption
    about: Callable[[], Mapping[str, Any]]
    """Returns what the run adds to each: which member it is of, what was recorded so far."""
    world: World = SingleProcess()
    """The processes that stop together and each write a part."""
    _asked: Callable[[], list[int]] | None = field(default=None, init=False)

    def after_step(self, where: str, make: Callable[[], Checkpoint]) -> None:
        """Write a checkpoint if one is due; after a signal write one in any case, and stop.

        Several processes do so a step later, when each has heard what the others want: so none
        waits for an answer.
        """
        stop, due = self.interruption.signal, self.checkpoints.due()
        if self.world.size > 1:
            stop, due = self._agreed(stop, due)
        if stop is not None:
            self._stop(where, self._save(make(), wait=True), stop)
        if due:
            self._save(make(), wait=False)

    def after_stage(self, where: str, make: Callable[[], Checkpoint]) -> None:
        """Write a checkpoint; stop after a signal."""
        stop = self.interruption.signal
        if self.world.size > 1:
            self._agreed(stop, False)  # as of a step ago
            stop, _ = self._agreed(stop, False)
            self._agreed(None, False)
            self._asked = None
        kept = self._save(make(), wait=stop is not None)
        if stop is not None:
            self._stop(where, kept, stop)

    def _agreed(self, stop: int | None, due: bool) -> tuple[int | None, bool]:
        """Say what this process wants; return what any of them wanted a step ago."""
        due = due and self.world.is_rank0
        asked, self._asked = self._asked, self.world.max_async([stop or 0, int(due)])
        if asked is None:
            return None, False
        signal_number, wanted = asked()
        return signal_number or None, bool(wanted)

    def _save(self, checkpoint: Checkpoint, *, wait: bool) -> bool:
        if not self.checkpoints.enabled:
            return False
        world = self.world
        copies = {
            name: _copied(tensor)
            for name, tensor in checkpoint.tensors.items()
            if world.is_rank0 or is_row(name)
        }
        kept = Checkpoint({**checkpoint.facts, **self.about()}, copies)
        self.checkpoints.join()  # the one before has its name
        attempt = world.broadcast(self.checkpoints.next_attempt())
        begun = self.checkpoints.save(kept, attempt=attempt)
        return world.broadcast_from_rank0(self.checkpoints.written) if wait else begun

    def _stop(self, where: str, kept: bool, number: int) -> None:
        left = f"stopped after {where}"
        if not kept:
            left += ", of which no checkpoint could be written"
        raise Interrupted(left, signal_number=number)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's random numbers, on the host and on a GPU that is used."""
    found = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["random.cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on with the random numbers that `random_state` saw; a GPU's only on a GPU."""
    torch.set_rng_state(state["random.cpu"])
    if device.type == "cuda" and "random.cuda" in state:
        torch.cuda.set_rng_state(state["random.cuda"], device)
