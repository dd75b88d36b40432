"""Rows of measurements and tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from elias.report.page import seconds

TRAIN_SECONDS = "train_seconds"
MS_PER_POINT = "ms_per_point"
MEGABYTES = "megabytes"
REMOVED = "edges_removed"
"""Costs that a row may know beside its metrics; the last is a percentage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table, for one seed."""

    name: str
    """Which line: the same for every seed."""
    title: str
    """What people read."""
    seed: int | None = None
    """None where nothing is drawn at random."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """In percent; empty where nothing could be measured."""
    costs: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What sets this line apart, e.g. the value of λ."""
    run: str | None = None
    """The run it was read from, below the experiment's folder."""
    note: str = ""
    """Why there is no number."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON takes them."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of the table: the mean over seeds, and over members where each has a row."""

    name: str
    title: str
    n_seeds: int
    """How many rows it is the mean of."""
    mean: Mapping[str, float]
    """Of every metric and cost."""
    std: Mapping[str, float]
    """The standard deviation over rows (of a sample); empty where there is one."""
    settings: Mapping[str, Any]
    note: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON takes them."""
        return asdict(self)


def summarise(rows: Iterable[Row]) -> list[Line]:
    """Return the lines of a table in the order in which their first rows come.

    >>> rows = [Row(name="a", title="A", seed=s, metrics={"P@1": 70.0 + s}) for s in (0, 2)]
    >>> (line,) = summarise(rows)
    >>> line.mean["P@1"], round(line.std["P@1"], 3), line.n_seeds
    (71.0, 1.414, 2)
    """
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    return [_line(same) for same in by_name.values()]


def _line(rows: Sequence[Row]) -> Line:
    measured = [row for row in rows if row.metrics]
    values: dict[str, list[float]] = {}
    for row in measured:
        for key, value in (*row.metrics.items(), *row.costs.items()):
            values.setdefault(key, []).append(value)
    return Line(
        name=rows[0].name,
        title=rows[0].title,
        n_seeds=len(measured),
        mean={key: statistics.fmean(found) for key, found in values.items()},
        std={key: statistics.stdev(found) for key, found in values.items() if len(found) > 1},
        settings=rows[0].settings,
        note="; ".join(dict.fromkeys(row.note for row in rows if row.note)),
    )


_DECIMALS = {MS_PER_POINT: 3, MEGABYTES: 1, REMOVED: 1}
_TITLES = {
    TRAIN_SECONDS: "trained in",
    MS_PER_POINT: "ms/point",
    MEGABYTES: "MB",
    REMOVED: "% pruned",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Which numbers an experiment shows, and under what heading its lines stand."""

    heading: str
    """What the first column holds."""
    columns: Sequence[str]
    """Metrics and costs, all of them, for Markdown."""
    shown: Sequence[str]
    """Those that fit a terminal."""

    def header(self, columns: Sequence[str]) -> list[str]:
        """Return the names of columns."""
        return [self.heading, *(_TITLES.get(key, key) for key in columns)]

    def rows(
        self, lines: Sequence[Line], columns: Sequence[str], *, between: str = " ± "
    ) -> list[list[str]]:
        """Return the cells of lines; one without all numbers says why in its first cell.

        ``between`` stands between a mean and its standard deviation.
        """
        return [
            [_first_cell(line), *(cell(line, key, between) for key in columns)] for line in lines
        ]

    def markdown(self, lines: Sequence[Line]) -> str:
        """Return all columns that have a number as a Markdown table."""
        columns = [key for key in self.columns if any(key in line.mean for line in lines)]
        table = [
            self.header(columns),
            ["---"] * (len(columns) + 1),
            *self.rows(lines, columns),
        ]
        return "".join(f"| {' | '.join(map(_escaped, row))} |\n" for row in table)


def cell(line: Line, key: str, between: str) -> str:
    """Return a mean, and of a metric its standard deviation where there are several seeds."""
    if key not in line.mean:
        return ""
    if key == TRAIN_SECONDS:
        return seconds(line.mean[key])
    mean = f"{line.mean[key]:.{_DECIMALS.get(key, 2)}f}"
    if key in _DECIMALS or key not in line.std:
        return mean
    return f"{mean}{between}{line.std[key]:.2f}"


def _first_cell(line: Line) -> str:
    return f"{line.title} ({line.note})" if line.note else line.title


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
