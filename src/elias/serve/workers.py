"""Serve with one process, or with several worker processes under a supervisor.

The supervisor loads no model.
"""

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
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from elias.config.io import HUB_PREFIX
from elias.errors import ConfigError, EliasError, RunError
from elias.serve.settings import UNHEALTHY_FILE, ServeSettings, check_installed

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess
    from types import FrameType


logger = logging.getLogger(__name__)

_LOAD_FAILED = 2
"""Exit code of a worker that cannot load its model."""
_MAX_DELAY = 30.0
"""Maximum seconds between two attempts to start a worker."""
_MAX_DEATHS = 10
"""Number of worker deaths within `_PERIOD` after which the server exits if none is serving."""
_UNHEALTHY_DEATHS = 3
"""Number of deaths within `_PERIOD` from which ``/health`` is 503 until all are ready."""
_PERIOD = 300.0
_SECONDS_TO_EXIT = 5.0
_POLL_SECONDS = 0.2
_METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the metrics folder: enables multiprocess prometheus_client."""


def serve(settings: ServeSettings) -> None:
    """Serve until SIGTERM or SIGINT, then finish accepted requests; SIGHUP reloads the model.

    Raises:
        ConfigError: If the address cannot be used, or a package is missing.
        ModelError: If the model cannot be loaded.
    """
    check_installed()
    model = settings.model
    if isinstance(model, Path) and not model.exists():
        raise ConfigError(
            f"{model}: no such folder; give that of a saved model or a run, or for a model of the "
            f"hub write {HUB_PREFIX}user/model@revision"
        )
    with bind(settings.host, settings.port) as sock:
        logger.info("serving %s on %s (Ctrl-C to stop)", model, url_of(sock))
        if not settings.is_local and not settings.keys:
            logger.warning(
                "anyone who can reach %s can use this server; --api-key-file requires a key",
                settings.host,
            )
        if settings.workers > 1:
            _Supervisor(sock, settings).run()
            return
        _ignore_sighup()
        from elias.serve.server import serve_on  # here: it imports torch

        serve_on(sock, settings)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address.

    Raises:
        ConfigError: If the address is in use, not permitted, or not an address of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"--host {host}: is not an address ({error.strerror or error})"
        ) from error
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
    """Return the URL of a server that listens on a socket."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(eq=False)
class _Worker:
    process: SpawnProcess
    messages: Connection
    """Receives None when the worker is ready, or the reason why its model cannot be loaded."""
    load_error: str = "the model could not be loaded"
    is_ready: bool = False


