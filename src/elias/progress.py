"""Progress of long work: a passing bar on a terminal's stderr, a log line now and then elsewhere.

A library must not write to its user's terminal, so nothing shows until `enable` was called (the
command line does).
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Sized
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from rich.console import Console


logger = logging.getLogger(__name__)

T = TypeVar("T")

SECONDS_BEFORE_LINE = 2.0
SECONDS_BETWEEN_LINES = 10.0

_state = {"enabled": False}


class Advance(Protocol):
    """Says that ``steps`` more are done; ``note`` (a loss, say) is shown beside the count."""

    def __call__(self, steps: int = 1, note: str = "") -> None:
        """Take the steps."""


def enable(on: bool = True) -> None:
    """Show progress from now on, or stop showing it."""
    _state["enabled"] = on


def is_enabled() -> bool:
    """Say whether progress is shown."""
    return _state["enabled"]


@contextmanager
def hushed() -> Iterator[None]:
    """Show nothing of what begins inside, as under a bar that counts the whole."""
    before = _state["enabled"]
    enable(False)
    try:
        yield
    finally:
        enable(before)


def track(iterable: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yield the items of ``iterable``, showing how many are done.

    >>> sum(track([1, 2, 3], "adding"))
    6
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    with progress(description, total) as advance:
        for item in iterable:
            yield item
            advance()


def progress(description: str, total: int | None = None) -> AbstractContextManager[Advance]:
    """Show one task while the ``with`` block runs; its target is called to advance it.

    A bar goes away with the block; a log line comes only once the work takes a while.

    >>> with progress("reading", total=10) as advance:
    ...     advance(5)
    ...     advance(5, note="last file")
    """
    if not _state["enabled"]:
        return _silent()
    if sys.stderr.isatty():
        return _bar(description, total)
    return _lines(description, total)


@cache
def console() -> Console:
    """Return the console on stderr that bars draw on; log through it to keep lines whole."""
    from rich.console import Console  # here, not above: a library user may never need it

    return Console(stderr=True)


@contextmanager
def _silent() -> Iterator[Advance]:
    def advance(steps: int = 1, note: str = "") -> None:
        del steps, note

    yield advance


@contextmanager
def _bar(description: str, total: int | None) -> Iterator[Advance]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        Elapsed(),
        Remaining(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    # stdout is data: rich must not draw redirected prints on stderr
    with Progress(*columns, console=console(), redirect_stdout=False, transient=True) as bar:
        task = bar.add_task(description, total=total, note="")

        def advance(steps: int = 1, note: str = "") -> None:
            bar.advance(task, steps)
            if note:
                bar.update(task, note=note)

        yield advance


@contextmanager
def _lines(description: str, total: int | None) -> Iterator[Advance]:
    start = time.monotonic()
    done, last = 0, start
    title = description if total is None else f"{description} ({total:,})"
    first = threading.Timer(SECONDS_BEFORE_LINE, logger.info, ("%s ...", title))
    first.daemon = True  # work that hangs must not keep the interpreter from ending
    first.start()

    def advance(steps: int = 1, note: str = "") -> None:
        nonlocal done, last
        done += steps
        now = time.monotonic()
        if now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        count = f"{done:,}" if total is None else f"{done:,}/{total:,}"
        logger.info("%s: %s in %.0f s%s", description, count, now - start, note and f", {note}")

    try:
        yield advance
    finally:
        first.cancel()
