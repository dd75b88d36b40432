"""One worker: an event loop that serves on a socket until it is told to end."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from elias import progress
from elias.serve.access_log import PlainLines
from elias.serve.app import create_app

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from elias.serve.backend import Backend
    from elias.serve.settings import ServeSettings


logger = logging.getLogger(__name__)

_BACKLOG = 2048


class _Server(uvicorn.Server):
    """A server whose signals are handled here, so that ending by one is a success."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def _nothing() -> None:
    pass


def serve_on(
    sock: socket.socket,
    settings: ServeSettings,
    *,
    on_ready: Callable[[], None] = _nothing,
    replaces: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reads the model again.

    ``on_ready`` is called once the model is read. A worker that ``replaces`` another reads a model
    that was served before: if it cannot, that counts as a reload that failed.

    Raises:
        EliasError: If the model cannot be read at the start.
    """
    _set_up_logs()
    if settings.workers > 1:
        _share_cores(settings.workers)
    # a batch that takes long is no news: bars and their lines would stand between those of the log
    with progress.hushed(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(sock, settings, on_ready, replaces))


async def _serve(
    sock: socket.socket, settings: ServeSettings, on_ready: Callable[[], None], replaces: bool
) -> None:
    application = create_app(settings, load=False)
    config = uvicorn.Config(
        application.asgi,
        interface="asgi3",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        # what was accepted is answered, or given up, by then
        timeout_graceful_shutdown=int(settings.limits.timeout) + 1,
    )
    server = _Server(config)
    _handle_signals(server, application.backend, alone=settings.workers == 1)
    reading = asyncio.create_task(application.backend.load())
    reading.add_done_callback(lambda task: _loaded(task, server, on_ready))
    await server.serve(sockets=[sock])
    if reading.done():
        if replaces and reading.exception() is not None:
            application.backend.measures.reloads.labels("failure").inc()
        reading.result()  # why it could not be read, if so
    reading.cancel()


def _handle_signals(server: uvicorn.Server, backend: Backend, *, alone: bool) -> None:
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[bool]] = set()

    def end(number: int = signal.SIGTERM) -> None:
        server.handle_exit(number, None)

    def reload() -> None:
        task = loop.create_task(backend.reload())
        reloads.add(task)  # or it may be collected before it is done
        task.add_done_callback(reloads.discard)

    def orphaned(sentinel: int) -> None:
        loop.remove_reader(sentinel)
        end()

    loop.add_signal_handler(signal.SIGTERM, end)
    loop.add_signal_handler(signal.SIGHUP, reload)
    if alone:
        loop.add_signal_handler(signal.SIGINT, end, signal.SIGINT)
        return
    # a terminal's ^C comes to all; the parent hands it on, once
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:  # who loses its parent ends too
        loop.add_reader(parent.sentinel, orphaned, parent.sentinel)


def _loaded(task: asyncio.Task[None], server: uvicorn.Server, on_ready: Callable[[], None]) -> None:
    if task.cancelled():
        return
    if task.exception() is not None:
        server.should_exit = True
    else:
        logger.info("worker %d is ready", os.getpid())
        on_ready()


def _set_up_logs() -> None:
    """Send what is told to stderr, line by line."""
    for name, level in (("elias.access", logging.INFO), ("uvicorn.error", logging.WARNING)):
        log = logging.getLogger(name)
        log.handlers = [PlainLines()]
        log.propagate = False
        log.setLevel(level)
    ours = logging.getLogger("elias")
    if not ours.handlers:  # a worker of several: the command line set up its parent's
        ours.addHandler(PlainLines())
        ours.setLevel(logging.INFO)


def _share_cores(workers: int) -> None:
    """Compute on a share of the cores that this process may use, which can be fewer than there are.

    A thread per core that others use too makes all of them wait.
    """
    import torch

    torch.set_num_threads(max(1, _n_cores() // workers))


def _n_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the faster loop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
