"""Draw plots as SVG.

Each stands alone: a title and a description to be read aloud, text in the colour of the page, and
series in the page's ``--series-1`` to ``--series-6``, told apart by dashes and shapes too. Values
show when the pointer rests on a mark.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from elias.report.page import Markup, element

WIDTH = 460.0
"""Units of a plot's width. A page shows one about as many pixels wide, so that its letters keep
their size, and a phone at three quarters of it."""
HEIGHT = 300.0
FONT = 12.0
"""Height of a letter, in the same units."""

N_COLOURS = 6
FALLBACKS = ("#2563a8", "#c2570c", "#2c7d4f", "#7d4bb3", "#b83260", "#4b6a73")
"""The colours of the series where the page names none, as ``--series-1`` and so on."""

_LETTER = 0.58  # mean width of a letter in a sans serif face, of its height
_GAP = 14.0  # between two tick labels
_SHORTEST = 6  # letters that a name which does not fit may be cut to


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a plot: what it says, and from where to where it goes."""

    label: str
    low: float | None = None
    """Where it begins; chosen from the data when None."""
    high: float | None = None
    log: bool = False
    """Whether equal steps multiply; then everything shown must be above 0."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to places between ``start`` and ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        low, high, value = ((math.log(v) if self.log else v) for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def colour(series: int) -> str:
    """Return how a series is painted, as CSS."""
    place = series % N_COLOURS
    return f"var(--series-{place + 1}, {FALLBACKS[place]})"


def text_width(label: str) -> float:
    """Return about how wide a label is drawn."""
    return len(label) * FONT * _LETTER


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most ``most`` round values from ``low`` to ``high``, in steps of 1, 2 or 5.

    >>> ticks(0, 1, 6)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if high <= low:
        return [low]
    step = _step(low, high, most, around=False)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _step(low: float, high: float, most: int, *, around: bool) -> float:
    """Return the smallest round step that takes ``most`` ticks within a range, or around it."""
    size: float = 10 ** math.floor(math.log10((high - low) / max(most - 1, 1)))
    slack = -1e-9 if around else 1e-9
    for factor in (1, 2, 5, 10, 20, 50):
        step = factor * size
        outer = math.ceil(high / step + slack), math.floor(low / step - slack)
        inner = math.floor(high / step + slack), math.ceil(low / step - slack)
        last, first = outer if around else inner
        if last - first + 1 <= most:
            break
    return step


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most ``most`` of the values 1, 2, 5, 10, 20 … from ``low`` to ``high``.

    >>> log_ticks(1, 100, 7)
    [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**power for power in range(first, last + 1) for f in factors]
        found = [v for v in found if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
        if len(found) <= most:
            break
    return found[:: math.ceil(len(found) / max(most, 1))] if found else [low, high]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Return the values with as many decimals as it takes to tell them apart.

    >>> tick_labels([0, 0.25, 0.5]), tick_labels([0, 5000])
    (['0', '0.25', '0.50'], ['0', '5,000'])
    """
    for decimals in range(7):
        labels = [f"{value:,.{decimals}f}" for value in values]
        if all(abs(float(f"{v:.{decimals}f}") - v) <= 1e-9 * max(1, abs(v)) for v in values):
            break
    return ["0" if float(v) == 0 else label for v, label in zip(values, labels, strict=True)]


def nice_range(axis: Axis, values: Sequence[float], most: int) -> tuple[float, float]:
    """Return where an axis begins and ends: as it says, else at ticks around the values."""
    low = min(values, default=0.0) if axis.low is None else axis.low
    high = max(values, default=1.0) if axis.high is None else axis.high
    if axis.log:
        return low, high if high > low else low * 10
    if high <= low:
        high = low + (abs(low) or 1.0)
    step = _step(low, high, most, around=True)
    if axis.low is None:
        low = math.floor(low / step + 1e-9) * step
    if axis.high is None:
        high = math.ceil(high / step - 1e-9) * step
    return low, high


@dataclass(frozen=True, slots=True)
class Frame:
    """The place of a plot: its two scales, and all that is drawn around them."""

    x: Scale
    y: Scale
    around: Markup
    """Grid, ticks, labels and legend."""

    @property
    def width(self) -> float:
        """Return how wide the plot's inside is."""
        return self.x.end - self.x.start

    def drawn(self, title: str, description: str, *shapes: object) -> Markup:
        """Return the whole plot, read aloud by its title and description."""
        return drawing(title, description, self.around, *shapes)


def drawing(title: str, description: str, *shapes: object, height: float = HEIGHT) -> Markup:
    """Return shapes as one SVG, read aloud by its title and description."""
    key = f"plot-{zlib.crc32(f'{title}|{description}'.encode('utf8', 'replace')):08x}"
    return element(
        "svg",
        element("title", title, id=f"{key}-title"),
        element("desc", description, id=f"{key}-desc"),
        *shapes,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
        font_size=FONT,
        font_family="system-ui, sans-serif",
        fill="currentColor",
    )


