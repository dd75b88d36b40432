import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias.clustering import balanced_clusters, label_centroids

NOTHING = np.zeros((4, 0), dtype=np.float32)


def test_similar_labels_are_in_the_same_cluster():
    rows = np.repeat(np.eye(4, dtype=np.float32), 25, axis=0)
    order = np.random.default_rng(0).permutation(100)

    assignment = balanced_clusters(csr_matrix(rows[order]), np.zeros((100, 0), np.float32), 4, 0)

    groups = [assignment[order // 25 == group] for group in range(4)]
    assert sorted(len(set(group)) for group in groups)[:2] == [1, 1]  # 2-means may err once
    assert np.bincount(assignment).tolist() == [25] * 4


def test_labels_without_points_fill_the_smaller_clusters():
    sparse = csr_matrix(np.array([[1, 0], [0, 0], [0, 1], [1, 1]], dtype=np.float32))

    assignment = balanced_clusters(sparse, NOTHING, 2, 0)

    assert np.bincount(assignment).tolist() == [2, 2]


def test_if_no_label_has_points_labels_are_distributed_evenly():
    assignment = balanced_clusters(csr_matrix((4, 3), dtype=np.float32), NOTHING, 3, 0)

    assert assignment.tolist() == [0, 1, 2, 0]


def test_one_cluster_takes_all():
    assignment = balanced_clusters(csr_matrix(np.eye(4, dtype=np.float32)), NOTHING, 1, 0)

    assert assignment.tolist() == [0, 0, 0, 0]


def test_another_seed_may_give_other_clusters():
    rng = np.random.default_rng(0)
    sparse, dense = csr_matrix((64, 1), dtype=np.float32), rng.random((64, 5), dtype=np.float32)

    clusterings = {tuple(balanced_clusters(sparse, dense, 8, seed)) for seed in range(5)}

    assert len(clusterings) > 1


def test_a_label_without_points_has_no_centroid():
    labels = csr_matrix(np.array([[1, 0], [1, 0]]))
    bow = csr_matrix(np.array([[1, 0], [0, 1]], dtype=np.float32))

    sparse, dense = label_centroids(labels, bow, np.array([[3.0], [-9.0]], dtype=np.float32))

    assert sparse.toarray()[0].tolist() == pytest.approx([0.5**0.5, 0.5**0.5])
    assert dense.tolist() == [[0.0], [0.0]]  # 1 and -1 cancel out
    assert not sparse.toarray()[1].any()
