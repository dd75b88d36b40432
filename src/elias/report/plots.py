"""Draw line, bar, dot and scatter plots as SVG, for the report and the experiments.

    plot = Plot("Loss by epoch", Axis("epoch"), Axis("loss"))
    plot.line("training", [1, 2, 3], [3.0, 2.0, 1.0])
    svg = plot.svg("It falls from 3 to 1.")

The title and the description are for screen readers. Text has the text colour of the page. Series
have the colours ``--series-1`` to ``--series-6`` of the page's style sheet, and different dashes
and markers. Hovering over a mark shows its value.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import ArrayLike

WIDTH = 460.0
"""Width of a plot in SVG units. It is close to the width in pixels, so that text keeps its size."""
HEIGHT = 300.0
FONT = 12.0
"""Font size in SVG units."""
ROW_HEIGHT = 24.0
"""Height of a row of a dot plot."""
MAX_MARKERS = 30
"""Lines with more points are drawn without markers."""

_COLOURS = ("#2563a8", "#c2570c", "#2c7d4f", "#7d4bb3", "#b83260", "#4b6a73")
_DASHES = (None, "7 4", "2 3", "9 3 2 3", "12 4", "4 2")
_MARKERS = (
    "M-1 0A1 1 0 0 1 1 0A1 1 0 0 1-1 0Z",  # circle
    "M-1-1H1V1H-1Z",  # square
    "M-1.4 0L0-1.4L1.4 0L0 1.4Z",  # diamond
    "M-1.4 1L0-1.4L1.4 1Z",  # triangle
)
"""Outlines of the markers, for a size of 1."""
_LETTER_WIDTH = 0.58 * FONT  # mean over the letters of a sans serif font
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_LONGEST_NAME = int(0.45 * WIDTH / _LETTER_WIDTH)


@dataclass(frozen=True, slots=True)
class Axis:
    """Label and range of an axis."""

    label: str
    low: float | None = None
    """Lower end of the axis. If ``low`` or ``high`` is None, it is derived from the data."""
    high: float | None = None
    log: bool = False
    """True for a logarithmic axis, whose values must be positive."""
    categories: Sequence[str] | None = None
    """Names of equally wide slots, for an axis of categories instead of numbers."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Mapping of values in [``low``, ``high``] to coordinates from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)


