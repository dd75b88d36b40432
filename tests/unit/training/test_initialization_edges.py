import math

import numpy as np
import torch
from scipy.sparse import csr_matrix

from elias.training.initialization import edge_counts, first_logits, strongest_edges

COUNTS = csr_matrix(np.array([[5.0, 3.0, 1.0, 0.0], [4.0, 0.0, 0.0, 0.0]], dtype=np.float32))


def test_the_cluster_scores_of_a_point_count_for_its_labels():
    beams, scores = np.array([[0, 1], [1, 0]]), np.array([[0.9, 0.2], [0.8, 0.1]], dtype=np.float32)
    labels = csr_matrix(np.array([[7.0, 0.0], [7.0, 7.0]]))  # what is stored counts once

    counts = edge_counts(beams, scores, labels, np.array([0, 1]), n_clusters=3, n_edges=2)

    np.testing.assert_allclose(counts.toarray(), [[1.0, 0.1], [1.0, 0.8], [0.0, 0.0]], rtol=1e-6)


def test_a_label_without_other_edges_keeps_the_edge_of_its_cluster():
    edges = strongest_edges(COUNTS, np.array([0, 0, 1, 1]), edges_per_cluster=2)

    assert [sorted(row) for row in edges.tolist()] == [[0, 1], [2, 3]]


def test_a_label_may_have_several_clusters():
    edges = strongest_edges(COUNTS, np.array([0, 0, 1, 1]), edges_per_cluster=3)

    assert [sorted(row) for row in edges.tolist()] == [[0, 1, 2], [0, 3, 4]]  # 4: no edge


def test_random_logits_are_between_zero_and_one_and_follow_the_seed():
    edges = strongest_edges(COUNTS, np.array([0, 0, 1, 1]), edges_per_cluster=3)

    def draw(seed):
        return first_logits(edges, COUNTS, "random", torch.Generator().manual_seed(seed))

    assert ((draw(0) >= 0) & (draw(0) < 1)).all()
    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


def test_logits_from_counts_are_half_the_logarithm():
    logits = first_logits(np.array([[0, 3], [0, 4]]), COUNTS, "counts", torch.Generator())

    assert logits[0, 0].item() == np.float32(0.5 * math.log(5.1))
    assert logits[0, 1].item() == np.float32(0.5 * math.log(0.1))
    assert logits.isfinite().all()
