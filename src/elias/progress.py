"""Show the progress of long tasks: as a bar in a terminal or notebook, elsewhere as log lines.

The command line and notebooks show progress. In other programs, nothing is shown until `enable` is
called.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections.abc import Sized
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from rich.console import Console


logger = logging.getLogger(__name__)

T = TypeVar("T")

NOTE = 25
"""Log level of lines that every command prints, between INFO and WARNING."""
SECONDS_BEFORE_BAR = 1.0  # delay in a notebook, where a removed bar leaves an empty line
SECONDS_BEFORE_LINE = 2.0
SECONDS_BETWEEN_LINES = 10.0

_IN_NOTEBOOK = "ipykernel" in sys.modules
_state = {"enabled": _IN_NOTEBOOK}


class Advance(Protocol):
    """Type of the function that advances a progress bar."""

    def __call__(self, steps: int = 1, note: str = "") -> None:
        """Add ``steps`` to the count, and show ``note``, such as the loss, next to it."""


def enable(on: bool = True) -> None:
    """Switch the display of progress on or off."""
    _state["enabled"] = on


@contextmanager
def progress_disabled() -> Iterator[None]:
    """Hide progress that starts inside a ``with`` block, e.g. if an outer bar shows the total."""
    before = _state["enabled"]
    enable(False)
    try:
        yield
    finally:
        enable(before)


def track(iterable: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yield the items of ``iterable`` and show how many are done.

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
    """Show the progress of a ``with`` block, and yield a function that advances it.

    In a terminal or a notebook, show a bar that disappears at the end of the block. Elsewhere, log
    the progress from time to time, starting after `SECONDS_BEFORE_LINE`.

    >>> with progress("reading", total=10) as advance:
    ...     advance(5)
    ...     advance(5, note="last file")
    """
    if not _state["enabled"]:
        return nullcontext(_ignore)
    if _IN_NOTEBOOK:
        return _notebook_bar(description, total)
    if sys.stderr.isatty():
        return _bar(description, total)
    return _lines(description, total)


@cache
def console() -> Console:
    """Return the console on stderr. Log messages must use it so that they do not break the bars."""
    from rich.console import Console  # imported late, because it is only needed on the command line

    return Console(stderr=True)


def _ignore(steps: int = 1, note: str = "") -> None:
    del steps, note


@contextmanager
def _bar(description: str, total: int | None) -> Iterator[Advance]:
    from rich import progress as rich

    columns = (
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[note]}", markup=False),
    )
    # stdout may carry data, so rich must not redirect it to stderr
    with rich.Progress(*columns, console=console(), redirect_stdout=False, transient=True) as bar:
        task = bar.add_task(description, total=total, note="")

        def advance(steps: int = 1, note: str = "") -> None:
            bar.advance(task, steps)
            if note:
                bar.update(task, note=note)

        yield advance


@contextmanager
def _notebook_bar(description: str, total: int | None) -> Iterator[Advance]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without ipywidgets, tqdm shows a bar of characters
        from tqdm.auto import tqdm

    with tqdm(total=total, desc=description, leave=False, delay=SECONDS_BEFORE_BAR) as bar:

        def advance(steps: int = 1, note: str = "") -> None:
            bar.update(steps)
            if note:
                bar.set_postfix_str(note, refresh=False)

        yield advance


@contextmanager
def _lines(description: str, total: int | None) -> Iterator[Advance]:
    start = time.monotonic()
    done, last = 0, start
    title = description if total is None else f"{description} ({total:,})"
    first = threading.Timer(SECONDS_BEFORE_LINE, logger.info, ("%s ...", title))
    first.daemon = True  # a waiting timer must not keep the interpreter alive
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


def seconds(value: float) -> str:
    """Format a duration.

    >>> seconds(3.21), seconds(75.2), seconds(7320)
    ('3.2 s', '1 min 15 s', '2 h 2 min')
    """
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
