import numba
import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias.rerank.sparse_ranker import SparseRanker

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
    ranker = SparseRanker.from_label_rows(weights, biases, N_DENSE)
    return sparse.astype(np.float32), dense, ranker, candidates


def scores(sparse, dense, ranker, candidates):
    return ranker.score(sparse, dense, candidates)


def test_many_points_on_threads_score_as_each_does_alone(problem):
    sparse, dense, ranker, candidates = problem

    together = scores(sparse, dense, ranker, candidates)

    for i in range(0, N_POINTS, 37):
        one = slice(i, i + 1)
        alone = scores(sparse[one], dense[one], ranker, candidates[one])
        np.testing.assert_array_equal(alone, together[one])


def test_the_number_of_threads_changes_no_margin(problem):
    before = numba.get_num_threads()
    actual = []
    for n_threads in (1, numba.config.NUMBA_NUM_THREADS):
        numba.set_num_threads(n_threads)
        actual.append(scores(*problem))
    numba.set_num_threads(before)

    np.testing.assert_array_equal(actual[0], actual[1])


def test_columns_need_not_be_in_order(problem):
    sparse, dense, ranker, candidates = problem
    backwards = sparse[:, ::-1][:, ::-1].tocsr()
    for row in range(N_POINTS):
        span = slice(sparse.indptr[row], sparse.indptr[row + 1])
        backwards.indices[span] = sparse.indices[span][::-1]
        backwards.data[span] = sparse.data[span][::-1]
    backwards.has_sorted_indices = False

    actual = scores(backwards, dense, ranker, candidates)

    np.testing.assert_array_equal(actual, scores(sparse, dense, ranker, candidates))


def test_no_points_have_no_margins(problem):
    sparse, dense, ranker, candidates = problem

    actual = scores(sparse[:0], dense[:0], ranker, candidates[:0])

    assert actual.shape == (0, 5)
