"""A plot of named lines: each a row of dots on one scale, so that long names can be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from elias.analysis.axes import (
    FONT,
    WIDTH,
    Axis,
    Scale,
    colour,
    drawing,
    nice_range,
    text_width,
    tick_labels,
    ticks,
)
from elias.analysis.markup import Markup, element

if TYPE_CHECKING:
    from elias.analysis.plots import Words
    from elias.experiments.rows import Line

PITCH = 24.0
"""From one line to the next."""
_WIDEST = 0.45
"""Share of the width that names may take."""
_SIZE = 4.0


def dot_plot(lines: Sequence[Line], metrics: Sequence[str], words: Words) -> Markup:
    """Return a row for each line that has numbers, with a dot for each metric.

    A thin bar spans the standard deviation over seeds.
    """
    shown = [line for line in lines if line.mean]
    names = [_cut(line.title) for line in shown]
    left = max(text_width(name) for name in names) + 10
    values = [line.mean[key] for line in shown for key in metrics]
    low, high = nice_range(Axis(label="%"), values, most=6)
    scale = Scale(low, high, left, WIDTH - 16)
    top = 2.2 * FONT
    bottom = top + PITCH * len(shown)
    marks = ticks(low, high, 6)
    return drawing(
        words.title,
        words.description,
        _legend(metrics),
        [
            _tick(scale(at), label, top, bottom)
            for at, label in zip(marks, tick_labels(marks), strict=True)
        ],
        [
            _row(line, name, metrics, scale, top + PITCH * (i + 0.5))
            for i, (line, name) in enumerate(zip(shown, names, strict=True))
        ],
        element("text", "%", x=left - 18, y=bottom + 1.4 * FONT, text_anchor="end", opacity=0.75),
        height=bottom + 2 * FONT,
    )


def _cut(name: str) -> str:
    most = int(_WIDEST * WIDTH / text_width("x"))
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _legend(metrics: Sequence[str]) -> Markup:
    drawn, x = [], 0.0
    for series, key in enumerate(metrics):
        drawn.append(_mark(series, x + 8, FONT * 0.7))
        drawn.append(element("text", key, x=x + 18, y=FONT))
        x += 18 + text_width(key) + 20
    return element("g", drawn)


def _tick(x: float, label: str, top: float, bottom: float) -> Markup:
    line = element(
        "line", x1=x, x2=x, y1=top, y2=bottom, stroke="currentColor", stroke_opacity=0.16
    )
    return element(
        "g", line, element("text", label, x=x, y=bottom + 1.4 * FONT, text_anchor="middle")
    )


def _row(line: Line, name: str, metrics: Sequence[str], scale: Scale, y: float) -> Markup:
    label = element("text", name, x=0.0, y=y + FONT / 3)
    return element("g", label, [_dot(line, key, i, scale, y) for i, key in enumerate(metrics)])


def _dot(line: Line, key: str, series: int, scale: Scale, y: float) -> Markup:
    mean, std = line.mean[key], line.std.get(key, 0.0)
    told = f"{line.title}, {key}: {mean:.2f}{f' ± {std:.2f}' if std else ''}"
    low, high = scale(mean - std), scale(mean + std)
    spread = element("line", x1=low, x2=high, y1=y, y2=y, stroke=colour(series), stroke_width=1.5)
    return element(
        "g", element("title", told), spread if std else None, _mark(series, scale(mean), y)
    )


def _mark(series: int, x: float, y: float) -> Markup:
    """Return a dot, a square or a diamond, so that series differ in more than colour."""
    fill, r = colour(series), _SIZE
    if series % 3 == 0:
        return element("circle", cx=x, cy=y, r=r, fill=fill)
    if series % 3 == 1:
        return element("rect", x=x - r, y=y - r, width=2 * r, height=2 * r, fill=fill)
    r *= 1.4
    path = f"M{x - r:.1f} {y:.1f}L{x:.1f} {y - r:.1f}L{x + r:.1f} {y:.1f}L{x:.1f} {y + r:.1f}Z"
    return element("path", d=path, fill=fill)
