"""The first edges of the learned graph: counted right, the strongest kept, no label orphaned."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

import reference
from elias.model.graph import partition_edges
from elias.training.initialization import edge_counts, first_logits, strongest_edges

SIZES = {
    "n_labels": st.integers(1, 15),
    "n_clusters": st.integers(1, 6),
    "seed": st.integers(0, 2**31),
}


def random_counts(n_labels, n_clusters, seed):
    """Counts with ties and gaps, and a balanced partition."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4, (n_clusters, n_labels)) * (rng.random((n_clusters, n_labels)) < 0.7)
    partition = rng.permutation(np.arange(n_labels) % n_clusters)
    return csr_matrix(counts.astype(np.float32)), partition


def kept_by(edges, n_labels):
    return [{label for label in row if label < n_labels} for row in edges.tolist()]


@given(width=st.integers(1, 4), n_points=st.integers(1, 8), **SIZES)
def test_edge_counts_are_those_of_a_loop_over_points(width, n_points, n_labels, n_clusters, seed):
    rng = np.random.default_rng(seed)
    width = min(width, n_clusters)
    beams = np.stack([rng.permutation(n_clusters)[:width] for _ in range(n_points)])
    scores = rng.random((n_points, width), dtype=np.float32)
    labels = rng.random((n_points, n_labels)) < 0.3

    partition = rng.permutation(np.arange(n_labels) % n_clusters)

    counts = edge_counts(beams, scores, csr_matrix(labels), partition, n_clusters, n_labels)

    own = [np.flatnonzero(row) for row in labels]
    expected = reference.edge_counts(beams, scores, own, n_clusters, n_labels)
    np.testing.assert_allclose(counts.toarray(), expected.numpy(), rtol=1e-5)


@given(n_points=st.integers(1, 20), most=st.integers(1, 6), **SIZES)
def test_dropped_counts_change_neither_edges_nor_initial_logits(
    n_points, most, n_labels, n_clusters, seed
):
    rng = np.random.default_rng(seed)
    width = min(2, n_clusters)
    beams = np.stack([rng.permutation(n_clusters)[:width] for _ in range(n_points)])
    scores = rng.integers(1, 3, (n_points, width)).astype(np.float32)  # many counts are equal
    labels = csr_matrix(rng.random((n_points, n_labels)) < 0.5)
    partition = rng.permutation(np.arange(n_labels) % n_clusters)
    most += -(-n_labels // n_clusters)

    few, many = (
        edge_counts(beams, scores, labels, partition, n_clusters, most) for most in (most, n_labels)
    )

    edges = strongest_edges(few, partition, most)
    np.testing.assert_array_equal(edges, strongest_edges(many, partition, most))
    few_logits, many_logits = (
        first_logits(edges, counts, "counts", torch.Generator()) for counts in (few, many)
    )
    assert torch.equal(few_logits, many_logits)
    n_own = np.bincount(partition, minlength=n_clusters)
    assert (np.diff(few.indptr) <= most + n_own).all()


@given(spare=st.integers(0, 5), **SIZES)
def test_every_label_keeps_an_edge_and_no_cluster_more_than_its_share(
    spare, n_labels, n_clusters, seed
):
    counts, partition = random_counts(n_labels, n_clusters, seed)
    budget = -(-n_labels // n_clusters) + spare

    edges = strongest_edges(counts, partition, budget)

    selected = kept_by(edges, n_labels)
    assert edges.shape == (n_clusters, budget)
    assert set().union(*selected) == set(range(n_labels))
    assert [len(row) for row in selected] == [(row < n_labels).sum() for row in edges]  # no repeats


@given(spare=st.integers(0, 5), **SIZES)
def test_a_strong_edge_gives_way_only_to_labels_of_the_clusters_own_partition(
    spare, n_labels, n_clusters, seed
):
    counts, partition = random_counts(n_labels, n_clusters, seed)
    budget = -(-n_labels // n_clusters) + spare

    selected = kept_by(strongest_edges(counts, partition, budget), n_labels)

    for cluster, labels in enumerate(selected):
        strength = counts.toarray()[cluster]
        order = np.lexsort((np.arange(n_labels), -strength)).tolist()
        strongest = [label for label in order[:budget] if strength[label] > 0]
        for label in set(strongest) - labels:
            weaker = labels & set(order[order.index(label) :])
            assert len(labels) == budget
            assert all(partition[other] == cluster for other in weaker)
        assert all(partition[label] == cluster for label in labels - set(strongest))


@given(**SIZES)
def test_with_room_for_all_every_counted_edge_is_kept_and_orphans_join_their_partition(
    n_labels, n_clusters, seed
):
    counts, partition = random_counts(n_labels, n_clusters, seed)

    selected = kept_by(strongest_edges(counts, partition, n_labels), n_labels)

    dense = counts.toarray()
    orphans = np.flatnonzero(dense.sum(axis=0) == 0)
    for cluster in range(n_clusters):
        own = {label for label in orphans if partition[label] == cluster}
        assert selected[cluster] == set(np.flatnonzero(dense[cluster])) | own


@given(**SIZES)
def test_first_logits_follow_the_counts(n_labels, n_clusters, seed):
    counts, partition = random_counts(n_labels, n_clusters, seed)
    edges = strongest_edges(counts, partition, n_labels)

    logits = first_logits(edges, counts, "counts", torch.Generator())

    assert logits.dtype == torch.float32
    for cluster, row in enumerate(edges.tolist()):
        for slot, label in enumerate(row):
            if label < n_labels:
                expected = 0.5 * np.log(counts[cluster, label] + 0.1)
                assert logits[cluster, slot].item() == pytest.approx(expected, abs=1e-5)


@given(**SIZES)
def test_the_edges_of_a_partition_are_the_partition(n_labels, n_clusters, seed):
    assignment = np.random.default_rng(seed).integers(0, n_clusters, n_labels)

    edges = partition_edges(torch.from_numpy(assignment), n_clusters)

    expected = [set(np.flatnonzero(assignment == cluster)) for cluster in range(n_clusters)]
    assert kept_by(edges, n_labels) == expected
    assert (edges < n_labels).sum() == n_labels
