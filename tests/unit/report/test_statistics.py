"""The numbers of the figures, computed by hand on a graph of two clusters."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from elias.metrics import recall_by_decile, score
from elias.model.graph import LabelGraph
from elias.predictions import Predictions
from elias.report import statistics as module
from elias.report.statistics import (
    RECALL_AT,
    THRESHOLDS,
    PointSample,
    clusters_per_label,
    graph_edges,
    label_maps,
    ranked_edge_scores,
    recalls,
    shares_above,
    spread,
    stage1_edges_above,
    true_scores,
)


@pytest.fixture
def edges():
    """Cluster 0 holds labels 0, 1, 2; cluster 1 holds labels 2, 3."""
    return csr_matrix([[1.0, 0.3, 0.05, 0.0], [0.0, 0.0, 0.5, 0.2]])


def test_the_edges_of_a_graph_are_those_it_stores_with_equation_5():
    logits = torch.tensor([[0.0, 3.0], [1.0, 9.0]]).log1p()
    graph = LabelGraph(torch.tensor([[1, 0], [2, 3]]), 3, 1.5, edge_logits=logits)  # 3: no edge

    edges = graph_edges(graph)

    assert edges.nnz == 3
    assert edges.toarray() == pytest.approx(np.array([[1.0, 0.3, 0.0], [0.0, 0.0, 1.0]]))


def test_edge_scores_are_averaged_by_rank_and_a_missing_edge_counts_as_0(edges):
    ranked, above = ranked_edge_scores(edges), shares_above(edges.data)

    assert ranked.mean(axis=0).tolist() == pytest.approx([0.75, 0.25, 0.025])
    assert above[[0, 5, 25, 50]].tolist() == pytest.approx([1, 0.8, 0.6, 0.2])
    assert len(above) == len(THRESHOLDS)


def test_stage_1_edges_are_counted_where_the_graph_has_them_above_a_threshold(edges):
    partition = np.array([0, 1, 1, 1])  # label 1 has lost its edge from cluster 1

    shares = stage1_edges_above(edges, partition)

    assert shares[[0, 20, 25, 50]].tolist() == pytest.approx([0.75, 0.5, 0.5, 0.25])


def test_clusters_of_a_label_are_counted_above_a_threshold(edges):
    frequencies = np.array([5, 9, 7, 1])  # in order: labels 1, 2, 0, 3

    means = clusters_per_label(edges, frequencies, (0.0, 0.25))

    order = [0, 2, 5, 7]  # the deciles of four labels
    assert means[0.0][order].tolist() == [1, 2, 1, 1]
    assert means[0.25][order].tolist() == [1, 1, 1, 0]
    assert np.isnan(means[0.0][[1, 3, 4, 6, 8, 9]]).all()


def test_clusters_are_averaged_over_the_labels_of_a_decile():
    labels = np.array([0, 0, 0, 1, 19])
    edges = csr_matrix((np.ones(5), (np.arange(5), labels)), shape=(5, 20))

    means = clusters_per_label(edges, np.arange(20)[::-1], (0.5,))

    assert means[0.5].tolist() == [2, *[0] * 8, 0.5]


@pytest.fixture
def evaluated():
    rng = np.random.default_rng(0)
    n_labels = 30
    ids = np.stack([rng.permutation(n_labels)[:20] for _ in range(40)])
    predictions = Predictions.from_scores(ids, rng.random(ids.shape), n_labels)
    truth = csr_matrix((rng.random((40, n_labels)) < 0.1).astype(np.float32))
    return predictions, truth, rng.integers(0, 50, n_labels)


def test_recall_is_that_of_the_metrics(evaluated):
    predictions, truth, frequencies = evaluated

    actual = recalls(*evaluated)

    assert actual.ks[-1] == 20
    assert actual.curve[-1] == pytest.approx(score(predictions, truth, None, ["R@20"])["R@20"])
    assert actual.by_decile.tolist() == pytest.approx(
        recall_by_decile(predictions, truth, frequencies, RECALL_AT).tolist()
    )
    assert actual.by_decile.sum() == pytest.approx(actual.curve[-1])


def test_scores_of_true_labels_are_those_predicted_for_them(evaluated):
    predictions, truth, frequencies = evaluated
    dense = truth.toarray() > 0
    first = np.argsort(-frequencies, kind="stable")[:3]  # the first tenth of 30 labels
    scores = [
        s
        for row, ranking in enumerate(predictions)
        for label, s in zip(ranking.ids, ranking.scores, strict=True)
        if dense[row, label] and label in first
    ]

    actual = true_scores(*evaluated)

    assert actual.quantiles[0].tolist() == pytest.approx(
        np.quantile(scores, (0.1, 0.25, 0.5, 0.75, 0.9)).tolist()
    )
    assert actual.pairs[0] == dense[:, first].sum()
    assert actual.recall[0] == pytest.approx(len(scores) / dense[:, first].sum())


def test_a_decile_without_true_labels_has_no_scores():
    predictions = Predictions.from_scores([[0, 1]], [[0.5, 0.4]], n_labels=10)

    actual = true_scores(predictions, csr_matrix(np.eye(1, 10)), np.arange(10)[::-1])

    assert actual.quantiles[0].tolist() == pytest.approx([0.5] * 5)
    assert np.isnan(actual.quantiles[1:]).all()
    assert actual.recall.tolist() == [1] + [0] * 9


N_POINTS = 60


@pytest.fixture
def sample():
    """Label 0 lies under clusters 0 and 1, label 1 under cluster 0 alone."""
    rng = np.random.default_rng(0)
    embedding = rng.normal(size=(N_POINTS, 4)).astype(np.float32)
    embedding[40:] = [1, 0, 0, 0] + 0.1 * rng.normal(size=(20, 4))
    labels = np.zeros((N_POINTS, 2), dtype=np.float32)
    labels[:20, 0] = 1
    labels[40:, 1] = 1
    members = np.ones((N_POINTS, 2), dtype=bool)
    return PointSample(
        csr_matrix(labels), embedding, np.zeros(N_POINTS, dtype=np.int64), csr_matrix(members)
    )


@pytest.fixture
def label_edges():
    return csr_matrix([[0.9, 1.0], [0.5, 0.1]])


def test_labels_are_divided_by_their_number_of_clusters(sample, label_edges):
    actual = label_maps(sample, label_edges, seed=0)

    assert [(panel.label, panel.clusters) for panel in actual.several] == [(0, (0, 1))]
    assert [(panel.label, panel.clusters) for panel in actual.one] == [(1, (0,))]
    assert (len(actual.spreads_several), len(actual.spreads_one)) == (1, 1)


def test_a_point_is_drawn_once_and_its_label_comes_first(sample, label_edges):
    panel = label_maps(sample, label_edges, seed=0).several[0]

    assert panel.points.shape == (20, 2)
    assert [len(points) for points in panel.cluster_points] == [40, 0]


def test_the_same_seed_gives_the_same_picture(sample, label_edges):
    first, again = (label_maps(sample, label_edges, seed=3).one[0].points for _ in range(2))

    assert np.array_equal(first, again)


def test_points_that_point_every_way_spread_more_than_those_that_agree(sample, label_edges):
    actual = label_maps(sample, label_edges, seed=0)

    assert actual.spreads_several[0] > 0.5 > 0.1 > actual.spreads_one[0]


def test_labels_with_few_points_are_not_drawn(sample, label_edges, monkeypatch):
    monkeypatch.setattr(module, "MIN_DRAWN", 21)

    actual = label_maps(sample, label_edges, seed=0)

    assert (actual.several, actual.one) == ((), ())


def test_spread_is_0_for_one_direction_and_1_for_opposite_ones():
    assert spread(np.array([[1.0, 0], [5, 0]], dtype=np.float32)) == pytest.approx(0)
    assert spread(np.array([[1.0, 0], [-2, 0]], dtype=np.float32)) == pytest.approx(1)


def test_points_that_are_all_alike_can_be_drawn(sample, label_edges):
    alike = PointSample(sample.labels, np.ones_like(sample.embedding), sample.best, sample.members)

    actual = label_maps(alike, label_edges, seed=0)

    assert np.isfinite(actual.one[0].points).all()
