import numba
import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias.rerank.sparse_ranker import as_classifiers, candidate_margins

N_POINTS, N_WORDS, N_DENSE, N_LABELS = 700, 3000, 4, 9


@pytest.fixture(scope="module")
def problem():
    """Many points of few features, and labels of few and of very many weights."""
    rng = np.random.default_rng(0)
    sparse = csr_matrix(rng.random((N_POINTS, N_WORDS)) * (rng.random((N_POINTS, N_WORDS)) < 0.002))
    dense = rng.standard_normal((N_POINTS, N_DENSE)).astype(np.float32)
    density = np.linspace(0.001, 1, N_LABELS)[:, None]
    shape = N_LABELS, N_WORDS + N_DENSE
    weights = csr_matrix(rng.standard_normal(shape) * (rng.random(shape) < density), dtype="f4")
    biases = rng.standard_normal(N_LABELS).astype(np.float32)
    candidates = rng.integers(0, N_LABELS + 1, (N_POINTS, 5))
    return sparse.astype(np.float32), dense, as_classifiers(weights, biases), candidates


def test_many_points_on_threads_score_as_each_does_alone(problem):
    sparse, dense, classifiers, candidates = problem

    together = candidate_margins(sparse, dense, classifiers, candidates)

    for i in range(0, N_POINTS, 37):
        one = slice(i, i + 1)
        alone = candidate_margins(sparse[one], dense[one], classifiers, candidates[one])
        np.testing.assert_array_equal(alone, together[one])


def test_the_number_of_threads_changes_no_margin(problem):
    before = numba.get_num_threads()
    found = []
    for n_threads in (1, numba.config.NUMBA_NUM_THREADS):
        numba.set_num_threads(n_threads)
        found.append(candidate_margins(*problem))
    numba.set_num_threads(before)

    np.testing.assert_array_equal(found[0], found[1])


def test_columns_need_not_be_in_order(problem):
    sparse, dense, classifiers, candidates = problem
    backwards = sparse[:, ::-1][:, ::-1].tocsr()
    for row in range(N_POINTS):
        span = slice(sparse.indptr[row], sparse.indptr[row + 1])
        backwards.indices[span] = sparse.indices[span][::-1]
        backwards.data[span] = sparse.data[span][::-1]
    backwards.has_sorted_indices = False

    found = candidate_margins(backwards, dense, classifiers, candidates)

    np.testing.assert_array_equal(found, candidate_margins(sparse, dense, classifiers, candidates))


def test_no_points_have_no_margins(problem):
    sparse, dense, classifiers, candidates = problem

    found = candidate_margins(sparse[:0], dense[:0], classifiers, candidates[:0])

    assert found.shape == (0, 5)
