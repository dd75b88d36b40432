"""What plots stand in: scales, ticks that read well, a legend, and labels that do not overlap."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from elias.analysis.markup import Markup, element

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
