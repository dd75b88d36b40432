"""Print notes, warnings and tables on the terminal."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from elias import progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console, RenderableType
    from rich.table import Table


logger = logging.getLogger(__name__)

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


STAGE_METRICS = (
    *("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@20", "R@100"),
)
"""What a stage is judged by."""

_UNWRAPPED = 10_000


def print_out(*renderables: RenderableType) -> None:
    """Print to stdout: at the width of a terminal, else as wide as the content."""
    from rich.console import Console

    if sys.stdout.isatty():
        _print_all(Console(highlight=False, markup=False), renderables)
        return
    console = Console(width=_UNWRAPPED, highlight=False, markup=False, color_system=None)
    with console.capture() as captured:
        _print_all(console, renderables)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _print_all(console: Console, renderables: Iterable[RenderableType]) -> None:
    for renderable in renderables:
        # plain lines may be commands to copy, which a break would spoil
        console.print(renderable, soft_wrap=isinstance(renderable, str))


def grid(rows: Iterable[tuple[str, Any]]) -> Table:
    """Return a table of names and values without rules; rows with the value None are left out."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        if value is not None:
            table.add_row(Text(name), Text(_shown(value)))
    return table


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], *, n_left: int = 1) -> Table:
    """Return a table under a header; all but the first ``n_left`` columns are numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(header):
        table.add_column(
            Text(name), justify="left" if i < n_left else "right", no_wrap=i >= n_left or not i
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def stage_table(
    metrics: Mapping[str, Mapping[str, Mapping[str, float]]], split: str
) -> list[RenderableType]:
    """Return the metrics on a split, a row for each stage and component, under a heading."""
    from elias.report.sections import COMPONENTS

    found = {stage: splits[split] for stage, splits in metrics.items() if split in splits}
    rows = [
        [COMPONENTS.get(stage, stage), *(_percent(values.get(name)) for name in STAGE_METRICS)]
        for stage, values in found.items()
    ]
    # an ensemble's rows before the last are those of its first member
    whose = "; up to the ensemble, of its first member" if "ensemble" in found else ""
    return [f"On the {split} split, in percent{whose}:", columns(["", *STAGE_METRICS], rows)]


def metrics_table(metrics: Mapping[str, float]) -> Table:
    """Return metrics such as ``P@1`` with a row for each kind and a column for each k."""
    kinds = list(dict.fromkeys(name.partition("@")[0] for name in metrics))
    ks = sorted({int(name.partition("@")[2]) for name in metrics})
    rows = [[kind, *(_percent(metrics.get(f"{kind}@{k}")) for k in ks)] for kind in kinds]
    return columns(["%", *(f"@{k}" for k in ks)], rows)


def seconds(value: float) -> str:
    """Return a time as people say it.

    >>> seconds(3.21), seconds(75.2)
    ('3.2 s', '1 min 15 s')
    """
    from elias.report.page import seconds as said

    return said(value)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return str(value)
