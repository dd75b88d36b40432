"""Serve with one process, or with several worker processes under a supervisor.

Each worker runs its own event loop and serves on the same socket. The supervisor loads no model.
Workers share memory in two ways: the weights are memory-mapped files, and on Linux workers are
forked after the supervisor has imported the libraries.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import uvicorn

from elias.config.io import HUB_PREFIX
from elias.errors import ConfigError, EliasError, RunError
from elias.progress import progress_disabled
from elias.serve.schemas import raw_response
from elias.serve.settings import UNHEALTHY_FILE, ServeSettings, is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.process import BaseProcess

    from elias.serve.backend import Backend


logger = logging.getLogger(__name__)

_MAX_DELAY = 30.0
"""Maximum seconds between two attempts to start a worker."""
_MAX_DEATHS = 10
"""Number of worker deaths within `_PERIOD` after which the server exits if no worker is ready."""
_UNHEALTHY_DEATHS = 3
"""Number of worker deaths within `_PERIOD` after which ``/health`` returns 503 until all workers
are ready again."""
_PERIOD = 300.0
_SECONDS_TO_EXIT = 5.0
_POLL_SECONDS = 0.2
_MAX_REFUSED, _SECONDS_TO_READ = 16, 0.05
"""Number of connections to refuse per poll during shutdown, and seconds to read each request."""
_HAS_SIGHUP = hasattr(signal, "SIGHUP")  # not on Windows
_FORKS = sys.platform == "linux"
"""Fork workers on Linux only. On macOS, some system libraries do not work after a fork."""
_SHARED_MODULES = ("elias.serve.app", "elias.serve.backend", "elias.serve.connections")
"""Modules that the supervisor imports before it forks. They import torch, but compute nothing."""
_FORWARDED = (signal.SIGTERM, *((signal.SIGHUP,) if _HAS_SIGHUP else ()))
"""Signals that the supervisor sends to workers."""
_READY_FILE, _READY_GLOB, _ERROR_FILE = "ready-{}", "ready-*", "error-{}"
"""Files in the metrics folder that a worker writes when it is ready or cannot load the model.

