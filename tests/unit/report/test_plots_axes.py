from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elias.report.plots import (
    Axis,
    Scale,
    _category_marks,
    _number_marks,
    log_ticks,
    nice_range,
    text_width,
    tick_labels,
    ticks,
)

RANGES = st.tuples(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6)).map(lambda p: (p[0], p[0] + p[1]))


@given(bounds=RANGES, most=st.integers(2, 12))
def test_ticks_lie_within_the_range_evenly_and_are_few(bounds, most):
    low, high = bounds

    found = ticks(low, high, most)

    slack = 1e-6 * max(abs(low), abs(high), 1)
    steps = [b - a for a, b in pairwise(found)]
    assert len(found) <= most
    assert all(low - slack <= value <= high + slack for value in found)
    assert steps == pytest.approx(steps[:1] * len(steps), abs=slack)


@given(bounds=RANGES)
def test_a_chosen_range_holds_all_values_and_ends_at_ticks(bounds):
    low, high = nice_range(Axis(label=""), bounds, most=6)

    found = ticks(low, high, 6)
    assert low <= bounds[0] + 1e-6
    assert high >= bounds[1] - 1e-6
    assert (found[0], found[-1]) == pytest.approx((low, high), rel=1e-6, abs=1e-6)


def test_a_given_range_is_kept():
    assert nice_range(Axis(label="", low=0.0, high=1.0), [0.3, 0.4], most=6) == (0.0, 1.0)


def test_a_range_of_one_value_is_widened():
    low, high = nice_range(Axis(label=""), [5.0, 5.0], most=6)

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
def test_ticks_of_a_logarithm_are_powers_or_between(bounds, most, expected):
    assert log_ticks(*bounds, most) == expected


def test_tick_labels_have_the_decimals_they_need():
    assert tick_labels([0, 0.05, 0.1]) == ["0", "0.05", "0.10"]
    assert tick_labels([-2, 0, 20000]) == ["-2", "0", "20,000"]


def overlaps(marks):
    edges = [(place - text_width(n) / 2, place + text_width(n) / 2) for place, n in marks]
    return any(right[0] < left[1] for left, right in pairwise(edges))


@given(high=st.floats(1e-3, 1e9), log=st.booleans())
def test_tick_labels_never_overlap(high, log):
    scale = Scale(high / 1000 if log else 0.0, high, 40, 440, log)

    assert not overlaps(_number_marks(scale))


@given(names=st.lists(st.text("abcdefgh ", min_size=1, max_size=30), min_size=1, max_size=60))
def test_names_of_categories_never_overlap(names):
    marks = _category_marks(Scale(0, len(names), 40, 440), names)

    assert marks
    assert not overlaps(marks)


def test_a_logarithmic_scale_gives_equal_room_to_equal_factors():
    scale = Scale(1, 100, 0, 200, log=True)

    assert [scale(v) for v in (1, 10, 100)] == pytest.approx([0, 100, 200])