class Plot:
    """A plot with two axes. Add marks, then draw it with `svg`."""

    def __init__(self, title: str, x: Axis, y: Axis) -> None:
        self.title, self.x, self.y = title, x, y
        self._xs: list[float] = []  # values that the axes must cover
        self._ys: list[float] = []
        self._legend: list[tuple[str, Markup]] = []  # name and symbol of each series
        self._marks: list[Callable[[Scale, Scale], Iterator[Markup]]] = []
        self._has_rules = False

    def line(
        self, name: str, xs: ArrayLike, ys: ArrayLike, *, band: Sequence[ArrayLike] = ()
    ) -> None:
        """Add a line. Points whose y is not finite are skipped.

        ``band`` has the lower and upper bounds of an area to shade around the line.
        """
        columns = np.array([xs, ys, *band], dtype=np.float64)
        columns = columns[:, np.isfinite(columns[1])]
        x_values, y_values, *bounds = columns.tolist()
        series = len(self._legend)
        has_markers = len(x_values) <= MAX_MARKERS
        style = {"stroke_width": 2, "stroke_linejoin": "round"}
        style |= {"stroke_dasharray": _DASHES[series % len(_DASHES)]}
        paint = colour(series)

        def draw(x: Scale, y: Scale) -> Iterator[Markup]:
            if bounds:
                low, high = bounds
                outline = _path(x, y, [*x_values, *x_values[::-1]], [*high, *low[::-1]])
                yield element("path", d=f"{outline}Z", fill=paint, fill_opacity=0.16)
            path = _path(x, y, x_values, y_values)
            yield element("path", d=path, fill="none", stroke=paint, **style)
            for a, b in zip(x_values, y_values, strict=True) if has_markers else ():
                value = element("title", f"{name}: {a:g}, {b:.4g}")
                yield element("g", value, _marker(series, x(a), y(b)))

        symbol = element("path", d="M-9 0H9", fill="none", stroke=paint, **style)
        self._legend.append((name, element("g", symbol, _marker(series) if has_markers else None)))
        self._xs += x_values
        self._ys += columns[1:].ravel().tolist()
        self._marks.append(draw)

    def rule(self, at: float, name: str) -> None:
        """Add a vertical line with a name."""

        def draw(x: Scale, y: Scale) -> Iterator[Markup]:
            path = f"M{x(at):.1f} {y.start:.1f}V{y.end - 6:.1f}"
            yield element("path", d=path, stroke="currentColor", opacity=0.45, stroke_dasharray=3)
            fits = x(at) + _text_width(name) + 8 <= WIDTH
            anchor, shift = ("start", 5) if fits else ("end", -5)
            yield _text(name, x(at) + shift, y.end - 5, anchor, opacity=0.75)

        self._has_rules = True
        self._marks.append(draw)

    def bars(self, groups: Mapping[str, ArrayLike]) -> None:
        """Add a bar for each group and category of the x axis, unless its value is NaN.

        If there is only one group, the value of each bar is written above it.
        """
        heights = {name: np.asarray(v, dtype=np.float64).tolist() for name, v in groups.items()}

        def draw(x: Scale, y: Scale) -> Iterator[Markup]:
            width = 0.76 * (x(1) - x(0)) / len(heights)
            for series, (name, values) in enumerate(heights.items()):
                for i, (category, height) in enumerate(zip(categories, values, strict=True)):
                    if math.isfinite(height):
                        left = x(i + 0.12) + series * width
                        title = f"{name}, {category}: {height:,.4g}"
                        yield _bar(left, 0.94 * width, y(0), y(height), series, title)
                        if len(heights) == 1:
                            middle, above = left + width / 2, y(height) - 4
                            yield _text(number(height), middle, above, font_size=0.85 * FONT)

        categories = self.x.categories or ()
        for series, (name, values) in enumerate(heights.items()):
            swatch = element("rect", x=-6, y=-5, width=12, height=10, rx=2, fill=colour(series))
            self._legend.append((name, swatch))
            self._ys += filter(math.isfinite, values)
        self._ys.append(0.0)
        self._marks.append(draw)

    def histogram(self, counts: ArrayLike, edges: ArrayLike) -> None:
        """Add a histogram with a bar for each of ``counts``, between consecutive ``edges``."""
        heights, bounds = (np.asarray(v, dtype=np.float64).tolist() for v in (counts, edges))

        def draw(x: Scale, y: Scale) -> Iterator[Markup]:
            for (low, high), height in zip(pairwise(bounds), heights, strict=True):
                title = f"{low:,.4g} to {high:,.4g}: {height:,.4g}"
                width = max(x(high) - x(low) - 1, 0.5)
                yield _bar(x(low) + 0.5, width, y(0), y(height), 0, title)

        self.x = replace(self.x, low=bounds[0], high=bounds[-1])
        self._ys += [0.0, *heights]
        self._marks.append(draw)

    def dots(self, name: str, values: Sequence[float], spreads: Sequence[float]) -> None:
        """Add a dot for each category of the y axis, and a line for the spread of the value."""
        series = len(self._legend)

        def draw(x: Scale, y: Scale) -> Iterator[Markup]:
            for i, category in enumerate(self.y.categories or ()):
                mean, spread, height = values[i], spreads[i], y(i + 0.5)
                title = f"{category}, {name}: {mean:.2f}" + (f" ± {spread:.2f}" if spread else "")
                span = f"M{x(mean - spread):.1f} {height:.1f}H{x(mean + spread):.1f}"
                line = element("path", d=span, stroke=colour(series), stroke_width=1.5)
                dot = _marker(series, x(mean), height, 4.0)
                yield element("g", element("title", title), line if spread else None, dot)

        self._legend.append((name, _marker(series, size=4.0)))
        self._xs += values
        self._marks.append(draw)

    def svg(self, description: str) -> Markup:
        """Draw the plot with its axes and, for several series, a legend."""
        legend, top = _draw_legend(self._legend if len(self._legend) > 1 else [])
        labels = [_text(self.y.label, 0.0, top + FONT, "start", opacity=0.75)]
        rows = self.y.categories
        top += FONT / 2 if rows else 2 * FONT + 4 + (FONT if self._has_rules else 0)
        bottom = top + ROW_HEIGHT * len(rows) if rows else HEIGHT - 3 * FONT - 4
        height = bottom + 3 * FONT + 4
        y, y_ticks = _scale(self.y, self._ys, *((top, bottom) if rows else (bottom, top)), 6)
        left = max(_text_width(label) for _, label in y_ticks) + 10
        right = WIDTH - (4 if self.x.categories else 18)  # the last tick label is centred there
        x, x_ticks = _scale(self.x, self._xs, left, right, 8)
        labels += [_text(label, left - 6, at + FONT / 3, "end") for at, label in y_ticks]
        labels += [_text(label, at, bottom + FONT + 5) for at, label in x_ticks]
        labels.append(_text(self.x.label, (left + WIDTH) / 2, height - 5, opacity=0.75))
        vertical = "".join(f"M{at:.1f} {top:.1f}V{bottom:.1f}" for at, _ in x_ticks)
        horizontal = "".join(f"M{left:.1f} {at:.1f}H{WIDTH}" for at, _ in y_ticks)
        lines = vertical if rows else horizontal
        grid = element("path", d=lines, stroke="currentColor", opacity=0.16)
        marks = [element("g", list(draw(x, y))) for draw in self._marks]
        return _svg(self.title, description, [legend, grid, labels, marks], height)


