"""Serving as a process, or as several that are looked after by a parent without a model."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from elias.errors import HUB_PREFIX, ConfigError, EliasError, RunError
from elias.serve.settings import UNHEALTHY_FILE, ServeSettings, check_installed

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess
    from types import FrameType


logger = logging.getLogger(__name__)

_MISTAKE = 2
"""A worker's exit code when its model cannot be read."""
_LONGEST_WAIT = 30.0
"""Seconds at most between two attempts to start a worker."""
_MOST_DEATHS = 10
_SPAN = 300.0
"""So many deaths of workers in so many seconds end the server, unless one of them serves."""
_UNHEALTHY_DEATHS = 3
"""So many of them, and workers missing, are told by ``/health``."""
_SECONDS_TO_END = 5.0
_TICK = 0.2
_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""By it prometheus_client knows, when it is first imported, that it is one of several."""


def serve(settings: ServeSettings) -> None:
    """Serve until SIGTERM or SIGINT, finishing what was accepted; SIGHUP reads the model again.

    Raises:
        ConfigError: If the address cannot be had, or a package is missing.
        ModelError: If the model cannot be read.
    """
    check_installed()
    _check_folder(settings.model)
    with bound(settings.host, settings.port) as sock:
        logger.info("serving %s on %s (^C ends it)", settings.model, url_of(sock))
        if not settings.is_local and not settings.keys:
            logger.warning(
                "whoever reaches %s can use it; --api-key-file asks for a key", settings.host
            )
        if settings.workers == 1:
            _ignore_reload()
            from elias.serve.server import serve_on  # here: it imports torch

            serve_on(sock, settings)
        else:
            _Supervisor(sock, settings).run()


def _check_folder(model: Path | str) -> None:
    """Refuse a folder that does not exist, before any process is started."""
    if isinstance(model, Path) and not model.exists():
        raise ConfigError(
            f"{model}: no such folder; give that of a saved model or a run, or for a model of the "
            f"hub write {HUB_PREFIX}user/model@revision"
        )


def bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address.

    Raises:
        ConfigError: If the address is taken, not allowed, or not of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--host {host}: is no address ({error.strerror or error})") from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot serve on {host} port {port} ({error.strerror}); choose another with --host "
            "and --port"
        ) from error
    sock.set_inheritable(True)
    return sock


def url_of(sock: socket.socket) -> str:
    """Return where a browser finds what listens on a socket."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(eq=False)
class _Worker:
    process: SpawnProcess
    news: Connection
    """Where it says None when it is ready, or why its model cannot be read."""
    failure: str = "no model"
    is_ready: bool = False


