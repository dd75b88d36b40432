"""The compiled solver finds the minimum of the dense problem, and scores are dense products."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix, hstack, random_array

from elias.rerank.solver import fit_label_classifiers, group_pairs
from elias.rerank.sparse_ranker import SparseRanker, unit_embedding

EXACT = {"tolerance": 1e-6, "max_iterations": 1000}
SIZES = {
    "n_points": st.integers(1, 12),
    "n_features": st.integers(1, 9),
    "n_dense": st.integers(0, 5),
    "n_labels": st.integers(1, 6),
    "seed": st.integers(0, 2**31),
}


def objective(weight, points, signs, cost):
    """½‖w‖² + C·Σ max(0, 1 − y·w·x)²."""
    slack = np.maximum(0, 1 - signs * (points @ weight))
    return 0.5 * weight @ weight + cost * (slack**2).sum()


def dense_minimum(points, signs, cost):
    """Newton's method on the primal, where it is a parabola: the points with slack decide."""
    weight = np.zeros(points.shape[1])
    for _ in range(200):
        slack = 1 - signs * (points @ weight)
        inside = points[slack > 0]
        gradient = weight - 2 * cost * (signs * np.maximum(slack, 0)) @ points
        if np.abs(gradient).max() < 1e-12:
            break
        step = np.linalg.solve(np.eye(len(weight)) + 2 * cost * inside.T @ inside, gradient)
        rate = 1.0
        while objective(weight - rate * step, points, signs, cost) > objective(
            weight, points, signs, cost
        ):
            rate /= 2
            if rate < 1e-9:
                return weight
        weight = weight - rate * step
    return weight


def logistic_minimum(points, signs, cost):
    """Newton's method on ½‖w‖² + C·Σ log(1 + exp(−y·w·x)), halving steps that overshoot."""

    def loss(weight):
        return 0.5 * weight @ weight + cost * np.logaddexp(0, -signs * (points @ weight)).sum()

    weight = np.zeros(points.shape[1])
    for _ in range(200):
        wrong = 1 / (1 + np.exp(signs * (points @ weight)))
        gradient = weight - cost * (signs * wrong) @ points
        if np.abs(gradient).max() < 1e-12:
            break
        bend = np.eye(len(weight)) + cost * (points.T * (wrong * (1 - wrong))) @ points
        step, rate = np.linalg.solve(bend, gradient), 1.0
        while rate > 1e-9 and loss(weight - rate * step) > loss(weight):
            rate /= 2
        weight = weight - rate * step
    return weight


MINIMA = {"squared-hinge": dense_minimum, "logistic": logistic_minimum}


def make_problem(n_points, n_features, n_dense, n_labels, seed):
    """Sparse and dense features, candidates with padding, and relevant labels."""
    rng = np.random.default_rng(seed)
    sparse = csr_matrix(random_array((n_points, n_features), density=0.4, rng=rng), dtype="f4")
    dense = rng.standard_normal((n_points, n_dense)).astype(np.float32)
    order = rng.permuted(np.tile(np.arange(n_labels + 2), (n_points, 1)), axis=1)
    candidates = np.minimum(order[:, : rng.integers(1, n_labels + 2)], n_labels)
    labels = csr_matrix(rng.random((n_points, n_labels)) < 0.3, dtype=np.float32)
    return sparse, dense, candidates, labels


def widened(matrix, n_more, value):
    """The matrix with more columns before its own, all of one value."""
    more = csr_matrix(np.full((matrix.shape[0], n_more), value, dtype=np.float32))
    return hstack([more, matrix], format="csr", dtype=np.float32)


def sub_problem(candidates, labels, label):
    """The rows of one label and their signs, by looking at every pair."""
    relevant = labels.toarray() > 0
    rows = [i for i in range(len(candidates)) if label in candidates[i] or relevant[i, label]]
    return rows, [1 if relevant[i, label] else -1 for i in rows]


@given(**SIZES)
def test_pairs_are_grouped_by_label_with_missing_positives_added(seed, **sizes):
    _, _, candidates, labels = make_problem(seed=seed, **sizes)

    starts, rows, signs = group_pairs(candidates, labels)

    for label in range(labels.shape[1]):
        span = slice(starts[label], starts[label + 1])
        assert (rows[span].tolist(), signs[span].tolist()) == sub_problem(candidates, labels, label)


@pytest.mark.parametrize("loss", MINIMA)
@pytest.mark.parametrize("n_more", [0, 5000], ids=["all columns walked", "columns picked"])
@given(cost=st.sampled_from([0.1, 1.0, 7.0]), **SIZES)
def test_every_classifier_is_at_the_minimum_of_its_own_rows(loss, n_more, cost, seed, **sizes):
    sparse, dense, candidates, labels = make_problem(seed=seed, **sizes)
    points = np.hstack([sparse.toarray(), dense, np.ones((len(dense), 1))]).astype(np.float64)

    weights, biases, _ = fit_label_classifiers(
        widened(sparse, n_more, 0.0),
        dense,
        group_pairs(candidates, labels),
        cost=cost,
        loss=loss,
        **EXACT,
    )

    assert weights[:, :n_more].nnz == 0
    actual = np.hstack([weights[:, n_more:].toarray(), biases[:, None]])
    for label in range(labels.shape[1]):
        rows, signs = sub_problem(candidates, labels, label)
        expected = MINIMA[loss](points[rows], np.array(signs), cost)
        np.testing.assert_allclose(actual[label], expected, atol=2e-5)


@given(prune=st.sampled_from([0.0, 0.05, 0.3]), **SIZES)
def test_pruning_drops_small_weights_and_no_other(prune, seed, **sizes):
    sparse, dense, candidates, labels = make_problem(seed=seed, **sizes)
    groups = group_pairs(candidates, labels)

    whole, biases, _ = fit_label_classifiers(sparse, dense, groups)
    pruned, same_biases, _ = fit_label_classifiers(sparse, dense, groups, prune=prune)

    expected = whole.toarray()
    expected[np.abs(expected) < np.float32(prune)] = 0
    np.testing.assert_array_equal(pruned.toarray(), expected)
    np.testing.assert_array_equal(same_biases, biases)
    assert pruned.has_canonical_format


@pytest.mark.parametrize("searching", [False, True])
@given(**SIZES)
def test_margins_of_candidates_are_those_of_the_dense_product(searching, seed, **sizes):
    sparse, dense, candidates, _ = make_problem(seed=seed, **sizes)
    rng = np.random.default_rng(seed)
    shape = sizes["n_labels"], sizes["n_features"] + sizes["n_dense"]
    weights = csr_matrix(random_array(shape, density=0.6, rng=rng), dtype=np.float32)
    if searching:  # a feature with weights of very many labels is searched for the candidates
        weights = widened(weights.T, 5000, 1.0).T.tocsr()
        candidates = candidates + 5000
    biases = rng.standard_normal(weights.shape[0]).astype(np.float32)

    ranker = SparseRanker.from_label_rows(weights, biases, dense.shape[1])
    actual = ranker.score(sparse, dense, candidates)

    points = np.hstack([sparse.toarray(), unit_embedding(dense)])
    every = points @ weights.toarray().T + biases
    every = np.hstack([every, np.full((len(every), 1), -np.inf)])
    np.testing.assert_allclose(
        actual, np.take_along_axis(every, candidates, 1), rtol=1e-4, atol=1e-5
    )
