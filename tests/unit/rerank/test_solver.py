"""Masked classifiers beside scikit-learn's, and the sub-problems that have little to learn from."""

import numba
import numpy as np
import pytest
from scipy.sparse import csr_matrix, hstack
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC

from elias.rerank import solver
from elias.rerank.solver import fit_label_classifiers, group_pairs

N_POINTS, N_WORDS, N_DENSE, N_LABELS = 300, 80, 12, 15


@pytest.fixture(scope="module")
def problem():
    """Points whose labels follow from their features, but for some noise."""
    rng = np.random.default_rng(3)
    sparse = rng.random((N_POINTS, N_WORDS)) * (rng.random((N_POINTS, N_WORDS)) < 0.1)
    dense = rng.standard_normal((N_POINTS, N_DENSE)).astype(np.float32) / 3
    truth = rng.standard_normal((N_WORDS + N_DENSE, N_LABELS))
    wanted = np.hstack([sparse, dense]) @ truth + 0.5 * rng.standard_normal((N_POINTS, N_LABELS))
    candidates = np.argsort(-wanted, axis=1)[:, 2:9]  # some relevant labels are missing
    labels = csr_matrix(wanted > 1.5, dtype=np.float32)
    return csr_matrix(sparse, dtype=np.float32), dense, candidates, labels


def primal(weight, bias, points, signs, cost):
    slack = np.maximum(0, 1 - signs * (points @ weight + bias))
    return 0.5 * (weight @ weight + bias * bias) + cost * (slack**2).sum()


def by_label(problem):
    """Yield (label, rows, signs) of each sub-problem."""
    starts, rows, signs = group_pairs(*problem[2:])
    for label in range(N_LABELS):
        span = slice(starts[label], starts[label + 1])
        yield label, rows[span], signs[span].astype(np.float64)


@pytest.mark.parametrize("cost", [0.3, 1.0])
def test_each_classifier_is_that_of_scikit_learn_on_the_same_rows(problem, cost):
    sparse, dense, candidates, labels = problem
    points = hstack([sparse, csr_matrix(dense)], format="csr", dtype=np.float64)

    weights, biases, _ = fit_label_classifiers(
        sparse,
        dense,
        group_pairs(candidates, labels),
        cost=cost,
        tolerance=1e-6,
        max_iterations=1000,
    )

    for label, rows, signs in by_label(problem):
        svm = LinearSVC(C=cost, tol=1e-10, max_iter=1_000_000, dual=True, random_state=0)
        svm.fit(points[rows], signs)
        mine = weights[label].toarray().ravel().astype(np.float64)
        np.testing.assert_allclose(mine, svm.coef_.ravel(), atol=1e-5)
        np.testing.assert_allclose(biases[label], svm.intercept_[0], atol=1e-5)
        theirs = primal(svm.coef_.ravel(), svm.intercept_[0], points[rows], signs, cost)
        assert primal(mine, biases[label], points[rows], signs, cost) <= theirs * (1 + 1e-6)


def test_classifiers_that_go_on_stay_close_to_the_earlier_ones(problem):
    sparse, dense, candidates, labels = problem
    points = hstack([sparse, csr_matrix(dense)], format="csr", dtype=np.float64)
    rng = np.random.default_rng(1)
    first = rng.standard_normal((2, N_WORDS + N_DENSE)) * (rng.random(N_WORDS + N_DENSE) < 0.5)
    start = csr_matrix(first, dtype=np.float32), np.float32([0.5, -0.5])
    groups = group_pairs(candidates, labels)
    exact = {"tolerance": 1e-6, "max_iterations": 1000}

    weights, biases, _ = fit_label_classifiers(sparse, dense, groups, start=start, **exact)
    plain, _, _ = fit_label_classifiers(sparse, dense, groups, **exact)

    for label, rows, signs in by_label(problem):
        mine = weights[label].toarray().ravel().astype(np.float64)
        if label >= 2:
            np.testing.assert_array_equal(mine, plain[label].toarray().ravel())
            continue
        # at the minimum, the gradient of ½‖w − w₀‖² + Σ max(0, 1 − s)² is 0
        slack = np.maximum(0, 1 - signs * (points[rows] @ mine + biases[label]))
        gradient = mine - start[0][label].toarray().ravel() - 2 * points[rows].T @ (signs * slack)
        np.testing.assert_allclose(gradient, 0, atol=1e-4)