class _Supervisor:
    """Start workers, replace those that die, and forward signals to them."""

    def __init__(self, sock: socket.socket, settings: ServeSettings) -> None:
        self._sock = sock
        self._folder = Path(tempfile.mkdtemp(prefix="elias-metrics-"))
        self._settings = replace(settings, metrics_folder=self._folder)
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._signals: list[int] = []
        self._stopping = False
        self._kill_time = float("inf")
        self._was_ready = False
        self._failed_loads = 0
        self._deaths: list[float] = []
        self._next_start = 0.0

    def run(self) -> None:
        """Start the workers and supervise them until the server stops."""
        previous = {
            number: signal.signal(number, self._receive_signal)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        os.environ[_METRICS_VARIABLE] = str(self._folder)
        try:
            while not self._stopping or self._workers:
                self._process_signals()
                self._start_workers()
                wait([worker.process.sentinel for worker in self._workers], timeout=_POLL_SECONDS)
                self._reap_workers()
                self._update_health()
        finally:
            self._signal_workers(signal.SIGKILL)
            del os.environ[_METRICS_VARIABLE]
            shutil.rmtree(self._folder, ignore_errors=True)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _receive_signal(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)

    def _process_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGHUP:
                self._next_start = 0.0  # the model may be readable again
                self._signal_workers(signal.SIGHUP)
                continue
            # A second signal does not wait.
            self._signal_workers(signal.SIGKILL if self._stopping else signal.SIGTERM)
            self._stopping = True
            self._kill_time = time.monotonic() + self._settings.limits.timeout + _SECONDS_TO_EXIT
        if time.monotonic() > self._kill_time:
            self._signal_workers(signal.SIGKILL)

    def _signal_workers(self, number: int) -> None:
        for worker in self._workers:
            if worker.process.pid is not None and worker.process.is_alive():
                os.kill(worker.process.pid, number)

    def _start_workers(self) -> None:
        if self._stopping or time.monotonic() < self._next_start:
            return
        while len(self._workers) < self._settings.workers:
            messages, sender = self._context.Pipe(duplex=False)
            process = self._context.Process(
                target=_run_worker,
                args=(self._sock, self._settings, sender, self._was_ready),
                name="elias-worker",
            )
            process.start()
            sender.close()
            self._workers.append(_Worker(process, messages))

    def _reap_workers(self) -> None:
        """Receive the messages of all workers, and remove workers that have exited."""
        from prometheus_client.multiprocess import mark_process_dead

        exited = [worker for worker in self._workers if not worker.process.is_alive()]
        for worker in self._workers:  # first: `_handle_exit` needs to know if one was ever ready
            self._receive_messages(worker)
        for worker in exited:
            self._workers.remove(worker)
            # Remove its gauges from the metrics.
            mark_process_dead(worker.process.pid, str(self._folder))  # type: ignore[no-untyped-call]
            if not self._stopping:
                self._handle_exit(worker)

    def _receive_messages(self, worker: _Worker) -> None:
        with suppress(EOFError, OSError):  # from a worker that has exited
            while worker.messages.poll():
                error = worker.messages.recv()
                if error is None:
                    worker.is_ready = self._was_ready = True
                    self._failed_loads = 0
                else:
                    worker.load_error = error

    def _handle_exit(self, worker: _Worker) -> None:
        """Schedule the replacement of a worker that has exited, or give up.

        Raises:
            RunError: If no worker ever loaded the model, or too many have died.
        """
        code, pid, now = worker.process.exitcode, worker.process.pid, time.monotonic()
        if code == _LOAD_FAILED:
            if not self._was_ready:
                raise RunError(worker.load_error)
            # The model was readable before, so the other workers keep serving it.
            delay = min(2.0**self._failed_loads, _MAX_DELAY)
            self._failed_loads += 1
            self._next_start = now + delay
            logger.warning(
                "worker %d could not be started, the others continue; retry in %g s or on SIGHUP: "
                "%s",
                *(pid, delay, worker.load_error),
            )
            return
        self._deaths = [*(death for death in self._deaths if death >= now - _PERIOD), now]
        count = len(self._deaths)
        deaths = f"{count} workers have died within {_PERIOD / 60:g} minutes"
        if count >= _UNHEALTHY_DEATHS:
            temporary = self._folder / f"{UNHEALTHY_FILE}.new"
            temporary.write_text(f"{deaths}; others are being started", encoding="utf8")
            temporary.replace(self._folder / UNHEALTHY_FILE)
        if count >= _MAX_DEATHS and not any(other.is_ready for other in self._workers):
            raise RunError(
                f"{deaths} and none is serving, the last with code {code}; see the log for the "
                "reason, or check whether there is too little memory"
            )
        delay = 0.0 if count == 1 else min(2.0 ** (count - 2), _MAX_DELAY)
        self._next_start = now + delay
        logger.warning("worker %d died (code %s); replacing it in %g s", pid, code, delay)

    def _update_health(self) -> None:
        """Remove the unhealthy mark when all workers are ready."""
        if sum(worker.is_ready for worker in self._workers) == self._settings.workers:
            (self._folder / UNHEALTHY_FILE).unlink(missing_ok=True)


def _run_worker(
    sock: socket.socket, settings: ServeSettings, sender: Connection, is_replacement: bool
) -> None:
    """Serve in a worker process, and report success or failure of loading to the supervisor."""
    _ignore_sighup()
    from elias.serve.server import serve_on

    def report(error: str | None) -> None:
        with suppress(OSError):  # the supervisor is gone
            sender.send(error)

    try:
        serve_on(sock, settings, on_ready=lambda: report(None), is_replacement=is_replacement)
    except EliasError as error:
        report(" ".join(str(error).split()))
        sys.exit(_LOAD_FAILED)


def _ignore_sighup() -> None:
    """Ignore SIGHUP until its handler is installed.

    No reload is missed, because the model is loaded after that.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