def standalone(svg: Markup) -> str:
    """Return a plot as a file of its own, readable on light and on dark."""
    style = (
        "svg { color: #1d2126; background: #ffffff } "
        "@media (prefers-color-scheme: dark) { svg { color: #e4e7eb; background: #15181c } }"
    )
    return svg.replace("<title", f"<style>{style}</style><title", 1)


def frame(
    x: Axis,
    y: Axis,
    xs: Sequence[float],
    ys: Sequence[float],
    legend: Sequence[tuple[str, Markup]] = (),
    categories: Sequence[str] | None = None,
    *,
    above: float = 0.0,
) -> Frame:
    """Return the frame that all values fit in.

    Args:
        x: The axis below.
        y: The axis at the left.
        xs: What has to fit from left to right.
        ys: What has to fit from bottom to top.
        legend: The name of each series, and the mark it is known by, 18 units wide and centred
            on 0, 0; none is drawn for a single series.
        categories: Names of equal parts of the axis below, in place of numbers.
        above: Room to leave above the inside.
    """
    key, key_height = _legend(legend if len(legend) > 1 else ())
    top = key_height + 2 * FONT + 4 + above
    bottom = HEIGHT - (3 * FONT + 4)
    y_low, y_high = nice_range(y, ys, most=6)
    y_values = log_ticks(y_low, y_high, 6) if y.log else ticks(y_low, y_high, 6)
    y_names = tick_labels(y_values)
    left = max(map(text_width, y_names), default=0) + 10
    y_scale = Scale(y_low, y_high, bottom, top, y.log)
    if categories is None:
        x_low, x_high = nice_range(x, xs, most=8)
        x_scale = Scale(x_low, x_high, left, WIDTH - 18, x.log)
        marks = _number_marks(x_scale)
    else:
        x_scale = Scale(0, len(categories), left, WIDTH - 4)
        marks = _category_marks(x_scale, categories)
    around = [
        key,
        element("text", y.label, x=0.0, y=key_height + FONT, opacity=0.75),
        [_y_tick(y_scale(v), name, left) for v, name in zip(y_values, y_names, strict=True)],
        [
            element("text", name, x=place, y=bottom + FONT + 5, text_anchor="middle")
            for place, name in marks
        ],
        element(
            "text",
            x.label,
            x=(left + WIDTH) / 2,
            y=HEIGHT - 5,
            text_anchor="middle",
            opacity=0.75,
        ),
    ]
    return Frame(x_scale, y_scale, element("g", around))


def _y_tick(place: float, name: str, left: float) -> list[Markup]:
    line = element(
        "line",
        x1=left,
        x2=WIDTH,
        y1=place,
        y2=place,
        stroke="currentColor",
        stroke_opacity=0.16,
    )
    return [line, element("text", name, x=left - 6, y=place + FONT / 3, text_anchor="end")]


def _number_marks(scale: Scale) -> list[tuple[float, str]]:
    """Return places and labels of ticks, as many as fit beside each other."""
    for most in range(9, 1, -1):
        choose = log_ticks if scale.log else ticks
        values = choose(scale.low, scale.high, most)
        labels = tick_labels(values)
        marks = [(scale(value), label) for value, label in zip(values, labels, strict=True)]
        if _fit(marks):
            break
    return marks


def _category_marks(scale: Scale, names: Sequence[str]) -> list[tuple[float, str]]:
    """Return places and names of categories: all, or cut short, or every second or third."""
    room = int(((scale(1) - scale(0)) - _GAP / 2) / (FONT * _LETTER))
    if room > _SHORTEST:
        names = [name if len(name) <= room else f"{name[: room - 1]}…" for name in names]
    for step in range(1, len(names) + 1):
        marks = [(scale(i + 0.5), names[i]) for i in range(0, len(names), step)]
        if _fit(marks):
            break
    return marks


def _fit(marks: Sequence[tuple[float, str]]) -> bool:
    """Say whether labels centred on their places leave a gap between each other."""
    edges = [(place - text_width(n) / 2, place + text_width(n) / 2) for place, n in marks]
    return all(right[0] - left[1] >= _GAP / 2 for left, right in pairwise(edges))


def _legend(entries: Sequence[tuple[str, Markup]]) -> tuple[Markup, float]:
    """Return the legend and its height, in as many lines as it takes."""
    drawn = []
    x, y = 0.0, 0.0
    for name, mark in entries:
        width = 26 + text_width(name) + 20
        if x and x + width > WIDTH:
            x, y = 0.0, y + FONT * 1.5
        moved = element("g", mark, transform=f"translate({x + 10:.1f} {y + FONT * 0.75:.1f})")
        drawn.append(moved)
        drawn.append(element("text", name, x=x + 24, y=y + FONT))
        x += width
    return element("g", drawn), y + FONT * 1.5 if drawn else 0.0


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
