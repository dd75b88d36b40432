"""Plots of experiments: dots for what is compared, lines for what is varied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from elias.analysis.axes import Axis
from elias.analysis.plots import Array, Words, line_plot
from elias.analysis.plots import Line as Curve
from elias.experiments.dots import dot_plot
from elias.experiments.rows import REMOVED

if TYPE_CHECKING:
    from elias.analysis.markup import Markup
    from elias.experiments.rows import Line

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
