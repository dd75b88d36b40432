"""What a run leaves behind: its configuration, its metrics line by line, its log, its model."""

from __future__ import annotations

import json
import logging
import shutil
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elias.config import EliasConfig, read_tree
from elias.errors import ConfigError, RunError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
LOG_FILE = "train.log"
MODEL_FOLDER = "model"
PARTITION_FILE = "partition.npy"
"""(L,) each label's cluster in the last stage with the fixed graph; what Fig. 7 looks back at."""
REPORT_FILE = "report.html"
"""Not written by a run, but about one: it goes where the run goes."""
_OURS = (CONFIG_FILE, METRICS_FILE, LOG_FILE, PARTITION_FILE, REPORT_FILE)
_REPLACED = ".replaced"

logger = logging.getLogger(__name__)


class Run:
    """A training run: records what happens and how long it took, on disk if it has a folder."""

    def __init__(self, folder: Path | None = None, about: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.records: list[dict[str, Any]] = []
        self.timings: dict[str, float] = {}
        self._about = dict(about or {})

    def member(self, number: int) -> Run:
        """Return the same run as one member of an ensemble sees it.

        What the first member records is the run's; the others' lines name their member, and only
        the time they take is the run's too.
        """
        if number == 0:
            return self
        member = Run(self.folder, {"member": number})
        member.records = self.records
        member.timings = self.timings
        return member

    @property
    def model_folder(self) -> Path | None:
        """Return where the model goes when it is finished."""
        return None if self.folder is None else self.folder / MODEL_FOLDER

    @property
    def has_trained(self) -> bool:
        """Say whether an epoch was finished."""
        return any(record["event"] == "epoch" for record in self.records)

    def record(self, event: str, **facts: Any) -> None:
        """Note an event: one line of ``metrics.jsonl``."""
        line = {"event": event, **self._about, **facts}
        self.records.append(line)
        if self.folder is not None:
            with (self.folder / METRICS_FILE).open("a", encoding="utf8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def keep_partition(self, clusters: NDArray[np.int64]) -> None:
        """Keep which cluster each label is in (of the first member), whole or not at all."""
        if self.folder is None or self._about:
            return
        path = self.folder / PARTITION_FILE
        temporary = path.with_name(f".{path.name}.writing")
        with temporary.open("wb") as file:
            np.save(file, clusters.astype(np.int32), allow_pickle=False)
        temporary.replace(path)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Note how long the block takes, under the name ``step``."""
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start
        self.timings[step] = self.timings.get(step, 0.0) + seconds
        self.record("time", step=step, seconds=round(seconds, 3))


@contextmanager
def open_run(folder: Path | None, config: EliasConfig, *, overwrite: bool) -> Iterator[Run]:
    """Begin a run in ``folder`` and log to it; refuse to spoil another one there.

    A run that fails before its first epoch leaves nothing behind. A finished run that was to be
    replaced comes back unless the new one is finished too.
    """
    if folder is None:
        yield Run()
        return
    _make_room(folder, config, overwrite=overwrite)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    run = Run(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CONFIG_FILE, config.to_dict())
        with _logged(folder / LOG_FILE):
            yield run
    except BaseException:
        replaced = (folder / _REPLACED / MODEL_FOLDER).exists()
        if replaced or not run.has_trained:
            _take_back(folder, made)
            _move(folder / _REPLACED, folder)
        raise
    finally:
        shutil.rmtree(folder / _REPLACED, ignore_errors=True)


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Write to a file what the package tells."""
    handler = logging.FileHandler(path, mode="w", encoding="utf8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("elias")
    before = ours.level
    ours.addHandler(handler)
    ours.setLevel(min(before or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        ours.setLevel(before)
        ours.removeHandler(handler)
        handler.close()


def _take_back(folder: Path, made: list[Path]) -> None:
    """Remove a run in which nothing was trained: the corrected command may use its folder."""
    with suppress(OSError):  # what went wrong matters more
        for name in _OURS:
            (folder / name).unlink(missing_ok=True)
        for place in made:
            place.rmdir()  # refused where something else is in it


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder where no run may begin, whatever its configuration.

    A finished run comes back first if one that was to replace it was killed.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; give another --out")
    if (folder / _REPLACED / MODEL_FOLDER).exists() and not (folder / MODEL_FOLDER).exists():
        _take_back(folder, [])
        _move(folder / _REPLACED, folder)
    if (folder / MODEL_FOLDER).exists() and not overwrite:
        raise RunError(f"{folder}: holds a finished run; use --overwrite or another --out")


def _make_room(folder: Path, config: EliasConfig, *, overwrite: bool) -> None:
    """Check that a run may begin in ``folder``; with ``overwrite``, put the old one aside."""
    check_folder(folder, overwrite=overwrite)
    held = [name for name in (*_OURS, MODEL_FOLDER) if (folder / name).exists()]
    if not held:
        return
    if not overwrite:
        if _begun_with(folder) != config.to_dict():
            raise RunError(
                f"{folder}: a run was begun here with another configuration; "
                "use --overwrite or another --out"
            )
        logger.info("%s: an unfinished run of this configuration starts over", folder)
    shutil.rmtree(folder / _REPLACED, ignore_errors=True)
    (folder / _REPLACED).mkdir()
    _move(folder, folder / _REPLACED)


def _move(source: Path, target: Path) -> None:
    """Move the parts of a run from one folder to another."""
    for name in (*_OURS, MODEL_FOLDER):
        if (source / name).exists():
            (source / name).rename(target / name)


def _begun_with(folder: Path) -> dict[str, Any] | None:
    try:
        return read_tree(folder / CONFIG_FILE)
    except ConfigError:
        return None


def write_json(path: Path, tree: Any) -> None:
    """Write JSON whole: to a temporary file, then renamed."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf8")
    temporary.replace(path)
