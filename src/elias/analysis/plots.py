"""Plots as SVG text: lines, bars, boxes, dots and histograms, without any drawing library.

Each stands alone: a title and a description to be read aloud, text in the colour of the page, and
series in the page's ``--series-1`` to ``--series-6``, told apart by dashes and shapes too. Values
show when the pointer rests on a mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from elias.analysis.axes import FONT, WIDTH, Axis, Frame, colour, drawing, frame, text_width
from elias.analysis.markup import Markup, element

DASHES = (None, "7 4", "2 3", "9 3 2 3", "12 4", "4 2")
MOST_MARKED = 30
"""Points of a line that are marked one by one."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A series of points to be joined."""

    name: str
    xs: ArrayLike
    ys: ArrayLike
    band: tuple[ArrayLike, ArrayLike] | None = None
    """Lower and upper bounds to be shaded."""
    series: int | None = None
    """Its colour and dashes; its place among the lines when None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dots:
    """A group of points in the plane."""

    name: str
    points: ArrayLike
    """(n, 2)."""
    radius: float = 2.6
    opacity: float = 0.8
    series: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a plot is called and says."""

    title: str
    description: str
    """What there is to see, for those who do not see it."""


def line_plot(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    words: Words,
    *,
    rules: Mapping[float, str] | None = None,
) -> Markup:
    """Return lines over numbers; ``rules`` are upright lines, named, where something begins."""
    parts = [_LinePart(line, place) for place, line in enumerate(lines)]
    xs = np.concatenate([part.xs for part in parts])
    ys = np.concatenate([values for part in parts for values in part.heights()])
    space = frame(
        x,
        y,
        xs.tolist(),
        ys.tolist(),
        legend=[(part.name, part.key()) for part in parts],
        above=FONT if rules else 0.0,
    )
    drawn = [_rule(space, at, name) for at, name in (rules or {}).items()]
    return space.drawn(words.title, words.description, drawn, [p.drawn(space) for p in parts])


class _LinePart:
    """A line on its way to the page."""

    def __init__(self, line: Line, place: int) -> None:
        self.name = line.name
        self.xs: Array = np.asarray(line.xs, dtype=np.float64)
        self.ys: Array = np.asarray(line.ys, dtype=np.float64)
        self.band = None if line.band is None else [np.asarray(b, np.float64) for b in line.band]
        self.series = place if line.series is None else line.series
        self.marked = len(self.xs) <= MOST_MARKED

    def heights(self) -> list[Array]:
        return [self.ys, *(self.band or [])]

    def key(self) -> Markup:
        line = element("path", d="M-9 0H9", **self._stroke())
        return element("g", line, _shape(self.series, 0, 0) if self.marked else None)

    def drawn(self, space: Frame) -> Markup:
        shapes: list[object] = []
        if self.band is not None:
            low, high = self.band
            there = _path(space, self.xs, high)
            back = _path(space, self.xs[::-1], low[::-1]).replace("M", "L", 1)
            shapes.append(
                element("path", d=f"{there}{back}Z", fill=colour(self.series), fill_opacity=0.16)
            )
        shapes.append(element("path", d=_path(space, self.xs, self.ys), **self._stroke()))
        if self.marked:
            shapes += [self._mark(space, x, y) for x, y in zip(self.xs, self.ys, strict=True)]
        return element("g", shapes)

    def _mark(self, space: Frame, x: float, y: float) -> Markup:
        told = f"{self.name}: {x:g}, {y:.4g}"
        return element("g", element("title", told), _shape(self.series, space.x(x), space.y(y)))

    def _stroke(self) -> dict[str, object]:
        return {
            "fill": "none",
            "stroke": colour(self.series),
            "stroke_width": 2,
            "stroke_linejoin": "round",
            "stroke_dasharray": DASHES[self.series % len(DASHES)],
        }


def _path(space: Frame, xs: Array, ys: Array) -> str:
    places = (f"{space.x(x):.1f} {space.y(y):.1f}" for x, y in zip(xs, ys, strict=True))
    return "M" + "L".join(places)