def test_a_label_without_pairs_keeps_its_earlier_classifier():
    start = csr_matrix(np.float32([[0, 0.5, 0, -2], [0, 0, 3, 0]])), np.float32([0.25, 1])
    groups = np.zeros(3, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int8)

    points = csr_matrix(np.eye(2, 3, dtype=np.float32)), np.ones((2, 1), np.float32)
    weights, biases, _ = fit_label_classifiers(*points, groups, start=start, prune=0.1)

    assert weights.toarray().tolist() == start[0].toarray().tolist()
    assert biases.tolist() == [0.25, 1]


@pytest.mark.parametrize("cost", [0.3, 1.0])
def test_the_logistic_loss_is_that_of_scikit_learn_on_the_same_rows(problem, cost):
    sparse, dense, candidates, labels = problem
    points = hstack([sparse, csr_matrix(dense)], format="csr", dtype=np.float64)

    weights, biases, _ = fit_label_classifiers(
        sparse,
        dense,
        group_pairs(candidates, labels),
        loss="logistic",
        cost=cost,
        tolerance=1e-6,
        max_iterations=1000,
    )

    for label, rows, signs in by_label(problem):
        theirs = LogisticRegression(C=cost, tol=1e-10, solver="liblinear", max_iter=1_000_000)
        theirs.fit(points[rows], signs)
        mine = weights[label].toarray().ravel().astype(np.float64)
        np.testing.assert_allclose(mine, theirs.coef_.ravel(), atol=1e-5)
        np.testing.assert_allclose(biases[label], theirs.intercept_[0], atol=1e-5)


@pytest.mark.parametrize("loss", ["squared-hinge", "logistic"])
def test_a_fit_with_more_points_starts_from_an_earlier_solution(problem, loss):
    sparse, dense, candidates, labels = problem
    n_before = N_POINTS - 30
    groups, before = (
        group_pairs(candidates, labels),
        group_pairs(candidates[:n_before], labels[:n_before]),
    )
    exact = {"loss": loss, "tolerance": 1e-6, "max_iterations": 1000}

    *_, solution = fit_label_classifiers(sparse[:n_before], dense[:n_before], before, **exact)
    weights, biases, known = fit_label_classifiers(
        sparse, dense, groups, solution=solution, **exact
    )
    from_zero, same_biases, _ = fit_label_classifiers(sparse, dense, groups, **exact)
    at_once, _, _ = fit_label_classifiers(
        sparse, dense, groups, loss=loss, solution=known, max_iterations=1
    )

    assert (np.diff(before[0]) < np.diff(groups[0])).all()
    np.testing.assert_allclose(weights.toarray(), from_zero.toarray(), atol=1e-5)
    np.testing.assert_allclose(biases, same_biases, atol=1e-5)
    np.testing.assert_allclose(at_once.toarray(), from_zero.toarray(), atol=1e-5)


def test_the_usual_tolerance_ends_near_the_minimum(problem):
    sparse, dense, candidates, labels = problem
    points = hstack([sparse, csr_matrix(dense)], format="csr", dtype=np.float64)
    groups = group_pairs(candidates, labels)

    rough, rough_biases, _ = fit_label_classifiers(sparse, dense, groups)
    exact, biases, _ = fit_label_classifiers(
        sparse, dense, groups, tolerance=1e-6, max_iterations=1000
    )

    for label, rows, signs in by_label(problem):
        least = primal(exact[label].toarray()[0], biases[label], points[rows], signs, 1.0)
        reached = primal(rough[label].toarray()[0], rough_biases[label], points[rows], signs, 1.0)
        assert least * (1 - 1e-6) <= reached <= least * 1.02


