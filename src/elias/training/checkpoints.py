"""Checkpoints on disk: written whole beside the training, checked when they are read.

A checkpoint is a folder of numbers (safetensors), facts (JSON), and a manifest that is written
last and names the size and the SHA-256 of every other file. It is filled under a hidden name,
flushed and renamed. What a checkpoint says is no business of this module.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import elias
from elias.data.staging import staged_folder
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from elias.config import CheckpointConfig

logger = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
FACTS_FILE = "state.json"
TENSORS_FILE = "state.safetensors"
FORMAT_VERSION = 1
WEIGHTS = "model."
"""What the names of the model's own weights begin with: these must be finite."""


class Checkpoint(NamedTuple):
    """What a checkpoint holds."""

    facts: dict[str, Any]
    """What JSON can hold."""
    tensors: dict[str, Tensor]
    """On the CPU."""


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with their names put under a prefix.

    >>> list(prefixed("model.", {"bias": torch.zeros(1)}))
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

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder = folder
        self.config = config
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

    def save(self, checkpoint: Checkpoint, *, wait: bool = False) -> bool:
        """Write a checkpoint in a thread; its tensors must be nobody else's.

        One under way is waited for. A disk that is full, or gone, is told and no more: training
        goes on. With ``wait``, says whether it was written; else whether that was begun.
        """
        if not self.enabled:
            return False
        self.join()
        self._written = False
        self._steps, self._saved_at = 0, time.monotonic()
        self._writer = threading.Thread(
            target=self._write, args=(checkpoint,), name="elias-checkpoint", daemon=True
        )
        self._writer.start()
        if not wait:
            return True
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

    def newest(self, wanted: Callable[[Mapping[str, Any]], bool]) -> Checkpoint | None:
        """Return the newest checkpoint that is whole and whose facts are wanted.

        One that is damaged is told, and the one before it is taken.
        """
        for place in reversed(self._places()):
            problem = damage(place)
            if problem:
                logger.warning("checkpoint %s: %s; the one before it is used", place, problem)
                _remove(place)
                continue
            facts = json.loads((place / FACTS_FILE).read_text(encoding="utf8"))
            if wanted(facts):
                return Checkpoint(facts, load_file(place / TENSORS_FILE))
        return None

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

    def _write(self, checkpoint: Checkpoint) -> None:
        try:
            if not _all_finite(under(WEIGHTS, checkpoint.tensors)):
                logger.warning("no checkpoint is written: a weight is not finite")
                return
            places = self._places()
            number = int(places[-1].name) + 1 if places else 1
            place = self.folder / f"{number:08d}"
            with staged_folder(place) as staging:
                save_file(checkpoint.tensors, staging / TENSORS_FILE)
                write_facts(staging / FACTS_FILE, checkpoint.facts)
                seal(staging)
            self._written = True
            for old in [*places, place][: -self.config.keep]:
                _remove(old)
            logger.debug("checkpoint %s written", place)
        except (OSError, SafetensorError, DataError) as error:
            logger.warning(
                "no checkpoint could be written to %s (%s); training goes on", self.folder, error
            )
        except BaseException as error:  # a bug of ours: raised where it is seen
            self._failure = error


def write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Write JSON."""
    path.write_text(json.dumps(facts, ensure_ascii=False), encoding="utf8")


def seal(folder: Path) -> None:
    """Write the manifest of a folder that is otherwise complete."""
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": _digest(path),
        }
        for path in _files(folder)
    }
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


def _all_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Say whether all numbers are; a sum would overflow, and a mask be as large as the weights."""
    for tensor in tensors.values():
        if tensor.is_floating_point() and tensor.numel():
            lowest, highest = tensor.aminmax()
            if not bool(torch.isfinite(lowest) & torch.isfinite(highest)):
                return False
    return True