def _rule(space: Frame, at: float, name: str) -> Markup:
    place = space.x(at)
    fits = place + text_width(name) + 8 <= WIDTH
    line = element(
        "line",
        x1=place,
        x2=place,
        y1=space.y.start,
        y2=space.y.end - 6,
        stroke="currentColor",
        stroke_opacity=0.45,
        stroke_dasharray="3 3",
    )
    label = element(
        "text",
        name,
        x=place + (5 if fits else -5),
        y=space.y.end - 5,
        text_anchor="start" if fits else "end",
        opacity=0.75,
    )
    return element("g", line, label)


def _shape(series: int, x: float, y: float, size: float = 3.2) -> Markup:
    """Return the mark of a series: each has a shape of its own beside its colour."""
    fill = colour(series)
    kind = series % 4
    if kind == 0:
        return element("circle", cx=float(x), cy=float(y), r=size, fill=fill)
    if kind == 1:
        return element("rect", x=x - size, y=y - size, width=2 * size, height=2 * size, fill=fill)
    r = size * 1.4
    if kind == 2:
        path = f"M{x - r:.1f} {y:.1f}L{x:.1f} {y - r:.1f}L{x + r:.1f} {y:.1f}L{x:.1f} {y + r:.1f}Z"
    else:
        path = f"M{x - r:.1f} {y + size:.1f}L{x:.1f} {y - r:.1f}L{x + r:.1f} {y + size:.1f}Z"
    return element("path", d=path, fill=fill)


def _swatch(series: int) -> Markup:
    return element("rect", x=-6, y=-5, width=12, height=10, rx=2, fill=colour(series))


def bar_plot(
    categories: Sequence[str], groups: Mapping[str, ArrayLike], x: Axis, y: Axis, words: Words
) -> Markup:
    """Return bars over categories, side by side where there are several groups of values.

    A value that is not a number has no bar.
    """
    values = {name: np.asarray(given, dtype=np.float64) for name, given in groups.items()}
    known = np.concatenate([v[np.isfinite(v)] for v in values.values()])
    heights = [0.0, *known.tolist()]
    legend = [(name, _swatch(i)) for i, name in enumerate(values)]
    space = frame(x, y, [], heights, legend=legend, categories=categories)
    pitch = space.width / len(categories)
    width = pitch * 0.76 / len(values)
    numbers = _bar_numbers(values, width if len(values) > 1 else pitch)
    bars = []
    for series, (name, of_group) in enumerate(values.items()):
        for place, value in enumerate(of_group.tolist()):
            if not np.isfinite(value):
                continue
            left = space.x.start + pitch * (place + 0.12) + width * series
            told = f"{name}, {categories[place]}: {value:,.4g}"
            bars.append(_bar(space, left, width * 0.94, (0.0, value), series, told))
            if numbers:
                bars.append(_bar_number(space, left + width / 2, value, numbers[series][place]))
    return space.drawn(words.title, words.description, bars)


def _bar_numbers(values: Mapping[str, Array], room: float) -> list[list[str]]:
    """Return the numbers to write above bars; none where they would touch."""
    written = [[f"{v:,.3g}" if v < 1000 else f"{v:,.0f}" for v in g] for g in values.values()]
    widest = max((text_width(number) for group in written for number in group), default=0)
    return written if widest * 0.85 + 3 <= room else []


def _bar_number(space: Frame, x: float, value: float, number: str) -> Markup:
    size = FONT * 0.85
    return element("text", number, x=x, y=space.y(value) - 4, text_anchor="middle", font_size=size)


def _bar(
    space: Frame, left: float, width: float, span: tuple[float, float], series: int, told: str
) -> Markup:
    bottom, top = space.y(span[0]), space.y(span[1])
    return element(
        "rect",
        element("title", told),
        x=left,
        y=min(top, bottom),
        width=width,
        height=max(abs(bottom - top), 0.5),
        fill=colour(series),
    )


def histogram(values: ArrayLike, edges: ArrayLike, x: Axis, y: Axis, words: Words) -> Markup:
    """Return how many values lie between each edge and the next."""
    counts, bounds = np.histogram(np.asarray(values), bins=np.asarray(edges))
    return binned_plot(counts, bounds, x, y, words)


