"""The numbers of the figures, by hand on a graph of two clusters."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from elias.metrics import recall_by_decile, score
from elias.model.graph import LabelGraph
from elias.predictions import Predictions
from elias.report.statistics import (
    RECALL_AT,
    THRESHOLDS,
    Edges,
    clusters_per_label,
    decile_means,
    edge_weights,
    learning_curve,
    recalls,
    stage1_edges_kept,
    stored_edges,
    true_scores,
)


@pytest.fixture
def edges():
    """Cluster 0 holds labels 0, 1, 2; cluster 1 holds labels 2, 3."""
    return Edges(
        np.array([0, 0, 0, 1, 1]),
        np.array([0, 1, 2, 2, 3]),
        np.array([1.0, 0.3, 0.05, 0.5, 0.2]),
        n_clusters=2,
        n_labels=4,
    )


def test_the_edges_of_a_graph_are_those_it_stores_with_equation_5():
    logits = torch.tensor([[0.0, 3.0], [1.0, 9.0]]).log1p()
    graph = LabelGraph(torch.tensor([[1, 0], [2, 3]]), 3, 1.5, edge_logits=logits)  # 3: no edge

    found = stored_edges(graph)

    assert found.clusters.tolist() == [0, 0, 1]
    assert found.labels.tolist() == [1, 0, 2]
    assert found.scores.tolist() == pytest.approx([0.3, 1.0, 1.0])


def test_edge_weights_are_averaged_by_rank_and_a_missing_edge_weighs_nothing(edges):
    weights = edge_weights(edges)

    assert weights.mean.tolist() == pytest.approx([0.75, 0.25, 0.025])
    assert weights.kept[[0, 5, 25, 50]].tolist() == pytest.approx([1, 0.8, 0.6, 0.2])
    assert len(weights.kept) == len(THRESHOLDS)


def test_stage_1_edges_count_as_kept_where_the_graph_holds_them_above_a_threshold(edges):
    partition = np.array([0, 1, 1, 1])  # label 1 has lost its edge from cluster 1

    kept = stage1_edges_kept(edges, partition)

    assert kept[[0, 20, 25, 50]].tolist() == pytest.approx([0.75, 0.5, 0.5, 0.25])


def test_clusters_of_a_label_are_counted_above_a_threshold(edges):
    frequencies = np.array([5, 9, 7, 1])  # in order: labels 1, 2, 0, 3

    means = clusters_per_label(edges, frequencies, (0.0, 0.25))

    order = [0, 2, 5, 7]  # the deciles of four labels
    assert means[0.0][order].tolist() == [1, 2, 1, 1]
    assert means[0.25][order].tolist() == [1, 1, 1, 0]
    assert np.isnan(means[0.0][[1, 3, 4, 6, 8, 9]]).all()


def test_means_are_taken_over_the_labels_of_a_decile():
    means = decile_means(np.array([1, 3, 8]), np.array([0, 0, 9]))

    assert means[[0, 9]].tolist() == [2, 8]


@pytest.fixture
def judged():
    rng = np.random.default_rng(0)
    n_labels = 30
    ids = np.stack([rng.permutation(n_labels)[:20] for _ in range(40)])
    predictions = Predictions.from_scores(ids, rng.random(ids.shape), n_labels)
    truth = csr_matrix((rng.random((40, n_labels)) < 0.1).astype(np.float32))
    return predictions, truth, rng.integers(0, 50, n_labels)


def test_recall_is_that_of_the_metrics(judged):
    predictions, truth, frequencies = judged

    found = recalls(*judged)

    assert found.ks[-1] == 20
    assert found.curve[-1] == pytest.approx(score(predictions, truth, None, ["R@20"])["R@20"])
    assert found.by_decile.tolist() == pytest.approx(
        recall_by_decile(predictions, truth, frequencies, RECALL_AT).tolist()
    )
    assert found.by_decile.sum() == pytest.approx(found.curve[-1])


def test_scores_of_true_labels_are_those_predicted_for_them(judged):
    predictions, truth, frequencies = judged
    dense = truth.toarray() > 0
    first = np.argsort(-frequencies, kind="stable")[:3]  # the first tenth of 30 labels
    scores = [
        s
        for row, ranking in enumerate(predictions)
        for label, s in zip(ranking.ids, ranking.scores, strict=True)
        if dense[row, label] and label in first
    ]

    found = true_scores(*judged)

    assert found.quantiles[0].tolist() == pytest.approx(
        np.quantile(scores, (0.1, 0.25, 0.5, 0.75, 0.9)).tolist()
    )
    assert found.pairs[0] == dense[:, first].sum()
    assert found.found[0] == pytest.approx(len(scores) / dense[:, first].sum())


def test_a_decile_without_true_labels_has_no_scores():
    predictions = Predictions.from_scores([[0, 1]], [[0.5, 0.4]], n_labels=10)

    found = true_scores(predictions, csr_matrix(np.eye(1, 10)), np.arange(10)[::-1])

    assert found.quantiles[0].tolist() == pytest.approx([0.5] * 5)
    assert np.isnan(found.quantiles[1:]).all()
    assert found.found.tolist() == [1] + [0] * 9


def test_a_learning_curve_goes_through_all_stages():
    curve = learning_curve(
        [
            {"stage": "stage1", "loss": 3.0, "validation": {"P@1": 10.0}},
            {"stage": "stage1", "loss": 2.0, "validation": {"P@1": 20.0}},
            {"stage": "stage2", "loss": 1.0, "validation": {"P@1": 30.0, "R@100": 5.0}},
        ]
    )

    assert curve.loss.tolist() == [3, 2, 1]
    assert curve.begins == {1: "stage1", 3: "stage2"}
    assert curve.validation["P@1"].tolist() == [10, 20, 30]
    assert np.isnan(curve.validation["R@100"][:2]).all()


def test_a_run_without_validation_has_a_loss_alone():
    curve = learning_curve([{"stage": "stage1", "loss": 3.0, "validation": {}}])

    assert curve.validation == {}
