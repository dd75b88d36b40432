"""Plots are complete SVG documents whose marks stand where the values say."""

from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elias.report.plots import (
    HEIGHT,
    WIDTH,
    Axis,
    Plot,
    Scale,
    axis_ticks,
    element,
    labels_touch,
    log_ticks,
    scatter_plot,
    standalone,
    text,
    tick_labels,
)

SVG = "{http://www.w3.org/2000/svg}"
TITLE, DESCRIPTION = "A <title>", "What there is & was to see"
X, Y = Axis("across"), Axis("up")


def plot_with(add, x=X, y=Y):
    """The SVG of a plot that ``add`` has added marks to."""
    plot = Plot(TITLE, x, y)
    add(plot)
    return plot.svg(DESCRIPTION)


def lines(*points):
    """A plot of lines, each given as names, xs and ys."""
    return plot_with(lambda plot: [plot.line(*one) for one in points])


def categories(*names):
    return Axis("across", categories=names)


def point_and_rule(plot):
    plot.line("a", [1], [3])
    plot.rule(1.0, "begin")


def two_dots(plot):
    plot.dots("P@1", [70.0, 75.0], [0.0, 2.0])
    plot.dots("R@100", [90.0, 95.0], [1.0, 2.0])


PLOTS = {
    "lines": plot_with(lambda p: p.line("a", [1, 2], [3, 4], band=([2, 3], [4, 5]))),
    "a point": plot_with(point_and_rule),
    "bars": plot_with(lambda p: p.bars({"a": [1, np.nan], "b": [2, 0]}), categories("x", "y")),
    "histogram": plot_with(lambda p: p.histogram([1, 3], [0, 2, 4])),
    "dots": plot_with(two_dots, Axis("%"), Axis("", categories=("first", "second"))),
    "scatter": scatter_plot(TITLE, DESCRIPTION, [("a", 0, [[1, 1]]), ("b", 1, [])]),
}
EVERY = pytest.mark.parametrize("svg", PLOTS.values(), ids=PLOTS.keys())


def tree_of(svg):
    return ElementTree.fromstring(svg)


def texts(svg):
    return [text.text for text in tree_of(svg).iter(f"{SVG}text")]


def n_markers(svg):
    """Count the markers, which are the only shapes that are scaled."""
    return sum("scale" in shape.get("transform", "") for shape in tree_of(svg).iter(f"{SVG}path"))


def titles(svg, tag):
    """The values that marks show when the pointer rests on them."""
    return [
        mark.find(f"{SVG}title").text
        for mark in tree_of(svg).iter(f"{SVG}{tag}")
        if mark.find(f"{SVG}title") is not None
    ]


@EVERY
def test_a_plot_has_a_title_and_a_description_for_screen_readers(svg):
    tree = tree_of(svg)

    title, description = tree[0], tree[1]
    assert (title.tag, title.text) == (f"{SVG}title", TITLE)
    assert (description.tag, description.text) == (f"{SVG}desc", DESCRIPTION)
    assert tree.get("role") == "img"
    assert tree.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"


@EVERY
def test_no_coordinate_is_missing_or_outside(svg):
    assert "nan" not in svg.lower()
    assert "inf" not in svg
    for mark in tree_of(svg).iter(f"{SVG}rect"):
        if mark.get("x") and float(mark.get("x")) >= 0:
            assert float(mark.get("x")) + float(mark.get("width")) <= WIDTH + 0.1
            assert 0 <= float(mark.get("y")) <= HEIGHT


@EVERY
def test_a_plot_can_be_a_file_of_its_own(svg):
    tree = tree_of(standalone(svg))

    assert tree[0].tag == f"{SVG}style"
    assert "prefers-color-scheme: dark" in tree[0].text


def test_bars_are_as_high_as_their_values_and_a_single_group_shows_them():
    svg = plot_with(lambda p: p.bars({"x": [1, 3]}), categories("a", "b"))

    bars = [bar for bar in tree_of(svg).iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    heights = [float(bar.get("height")) for bar in bars]
    assert heights[1] == pytest.approx(3 * heights[0], rel=1e-3)
    assert titles(svg, "rect") == ["x, a: 1", "x, b: 3"]
    assert texts(svg).count("3") == 2  # above the bar and at the axis


def test_a_histogram_has_a_bar_for_each_bin():
    svg = plot_with(lambda p: p.histogram([1, 2, 1], [0, 1, 2, 4]))

    assert titles(svg, "rect") == ["0 to 1: 1", "1 to 2: 2", "2 to 4: 1"]


def test_a_dot_plot_has_a_row_for_each_category_and_shows_the_spread():
    names = ("first", "a name much longer than half of the plot is wide")

    svg = plot_with(two_dots, Axis("%"), Axis("", categories=names))

    assert f"{names[0]}, P@1: 70.00" in titles(svg, "g")
    assert f"{names[1]}, P@1: 75.00 ± 2.00" in titles(svg, "g")
    assert "first" in texts(svg)
    assert "a name much longer than half…" in texts(svg)


def test_several_series_have_a_legend_and_a_single_one_has_none():
    first, second = ("first", [1, 2], [1, 2]), ("second <b>", [1, 2], [2, 1])

    assert "first" not in texts(lines(first))
    assert {"first", "second <b>"} <= set(texts(lines(first, second)))


def test_lines_differ_in_more_than_colour():
    svg = lines(*((str(i), range(40), range(40)) for i in range(4)))

    paths = [path for path in tree_of(svg).iter(f"{SVG}path") if path.get("stroke-width") == "2"]
    assert len({path.get("stroke-dasharray") for path in paths}) == 4


def test_a_line_of_many_points_has_no_markers():
    few, many = (lines(("a", range(n), range(n))) for n in (5, 500))

    assert n_markers(few) == 5
    assert n_markers(many) == 0


def test_a_line_skips_values_that_are_not_finite():
    svg = lines(("a", [1, 2, 3], [5.0, np.nan, 7.0]))

    assert titles(svg, "g") == ["a: 1, 5", "a: 3, 7"]


def test_points_that_coincide_can_be_drawn():
    svg = scatter_plot(TITLE, DESCRIPTION, [("a", 0, np.zeros((3, 2)))])

    assert n_markers(svg) == 3


def test_long_names_in_a_legend_take_several_lines():
    svg = lines(*((f"a name that takes some room {i}", [1], [1]) for i in range(5)))

    names = [text for text in tree_of(svg).iter(f"{SVG}text") if "room" in (text.text or "")]
    assert len({text.get("y") for text in names}) == 5
    assert all(float(text.get("x")) < WIDTH for text in names)


RANGES = st.tuples(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6)).map(lambda p: (p[0], p[0] + p[1]))


