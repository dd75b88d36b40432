"""Clusters of labels: equal in size whatever the numbers, repeatable, and near to each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix, random_array

import reference
from elias import clustering
from elias.clustering import balanced_clusters, label_centroids


def random_centroids(n_labels, n_words, dim, known, seed):
    """Centroids of labels; those that are not known have none."""
    rng = np.random.default_rng(seed)
    sparse = random_array((n_labels, n_words), density=0.3, rng=rng, dtype=np.float32).tolil()
    dense = rng.standard_normal((n_labels, dim)).astype(np.float32)
    sparse[:, 0] = 1  # no label is without a word by chance
    sparse[~known], dense[~known] = 0, 0
    return csr_matrix(sparse), dense


@given(
    n_labels=st.integers(1, 60),
    n_clusters=st.integers(1, 20),
    dim=st.sampled_from([0, 3]),
    share_known=st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_cluster_sizes_are_equal_to_within_one(n_labels, n_clusters, dim, share_known, seed):
    known = np.random.default_rng(seed).random(n_labels) < share_known
    sparse, dense = random_centroids(n_labels, 7, dim, known, seed)

    assignment = balanced_clusters(sparse, dense, n_clusters, seed)

    assert reference.is_balanced(assignment, n_clusters)
    assert reference.is_balanced(assignment[known], n_clusters)
    assert reference.is_balanced(assignment[~known], n_clusters)


@given(n_labels=st.integers(2, 40), n_clusters=st.integers(2, 9), seed=st.integers(0, 2**31))
def test_one_seed_gives_one_clustering(n_labels, n_clusters, seed):
    sparse, dense = random_centroids(n_labels, 5, 2, np.ones(n_labels, dtype=bool), seed)

    first = balanced_clusters(sparse, dense, n_clusters, seed)

    assert np.array_equal(balanced_clusters(sparse, dense, n_clusters, seed), first)


@given(quarter=st.integers(1, 15), dense=st.booleans(), seed=st.integers(0, 2**31))
def test_two_groups_far_apart_become_two_clusters(quarter, dense, seed):
    half = 2 * quarter + 1  # odd, or both groups split evenly would be an optimum too
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat([0, 1], half))
    centroids = np.eye(2, dtype=np.float32)[group]
    centroids = np.hstack([centroids, 0.01 * rng.random((2 * half, 2), dtype=np.float32)])
    nothing = np.zeros((2 * half, 0), dtype=np.float32)
    parts = (csr_matrix(centroids[:, :0]), centroids) if dense else (csr_matrix(centroids), nothing)

    assignment = balanced_clusters(*parts, 2, seed)

    assert len(set(zip(group, assignment, strict=True))) == 2


@given(n_points=st.integers(1, 8), with_embedding=st.booleans(), seed=st.integers(0, 2**31))
def test_a_centroid_is_the_unit_length_sum_of_its_points(n_points, with_embedding, seed):
    rng = np.random.default_rng(seed)
    labels = rng.random((n_points, 5)) < 0.4
    bow = rng.random((n_points, 6)).astype(np.float32) * (rng.random((n_points, 6)) < 0.5)
    bow /= np.maximum(np.linalg.norm(bow, axis=1, keepdims=True), 1e-9)
    embedding = rng.standard_normal((n_points, 3)).astype(np.float32) if with_embedding else None

    sparse, dense = label_centroids(csr_matrix(labels), csr_matrix(bow), embedding)

    points = np.zeros((n_points, 6 + 3 * with_embedding))
    points[:, :6] = bow
    if embedding is not None:
        points[:, 6:] = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    for label in range(5):
        total = sum((points[i] for i in range(n_points) if labels[i, label]), 0 * points[0])
        expected = total / (np.linalg.norm(total) or 1)
        actual = np.concatenate([sparse.toarray()[label], dense[label]])
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@given(power=st.integers(2, 6), dim=st.sampled_from([0, 3]), seed=st.integers(0, 2**31))
def test_a_node_shared_among_threads_is_halved_as_one_thread_does(power, dim, seed):
    rng = np.random.default_rng(seed)
    # small whole numbers and halves of equal size: sums are exact in whatever order
    sparse = csr_matrix(rng.integers(0, 3, (2**power, 9)), dtype=np.float32)
    dense = rng.integers(-2, 3, (2**power, dim)).astype(np.float32)

    alone = balanced_clusters(sparse, dense, 4, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clustering, "_LARGE_NODE", 2)
        patch.setattr(clustering, "_BLOCKS", 3)
        shared = balanced_clusters(sparse, dense, 4, seed)

    np.testing.assert_array_equal(shared, alone)


@given(scores=st.lists(st.integers(-3, 3), min_size=1, max_size=40), data=st.data())
def test_the_lowest_scores_are_the_first_of_a_stable_sort(scores, data):
    count = data.draw(st.integers(1, len(scores)))
    chosen = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    )
    values = np.array(scores, dtype=np.float32)
    wanted = np.zeros(len(scores), dtype=bool)
    wanted[np.argsort(values, kind="stable")[:count]] = True
    n_changed = (wanted != chosen).sum()

    assert clustering._choose_lowest(values, count, chosen) == n_changed
    np.testing.assert_array_equal(chosen, wanted)
