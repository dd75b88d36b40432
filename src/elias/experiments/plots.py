"""Plots of experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from elias.experiments.tables import REMOVED
from elias.report.page import Markup, element
from elias.report.plots import (
    FONT,
    WIDTH,
    Array,
    Axis,
    Scale,
    Words,
    colour,
    drawing,
    line_plot,
    nice_range,
    text_width,
    tick_labels,
    ticks,
)
from elias.report.plots import Line as Curve

if TYPE_CHECKING:
    from elias.experiments.tables import Line


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


_WIDE = 20.0
"""How many times the smallest value the largest is where equal steps should multiply."""


def beside(lines: Sequence[Line], title: str, metrics: Sequence[str]) -> Markup:
    """Return named lines below each other, a dot for each metric."""
    told = "; ".join(
        f"{line.title}: {', '.join(f'{key} {line.mean[key]:.2f}' for key in metrics)}"
        for line in lines
        if line.mean
    )
    return dot_plot(lines, metrics, Words(title=title, description=f"{told}."))


def curves(
    lines: Sequence[Line], parameter: str, symbol: str, base: float, metrics: Sequence[str]
) -> Markup:
    """Return how metrics change with a parameter, beside their values at (or next to) ``base``."""
    shown = [line for line in lines if line.mean]
    values = np.array([float(line.settings[parameter]) for line in shown])
    start = shown[int(np.argmin(np.abs(values - base)))]
    at = float(start.settings[parameter])
    best = {key: shown[int(np.argmax([line.mean[key] for line in shown]))] for key in metrics}
    told = ", ".join(f"{key} at {line.settings[parameter]:g}" for key, line in best.items())
    wide = values.min() > 0 and values.max() / values.min() > _WIDE
    return line_plot(
        [_curve(shown, values, key, start) for key in metrics],
        Axis(label=symbol, log=bool(wide)),
        Axis(label=f"points above {symbol} = {at:g}"),
        Words(title=f"Metrics by {symbol}", description=f"Highest: {told}."),
    )


def _curve(lines: Sequence[Line], values: Array, key: str, start: Line) -> Curve:
    means = np.array([line.mean[key] - start.mean[key] for line in lines])
    spread = np.array([line.std.get(key, 0.0) for line in lines])
    band = (means - spread, means + spread) if spread.any() else None
    return Curve(name=key, xs=values, ys=means, band=band)


def losses(
    lines: Sequence[Line], groups: Mapping[str, str], whole: str, metrics: Sequence[str]
) -> Markup:
    """Return what pruning costs: metrics beside those of the whole model, by edges removed.

    Args:
        lines: With a setting ``by`` that says how edges were chosen.
        groups: What each way of choosing is called.
        whole: The name of the line that nothing was removed of.
        metrics: Those to draw.
    """
    shown = [line for line in lines if line.mean]
    start = next((line for line in shown if line.name == whole), shown[0])
    drawn = []
    for by, title in groups.items():
        own = sorted(
            (line for line in shown if line.settings["by"] == by or line is start),
            key=lambda line: line.mean[REMOVED],
        )
        drawn += [
            Curve(
                name=f"{key}, {title}",
                xs=[line.mean[REMOVED] for line in own],
                ys=[line.mean[key] - start.mean[key] for line in own],
            )
            for key in metrics
        ]
    most = max(line.mean[REMOVED] for line in shown)
    words = Words(
        title="What pruning edges costs (Table 9)",
        description=f"Up to {most:.1f}% of the edges removed.",
    )
    x = Axis(label="% of edges removed", low=0.0, high=100.0)
    return line_plot(drawn, x, Axis(label="points above the whole model"), words)
