"""Nearest neighbours found sparsely, a batch at a time, are those of one dense product."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from elias.baselines import NearestNeighbours
from elias.baselines.knn import strongest
from elias.data.corpus import Corpus, Split

N_LABELS = 7


def unit(rows):
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)


def dense_scores(points, labels, queries, k):
    """Summed cosine of the k nearest points that share a feature, in float64."""
    similarity = unit(queries.astype(float)) @ unit(points.astype(float)).T
    scores = np.zeros((len(queries), labels.shape[1]))
    for row, values in enumerate(similarity):
        ranked = sorted(np.flatnonzero(values > 0), key=lambda i: (-values[i], i))
        if len(ranked) > k:  # a choice that rounding could turn is none to compare
            assume(values[ranked[k - 1]] - values[ranked[k]] > 1e-5)
        for point in ranked[:k]:
            scores[row] += values[point] * labels[point]
    return scores


def corpus_of(points, labels):
    train = Split(labels=csr_matrix(labels.astype(np.float32)), features=csr_matrix(points))
    return Corpus(train=train, label_names=[f"label {i}" for i in range(labels.shape[1])])


@given(
    n_points=st.integers(1, 12),
    n_queries=st.integers(1, 8),
    k=st.integers(1, 6),
    entries=st.sampled_from([1, 5, 2**23]),
    seed=st.integers(0, 2**31),
)
def test_labels_score_as_in_a_dense_product(n_points, n_queries, k, entries, seed):
    rng = np.random.default_rng(seed)
    points, queries = (
        rng.random((n, 6)).astype(np.float32) * (rng.random((n, 6)) < 0.4)
        for n in (n_points, n_queries)
    )
    labels = rng.random((n_points, N_LABELS)) < 0.4
    expected = dense_scores(points, labels, queries, k)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elias.baselines.knn._MAX_SIMILARITIES", entries)
        neighbours = NearestNeighbours(corpus_of(points, labels), k=k)
        actual = neighbours.predict(csr_matrix(queries), top_k=9)

    assert len(actual) == n_queries
    np.testing.assert_allclose(actual.to_csr().toarray(), expected, atol=1e-5)


@given(
    rows=st.lists(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=5, max_size=5), min_size=1),
    k=st.integers(1, 6),
)
def test_the_strongest_entries_are_kept_and_of_equal_ones_the_first(rows, k):
    matrix = np.array(rows, dtype=np.float32)

    selected = strongest(csr_matrix(matrix), k).toarray()

    for row, left in zip(matrix, selected, strict=True):
        best = sorted(np.flatnonzero(row), key=lambda i: (-row[i], i))[:k]
        assert sorted(np.flatnonzero(left)) == sorted(best)
        np.testing.assert_array_equal(left[best], row[best])
