"""Tables for people, readable at 80 columns; where the output is no terminal, never wrapped."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console, RenderableType
    from rich.table import Table

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
    from elias.analysis.facts import COMPONENTS

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
    from elias.analysis.page import seconds as said

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