@given(bounds=RANGES, most=st.integers(3, 12))
def test_an_open_axis_holds_all_values_and_ends_at_its_ticks(bounds, most):
    low, high, ticks = axis_ticks(X, bounds, most)

    slack = 1e-6 * max(map(abs, bounds))
    steps = [b - a for a, b in pairwise(ticks)]
    assert len(ticks) <= most
    assert low <= bounds[0] + slack
    assert high >= bounds[1] - slack
    assert (ticks[0], ticks[-1]) == pytest.approx((low, high), rel=1e-6, abs=1e-6)
    assert steps == pytest.approx(steps[:1] * len(steps), abs=slack + 1e-6)


def test_ends_that_an_axis_gives_are_kept_and_ticks_lie_between():
    assert axis_ticks(Axis("", 0.0, 1.0), [0.3], 6) == (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1])
    assert axis_ticks(Axis("", 1.0, 13.0), [], 8) == (1, 13, [2, 4, 6, 8, 10, 12])


def test_a_range_of_one_value_is_widened():
    low, high, _ = axis_ticks(X, [5.0, 5.0], 6)

    assert low <= 5.0 < high


@pytest.mark.parametrize(
    ("bounds", "most", "expected"),
    [
        ((1, 100), 7, [1, 2, 5, 10, 20, 50, 100]),
        ((1, 100), 5, [1, 3, 10, 30, 100]),
        ((1, 1000), 4, [1, 10, 100, 1000]),
        ((1, 1000), 2, [1, 100]),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_round_values(bounds, most, expected):
    assert log_ticks(*bounds, most) == expected


def test_tick_labels_have_the_decimals_they_need():
    assert tick_labels([0, 0.05, 0.1]) == ["0", "0.05", "0.10"]
    assert tick_labels([-2, 0, 20000]) == ["-2", "0", "20,000"]


@given(high=st.floats(1e-3, 1e9), log=st.booleans())
def test_tick_labels_never_touch(high, log):
    values = [high / 1000 if log else 0.0, high]

    svg = plot_with(lambda p: p.line("a", values, [0.0, 1.0]), Axis("across", log=log))

    bottom = max(float(t.get("y")) for t in tree_of(svg).iter(f"{SVG}text")) - 10
    ticks = [
        (float(text.get("x")), text.text)
        for text in tree_of(svg).iter(f"{SVG}text")
        if bottom - 30 < float(text.get("y")) < bottom and text.get("text-anchor") == "middle"
    ]
    assert len(ticks) > 1
    assert not labels_touch(ticks)


def test_a_logarithmic_scale_gives_equal_room_to_equal_factors():
    scale = Scale(1, 100, 0, 200, log=True)

    assert [scale(v) for v in (1, 10, 100)] == pytest.approx([0, 100, 200])


@given(content=st.text(), attribute=st.text())
def test_any_text_stays_text(content, attribute):
    tree = ElementTree.fromstring(element("p", content, title=attribute))

    assert list(tree) == []
    assert set(tree.attrib) <= {"title"}


@pytest.mark.parametrize("nasty", ["<script>alert(1)</script>", '" onload="x', "a & b", "'"])
def test_what_looks_like_markup_comes_back_as_it_was(nasty):
    tree = ElementTree.fromstring(element("p", nasty, title=nasty))

    assert (tree.text, tree.get("title"), list(tree)) == (nasty, nasty, [])


def test_characters_that_no_document_may_hold_are_replaced():
    assert text("a\x00b\ud800c\x1bd") == "a\ufffdb\ufffdc\ufffdd"


def test_lists_are_flattened_and_none_is_skipped():
    assert element("ul", [element("li", "a"), None, ["b"]]) == "<ul><li>a</li>b</ul>"


def test_attributes_that_are_none_are_left_out():
    assert element("p", id=None, stroke_width=2.0) == '<p stroke-width="2"></p>'


def test_text_joined_to_markup_is_escaped():
    assert element("b") + "<i>" == "<b></b>&lt;i&gt;"
