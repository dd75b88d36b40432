"""What commands tell on stderr beside their results: log lines, notes, tables and bars."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from elias import progress

if TYPE_CHECKING:
    from rich.console import RenderableType

NOTE = 25
"""The level of a command's own notes: above what the library tells, below its warnings."""

_ours = logging.getLogger("elias")
_commands = logging.getLogger(__name__)


class _OnConsole(logging.Handler):
    """Writes log lines above the bars, unwrapped, so that a line in a file stays a line."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.levelno >= logging.WARNING:
                text = f"{record.levelname.lower()}: {text}"
            elif self.level <= logging.DEBUG:
                text = f"{record.name}: {text}"
            progress.console().print(text, markup=False, highlight=False, soft_wrap=True)
        except Exception:
            self.handleError(record)


def set_up(*, verbose: bool, quiet: bool, talkative: bool) -> None:
    """Show bars and log lines on stderr from now on.

    Args:
        verbose: Show everything.
        quiet: Show warnings only, and no bars.
        talkative: Whether the command tells its steps without being asked.
    """
    level = logging.INFO if talkative else NOTE
    if verbose:
        level = logging.DEBUG
    elif quiet:
        level = logging.WARNING
    for handler in list(_ours.handlers):
        if isinstance(handler, _OnConsole):
            _ours.removeHandler(handler)
    # the handler has the level: a run lowers the logger's for its own log
    _ours.addHandler(_OnConsole(level))
    _ours.setLevel(level)
    progress.enable(not quiet)


def hush() -> None:
    """Show errors only from now on: another process tells the same."""
    for handler in _ours.handlers:
        if isinstance(handler, _OnConsole):
            handler.setLevel(logging.ERROR)
    progress.enable(False)


def is_verbose() -> bool:
    """Say whether everything is shown."""
    return any(h.level <= logging.DEBUG for h in _ours.handlers if isinstance(h, _OnConsole))


def is_quiet() -> bool:
    """Say whether warnings alone are shown."""
    return any(h.level > NOTE for h in _ours.handlers if isinstance(h, _OnConsole))


def note(text: str) -> None:
    """Tell one line."""
    _commands.log(NOTE, "%s", text)


def warn(text: str) -> None:
    """Tell one line that is told even to those who want quiet."""
    _commands.warning("%s", text)


def show(renderable: RenderableType) -> None:
    """Show a table, or anything else rich can draw."""
    if not is_quiet():
        progress.console().print(renderable)