def scatter_plot(
    title: str, description: str, groups: Sequence[tuple[str, int, ArrayLike]]
) -> Markup:
    """Return a scatter plot without axes, for example of a t-SNE projection.

    Each group has a name, the index of a colour, and points (n, 2). The last group is drawn larger,
    on top of the other groups.
    """
    points = [np.asarray(group[2], dtype=np.float64).reshape(-1, 2) for group in groups]
    low, high = np.min(np.concatenate(points), axis=0), np.max(np.concatenate(points), axis=0)
    room = np.array([WIDTH, HEIGHT]) - 24
    scale = float((room / np.maximum(high - low, 1e-9)).min())
    shift = 12 + (room - (high - low) * scale) / 2
    shapes = []
    for i, (name, series, _) in enumerate(groups):
        size, opacity = (6.0, 0.95) if i == len(groups) - 1 else (4.0, 0.6)
        centres = ((points[i] - low) * scale + shift).tolist()
        dots = [_marker(series, x, y, size) for x, y in centres]
        shapes.append(element("g", element("title", name), dots, opacity=opacity))
    return _svg(title, description, shapes, HEIGHT)


def standalone(svg: Markup) -> str:
    """Return a plot as the text of an SVG file, with colours for light and dark mode."""
    style = "svg { color: #1d2126; background: #ffffff } "
    style += "@media (prefers-color-scheme: dark) { svg { color: #e4e7eb; background: #15181c } }"
    return str(svg).replace("<title", f"<style>{style}</style><title", 1)


def colour(series: int) -> str:
    """Return the CSS colour of a series."""
    i = series % len(_COLOURS)
    return f"var(--series-{i + 1}, {_COLOURS[i]})"


def _scale(
    axis: Axis, values: Sequence[float], start: float, end: float, max_ticks: int
) -> tuple[Scale, list[tuple[float, str]]]:
    """Return the scale of an axis, and the coordinates and labels of its ticks.

    There are at most ``max_ticks`` ticks, and fewer if their labels would touch.
    """
    if axis.categories is not None:
        scale, longest = Scale(0, len(axis.categories), start, end), _LONGEST_NAME
        names = (n if len(n) <= longest else f"{n[: longest - 1]}…" for n in axis.categories)
        return scale, [(scale(i + 0.5), name) for i, name in enumerate(names)]
    for n_ticks in range(max_ticks, 2, -1):
        low, high, ticks = axis_ticks(axis, values, n_ticks)
        scale = Scale(low, high, start, end, axis.log)
        labels = list(zip(map(scale, ticks), tick_labels(ticks), strict=True))
        if end < start or not labels_touch(labels):  # a vertical axis starts at the bottom
            break
    return scale, labels


def axis_ticks(
    axis: Axis, values: Sequence[float], max_ticks: int
) -> tuple[float, float, list[float]]:
    """Return both ends of an axis and at most ``max_ticks`` (>= 3) ticks, in steps of 1, 2 or 5.

    An end that is None in ``axis`` becomes the nearest tick below or above all values.

    >>> axis_ticks(Axis("score", low=0.0), [0.3, 0.9], 6)
    (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    """
    low = min(values, default=0.0) if axis.low is None else axis.low
    high = max(values, default=1.0) if axis.high is None else axis.high
    if axis.log:
        high = high if high > low else 10 * low
        return low, high, log_ticks(low, high, max_ticks)
    if high <= low:
        high = low + (abs(low) or 1.0)
    power: float = 10 ** math.floor(math.log10((high - low) / (max_ticks - 1)))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first < max_ticks:
            break
    low = first * step if axis.low is None else low
    high = last * step if axis.high is None else high
    ticks = [round(i * step, 12) for i in range(first, last + 1)]
    return low, high, [t for t in ticks if low - 1e-6 * step <= t <= high + 1e-6 * step]