Their names contain the process id of the worker.
"""


def serve(settings: ServeSettings) -> None:
    """Serve until SIGTERM or SIGINT, then finish accepted requests. SIGHUP reloads the model.

    Windows has no SIGHUP. There, restart the server to load another model.

    Raises:
        ConfigError: If the address cannot be used, or several workers are requested on Windows.
        ModelError: If the model cannot be loaded.
    """
    model = settings.model
    if isinstance(model, Path) and not model.exists():
        raise ConfigError(
            f"{model}: no such folder; give the folder of a saved model or a run, or "
            f"{HUB_PREFIX}user/model@revision for a model on the hub"
        )
    if settings.workers > 1 and not _HAS_SIGHUP:
        raise ConfigError("--workers: this system supports only one worker; leave the option out")
    with bind(settings.host, settings.port) as sock:
        logger.info("serving %s on %s (Ctrl-C to stop)", model, url_of(sock))
        if not is_loopback(settings.host) and not settings.keys:
            logger.warning(
                "anyone who can reach %s can use this server; use --api-key-file to require a key",
                settings.host,
            )
        if settings.workers > 1:
            with TemporaryDirectory(prefix="elias-metrics-", ignore_cleanup_errors=True) as folder:
                _Supervisor(sock, settings, Path(folder)).run()
        else:
            _serve_on(sock, settings)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address.

    Raises:
        ConfigError: If the address is in use, not permitted, or not an address of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        problem = f"--host {host}: is not an address ({error.strerror})"
        raise ConfigError(f"{problem}; give a host name or an IP address") from error
    if os.name == "posix":  # on Windows, this option would let two servers share a port
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        problem = f"cannot serve on {host} port {port} ({error.strerror})"
        raise ConfigError(f"{problem}; choose another with --host or --port") from error
    return sock


def url_of(sock: socket.socket) -> str:
    """Return the URL of a server that listens on a socket."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Supervisor:
    """Supervisor that starts workers, replaces dead workers and forwards signals to all workers."""

    def __init__(self, sock: socket.socket, settings: ServeSettings, folder: Path) -> None:
        self._sock = sock
        self._settings = replace(settings, metrics_folder=folder)
        self._folder = folder
        self._workers: list[BaseProcess] = []
        self._signals: list[int] = []
        self._stopping = False
        self._kill_time = float("inf")
        self._was_ready = False
        self._failed_loads = 0
        self._deaths: list[float] = []
        self._next_start = 0.0

    def run(self) -> None:
        """Start the workers and supervise them until the server stops."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: self._signals.append(number))
        # prometheus_client then writes the metrics of each process to this folder.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(self._folder)
        if _FORKS:
            for module in _SHARED_MODULES:
                import_module(module)
            gc.freeze()  # garbage collection in the workers would copy shared pages
        try:
            while not self._stopping or self._workers:
                self._process_signals()
                self._start_workers()
                wait([worker.sentinel for worker in self._workers], timeout=_POLL_SECONDS)
                if self._stopping:
                    self._refuse_connections()
                self._reap_workers()
        finally:
            self._signal_workers(signal.SIGKILL)

    def _process_signals(self) -> None:
        while self._signals:
            if self._signals.pop(0) == signal.SIGHUP:
                self._next_start = 0.0  # the model may be readable again
                self._signal_workers(signal.SIGHUP)
                continue
            # On a second signal, stop without waiting for accepted requests.
            self._signal_workers(signal.SIGKILL if self._stopping else signal.SIGTERM)
            self._stopping = True
            self._kill_time = time.monotonic() + self._settings.limits.timeout + _SECONDS_TO_EXIT
        if time.monotonic() > self._kill_time:
            self._signal_workers(signal.SIGKILL)

    def _refuse_connections(self) -> None:
        """Answer new connections with status 503, because the workers no longer accept any."""
        self._sock.setblocking(False)
        with suppress(OSError):  # there are no more connections
            for _ in range(_MAX_REFUSED):
                connection, _ = self._sock.accept()
                with connection, suppress(OSError):
                    connection.sendall(raw_response(503, "the server is shutting down"))
                    # Closing with an unread request would discard the answer.
                    connection.shutdown(socket.SHUT_WR)
                    connection.settimeout(_SECONDS_TO_READ)
                    connection.recv(2**16)

    def _signal_workers(self, number: int) -> None:
        for worker in self._workers:
            if worker.pid is not None and worker.is_alive():
                os.kill(worker.pid, number)

    def _start_workers(self) -> None:
        if self._stopping or time.monotonic() < self._next_start:
            return
        while len(self._workers) < self._settings.workers:
            context: Any = multiprocessing.get_context("fork" if _FORKS else "spawn")
            worker = context.Process(
                target=_run_worker, args=(self._sock, self._settings, self._folder)
            )
            if _FORKS:  # delay signals to the worker until it has its own handlers
                signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
            worker.start()
            if _FORKS:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
            self._workers.append(worker)

    def _reap_workers(self) -> None:
        """Handle workers that have exited, and mark the server healthy if all are ready."""
        from prometheus_client.multiprocess import mark_process_dead

        exited = [worker for worker in self._workers if not worker.is_alive()]
        # Update this first, because `_handle_exit` needs to know whether a worker was ever ready.
        self._was_ready = self._was_ready or self._n_ready() > 0
        for worker in exited:
            self._workers.remove(worker)
            # Remove its gauges from the metrics.
            mark_process_dead(worker.pid, str(self._folder))  # type: ignore[no-untyped-call]
            if not self._stopping:
                self._handle_exit(worker)
        if self._n_ready() == self._settings.workers:
            self._failed_loads = 0
            (self._folder / UNHEALTHY_FILE).unlink(missing_ok=True)

    def _n_ready(self) -> int:
        files = (self._folder / _READY_FILE.format(worker.pid) for worker in self._workers)
        return sum(file.exists() for file in files)

    def _handle_exit(self, worker: BaseProcess) -> None:
        """Schedule the replacement of a worker that has exited, or give up.

        Raises:
            RunError: If no worker ever loaded the model, or too many have died.
        """
        now, error_file = time.monotonic(), self._folder / _ERROR_FILE.format(worker.pid)
        (self._folder / _READY_FILE.format(worker.pid)).unlink(missing_ok=True)
        if error_file.exists():
            error = error_file.read_text(encoding="utf8")
            error_file.unlink()
            if not self._was_ready:
                raise RunError(error)
            # The model was readable before, so the other workers keep serving it.
            delay = min(2.0**self._failed_loads, _MAX_DELAY)
            self._failed_loads += 1
            self._next_start = now + delay
            logger.warning(
                "worker %d could not load the model; the other workers continue, and a new one "
                "starts in %g s or on SIGHUP: %s",
                *(worker.pid, delay, error),
            )
            return
        self._deaths = [*(death for death in self._deaths if death >= now - _PERIOD), now]
        code, count = worker.exitcode, len(self._deaths)
        deaths = f"{count} workers have died within {_PERIOD / 60:g} minutes"
        if count >= _UNHEALTHY_DEATHS:
            temporary = self._folder / f"{UNHEALTHY_FILE}.new"
            temporary.write_text(f"{deaths}; others are being started", encoding="utf8")
            temporary.replace(self._folder / UNHEALTHY_FILE)
        if count >= _MAX_DEATHS and not self._n_ready():
            raise RunError(
                f"{deaths} and none is serving (last exit code {code}); see the log for the "
                "reason, and check whether there is enough memory"
            )
        delay = 0.0 if count == 1 else min(2.0 ** (count - 2), _MAX_DELAY)
        self._next_start = now + delay
        logger.warning("worker %d died (code %s); replacing it in %g s", worker.pid, code, delay)


def _run_worker(sock: socket.socket, settings: ServeSettings, folder: Path) -> None:
    """Serve in a worker process, and tell the supervisor if the model cannot be loaded."""
    if _FORKS:  # replace the handlers of the supervisor
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    try:
        _serve_on(sock, settings)
    except EliasError as error:
        file = folder / _ERROR_FILE.format(os.getpid())
        file.write_text(" ".join(str(error).split()), encoding="utf8")
        sys.exit(2)


def _serve_on(sock: socket.socket, settings: ServeSettings) -> None:
    """Serve on a bound socket in this process.

    Raises:
        EliasError: If the model cannot be loaded at the start.
    """
    # Ignore SIGHUP until its handler is installed, which is before the model is loaded.
    if _HAS_SIGHUP:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _set_up_logging()
    if settings.workers > 1:
        _limit_threads(settings.workers)
    loop_factory = import_module("uvloop").new_event_loop if find_spec("uvloop") else None
    # Progress bars of long batches would mix with the lines of the log.
    with progress_disabled(), asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_serve(sock, settings))


async def _serve(sock: socket.socket, settings: ServeSettings) -> None:
    from elias.serve.backend import Backend  # here: imports torch

    backend = Backend(settings)
    server = _Server(uvicorn_config(backend))
    _handle_signals(server, backend)

    async def load() -> None:
        try:
            await backend.load()
        except Exception:
            backend.metrics.reloads.labels("failure").inc()  # visible only if other workers serve
            server.should_exit = True
            raise
        logger.info("worker %d is ready", os.getpid())
        if settings.metrics_folder is not None:
            (settings.metrics_folder / _READY_FILE.format(os.getpid())).touch()

    loading = asyncio.create_task(load())
    if settings.metrics_folder is not None and any(settings.metrics_folder.glob(_READY_GLOB)):
        await loading  # other workers are serving, so accept no requests before this one can
    await server.serve(sockets=[sock])
    if loading.done():
        loading.result()  # raises the error, if the model could not be loaded


def uvicorn_config(backend: Backend) -> uvicorn.Config:
    """Return the configuration of the HTTP server."""
    from elias.serve.app import create_app
    from elias.serve.connections import Connections, LimitedProtocol

    limits = backend.settings.limits
    return uvicorn.Config(
        create_app(backend),
        http=partial(LimitedProtocol, Connections(limits, backend.metrics)),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        # Longer than the timeout of a request, so that every accepted request is answered.
        timeout_graceful_shutdown=int(limits.timeout) + 1,
    )


class _Server(uvicorn.Server):
    """A uvicorn server without its own signal handlers. `_handle_signals` replaces them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers, unlike uvicorn."""
        yield


def _handle_signals(server: uvicorn.Server, backend: Backend) -> None:
    loop = asyncio.get_running_loop()
    reloads: list[asyncio.Task[bool]] = []  # without a reference, a task may be garbage collected

    def parent_died(sentinel: int) -> None:
        loop.remove_reader(sentinel)
        server.handle_exit(signal.SIGTERM, None)

    def on_signal(number: int, callback: Callable[[], None]) -> None:
        try:
            loop.add_signal_handler(number, callback)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(callback))

    on_signal(signal.SIGTERM, partial(server.handle_exit, signal.SIGTERM, None))
    if _HAS_SIGHUP:
        on_signal(signal.SIGHUP, lambda: reloads.append(loop.create_task(backend.reload())))
    if backend.settings.workers == 1:
        on_signal(signal.SIGINT, partial(server.handle_exit, signal.SIGINT, None))
        return
    # Ctrl-C reaches all processes of a terminal. Ignore it here, because the parent forwards it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if (parent := multiprocessing.parent_process()) is not None:
        loop.add_reader(parent.sentinel, parent_died, parent.sentinel)


def _set_up_logging() -> None:
    """Write the logs to stderr as plain lines."""
    for name, level in (("elias.access", logging.INFO), ("uvicorn.error", logging.ERROR)):
        log = logging.getLogger(name)
        log.handlers = [logging.StreamHandler(sys.__stderr__)]
        log.propagate = False
        log.setLevel(level)
    library = logging.getLogger("elias")
    if not library.handlers:  # one of several workers; otherwise, the command line has done it
        library.addHandler(logging.StreamHandler(sys.__stderr__))
        library.setLevel(logging.INFO)


def _limit_threads(workers: int) -> None:
    """Limit PyTorch to this worker's share of the CPU cores."""
    import torch

    has_affinity = hasattr(os, "sched_getaffinity")
    n_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    torch.set_num_threads(max(1, n_cores // workers))
