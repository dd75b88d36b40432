"""One worker: an event loop that serves on a socket until a signal stops it."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from elias import progress
from elias.serve.app import create_app

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from elias.serve.backend import Backend
    from elias.serve.settings import ServeSettings


logger = logging.getLogger(__name__)

_BACKLOG = 2048


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers: `serve_on` handles signals and exits with 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Override uvicorn: do not install signal handlers."""
        yield


def serve_on(
    sock: socket.socket,
    settings: ServeSettings,
    *,
    on_ready: Callable[[], None] = lambda: None,
    is_replacement: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reloads the model.

    Args:
        sock: Bound socket to listen on.
        settings: Settings of the server.
        on_ready: Called when the model is loaded.
        is_replacement: True if this worker replaces one that has exited. A failure to load the
            model then counts as a failed reload in the metrics.

    Raises:
        EliasError: If the model cannot be loaded at the start.
    """
    _set_up_logging()
    if settings.workers > 1:
        _limit_threads(settings.workers)
    # Progress bars of long batches would mix with the lines of the log.
    with progress.progress_disabled(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(sock, settings, on_ready, is_replacement))


async def _serve(
    sock: socket.socket, settings: ServeSettings, on_ready: Callable[[], None], is_replacement: bool
) -> None:
    application = create_app(settings, load=False)
    backend = application.backend
    config = uvicorn.Config(
        application.asgi,
        interface="asgi3",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        # By then every accepted request is answered.
        timeout_graceful_shutdown=int(settings.limits.timeout) + 1,
    )
    server = _Server(config)
    _handle_signals(server, backend, is_single=settings.workers == 1)

    async def load() -> None:
        try:
            await backend.load()
        except BaseException:
            server.should_exit = True
            raise
        logger.info("worker %d is ready", os.getpid())
        on_ready()

    loading = asyncio.create_task(load())
    await server.serve(sockets=[sock])
    if loading.done():
        if is_replacement and loading.exception() is not None:
            backend.metrics.reloads.labels("failure").inc()
        loading.result()  # raises the error, if the model could not be loaded
    loading.cancel()


def _handle_signals(server: uvicorn.Server, backend: Backend, *, is_single: bool) -> None:
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[bool]] = set()

    def shut_down(number: int = signal.SIGTERM) -> None:
        server.handle_exit(number, None)

    def reload() -> None:
        task = loop.create_task(backend.reload())
        reloads.add(task)  # keep a reference, or the task may be garbage collected
        task.add_done_callback(reloads.discard)

    def parent_died(sentinel: int) -> None:
        loop.remove_reader(sentinel)
        shut_down()

    loop.add_signal_handler(signal.SIGTERM, shut_down)
    loop.add_signal_handler(signal.SIGHUP, reload)
    if is_single:
        loop.add_signal_handler(signal.SIGINT, shut_down, signal.SIGINT)
        return
    # Ctrl-C reaches all processes of a terminal; the parent forwards it once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        loop.add_reader(parent.sentinel, parent_died, parent.sentinel)


def _set_up_logging() -> None:
    """Write the logs to stderr as plain lines."""
    for name, level in (("elias.access", logging.INFO), ("uvicorn.error", logging.WARNING)):
        log = logging.getLogger(name)
        log.handlers = [logging.StreamHandler(sys.__stderr__)]
        log.propagate = False
        log.setLevel(level)
    library = logging.getLogger("elias")
    if not library.handlers:  # in one of several workers; else the command line has set it up
        library.addHandler(logging.StreamHandler(sys.__stderr__))
        library.setLevel(logging.INFO)


def _limit_threads(workers: int) -> None:
    """Limit PyTorch to the share of this worker in the available CPU cores."""
    import torch

    has_affinity = hasattr(os, "sched_getaffinity")
    n_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    torch.set_num_threads(max(1, n_cores // workers))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the event loop factory of uvloop if it is installed, else that of asyncio."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
