"""The log of a run, for a person who asks afterwards what happened, and when."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

import elias

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

logger = logging.getLogger(__name__)


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
