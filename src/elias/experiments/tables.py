"""The lines of an experiment as cells: for Markdown and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elias.analysis.page import seconds
from elias.experiments.rows import MEGABYTES, MS_PER_POINT, REMOVED, TRAIN_SECONDS, Line

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
