"""The metrics agree with the obvious program: Python loops over points and ranks."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import sparse

from elias.metrics import (
    hierarchy_metrics,
    metrics_by_labels,
    metrics_by_points,
    recall_by_decile,
    score,
)
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


EDGES = st.sets(st.tuples(st.integers(0, N_LABELS - 1), st.integers(0, N_LABELS - 1)), max_size=14)


def slow_hierarchy(points, edges, k):
    def extended(labels):
        reached, waiting = set(labels), list(labels)
        while waiting:
            label = waiting.pop()
            for wider in (j for i, j in edges if i == label and j not in reached):
                reached.add(wider)
                waiting.append(wider)
        return reached

    shared = n_predicted = n_true = wrong = near = 0
    for ranked, true in points:
        predicted, relevant = extended(ranked[:k]), extended(true)
        shared += len(predicted & relevant)
        n_predicted += len(predicted)
        n_true += len(relevant)
        for label in set(ranked[:k]) - set(true):
            wrong += 1
            near += any((label, other) in edges or (other, label) in edges for other in true)
    values = {
        "hP": shared / max(n_predicted, 1),
        "hR": shared / max(n_true, 1),
        "hF": 2 * shared / max(n_predicted + n_true, 1),
        "near": near / max(wrong, 1),
    }
    return {f"{kind}@{k}": 100 * value for kind, value in values.items()}


@example(points=EVERY_KIND, edges={(0, 1), (1, 2), (2, 0), (7, 1)}, k=2)  # with a cycle
@given(points=POINTS, edges=EDGES, k=st.integers(1, 4))
def test_hierarchy_metrics_equal_sets_of_ancestors(points, edges, k):
    edges = {(i, j) for i, j in edges if i != j}
    broader = np.zeros((N_LABELS, N_LABELS))
    for i, j in edges:
        broader[i, j] = 1

    values = hierarchy_metrics(*make(points), sparse.csr_matrix(broader), ks=[k])

    assert values == pytest.approx(slow_hierarchy(points, edges, k), abs=1e-9)


@given(points=POINTS, data=st.data())
def test_groups_of_points_are_measured_like_their_points_alone(points, data):
    names = data.draw(st.lists(st.sampled_from("abc"), min_size=len(points), max_size=len(points)))
    predictions, truth = make(points)

    rows = metrics_by_points(predictions, truth, names, ks=(1, 3), assigned=predictions)

    assert {row["group"]: row["points"] for row in rows} == {x: names.count(x) for x in set(names)}
    for row in rows:
        own = [point for point, name in zip(points, names, strict=True) if name == row["group"]]
        hits = sum(len(set(ranked) & set(true)) for ranked, true in own)
        total = sum(len(ranked) + len(true) for ranked, true in own)
        assert row["P@3"] == pytest.approx(slow_metric("P", 3, own, RISING))
        assert row["F1"] == pytest.approx(200 * hits / max(total, 1))


@given(points=POINTS, groups=st.dictionaries(st.sampled_from("abc"), LABELS.filter(bool)))
def test_groups_of_labels_count_only_their_labels(points, groups):
    predictions, truth = make(points)

    rows = {
        row["group"]: row for row in metrics_by_labels(predictions, truth, groups, 2, predictions)
    }

    for name, labels in groups.items():
        own = [
            ([x for x in ranked if x in labels], set(true) & set(labels)) for ranked, true in points
        ]
        n_true = sum(len(true) for _, true in own)
        assert (name in rows) == (n_true > 0)
        if n_true:
            best = sum(len(set(ranked[:2]) & set(true) & set(labels)) for ranked, true in points)
            right = sum(len(set(ranked) & true) for ranked, true in own)
            n_assigned = sum(len(ranked) for ranked, _ in own)
            assert rows[name]["pairs"] == n_true
            assert rows[name]["R@2"] == pytest.approx(100 * best / n_true)
            assert rows[name]["F1"] == pytest.approx(200 * right / (n_assigned + n_true))
