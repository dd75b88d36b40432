"""Manage a run and its folder: configuration, metrics, log, lock and signals."""

from __future__ import annotations

import copy
import json
import logging
import os
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray

import elias
from elias.config import (
    EliasConfig,
    first_difference,
    model_settings,
    read_tree,
    without_learning_rates,
)
from elias.data.atomic import staged_file
from elias.distributed import SingleProcess, World
from elias.errors import ConfigError, Interrupted, RunError
from elias.persistence.manifest import METRICS_FILE, MODEL_FOLDER
from elias.training.checkpoint import Checkpoints, has_checkpoints
from elias.training.loggers import LOGGER_FOLDERS, Loggers, open_loggers

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
CONFIG_FILE = "config.json"
LOG_FILE = "train.log"
PARTITION_FILE = "partition.npy"
"""Array (L,) with the cluster of each label in the last stage with a fixed graph (for Fig. 7)."""
REPORT_FILE = "report.html"
"""Output of `elias report`, which is moved and removed together with the run."""
CHECKPOINTS_FOLDER = "checkpoints"
"""Folder of the checkpoints. It is removed when the run is finished."""
_FILES = (CONFIG_FILE, METRICS_FILE, LOG_FILE, PARTITION_FILE, REPORT_FILE)
_PARTS = (*_FILES, *LOGGER_FOLDERS, CHECKPOINTS_FOLDER, MODEL_FOLDER)
_REPLACED = ".replaced"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder during the block.

    If the process is killed, the operating system releases the lock.

    Raises:
        RunError: If another process, or another run in this process, holds the lock.
    """
    path = folder / LOCK_FILE
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        holder = "unknown"
        with suppress(OSError):
            holder = path.read_text(encoding="ascii", errors="replace").strip() or holder
        raise RunError(
            f"{folder}: a run is active here (process {holder}); wait until it is finished, stop "
            "it, or use another out="
        ) from None
    try:
        with suppress(OSError):  # the process id is only used in the message above
            path.write_text(f"{os.getpid()}\n", encoding="ascii")
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # before the release; FileLock does not accept a file that was removed
        lock.release()


def check_unlocked(folder: Path) -> None:
    """Raise a `RunError` if a run is active in a folder."""
    if (folder / LOCK_FILE).exists():
        with locked(folder):
            pass


class Interruption:
    """Signals that ask the run to stop.

    Inside `deferred`, the first signal is only recorded in `signal`, which the running code must
    check. A second signal, or any signal outside `deferred`, stops the run at once.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._deferred = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Record the first signal in this block in `signal`, instead of stopping at once."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM in this block, unless the caller has set its own handlers."""
        defaults: dict[signal.Signals, Any] = {
            signal.SIGINT: signal.default_int_handler,
            signal.SIGTERM: signal.SIG_DFL,
        }
        if threading.current_thread() is not threading.main_thread():
            defaults = {}
        handled = [n for n, handler in defaults.items() if signal.getsignal(n) is handler]
        for number in handled:
            signal.signal(number, self._handle)
        try:
            yield
        except SystemError as error:
            # numba replaces our exception if a signal arrives while it loads compiled code
            if self.signal is None:
                raise
            raise Interrupted(signal_number=self.signal) from error
        finally:
            for number in handled:
                signal.signal(number, defaults[number])

    def _handle(self, number: int, _: FrameType | None) -> None:
        is_first = self.signal is None
        self.signal = number
        if not (self._deferred and is_first):
            raise Interrupted(signal_number=number)


