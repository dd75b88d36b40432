"""Print notes, warnings and tables on the terminal."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING, Any

import typer

from elias import progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console, RenderableType
    from rich.table import Table


NOTE = 25
"""Log level of notes printed by commands: above the library's INFO, below WARNING."""
STAGE_METRICS = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@20", "R@100")
"""Metrics shown for each training stage."""
_UNWRAPPED = 10_000  # columns

_library_logger = logging.getLogger("elias")
_logger = logging.getLogger(__name__)


class _ConsoleHandler(logging.Handler):
    """Write log lines above the progress bars, unwrapped, so that each record is one line."""

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


def _handlers() -> list[_ConsoleHandler]:
    return [h for h in _library_logger.handlers if isinstance(h, _ConsoleHandler)]


def set_up(*, verbose: bool, quiet: bool, log_steps: bool) -> None:
    """Show progress bars and log lines on stderr.

    Args:
        verbose: Show everything.
        quiet: Show warnings only, and no bars.
        log_steps: Show the library's INFO lines.
    """
    level = logging.INFO if log_steps else NOTE
    if verbose:
        level = logging.DEBUG
    elif quiet:
        level = logging.WARNING
    for handler in _handlers():
        _library_logger.removeHandler(handler)
    # The handler keeps the level because a run lowers the logger's level for its own log file.
    _library_logger.addHandler(_ConsoleHandler(level))
    _library_logger.setLevel(level)
    progress.enable(not quiet)


def show_errors_only() -> None:
    """Hide all messages except errors. Ranks other than 0 call this; rank 0 prints for all."""
    for handler in _handlers():
        handler.setLevel(logging.ERROR)
    progress.enable(False)


def is_verbose() -> bool:
    """Return whether ``--verbose`` was given."""
    return any(handler.level <= logging.DEBUG for handler in _handlers())


def is_quiet() -> bool:
    """Return whether ``--quiet`` was given."""
    return any(handler.level > NOTE for handler in _handlers())


def note(text: str) -> None:
    """Print one line on stderr, unless ``--quiet`` was given."""
    _logger.log(NOTE, "%s", text)


def warn(text: str) -> None:
    """Print one line on stderr, even with ``--quiet``."""
    _logger.warning("%s", text)


def show(renderable: RenderableType) -> None:
    """Print a table on stderr, unless ``--quiet`` was given."""
    if not is_quiet():
        progress.console().print(renderable)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON on stdout."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def print_out(*renderables: RenderableType) -> None:
    """Print on stdout, wrapped to the terminal width; do not wrap if stdout is not a terminal."""
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
        # Plain lines may be commands to copy: do not break them.
        console.print(renderable, soft_wrap=isinstance(renderable, str))


def grid(rows: Iterable[tuple[str, Any]]) -> Table:
    """Return a borderless table of (name, value) rows; skip rows whose value is None."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        if value is not None:
            table.add_row(Text(name), Text(_format(value)))
    return table


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], *, n_left: int = 1) -> Table:
    """Return a table with a header; left-align the first ``n_left`` columns only."""
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
    """Return a heading and a table of metrics on a split, one row per stage or component."""
    from elias.report.sections import COMPONENTS

    stages = {stage: splits[split] for stage, splits in metrics.items() if split in splits}
    rows = [
        [COMPONENTS.get(stage, stage), *(_percent(values.get(name)) for name in STAGE_METRICS)]
        for stage, values in stages.items()
    ]
    members = "; rows above the ensemble are of its first member" if "ensemble" in stages else ""
    return [f"On the {split} split, in percent{members}:", columns(["", *STAGE_METRICS], rows)]


def metrics_table(metrics: Mapping[str, float]) -> Table:
    """Return a table of metrics with a row for each name (``P``) and a column for each k."""
    kinds = list(dict.fromkeys(name.partition("@")[0] for name in metrics))
    ks = sorted({int(name.partition("@")[2]) for name in metrics})
    rows = [[kind, *(_percent(metrics.get(f"{kind}@{k}")) for k in ks)] for kind in kinds]
    return columns(["%", *(f"@{k}" for k in ks)], rows)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _format(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
