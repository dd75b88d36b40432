"""The run folder: configuration, metrics, log, lock and signals."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import elias
from elias.config import EliasConfig, decisive, first_difference, read_tree, without_rates
from elias.distributed import SingleProcess
from elias.errors import ConfigError, Interrupted, RunError
from elias.persistence.manifest import METRICS_FILE, MODEL_FOLDER
from elias.training.checkpoint import Checkpoints
from elias.training.checkpoint_shards import Share
from elias.training.loggers import TRACKER_FOLDERS, Trackers, open_trackers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

    from numpy.typing import NDArray

    from elias.distributed import World


logger = logging.getLogger(__name__)

if sys.platform != "win32":  # runs are not locked there
    import fcntl


LOCK_FILE = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder that is there for this process alone.

    The lock is the system's (``flock``): it ends with the process, however that ends.

    Raises:
        RunError: If another process, or another run of this one, holds it.
    """
    if sys.platform == "win32":
        yield
        return
    path = folder / LOCK_FILE
    handle = _taken(path)
    try:
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while it is held: who waits for this file finds another (see _taken)
        os.close(handle)


def refuse_if_locked(folder: Path) -> None:
    """Refuse a folder that a run is at work in."""
    path = folder / LOCK_FILE
    if sys.platform == "win32" or not path.exists():
        return
    with suppress(FileNotFoundError):
        handle = os.open(path, os.O_RDWR)
        try:
            _lock(handle, path)
        finally:
            os.close(handle)


def _taken(path: Path) -> int:
    """Return the handle of the lock file at ``path``, held."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle, path)
            with suppress(FileNotFoundError):
                if _is_at(handle, path):
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # it was removed by the one who held it


def _lock(handle: int, path: Path) -> None:
    assert sys.platform != "win32"
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
        raise RunError(
            f"{path.parent}: a run is at work here (process {holder}); wait for it, stop it, or "
            "use another --out"
        ) from None


def _is_at(handle: int, path: Path) -> bool:
    return os.path.samestat(os.fstat(handle), path.stat())


class Interruption:
    """Whether the run was asked to stop.

    Inside `deferred` the first signal is only noted, and whoever is at work there looks; a second
    one, or one anywhere else, stops the run at once.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._deferred = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Note signals in this block instead of stopping at once."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to the signals in this block, unless the program listens to them itself."""
        usual: dict[signal.Signals, Any] = {
            signal.SIGINT: signal.default_int_handler,
            signal.SIGTERM: signal.SIG_DFL,
        }
        if threading.current_thread() is not threading.main_thread():
            usual = {}
        ours = [number for number, handler in usual.items() if signal.getsignal(number) is handler]
        for number in ours:
            signal.signal(number, self._hear)
        try:
            yield
        finally:
            for number in ours:
                signal.signal(number, usual[number])

    def _hear(self, number: int, _: FrameType | None) -> None:
        first = self.signal is None
        self.signal = number
        if not (self._deferred and first):
            raise Interrupted(signal_number=number)