def binned_plot(counts: ArrayLike, edges: ArrayLike, x: Axis, y: Axis, words: Words) -> Markup:
    """Return a histogram of counts that are known already, or of shares."""
    heights = np.asarray(counts, dtype=np.float64)
    bounds = np.asarray(edges, dtype=np.float64)
    fitted = Axis(label=x.label, low=float(bounds[0]), high=float(bounds[-1]))
    space = frame(fitted, y, bounds.tolist(), [0.0, *heights.tolist()])
    bars = []
    for low, high, height in zip(bounds, bounds[1:], heights, strict=False):
        left, right = space.x(low), space.x(high)
        told = f"{low:,.4g} to {high:,.4g}: {height:,.4g}"
        width = max(right - left - 1, 0.5)
        bars.append(_bar(space, left + 0.5, width, (0.0, height), 0, told))
    return space.drawn(words.title, words.description, bars)


def box_plot(
    categories: Sequence[str], groups: Mapping[str, ArrayLike], x: Axis, y: Axis, words: Words
) -> Markup:
    """Return boxes over categories: five rising quantiles for each, (categories, 5) in a group.

    A thin line goes from the first to the last, a box from the second to the fourth, and the third
    is marked. A row that is not a number is left out.
    """
    values = {name: np.asarray(given, dtype=np.float64) for name, given in groups.items()}
    known = np.concatenate([v[np.isfinite(v)] for v in values.values()])
    legend = [(name, _swatch(i)) for i, name in enumerate(values)]
    space = frame(x, y, [], known.tolist(), legend=legend, categories=categories)
    pitch = space.width / len(categories)
    width = pitch * 0.76 / len(values)
    boxes = []
    for series, (name, rows) in enumerate(values.items()):
        for place, row in enumerate(rows):
            if np.isfinite(row).all():
                middle = space.x.start + pitch * (place + 0.12) + width * (series + 0.5)
                told = f"{name}, {categories[place]}: median {row[2]:.3g}, half of all from "
                told += f"{row[1]:.3g} to {row[3]:.3g}"
                boxes.append(_box(space, middle, width * 0.8, row.tolist(), series, told))
    return space.drawn(words.title, words.description, boxes)


def _box(
    space: Frame, x: float, width: float, row: Sequence[float], series: int, told: str
) -> Markup:
    lowest, low, middle, high, highest = map(space.y, row)
    paint = colour(series)
    whisker = element("path", d=f"M{x:.1f} {lowest:.1f}V{highest:.1f}", stroke=paint)
    left = x - width / 2
    box = element(
        "rect",
        x=left,
        y=high,
        width=width,
        height=max(low - high, 0.5),
        fill=paint,
        fill_opacity=0.35,
        stroke=paint,
    )
    median = f"M{left:.1f} {middle:.1f}h{width:.1f}"
    mark = element("path", d=median, stroke="currentColor", stroke_width=2)
    return element("g", element("title", told), whisker, box, mark)


def scatter_plot(groups: Sequence[Dots], words: Words, *, height: float = 300.0) -> Markup:
    """Return points in a plane whose axes mean nothing, as t-SNE's; later groups lie above."""
    points = [np.asarray(group.points, dtype=np.float64).reshape(-1, 2) for group in groups]
    together = np.concatenate(points)
    low, high = together.min(axis=0), together.max(axis=0)
    room = np.array([WIDTH, height]) - 24
    scale = float((room / np.maximum(high - low, 1e-9)).min())
    shift = 12 + (room - (high - low) * scale) / 2
    shapes = []
    for place, (group, own) in enumerate(zip(groups, points, strict=True)):
        series = place if group.series is None else group.series
        places = (own - low) * scale + shift
        dots = [_shape(series, x, y, group.radius) for x, y in places.tolist()]
        shapes.append(element("g", element("title", group.name), dots, opacity=group.opacity))
    return drawing(words.title, words.description, shapes, height=height)