class _LogFile(logging.FileHandler):
    """A log file that ignores write errors such as a full disk. Other code reports them."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Append the package's log to a file, and log the start and the end of the block there."""
    handler = _LogFile(path, encoding="utf8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("elias")
    level = package.level
    package.addHandler(handler)
    package.setLevel(min(level or logging.INFO, logging.INFO))

    def log(text: str, level: int = logging.INFO) -> None:  # write to this file only
        handler.handle(logger.makeRecord(logger.name, level, "", 0, text, (), None))

    start = time.monotonic()
    log(
        f"started in {path.parent.resolve()} by process {os.getpid()} on {platform.node()}: "
        f"elias-xmc {elias.__version__}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    try:
        yield
        log(f"finished after {time.monotonic() - start:.1f} s")
    except BaseException as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
        log(f"stopped after {time.monotonic() - start:.1f} s: {reason}", logging.ERROR)
        raise
    finally:
        package.setLevel(level)
        package.removeHandler(handler)
        with suppress(OSError):
            handler.close()


class Run:
    """A training run. If it has a folder, its events are written there."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.number = 0
        """Index of this ensemble member, counted from 0."""
        self.records: list[dict[str, Any]] = []
        self.timings: dict[str, float] = {}
        self.interruption = Interruption()
        self.checkpoints: Checkpoints | None = None
        self.loggers = Loggers([])
        self.inputs: Mapping[str, Any] = {}
        """Fingerprints of the inputs (`run_inputs`). A resumed run must have the same inputs."""
        self._replaying = False
        self._started: dict[str, float] = {}
        self._earlier: dict[str, float] = {}

    def member(self, number: int) -> Run:
        """Return the run of one member of an ensemble.

        The first member is the run itself. Events of later members have a ``member`` field with the
        index of the member. All members share records, timings and checkpoints.
        """
        member = self if number == 0 else copy.copy(self)
        member.number = number
        return member

    def record(self, event: str, **values: Any) -> None:
        """Record an event, and append it to ``metrics.jsonl`` as one line."""
        if self._replaying:
            return
        member = {"member": self.number} if self.number else {}
        line = {"event": event, **member, **values}
        self.records.append(line)
        self.loggers.record(line)
        if self.folder is None:
            return
        path = self.folder / METRICS_FILE
        with _write_errors(path), path.open("a", encoding="utf8") as file:
            file.write(_json_line(line))

    @contextmanager
    def replaying(self, on: bool) -> Iterator[None]:
        """If ``on``, record nothing in this block, because it repeats steps of a resumed run."""
        self._replaying = on
        try:
            yield
        finally:
            self._replaying = False

    def metrics(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return this member's recorded metrics as {stage: {split: {metric: value}}}."""
        return {
            record["stage"]: {k: v for k, v in record.items() if isinstance(v, dict)}
            for record in self.records
            if record["event"] == "stage" and int(record.get("member", 0)) == self.number
        }

    def state(self) -> dict[str, Any]:
        """Return the state of the run for a checkpoint."""
        now = time.monotonic()
        return {
            "member": self.number,
            "made_of": dict(self.inputs),
            "records": list(self.records),
            "timings": dict(self.timings),
            "under_way": {step: now - start for step, start in self._started.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Reset the run to a state that `state` returned, and drop later records."""
        self.records[:] = state["records"]
        self.timings.clear()
        self.timings.update(state["timings"])
        self._earlier.update(state["under_way"])
        self.loggers.n_epochs = sum(record["event"] == "epoch" for record in self.records)
        if self.folder is not None:
            write_text(self.folder / METRICS_FILE, "".join(map(_json_line, self.records)))

    def save_partition(self, clusters: NDArray[np.int64]) -> None:
        """Save the cluster of each label. Only the first ensemble member does this."""
        if self.folder is None or self.number:
            return
        path = self.folder / PARTITION_FILE
        with _write_errors(path), staged_file(path) as temporary, temporary.open("wb") as file:
            np.save(file, clusters.astype(np.int32), allow_pickle=False)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Measure the duration of the block and record it under the name ``step``."""
        if self._replaying:
            yield
            return
        start = time.monotonic() - self._earlier.pop(step, 0.0)
        self._started[step] = start
        try:
            yield
        finally:
            del self._started[step]
        seconds = time.monotonic() - start
        self.timings[step] = self.timings.get(step, 0.0) + seconds
        self.record("time", step=step, seconds=round(seconds, 3))


@contextmanager
def open_run(
    folder: Path | None,
    config: EliasConfig,
    *,
    overwrite: bool,
    inputs: Mapping[str, Any] | None = None,
    world: World = SingleProcess(),
) -> Iterator[Run]:
    """Start or resume a run in ``folder``. Replace a finished run only if ``overwrite``.

    A run that fails before its first epoch or checkpoint is removed. If a run that replaces a
    finished run fails and cannot be resumed, the finished run is restored. Processes other than
    rank 0 write only their share of the checkpoints.
    """
    run = Run(folder if world.is_rank0 else None)
    run.inputs = dict(inputs or {})
    if folder is not None:
        run.checkpoints = Checkpoints(folder / CHECKPOINTS_FOLDER, config.checkpoint, world)
    if not world.is_rank0:
        with _on_other_rank(run, folder, world):
            yield run
        return
    if folder is None:
        world.broadcast(None)
        yield run
        return
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (
            locked(folder),
            _prepared(folder, config, run, overwrite=overwrite),
            logged(folder / LOG_FILE),
            run.interruption.listening(),
            closing(open_loggers(config, folder)) as run.loggers,
        ):
            world.broadcast(None)  # tell the other processes that the folder is ready
            yield run
    finally:
        with suppress(OSError):
            for path in new_folders:
                path.rmdir()  # fails if it is not empty


@contextmanager
def _on_other_rank(run: Run, folder: Path | None, world: World) -> Iterator[None]:
    """Wait for rank 0 to open the run. After the block, finish this process's last checkpoint."""
    world.broadcast(None)
    if folder is not None and not (folder / CONFIG_FILE).exists():
        raise RunError(
            f"{folder}: rank {world.rank} cannot see the files of rank 0; use an out= on a file "
            "system that all machines share"
        )
    with run.interruption.listening():
        try:
            yield
        finally:
            if run.checkpoints is not None:
                run.checkpoints.written()


@contextmanager
def _prepared(folder: Path, config: EliasConfig, run: Run, *, overwrite: bool) -> Iterator[None]:
    """Prepare the folder for a run, and clean up after the run ends, fails or is interrupted."""
    _make_room(folder, config, overwrite=overwrite)
    checkpoints, aside = run.checkpoints, folder / _REPLACED
    assert checkpoints is not None
    try:
        write_json(folder / CONFIG_FILE, config.to_dict())
        yield
        checkpoints.written()
        shutil.rmtree(checkpoints.folder, ignore_errors=True)
    except BaseException:
        with suppress(Exception):  # the error that ended the run is more important
            checkpoints.written()
        replaces_finished = (aside / MODEL_FOLDER).exists()
        if can_resume(folder) and replaces_finished:
            raise
        is_lost = not can_resume(folder) and not (folder / MODEL_FOLDER).exists()
        has_trained = any(record["event"] == "epoch" for record in run.records)
        if is_lost and (replaces_finished or not has_trained):
            _remove_unfinished(folder)
            _move_parts(aside, folder)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _remove_unfinished(folder: Path) -> None:
    """Remove the files of an unfinished run, so that a new run can use its folder."""
    with suppress(OSError):  # the error that ended the run is more important
        for name in (CHECKPOINTS_FOLDER, *LOGGER_FOLDERS):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in _FILES:
            (folder / name).unlink(missing_ok=True)


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Raise a `RunError` if ``folder`` cannot be used for a run, whatever its configuration."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file, not a folder; use another out=")
    check_unlocked(folder)
    _check_unfinished(folder, overwrite=overwrite)


def _check_unfinished(folder: Path, *, overwrite: bool) -> None:
    """Raise a `RunError` if the folder has a finished run that must not be overwritten.

    This includes a finished run that was moved aside and that `_make_room` will restore.
    """
    restored = (folder / _REPLACED / MODEL_FOLDER).exists() and not can_resume(folder)
    if not overwrite and ((folder / MODEL_FOLDER).exists() or restored):
        raise RunError(f"{folder}: holds a finished run; use overwrite=True or another out=")


def can_resume(folder: Path) -> bool:
    """Return whether a folder has an unfinished run with a checkpoint or a finished member."""
    return has_checkpoints(folder / CHECKPOINTS_FOLDER) and not (folder / MODEL_FOLDER).exists()


def _make_room(folder: Path, config: EliasConfig, *, overwrite: bool) -> None:
    """Check that a run can start or resume in ``folder``. If it starts, move old files aside."""
    aside = folder / _REPLACED
    if (
        (aside / MODEL_FOLDER).exists()
        and not (folder / MODEL_FOLDER).exists()
        and (overwrite or not can_resume(folder))
    ):
        # A run that was replacing a finished run was killed. Restore the finished run.
        _remove_unfinished(folder)
        _move_parts(aside, folder)
    _check_unfinished(folder, overwrite=overwrite)
    for partial in folder.glob(f".{MODEL_FOLDER}.*.partial"):  # left by a run killed while saving
        shutil.rmtree(partial, ignore_errors=True)
    if not any((folder / name).exists() for name in _PARTS):
        return
    if not overwrite:
        _check_same_config(folder, config)
        if can_resume(folder):
            return
        logger.info("%s: starting over because the unfinished run has no checkpoint", folder)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    _move_parts(folder, aside)


def _check_same_config(folder: Path, config: EliasConfig) -> None:
    """Raise a `RunError` if the configuration has changed. The error names the first difference.

    Learning rates may differ, so that a run that diverged can be resumed with lower ones.
    """
    rates, ours = "", model_settings(config.to_dict())
    try:
        theirs = model_settings(read_tree(folder / CONFIG_FILE))
        difference = first_difference(without_learning_rates(ours), without_learning_rates(theirs))
        rates = first_difference(ours, theirs)
    except ConfigError as error:
        difference = str(error)
    if difference:
        raise RunError(
            f"{folder}: a run was started here with another configuration ({difference}); "
            "use the original configuration, overwrite=True to start over, or another out="
        )
    if rates:
        logger.warning("%s: resumes with other learning rates (%s)", folder, rates)


def _move_parts(source: Path, target: Path) -> None:
    """Move the parts of a run from one folder to another."""
    for name in _PARTS:
        if (source / name).exists():
            (source / name).rename(target / name)


def _json_line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def write_json(path: Path, tree: Any) -> None:
    """Write ``tree`` as JSON to a temporary file, then rename it to ``path``."""
    write_text(path, json.dumps(tree, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to a temporary file, then rename it to ``path``."""
    with _write_errors(path), staged_file(path) as temporary:
        temporary.write_text(text, encoding="utf8", newline="\n")


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Convert an `OSError` that occurs while writing ``path`` into a `RunError`."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written: {error.strerror}; fix this and run the same command again"
        ) from error


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The events in the ``metrics.jsonl`` of a run, or no events for a model without a run."""

    events: Sequence[Mapping[str, Any]] = ()

    def of(self, event: str) -> list[Mapping[str, Any]]:
        """Return all events of one kind, such as data, epoch or stage, in order.

        For an ensemble, return only the events of the first member, which have no ``member`` field.
        """
        return [r for r in self.events if r.get("event") == event and "member" not in r]

    def times(self) -> dict[str, float]:
        """Return the duration of each timed step in seconds, summed over ensemble members."""
        seconds: dict[str, float] = {}
        for record in (r for r in self.events if r.get("event") == "time"):
            seconds[record["step"]] = seconds.get(record["step"], 0.0) + record["seconds"]
        return seconds

    def source(self) -> Path | None:
        """Return the path of the corpus, or None if it was not recorded."""
        path = self._last_data().get("source")
        return Path(path) if path else None

    def reading(self) -> dict[str, Any]:
        """Return the options with which the corpus was read, if they were recorded."""
        return dict(self._last_data().get("reading") or {})

    def _last_data(self) -> Mapping[str, Any]:
        return next(reversed(self.of("data")), {})


def read_records(run: Path) -> RunRecords:
    """Read the events of a run. There are none if the folder has no ``metrics.jsonl``."""
    path = run / METRICS_FILE
    if not path.exists():
        return RunRecords()
    events = []
    for number, line in enumerate(path.read_text(encoding="utf8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise RunError(f"{path}:{number}: is not a JSON object; correct or remove this line")
        events.append(record)
    return RunRecords(tuple(events))


def read_partition(run: Path, n_labels: int, n_clusters: int) -> NDArray[np.int64] | None:
    """Return the cluster of each label in the fixed graph (L,), or None if it was not saved."""
    path = run / PARTITION_FILE
    if not path.exists():
        return None
    try:
        partition = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        partition = np.empty(0)
    is_valid = partition.shape == (n_labels,) and np.issubdtype(partition.dtype, np.integer)
    if not is_valid or partition.min() < 0 or partition.max() >= n_clusters:
        raise RunError(
            f"{path}: expected {n_labels} cluster ids below {n_clusters}; "
            "remove the file, or train the run again"
        )
    clusters: NDArray[np.int64] = partition.astype(np.int64)
    return clusters