class _Supervisor:
    """Keeps as many workers as wanted, and hands signals on to them."""

    def __init__(self, sock: socket.socket, settings: ServeSettings) -> None:
        self._sock = sock
        self._folder = Path(tempfile.mkdtemp(prefix="elias-metrics-"))
        self._settings = replace(settings, metrics_folder=self._folder)
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._ending = False
        self._was_ready = False
        self._misread = 0
        self._deaths: deque[float] = deque()
        self._not_before = 0.0
        self._signals: list[int] = []
        self._deadline = float("inf")

    def run(self) -> None:
        """Start the workers, and look after them until the end."""
        before = {
            number: signal.signal(number, self._note)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        os.environ[_FOLDER_VARIABLE] = str(self._folder)  # read by prometheus_client
        try:
            while not self._ending or self._workers:
                self._heed_signals()
                self._start_missing()
                wait([worker.process.sentinel for worker in self._workers], timeout=_TICK)
                self._bury_dead()
                self._recover()
        finally:
            self._end_all(signal.SIGKILL)
            del os.environ[_FOLDER_VARIABLE]
            shutil.rmtree(self._folder, ignore_errors=True)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)

    def _heed_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGHUP:
                self._not_before = 0.0  # what could not be read may have been mended
                for worker in self._workers:
                    _send(worker.process, signal.SIGHUP)
                continue
            again, self._ending = self._ending, True
            self._end_all(signal.SIGKILL if again else signal.SIGTERM)
            self._deadline = time.monotonic() + self._settings.limits.timeout + _SECONDS_TO_END
        if self._ending and time.monotonic() > self._deadline:
            self._end_all(signal.SIGKILL)

    def _end_all(self, number: int) -> None:
        for worker in self._workers:
            _send(worker.process, number)

    def _start_missing(self) -> None:
        if self._ending or time.monotonic() < self._not_before:
            return
        while len(self._workers) < self._settings.workers:
            listening, telling = self._context.Pipe(duplex=False)
            process = self._context.Process(
                target=_work,
                args=(self._sock, self._settings, telling, self._was_ready),
                name="elias-worker",
            )
            process.start()
            telling.close()
            self._workers.append(_Worker(process, listening))

    def _hear(self, worker: _Worker) -> None:
        """Take in what a worker has said."""
        try:
            while worker.news.poll():
                said = worker.news.recv()
                if said is None:
                    worker.is_ready = self._was_ready = True
                    self._misread = 0
                else:
                    worker.failure = said
        except (EOFError, OSError):
            pass  # it is dead, and has said all it will

    def _bury_dead(self) -> None:
        dead = [worker for worker in self._workers if not worker.process.is_alive()]
        for worker in self._workers:  # all, first: whether one was ever ready decides below
            self._hear(worker)
        for worker in dead:
            self._workers.remove(worker)
            self._forget(worker)
            if not self._ending:
                self._consider(worker)

    def _forget(self, worker: _Worker) -> None:
        """Take what is true of living workers alone out of the metrics."""
        from prometheus_client.multiprocess import mark_process_dead

        mark_process_dead(worker.process.pid, str(self._folder))  # type: ignore[no-untyped-call]

    def _consider(self, worker: _Worker) -> None:
        """Have a dead worker replaced, soon or later, or give up."""
        code, pid = worker.process.exitcode, worker.process.pid
        if code == _MISTAKE and self._was_ready:
            # the folder was fine once, and those that serve what it held are not to suffer
            delay = min(2.0**self._misread, _LONGEST_WAIT)
            self._misread += 1
            self._not_before = time.monotonic() + delay
            logger.warning(
                "worker %d could not be started, the others go on; again in %g s, or on SIGHUP: %s",
                *(pid, delay, worker.failure),
            )
            return
        if code == _MISTAKE:
            self._ending = True
            self._deadline = time.monotonic() + _SECONDS_TO_END
            self._end_all(signal.SIGKILL)
            raise RunError(worker.failure)
        self._note_death()
        count = len(self._deaths)
        if count >= _MOST_DEATHS and not any(other.is_ready for other in self._workers):
            raise RunError(
                f"{count} workers have died within {_SPAN / 60:g} minutes and none serves, the "
                f"last with code {code}; the log says why, or too little memory is the reason"
            )
        delay = 0.0 if count == 1 else min(2.0 ** (count - 2), _LONGEST_WAIT)
        self._not_before = time.monotonic() + delay
        soon = "" if count == 1 else f" in {delay:g} s"
        logger.warning("worker %d died (code %s); another takes its place%s", pid, code, soon)

    def _note_death(self) -> None:
        """Count a death, forget those of long ago, and have the workers tell of many."""
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - _SPAN:
            self._deaths.popleft()
        if len(self._deaths) >= _UNHEALTHY_DEATHS:
            told = f"{len(self._deaths)} workers have died within {_SPAN / 60:g} minutes"
            new = self._folder / f"{UNHEALTHY_FILE}.new"
            new.write_text(f"{told}; others are being started", encoding="utf8")
            new.replace(self._folder / UNHEALTHY_FILE)

    def _recover(self) -> None:
        """Be healthy again once as many workers as wanted are ready."""
        if sum(worker.is_ready for worker in self._workers) == self._settings.workers:
            (self._folder / UNHEALTHY_FILE).unlink(missing_ok=True)


def _ignore_reload() -> None:
    """Ignore SIGHUP until it can be heeded: the model is read after that, so nothing is missed."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _send(process: SpawnProcess, number: int) -> None:
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, number)


def _work(
    sock: socket.socket, settings: ServeSettings, telling: Connection, replaces: bool
) -> None:
    """Be a worker; one that ``replaces`` another counts a model it cannot read as no reload."""
    _ignore_reload()
    from elias.serve.server import serve_on

    try:
        serve_on(sock, settings, on_ready=lambda: _tell(telling, None), replaces=replaces)
    except EliasError as error:
        _tell(telling, " ".join(str(error).split()))
        sys.exit(_MISTAKE)


def _tell(telling: Connection, said: str | None) -> None:
    with suppress(OSError):  # a parent that is gone hears nothing
        telling.send(said)