def log_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return at most ``max_ticks`` ticks of a logarithmic axis, such as 1, 2, 5, 10, 20.

    >>> log_ticks(1, 100, 7)
    [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [f * 10.0**power for power in range(first, last + 1) for f in factors]
        ticks = [v for v in ticks if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
        if len(ticks) <= max_ticks:
            break
    return ticks[:: math.ceil(len(ticks) / max_ticks)] if ticks else [low, high]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Format values with the number of decimals that the most precise value needs.

    >>> tick_labels([0, 0.25, 0.5]), tick_labels([0, 5000])
    (['0', '0.25', '0.50'], ['0', '5,000'])
    """
    for decimals in range(7):
        if all(abs(round(v, decimals) - v) <= 1e-9 * max(1, abs(v)) for v in values):
            break
    return [f"{v:,.{decimals}f}" if v else "0" for v in values]


def labels_touch(labels: Sequence[tuple[float, str]]) -> bool:
    """Return whether tick labels, centred at their coordinates, are less than a letter apart."""
    ends = [(at - _text_width(label) / 2, at + _text_width(label) / 2) for at, label in labels]
    return any(right[0] - left[1] < _LETTER_WIDTH for left, right in pairwise(ends))


def _draw_legend(entries: Sequence[tuple[str, Markup]]) -> tuple[Markup, float]:
    """Return the legend, in as many lines as it needs, and its height."""
    shapes = []
    x, y = 0.0, 0.0
    for name, symbol in entries:
        width = 40 + _text_width(name)
        if x and x + width > WIDTH:
            x, y = 0.0, y + 1.5 * FONT
        position = f"translate({x + 10:.1f} {y + 0.75 * FONT:.1f})"
        shapes += [element("g", symbol, transform=position), _text(name, x + 24, y + FONT, "start")]
        x += width
    return element("g", shapes), y + 1.5 * FONT if shapes else 0.0


def _svg(title: str, description: str, shapes: Sequence[object], height: float) -> Markup:
    key = f"plot-{zlib.crc32(f'{title}|{description}'.encode('utf8', 'replace')):08x}"
    return element(
        "svg",
        element("title", title, id=f"{key}-title"),
        element("desc", description, id=f"{key}-desc"),
        list(shapes),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
        **{"font_size": FONT, "font_family": "system-ui, sans-serif", "fill": "currentColor"},
    )


def _path(x: Scale, y: Scale, xs: Sequence[float], ys: Sequence[float]) -> str:
    return "M" + "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in zip(xs, ys, strict=True))


def _text(label: str, x: float, y: float, anchor: str = "middle", **style: object) -> Markup:
    return element("text", label, x=x, y=y, text_anchor=anchor, **style)


def _text_width(label: str) -> float:
    """Estimate the width of a label."""
    return len(label) * _LETTER_WIDTH


def _bar(left: float, width: float, bottom: float, top: float, series: int, title: str) -> Markup:
    box = {"x": left, "y": min(top, bottom), "width": width, "height": max(abs(bottom - top), 0.5)}
    return element("rect", element("title", title), **box, fill=colour(series))


def _marker(series: int, x: float = 0.0, y: float = 0.0, size: float = 3.2) -> Markup:
    """Return the marker of a series."""
    transform = f"translate({x:.1f} {y:.1f}) scale({size})"
    path = _MARKERS[series % len(_MARKERS)]
    return element("path", d=path, transform=transform, fill=colour(series))


def text(value: object) -> Markup:
    """Escape a value for use in markup. Markup itself is returned unchanged.

    Characters that XML does not allow are replaced by U+FFFD.

    >>> print(text("a < b"), text(Markup("<b>bold</b>")))
    a &lt; b <b>bold</b>
    """
    return value if isinstance(value, Markup) else escape(_NOT_XML.sub("\ufffd", str(value)))


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element with its children as markup.

    Children may be lists. Children and attributes that are None are skipped.

    Underscores in attribute names become hyphens, because ``stroke-width`` cannot be a Python name.
    Floats are rounded to two decimals.

    >>> print(element("text", "1 < 2", None, stroke_width=2.0, opacity=None))
    <text stroke-width="2">1 &lt; 2</text>
    """
    pairs = "".join(
        f' {key.replace("_", "-")}="{text(_two_decimals(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{pairs}>{_join(children)}</{name}>")


def _join(parts: object) -> str:
    if isinstance(parts, list | tuple):
        return "".join(map(_join, parts))
    return "" if parts is None else text(parts)


def _two_decimals(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def number(value: float, digits: int = 3) -> str:
    """Format a number with ``digits`` significant digits, or as a whole number if it is large.

    >>> number(1234567.0), number(0.12345), number(0.12345, 4), number(float("nan"))
    ('1,234,567', '0.123', '0.1235', '–')
    """
    if not math.isfinite(value):
        return "–"
    is_whole = abs(value) >= 1000 or value == int(value)
    return f"{value:,.0f}" if is_whole else f"{value:,.{digits}g}"
