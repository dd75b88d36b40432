"""Pruning edges: the dense truth, loop by loop, and what must hold whatever the graph is."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elias.errors import ConfigError
from elias.model.graph import (
    LabelGraph,
    edges_above,
    partition_edges,
    pruned_graph,
    strongest_edges_of,
)

GRAPHS = {
    "n_labels": st.integers(1, 12),
    "n_clusters": st.integers(1, 5),
    "beta": st.floats(1.0, 8.0),
    "seed": st.integers(0, 2**31),
}


def random_graph(n_labels, n_clusters, beta, seed):
    """A learned graph with gaps between its edges, in which every label has at least one."""
    generator = torch.Generator().manual_seed(seed)
    has_edge = torch.rand(n_clusters, n_labels, generator=generator) < 0.5
    home = torch.randint(n_clusters, (n_labels,), generator=generator)
    has_edge[home, torch.arange(n_labels)] = True
    labels = torch.arange(n_labels).expand(n_clusters, -1).masked_fill(~has_edge, n_labels)
    logits = torch.randn(n_clusters, n_labels, generator=generator) * 3
    return LabelGraph(labels.contiguous(), n_labels, beta, edge_logits=logits)


def dense(graph):
    """ŝ of every (cluster, label), nan where no edge is; and the score before min(1, ·)."""
    scores = torch.full((graph.n_clusters, graph.n_labels), math.nan)
    free = scores.clone()
    rows = zip(graph.edge_labels, graph.edge_log_scores(), graph.unsaturated_log(), strict=True)
    for cluster, (labels, log_scores, free_log) in enumerate(rows):
        for label, log_score, log_free in zip(labels, log_scores, free_log, strict=True):
            if label < graph.n_labels:
                scores[cluster, label] = log_score.exp()
                free[cluster, label] = log_free.exp()
    return scores.detach(), free.detach()


def loop_over(graph, is_strong):
    """The twin: which (cluster, label) stay, one at a time; the best edge of a label always."""
    scores, free = dense(graph)
    remaining = set()
    for cluster in range(graph.n_clusters):
        there = [label for label in range(graph.n_labels) if not free[cluster, label].isnan()]
        by_share = sorted(there, key=lambda label: (-free[cluster, label].item(), label))
        for label in there:
            if is_strong(scores[cluster, label].item(), by_share.index(label)):
                remaining.add((cluster, label))
    for label in range(graph.n_labels):
        shares = free[:, label].nan_to_num(-1.0).tolist()
        remaining.add((shares.index(max(shares)), label))
    return remaining


def stays_as_it_was(graph, pruned, remaining):
    before, after = dense(graph)[0], dense(pruned)[0]
    assert {(c, label) for c, label in (~after.isnan()).nonzero().tolist()} == remaining
    for cluster, label in remaining:
        assert after[cluster, label].item() == pytest.approx(before[cluster, label].item(), 1e-5)


@given(threshold=st.floats(0.0, 1.0), **GRAPHS)
def test_edges_above_a_threshold_stay_and_score_what_they_did(
    threshold, n_labels, n_clusters, beta, seed
):
    graph = random_graph(n_labels, n_clusters, beta, seed)

    pruned = pruned_graph(graph, edges_above(graph, threshold))

    stays_as_it_was(graph, pruned, loop_over(graph, lambda score, _: score >= threshold))


@given(count=st.integers(1, 6), **GRAPHS)
def test_the_strongest_edges_of_a_cluster_stay_and_score_what_they_did(
    count, n_labels, n_clusters, beta, seed
):
    graph = random_graph(n_labels, n_clusters, beta, seed)

    pruned = pruned_graph(graph, strongest_edges_of(graph, count))

    stays_as_it_was(graph, pruned, loop_over(graph, lambda _, rank: rank < count))


@given(threshold=st.floats(0.0, 1.0), **GRAPHS)
def test_every_label_can_still_be_reached_and_no_slot_is_wasted(
    threshold, n_labels, n_clusters, beta, seed
):
    graph = random_graph(n_labels, n_clusters, beta, seed)

    pruned = pruned_graph(graph, edges_above(graph, threshold))

    sizes = (pruned.edge_labels < n_labels).sum(dim=1)
    assert set(pruned.edge_labels.flatten().tolist()) >= set(range(n_labels))
    assert pruned.edge_labels.shape[1] == sizes.max()
    assert pruned.n_edges == sizes.sum()
    assert pruned.strongest_parents().tolist() == graph.strongest_parents().tolist()


@given(first=st.floats(0.0, 1.0), second=st.floats(0.0, 1.0), **GRAPHS)
def test_pruning_twice_is_pruning_by_the_higher_threshold(
    first, second, n_labels, n_clusters, beta, seed
):
    graph = random_graph(n_labels, n_clusters, beta, seed)

    once = pruned_graph(graph, edges_above(graph, max(first, second)))
    half = pruned_graph(graph, edges_above(graph, first))
    twice = pruned_graph(half, edges_above(half, second))

    torch.testing.assert_close(dense(twice)[0], dense(once)[0], equal_nan=True)


@given(**GRAPHS)
def test_a_threshold_of_zero_changes_nothing(n_labels, n_clusters, beta, seed):
    graph = random_graph(n_labels, n_clusters, beta, seed)

    pruned = pruned_graph(graph, edges_above(graph, 0.0))

    assert pruned.removed_log is None
    torch.testing.assert_close(dense(pruned)[0], dense(graph)[0], equal_nan=True)


def test_a_cluster_that_loses_nothing_has_a_finite_record_of_it():
    logits = torch.tensor([[0.0, 0.0], [5.0, -5.0]])
    graph = LabelGraph(torch.tensor([[0, 1], [0, 1]]), 2, 1.5, edge_logits=logits)

    pruned = pruned_graph(graph, edges_above(graph, 0.5))

    assert pruned.removed_log.isfinite().all()
    assert pruned.edge_labels.tolist() == [[0, 1], [0, 2]]
    torch.testing.assert_close(dense(pruned)[0][0], torch.tensor([0.75, 0.75]))


def test_a_fixed_graph_and_impossible_limits_are_refused():
    fixed = LabelGraph(partition_edges(torch.tensor([0, 1]), 2), 2, 1.0)
    learned = random_graph(3, 2, 2.0, 0)

    with pytest.raises(ConfigError, match="no learned graph"):
        pruned_graph(fixed, edges_above(fixed, 0.5))
    with pytest.raises(ConfigError, match=r"threshold must be in \[0, 1\].*not 1.5"):
        edges_above(learned, 1.5)
    with pytest.raises(ConfigError, match=r"top_k.*must be >= 1, not 0"):
        strongest_edges_of(learned, 0)
