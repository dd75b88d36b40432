"""The metrics agree with the obvious program: Python loops over points and ranks."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import sparse

from elias.metrics import recall_by_decile, score
from elias.predictions import Predictions

N_LABELS = 12
NAMES = [f"{kind}@{k}" for kind in ("P", "nDCG", "PSP", "PSnDCG", "R") for k in (1, 2, 5, 20)]
LABELS = st.lists(st.integers(0, N_LABELS - 1), unique=True, max_size=8)
POINTS = st.lists(st.tuples(LABELS, LABELS), min_size=1, max_size=6)  # ranked, true
WEIGHTS = st.lists(st.floats(1.0, 20.0), min_size=N_LABELS, max_size=N_LABELS)


def make(points):
    width = max(len(ranked) for ranked, _ in points)
    ids = [ranked + [N_LABELS] * (width - len(ranked)) for ranked, _ in points]
    scores = np.tile(np.linspace(1, 0.5, width), (len(points), 1))
    shape = (len(points), width)
    predictions = Predictions.from_scores(
        np.array(ids).reshape(shape), scores.reshape(shape), N_LABELS
    )
    truth = np.zeros((len(points), N_LABELS), dtype=np.float32)
    for row, (_, true) in enumerate(points):
        truth[row, true] = 1
    return predictions, sparse.csr_matrix(truth)


def slow_metric(kind, k, points, weights):
    numerator = denominator = 0.0
    for ranked, true in points:
        hits = [(rank, label) for rank, label in enumerate(ranked[:k], start=1) if label in true]
        best = sorted((weights[label] for label in true), reverse=True)[:k]
        ideal = sum(1 / math.log2(rank + 1) for rank in range(1, min(k, len(true)) + 1))
        if kind == "P":
            numerator += len(hits) / k
            denominator += 1
        elif kind == "nDCG":
            numerator += sum(1 / math.log2(rank + 1) for rank, _ in hits) / ideal if ideal else 0
            denominator += 1
        elif kind == "PSP":
            numerator += sum(weights[label] for _, label in hits)
            denominator += sum(best)
        elif kind == "PSnDCG" and true:
            numerator += sum(weights[label] / math.log2(rank + 1) for rank, label in hits) / ideal
            denominator += sum(w / math.log2(r + 1) for r, w in enumerate(best, start=1)) / ideal
        elif kind == "R" and true:
            numerator += len(hits) / len(true)
            denominator += 1
    return 100 * numerator / denominator if denominator else 0.0


def slow(points, weights, empty):
    if empty == "drop":
        points = [(ranked, true) for ranked, true in points if true]
    parsed = {name: name.split("@") for name in NAMES}
    return {name: slow_metric(kind, int(k), points, weights) for name, (kind, k) in parsed.items()}


# one row of each kind: a full one, a short one, one without predictions, one without truth
EVERY_KIND = [([3, 0, 7], [0, 7, 9]), ([5], [5, 2]), ([], [1]), ([4, 6], [])]
RISING = [float(weight) for weight in range(1, N_LABELS + 1)]


@example(points=EVERY_KIND, weights=RISING, empty="zero")
@example(points=EVERY_KIND, weights=RISING, empty="drop")
@given(points=POINTS, weights=WEIGHTS, empty=st.sampled_from(["zero", "drop"]))
def test_fast_metrics_equal_slow_loops(points, weights, empty):
    predictions, truth = make(points)

    values = score(predictions, truth, np.array(weights), NAMES, empty=empty)

    assert values == pytest.approx(slow(points, weights, empty), abs=1e-9)


@given(points=POINTS, weights=WEIGHTS)
def test_every_metric_is_between_zero_and_a_hundred(points, weights):
    predictions, truth = make(points)

    values = score(predictions, truth, np.array(weights), NAMES)

    assert all(0 <= value <= 100 + 1e-9 for value in values.values())


@given(truths=st.lists(LABELS.filter(bool), min_size=1, max_size=5), weights=WEIGHTS)
def test_predicting_the_truth_by_falling_weight_is_perfect(truths, weights):
    best_first = [sorted(true, key=lambda label: -weights[label]) for true in truths]
    predictions, truth = make(list(zip(best_first, truths, strict=True)))
    names = [name for name in NAMES if name.split("@")[0] in ("nDCG", "PSP", "PSnDCG")]

    values = score(predictions, truth, np.array(weights), names)

    assert list(values.values()) == pytest.approx([100.0] * len(names))


@given(points=POINTS, weights=WEIGHTS, seed=st.integers(0, 2**31))
def test_renaming_the_labels_changes_no_metric(points, weights, seed):
    new = np.random.default_rng(seed).permutation(N_LABELS)
    renamed = [([int(new[i]) for i in a], [int(new[i]) for i in b]) for a, b in points]
    new_weights = np.empty(N_LABELS)
    new_weights[new] = weights

    before = score(*make(points), np.array(weights), NAMES)
    after = score(*make(renamed), new_weights, NAMES)

    assert after == pytest.approx(before, abs=1e-9)


@given(points=POINTS, frequencies=st.lists(st.integers(0, 50), min_size=12, max_size=12))
def test_the_deciles_contributions_sum_to_recall(points, frequencies):
    predictions, truth = make(points)

    contribution = recall_by_decile(predictions, truth, np.array(frequencies), k=5)

    assert contribution.sum() == pytest.approx(score(predictions, truth, None, ["R@5"])["R@5"])
