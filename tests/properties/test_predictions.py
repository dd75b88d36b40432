"""Predictions agree with plain lists of (label, score) pairs, point by point."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elias.predictions import Predictions

N_LABELS = 6
SCORES = st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0])  # few, so that ties are common
POINT = st.dictionaries(st.integers(0, N_LABELS - 1), SCORES)
POINTS = st.lists(POINT, min_size=1, max_size=5)


def make(points):
    width = max(map(len, points))
    ids = np.full((len(points), width), N_LABELS)
    scores = np.zeros((len(points), width))
    for row, point in enumerate(points):
        ids[row, : len(point)] = list(point)
        scores[row, : len(point)] = list(point.values())
    return Predictions.from_scores(ids, scores, N_LABELS)


def ranked(point):
    return sorted(point.items(), key=lambda pair: (-pair[1], pair[0]))


def as_lists(predictions):
    return [list(zip(row.ids.tolist(), row.scores.tolist(), strict=True)) for row in predictions]


@given(POINTS)
def test_rows_are_ranked_by_score_then_id(points):
    assert as_lists(make(points)) == [ranked(point) for point in points]


@given(POINTS)
def test_csr_keeps_everything(points):
    predictions = make(points)

    again = Predictions.from_csr(predictions.to_csr())

    assert as_lists(again) == as_lists(predictions)


@given(POINTS, st.integers(0, 7))
def test_top_is_a_prefix(points, k):
    assert as_lists(make(points).top(k)) == [ranked(point)[:k] for point in points]


@given(POINTS, SCORES)
def test_a_threshold_is_a_filter(points, lowest):
    expected = [[pair for pair in ranked(point) if pair[1] >= lowest] for point in points]

    assert as_lists(make(points).threshold(lowest)) == expected
    thresholds = {0: 0.9, 3: -1.0}
    by_label = [
        [(label, score) for label, score in row if score >= thresholds.get(label, lowest)]
        for row in as_lists(make(points))
    ]
    assert as_lists(make(points).threshold(lowest, by_label=thresholds)) == by_label


@given(POINTS, st.data())
def test_dropping_pairs_is_a_filter(points, data):
    pair = st.tuples(st.integers(0, len(points) - 1), st.integers(0, N_LABELS - 1))
    pairs = data.draw(st.lists(pair))
    expected = [
        [actual for actual in ranked(point) if (row, actual[0]) not in pairs]
        for row, point in enumerate(points)
    ]

    dropped = make(points).drop(np.array(pairs, dtype=np.int64).reshape(-1, 2))

    assert as_lists(dropped) == expected


@given(st.lists(st.tuples(POINT, POINT), min_size=1, max_size=4))
def test_merging_is_a_mean_over_dictionaries(pairs):
    expected = [
        ranked({i: (a.get(i, 0.0) + b.get(i, 0.0)) / 2 for i in {*a, *b}}) for a, b in pairs
    ]

    merged = Predictions.merge([make([a for a, _ in pairs]), make([b for _, b in pairs])])

    assert as_lists(merged) == expected


@given(POINTS)
def test_merging_with_itself_changes_nothing(points):
    predictions = make(points)

    assert as_lists(Predictions.merge([predictions] * 3, how="max")) == as_lists(predictions)


@given(POINTS, st.dictionaries(st.integers(0, N_LABELS - 1), st.sampled_from([0.5, 2.0])))
def test_the_best_label_by_weight_is_that_of_a_loop(points, weights):
    best = [
        max(ranked(point), key=lambda pair: pair[1] * weights.get(pair[0], 1), default=None)
        for point in points
    ]

    assert as_lists(make(points).best_by(weights)) == [[pair] if pair else [] for pair in best]
