"""Plots are whole SVG documents whose marks stand where the values say."""

from xml.etree import ElementTree

import numpy as np
import pytest

from elias.report.plots import (
    HEIGHT,
    WIDTH,
    Axis,
    Dots,
    Line,
    Words,
    bar_plot,
    binned_plot,
    box_plot,
    histogram,
    line_plot,
    scatter_plot,
    standalone,
)

SVG = "{http://www.w3.org/2000/svg}"
WORDS = Words(title="A <title>", description="What there is & was to see")
X, Y = Axis(label="across"), Axis(label="up")
DECILES = [str(i) for i in range(1, 11)]
FIVE = np.tile([0.1, 0.2, 0.4, 0.6, 0.9], (10, 1))


def tree_of(svg):
    return ElementTree.fromstring(svg)


PLOTS = {
    "lines": line_plot([Line(name="a", xs=[1, 2], ys=[3, 4], band=([2, 3], [4, 5]))], X, Y, WORDS),
    "a point": line_plot([Line(name="a", xs=[1], ys=[3])], X, Y, WORDS, rules={1.0: "begin"}),
    "bars": bar_plot(["x", "y"], {"a": [1, np.nan], "b": [2, 0]}, X, Y, WORDS),
    "boxes": box_plot(DECILES, {"a": FIVE, "b": np.full((10, 5), np.nan)}, X, Y, WORDS),
    "histogram": histogram([1, 2, 2, 3], [0, 2, 4], X, Y, WORDS),
    "dots": scatter_plot([Dots(name="a", points=[[1, 1]]), Dots(name="b", points=[])], WORDS),
}
EVERY = pytest.mark.parametrize("svg", PLOTS.values(), ids=PLOTS.keys())


@EVERY
def test_a_plot_is_read_aloud_by_its_title_and_description(svg):
    tree = tree_of(svg)

    title, description = tree[0], tree[1]
    assert (title.tag, title.text) == (f"{SVG}title", WORDS.title)
    assert (description.tag, description.text) == (f"{SVG}desc", WORDS.description)
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
def test_a_plot_stands_alone_as_a_file(svg):
    tree = tree_of(standalone(svg))

    assert tree[0].tag == f"{SVG}style"
    assert "prefers-color-scheme: dark" in tree[0].text


def bars_of(svg):
    return [
        mark for mark in tree_of(svg).iter(f"{SVG}rect") if mark.find(f"{SVG}title") is not None
    ]


def test_bars_are_as_high_as_their_values():
    heights = [
        float(bar.get("height")) for bar in bars_of(bar_plot("ab", {"x": [1, 3]}, X, Y, WORDS))
    ]

    assert heights[1] == pytest.approx(3 * heights[0], rel=1e-3)


def test_a_histogram_counts_what_lies_between_its_edges():
    bars = bars_of(histogram([0.5, 1.5, 1.6, 3.9], [0, 1, 2, 4], X, Y, WORDS))

    told = [bar.find(f"{SVG}title").text for bar in bars]
    assert told == ["0 to 1: 1", "1 to 2: 2", "2 to 4: 1"]


def test_bins_that_are_counted_already_look_the_same():
    counted = histogram([0.5, 1.5, 1.6, 3.9], [0, 1, 2, 4], X, Y, WORDS)

    assert binned_plot([1, 2, 1], [0, 1, 2, 4], X, Y, WORDS) == counted


def test_series_have_a_legend_and_a_single_one_has_none():
    one = [Line(name="first", xs=[1, 2], ys=[1, 2])]
    two = [*one, Line(name="second <b>", xs=[1, 2], ys=[2, 1])]

    texts = [
        [t.text for t in tree_of(line_plot(lines, X, Y, WORDS)).iter(f"{SVG}text")]
        for lines in (one, two)
    ]

    assert "first" not in texts[0]
    assert {"first", "second <b>"} <= set(texts[1])


def test_lines_are_told_apart_without_colours():
    lines = [Line(name=str(i), xs=range(40), ys=range(40)) for i in range(4)]

    paths = list(tree_of(line_plot(lines, X, Y, WORDS)).iter(f"{SVG}path"))
    dashes = {path.get("stroke-dasharray") for path in paths if path.get("stroke")}
    assert len(dashes) == 4


def test_a_line_of_many_points_has_no_marks():
    few, many = (
        line_plot([Line(name="a", xs=range(n), ys=range(n))], X, Y, WORDS) for n in (5, 500)
    )

    assert len(list(tree_of(few).iter(f"{SVG}circle"))) == 5
    assert len(list(tree_of(many).iter(f"{SVG}circle"))) == 0


def test_points_that_coincide_can_be_drawn():
    svg = scatter_plot([Dots(name="a", points=np.zeros((3, 2)))], WORDS)

    assert len(list(tree_of(svg).iter(f"{SVG}circle"))) == 3


def test_long_names_in_a_legend_go_to_another_line():
    lines = [Line(name=f"a name that takes some room {i}", xs=[1], ys=[1]) for i in range(5)]

    texts = [
        t for t in tree_of(line_plot(lines, X, Y, WORDS)).iter(f"{SVG}text") if "room" in t.text
    ]

    assert len({t.get("y") for t in texts}) == 5
    assert all(float(t.get("x")) < WIDTH for t in texts)