class _LogFile(logging.FileHandler):
    """A log that a full disk ends without a word: who needs the room tells it."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Write to a file what the package tells, and how the run began and ended.

    A run that goes on adds to it.
    """
    handler = _LogFile(path, encoding="utf8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("elias")
    before = ours.level
    ours.addHandler(handler)
    ours.setLevel(min(before or logging.INFO, logging.INFO))
    try:
        with _story(handler, path):
            yield
    finally:
        ours.setLevel(before)
        ours.removeHandler(handler)
        with suppress(OSError):
            handler.close()


@contextmanager
def _story(handler: logging.Handler, path: Path) -> Iterator[None]:
    """Write how a run begins and ends; to the log alone, since who waits for it sees that."""

    def tell(level: int, text: str) -> None:
        handler.handle(logger.makeRecord(logger.name, level, "", 0, text, (), None))

    began = time.monotonic()
    tell(
        logging.INFO,
        f"begun in {path.parent.resolve()} by process {os.getpid()} on {platform.node()}: "
        f"elias-xmc {elias.__version__}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads",
    )
    try:
        yield
    except BaseException as error:
        why = " ".join(str(error).split()) or "no more is known"
        kind = type(error).__name__
        tell(logging.ERROR, f"stopped after {time.monotonic() - began:.1f} s: {kind}: {why}")
        raise
    tell(logging.INFO, f"finished after {time.monotonic() - began:.1f} s")


CONFIG_FILE = "config.json"
LOG_FILE = "train.log"
PARTITION_FILE = "partition.npy"
"""(L,) each label's cluster in the last stage with the fixed graph; what Fig. 7 looks back at."""
REPORT_FILE = "report.html"
"""Not written by a run, but about one: it goes where the run goes."""
CHECKPOINTS_FOLDER = "checkpoints"
"""What an unfinished run goes on from; gone when it is finished."""
_OURS = (CONFIG_FILE, METRICS_FILE, LOG_FILE, PARTITION_FILE, REPORT_FILE)
_PARTS = (*_OURS, *TRACKER_FOLDERS, CHECKPOINTS_FOLDER, MODEL_FOLDER)
_REPLACED = ".replaced"


class Run:
    """A training run: records what happens and how long it took, on disk if it has a folder."""

    def __init__(self, folder: Path | None = None, about: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.records: list[dict[str, Any]] = []
        self.timings: dict[str, float] = {}
        self.interruption = Interruption()
        self.checkpoints: Checkpoints | None = None
        self.trackers = Trackers([])
        self.made_of: Mapping[str, Any] = {}
        """What the model is made of beside its configuration: a run goes on with just that."""
        self._about = dict(about or {})
        self._redoing = False
        self._began: dict[str, float] = {}
        self._earlier: dict[str, float] = {}

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
        member.interruption, member.checkpoints = self.interruption, self.checkpoints
        member.made_of, member.trackers = self.made_of, self.trackers
        member._began, member._earlier = self._began, self._earlier
        return member

    @property
    def model_folder(self) -> Path | None:
        """Return where the model goes when it is finished."""
        return None if self.folder is None else self.folder / MODEL_FOLDER

    @property
    def number(self) -> int:
        """Return which member of an ensemble this is the run of; 0 for the first."""
        return int(self._about.get("member", 0))

    @property
    def can_go_on(self) -> bool:
        """Say whether anything was kept from which the same command goes on."""
        return self.checkpoints is not None and self.checkpoints.any()

    @property
    def has_trained(self) -> bool:
        """Say whether an epoch was finished."""
        return any(record["event"] == "epoch" for record in self.records)

    def record(self, event: str, **facts: Any) -> None:
        """Note an event: one line of ``metrics.jsonl``."""
        if self._redoing:
            return
        line = {"event": event, **self._about, **facts}
        self.records.append(line)
        self.trackers.record(line)
        if self.folder is None:
            return
        path = self.folder / METRICS_FILE
        with _written(path), path.open("a", encoding="utf8") as file:
            file.write(_as_line(line))

    @contextmanager
    def redoing(self, on: bool) -> Iterator[None]:
        """Record nothing in this block: it was done, and recorded, before the run went on."""
        self._redoing = on
        try:
            yield
        finally:
            self._redoing = False

    def metrics(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return what was recorded of each stage of this member on each split."""
        return {
            record["stage"]: {k: v for k, v in record.items() if isinstance(v, dict)}
            for record in self.records
            if record["event"] == "stage" and int(record.get("member", 0)) == self.number
        }

    def state(self) -> dict[str, Any]:
        """Return what was recorded so far, for a checkpoint."""
        now = time.monotonic()
        return {
            "member": self.number,
            "made_of": dict(self.made_of),
            "records": list(self.records),
            "timings": dict(self.timings),
            "under_way": {step: now - began for step, began in self._began.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; what was recorded after it is forgotten."""
        self.records[:] = state["records"]
        self.timings.clear()
        self.timings.update(state["timings"])
        self._earlier.update(state["under_way"])
        self.trackers.go_on(sum(record["event"] == "epoch" for record in self.records))
        if self.folder is not None:
            _write_whole(self.folder / METRICS_FILE, "".join(map(_as_line, self.records)))

    def keep_partition(self, clusters: NDArray[np.int64]) -> None:
        """Keep which cluster each label is in (of the first member), whole or not at all."""
        if self.folder is None or self._about:
            return
        path = self.folder / PARTITION_FILE
        temporary = path.with_name(f".{path.name}.writing")
        with _written(path):
            with temporary.open("wb") as file:
                np.save(file, clusters.astype(np.int32), allow_pickle=False)
            temporary.replace(path)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Note how long the block takes, under the name ``step``."""
        if self._redoing:
            yield
            return
        start = time.monotonic() - self._earlier.pop(step, 0.0)
        self._began[step] = start
        try:
            yield
        finally:
            del self._began[step]
        seconds = time.monotonic() - start
        self.timings[step] = self.timings.get(step, 0.0) + seconds
        self.record("time", step=step, seconds=round(seconds, 3))


def _as_line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


@contextmanager
def open_run(
    folder: Path | None,
    config: EliasConfig,
    *,
    overwrite: bool,
    made_of: Mapping[str, Any] | None = None,
    world: World = SingleProcess(),
) -> Iterator[Run]:
    """Start or resume a run in ``folder`` and log to it; refuse to spoil another run.

    A run that fails before its first epoch or checkpoint leaves nothing behind. A finished run
    that was to be replaced comes back unless the new one is finished or can be resumed. Processes
    other than rank 0 only write their share of the checkpoints.
    """
    if not world.is_rank0:
        with _open_helper_run(folder, config, world) as run:
            yield run
        return
    if folder is None:
        world.broadcast(None)
        yield Run()
        return
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; give another --out")
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    run = Run(folder)
    run.made_of = dict(made_of or {})
    share = Share(world.rank, world.size, world.has_lost_process)
    run.checkpoints = Checkpoints(folder / CHECKPOINTS_FOLDER, config.checkpoint, share)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder), _room(folder, config, run, overwrite=overwrite):
            write_json(folder / CONFIG_FILE, config.to_dict())
            with logged(folder / LOG_FILE), _tracked(run, config), run.interruption.listening():
                world.broadcast(None)  # the folder exists and is locked
                yield run
    finally:
        with suppress(OSError):
            for place in made:
                place.rmdir()  # fails if it is not empty


@contextmanager
def _open_helper_run(folder: Path | None, config: EliasConfig, world: World) -> Iterator[Run]:
    """Open the run of a process other than rank 0."""
    world.broadcast(None)  # wait until rank 0 has made the folder
    run = Run()
    if folder is not None:
        if not (folder / CONFIG_FILE).exists():
            raise RunError(
                f"{folder}: rank {world.rank} does not see what rank 0 has written there; give an "
                "--out on a file system that all machines share"
            )
        share = Share(world.rank, world.size, world.has_lost_process)
        run.checkpoints = Checkpoints(folder / CHECKPOINTS_FOLDER, config.checkpoint, share)
    with run.interruption.listening():
        try:
            yield run
        finally:
            if run.checkpoints is not None:
                run.checkpoints.join()


@contextmanager
def _tracked(run: Run, config: EliasConfig) -> Iterator[None]:
    """Hand what is recorded on to the trackers that the configuration asks for."""
    assert run.folder is not None
    run.trackers = open_trackers(config, run.folder)
    try:
        yield
    finally:
        run.trackers.close()


@contextmanager
def _room(folder: Path, config: EliasConfig, run: Run, *, overwrite: bool) -> Iterator[None]:
    """Make room for a run, then clear up after it, whether it is finished, failed or stopped."""
    _make_room(folder, config, overwrite=overwrite)
    checkpoints = run.checkpoints
    assert checkpoints is not None
    try:
        yield
        checkpoints.join()
        shutil.rmtree(checkpoints.folder, ignore_errors=True)
    except BaseException:
        with suppress(Exception):  # what went wrong first matters more
            checkpoints.join()
        _clear_up(folder, run)
        raise
    shutil.rmtree(folder / _REPLACED, ignore_errors=True)


def _clear_up(folder: Path, run: Run) -> None:
    """Leave of a run that failed what can go on, or is worth a look, and what it was to replace."""
    aside = folder / _REPLACED
    replaces_finished = (aside / MODEL_FOLDER).exists()
    if not (folder / MODEL_FOLDER).exists():
        if run.can_go_on and replaces_finished:
            return
        if not run.can_go_on and (replaces_finished or not run.has_trained):
            _take_back(folder)
            _move(aside, folder)
    shutil.rmtree(aside, ignore_errors=True)


def _take_back(folder: Path) -> None:
    """Remove a run in which nothing was trained: the corrected command may use its folder."""
    with suppress(OSError):  # what went wrong matters more
        for name in (CHECKPOINTS_FOLDER, *TRACKER_FOLDERS):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in _OURS:
            (folder / name).unlink(missing_ok=True)


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder where no run may begin, whatever its configuration; change nothing."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; give another --out")
    refuse_if_locked(folder)
    if not overwrite and _is_finished(folder):
        raise RunError(f"{folder}: holds a finished run; use --overwrite or another --out")


def can_go_on(folder: Path) -> bool:
    """Say whether a folder has an unfinished run with a checkpoint."""
    there = next((folder / CHECKPOINTS_FOLDER).glob("[!.]*"), None) is not None
    return there and not (folder / MODEL_FOLDER).exists()


def _is_finished(folder: Path) -> bool:
    """Say whether a folder has a finished run, or one that comes back (see `_bring_back`)."""
    if (folder / MODEL_FOLDER).exists():
        return True
    return (folder / _REPLACED / MODEL_FOLDER).exists() and not can_go_on(folder)


def _bring_back(folder: Path, *, overwrite: bool) -> None:
    """Bring back a finished run if one that was to replace it was killed, and cannot go on.

    One that could is given up where it is to be overwritten: the finished run is worth more.
    """
    aside = folder / _REPLACED
    if not (aside / MODEL_FOLDER).exists() or (folder / MODEL_FOLDER).exists():
        return
    if overwrite or not can_go_on(folder):
        _take_back(folder)
        _move(aside, folder)


def _make_room(folder: Path, config: EliasConfig, *, overwrite: bool) -> None:
    """Check that a run may begin, or go on, in ``folder``; put aside what must make room."""
    _bring_back(folder, overwrite=overwrite)
    if not overwrite and _is_finished(folder):
        raise RunError(f"{folder}: holds a finished run; use --overwrite or another --out")
    for left in folder.glob(f".{MODEL_FOLDER}.*.partial"):  # of a run killed while it saved
        shutil.rmtree(left, ignore_errors=True)
    held = [name for name in _PARTS if (folder / name).exists()]
    if not held:
        return
    if not overwrite:
        _refuse_another(folder, config)
        if can_go_on(folder):
            return
        logger.info("%s: an unfinished run of this configuration starts over", folder)
    _put_aside(folder)


def _put_aside(folder: Path) -> None:
    """Make room for a run to begin; what is there comes back if that fails at once."""
    shutil.rmtree(folder / _REPLACED, ignore_errors=True)
    (folder / _REPLACED).mkdir()
    _move(folder, folder / _REPLACED)


def _refuse_another(folder: Path, config: EliasConfig) -> None:
    """Refuse to go on with a run of another configuration, naming the first difference.

    Learning rates may change: a run that diverged resumes with lower ones.
    """
    rates = ""
    try:
        ours, begun = decisive(config.to_dict()), decisive(read_tree(folder / CONFIG_FILE))
        differs = first_difference(without_rates(ours), without_rates(begun))
        rates = first_difference(ours, begun)
    except ConfigError as error:
        differs = str(error)
    if differs:
        raise RunError(
            f"{folder}: a run was begun here with another configuration ({differs}); "
            "use --overwrite or another --out"
        )
    if rates:
        logger.warning("%s: resumes with other learning rates (%s)", folder, rates)


def refuse_other_parts(folder: Path, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Refuse to go on with a run that is made of something else, naming what."""
    for name in ours:
        if ours[name] != theirs.get(name):
            raise RunError(
                f"{folder}: a run was begun here with another {name} ({theirs.get(name)}, not "
                f"{ours[name]}); go on with that one, or use --overwrite or another --out"
            )


def _move(source: Path, target: Path) -> None:
    """Move the parts of a run from one folder to another."""
    for name in _PARTS:
        if (source / name).exists():
            (source / name).rename(target / name)


def write_json(path: Path, tree: Any) -> None:
    """Write JSON whole: to a temporary file, then renamed."""
    _write_whole(path, json.dumps(tree, indent=2, ensure_ascii=False) + "\n")


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.writing")
    with _written(path):
        with temporary.open("w", encoding="utf8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Turn a disk that is full or gone into one line."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written: {error.strerror}; mend that, and run the same command"
        ) from error


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The lines of ``metrics.jsonl``; a model without a run has none."""

    events: Sequence[Mapping[str, Any]] = ()

    def of(self, event: str) -> list[Mapping[str, Any]]:
        """Return the events of one kind, in order: data, epoch or stage.

        Of an ensemble, those of its first member: the others' lines name theirs.
        """
        return [r for r in self.events if r.get("event") == event and "member" not in r]

    def times(self) -> dict[str, float]:
        """Return the seconds of each step; a step that came twice is added up, as members' are."""
        seconds: dict[str, float] = {}
        for record in (r for r in self.events if r.get("event") == "time"):
            seconds[record["step"]] = seconds.get(record["step"], 0.0) + record["seconds"]
        return seconds

    def source(self) -> Path | None:
        """Return where the corpus was read from, if the run knows."""
        places = [record.get("source") for record in self.of("data")]
        return Path(places[-1]) if places and places[-1] else None

    def reading(self) -> dict[str, Any]:
        """Return the options that the corpus was read with."""
        given = [record.get("reading") for record in self.of("data")]
        return dict(given[-1]) if given and given[-1] else {}


def read_records(run: Path) -> RunRecords:
    """Read the events of a run; none where the folder is that of a model alone."""
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
            raise RunError(f"{path}:{number}: is not a JSON object; train the run again")
        events.append(record)
    return RunRecords(tuple(events))


def read_partition(run: Path, n_labels: int, n_clusters: int) -> NDArray[np.int64] | None:
    """Return each label's cluster in the fixed graph (L,), or None where a run kept none."""
    path = run / PARTITION_FILE
    if not path.exists():
        return None
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        found = np.empty(0)
    whole = found.shape == (n_labels,) and np.issubdtype(found.dtype, np.integer)
    if not whole or found.min() < 0 or found.max() >= n_clusters:
        raise RunError(
            f"{path}: is not a cluster below {n_clusters} for each of {n_labels} labels; "
            "remove the file, or train the run again"
        )
    clusters: NDArray[np.int64] = found.astype(np.int64)
    return clusters