def test_the_number_of_threads_changes_no_bit(problem, monkeypatch):
    sparse, dense, candidates, labels = problem
    groups = group_pairs(candidates, labels)
    monkeypatch.setattr(solver, "_PAIRS_PER_CHUNK", 50)  # so that threads have something to share
    assert len(list(solver._chunks(groups[0]))) > 3
    actual = []

    before = numba.get_num_threads()
    for n_threads in (1, numba.config.NUMBA_NUM_THREADS):
        numba.set_num_threads(n_threads)
        actual.append(fit_label_classifiers(sparse, dense, groups, prune=0.1)[:2])
    numba.set_num_threads(before)

    (one, one_biases), (other, other_biases) = actual
    assert (one != other).nnz == 0
    np.testing.assert_array_equal(one_biases, other_biases)


def test_a_label_s_classifier_does_not_depend_on_the_other_labels(problem):
    sparse, dense, candidates, labels = problem
    starts, rows, signs = group_pairs(candidates, labels)
    remaining = 3  # the rows of later labels go
    alone = (
        np.minimum(starts, starts[remaining]),
        rows[: starts[remaining]],
        signs[: starts[remaining]],
    )

    weights, _, _ = fit_label_classifiers(sparse, dense, (starts, rows, signs))
    few_weights, _, _ = fit_label_classifiers(sparse, dense, alone)

    assert (weights[:remaining] != few_weights[:remaining]).nnz == 0
    assert few_weights[remaining:].nnz == 0


def test_another_seed_visits_points_in_another_order(problem):
    sparse, dense, candidates, labels = problem
    groups = group_pairs(candidates, labels)

    one, _, _ = fit_label_classifiers(sparse, dense, groups, seed=0)
    other, _, _ = fit_label_classifiers(sparse, dense, groups, seed=1)

    assert (one != other).nnz > 0
    np.testing.assert_allclose(one.toarray(), other.toarray(), atol=0.2)


def test_one_pass_stops_after_one_pass(problem):
    sparse, dense, candidates, labels = problem
    groups = group_pairs(candidates, labels)

    one, _, _ = fit_label_classifiers(sparse, dense, groups, tolerance=1e-9, max_iterations=1)
    many, _, _ = fit_label_classifiers(sparse, dense, groups, tolerance=1e-9)

    assert np.abs(one - many).max() > 0.05


def fit_one(signs):
    """Fit a label on as many points of one feature each as there are signs."""
    sparse = csr_matrix(np.eye(max(1, len(signs)), dtype=np.float32))
    labels = csr_matrix(np.array(signs or [-1])[:, None] > 0, dtype=np.float32)
    candidates = np.zeros((max(1, len(signs)), 1), dtype=np.int64) + (0 if signs else 1)
    weights, biases, _ = fit_label_classifiers(
        sparse,
        np.zeros((sparse.shape[0], 0), dtype=np.float32),
        group_pairs(candidates, labels),
        tolerance=1e-9,
        max_iterations=1000,
    )
    return weights.toarray()[0], biases[0]


def test_a_label_that_no_point_has_learns_nothing():
    weight, bias = fit_one([])

    assert not weight.any()
    assert bias == 0


@pytest.mark.parametrize("sign", [1, -1])
def test_a_label_with_points_of_one_class_predicts_that_class(sign):
    weight, bias = fit_one([sign] * 4)

    # α = 1/(Q + ½) with Q = 1 on the diagonal and 1 for the bias everywhere: α(1.5 + 4) = 1
    np.testing.assert_allclose(weight, sign / 5.5, rtol=1e-5)
    np.testing.assert_allclose(bias, 4 * sign / 5.5, rtol=1e-5)


def test_a_positive_that_is_no_candidate_is_learned_from():
    sparse = csr_matrix(np.eye(3, dtype=np.float32))
    labels = csr_matrix(np.array([[1], [0], [0]], dtype=np.float32))
    padding = np.ones((1, 1), dtype=np.int64)
    candidates = np.concatenate([padding, 0 * padding, padding])

    weights, _, _ = fit_label_classifiers(
        sparse,
        np.zeros((3, 0), dtype=np.float32),
        group_pairs(candidates, labels),
    )

    positive, negative, untouched = weights.toarray()[0]
    assert positive > 0 > negative
    assert untouched == 0
