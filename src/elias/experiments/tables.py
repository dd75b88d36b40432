"""Average measurements over seeds, and format and plot them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elias.report.html import Markup, seconds
from elias.report.plots import Axis, Plot

TRAIN_SECONDS = "train_seconds"
MS_PER_POINT = "ms_per_point"
MEGABYTES = "megabytes"
REMOVED = "edges_removed"
"""Keys of `Row.costs`: `TRAIN_SECONDS` to `REMOVED`; `REMOVED` is in percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The measurements of one line of a table for one seed."""

    name: str
    """Key of the table line, the same for every seed."""
    title: str
    """Title of the line."""
    seed: int | None = None
    """Random seed; None for a deterministic method."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics by name, in percent; empty if nothing could be measured."""
    costs: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of this line, such as the value of λ."""
    run: str | None = None
    """Folder of the run, relative to the folder of the experiment."""
    note: str = ""
    """Reason for missing numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a table: the mean of all rows with the same name (seeds, ensemble members)."""

    name: str
    title: str
    n_seeds: int
    """Number of rows in the mean."""
    mean: Mapping[str, float]
    """Mean of each metric and cost."""
    std: Mapping[str, float]
    """Sample standard deviations; empty if there is only one row."""
    settings: Mapping[str, Any]
    note: str


def summarise(rows: Iterable[Row]) -> list[Line]:
    """Average the rows of each name into a line; order lines by their first row.

    >>> rows = [Row(name="a", title="A", seed=s, metrics={"P@1": 70.0 + s}) for s in (0, 2)]
    >>> (line,) = summarise(rows)
    >>> line.mean["P@1"], round(line.std["P@1"], 3), line.n_seeds
    (71.0, 1.414, 2)
    """
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    lines = []
    for name, same in by_name.items():
        measured = [row for row in same if row.metrics]
        values: dict[str, list[float]] = {}
        for row in measured:
            for key, value in (*row.metrics.items(), *row.costs.items()):
                values.setdefault(key, []).append(value)
        line = Line(
            name=name,
            title=same[0].title,
            n_seeds=len(measured),
            mean={key: statistics.fmean(v) for key, v in values.items()},
            std={key: statistics.stdev(v) for key, v in values.items() if len(v) > 1},
            settings=same[0].settings,
            note="; ".join(dict.fromkeys(row.note for row in same if row.note)),
        )
        lines.append(line)
    return lines


_DECIMALS = {MS_PER_POINT: 3, MEGABYTES: 1, REMOVED: 1}
_TITLES = {
    TRAIN_SECONDS: "training time",
    MS_PER_POINT: "ms/point",
    MEGABYTES: "MB",
    REMOVED: "% pruned",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of a table."""

    heading: str
    """Title of the first column."""
    columns: Sequence[str]
    """Metrics and costs of the Markdown table."""
    shown: Sequence[str]
    """Columns to show on a terminal, where fewer fit."""

    def header(self, columns: Sequence[str]) -> list[str]:
        """Return the titles of columns."""
        return [self.heading, *(_TITLES.get(key, key) for key in columns)]

    def rows(
        self, lines: Sequence[Line], columns: Sequence[str], *, between: str = " ± "
    ) -> list[list[str]]:
        """Return the table cells of each line; the first cell includes the note of the line.

        ``between`` separates a mean from its standard deviation.
        """
        titles = [f"{line.title} ({line.note})" if line.note else line.title for line in lines]
        return [
            [title, *(_cell(line, key, between) for key in columns)]
            for title, line in zip(titles, lines, strict=True)
        ]

    def markdown(self, lines: Sequence[Line]) -> str:
        """Return a Markdown table of all columns that have a number."""
        columns = [key for key in self.columns if any(key in line.mean for line in lines)]
        rows = [self.header(columns), ["---"] * (len(columns) + 1), *self.rows(lines, columns)]
        escaped = ([" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows)
        return "".join(f"| {' | '.join(row)} |\n" for row in escaped)


def _cell(line: Line, key: str, between: str) -> str:
    """Return a mean and, for a metric with several seeds, its standard deviation."""
    if key not in line.mean:
        return ""
    if key == TRAIN_SECONDS:
        return seconds(line.mean[key])
    mean = f"{line.mean[key]:.{_DECIMALS.get(key, 2)}f}"
    has_std = key not in _DECIMALS and key in line.std
    return f"{mean}{between}{line.std[key]:.2f}" if has_std else mean


def dot_plot(lines: Sequence[Line], title: str, metrics: Sequence[str]) -> Markup:
    """Plot a row for each line that has metrics, with a dot for each metric."""
    shown = [line for line in lines if line.mean]
    described = "; ".join(
        f"{line.title}: {', '.join(f'{key} {line.mean[key]:.2f}' for key in metrics)}"
        for line in shown
    )
    plot = Plot(title, Axis("%"), Axis("", categories=[line.title for line in shown]))
    for key in metrics:
        stds = [line.std.get(key, 0.0) for line in shown]
        plot.dots(key, [line.mean[key] for line in shown], stds)
    return plot.svg(f"{described}.")
