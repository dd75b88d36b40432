"""Figures show the numbers they are given, and leave out what is not known."""

from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
from scipy.sparse import csr_matrix

from elias.data.stats import PERCENTILES
from elias.labels import LabelTable
from elias.predictions import Predictions
from elias.report import statistics
from elias.report.report import (
    decision_values,
    edge_values,
    group_values,
    learning_values,
    map_values,
    recall_values,
    render,
    size_values,
)
from elias.report.statistics import LabelMaps

NOTHING = {
    **dict.fromkeys(("source", "learning", "recall", "probabilities", "reliability", "index")),
    **dict.fromkeys(("embeddings", "examples", "decisions")),
    **{key: {} for key in ("calibration_errors", "metrics", "times", "configuration", "groups")},
    **{"name": "run", "version": "1", "n_members": 1, "n_labels": 1, "n_points": 1},
    **{"statistics": statistics, "ECE_AT": 5, "PERCENTILES": PERCENTILES},
    **{"data": {"splits": {}}, "data_source": {}, "split": "test", "n_evaluated": 2},
}
EPOCHS = [
    {"stage": "stage1", "loss": 3.0, "validation": {"P@1": 10.0}},
    {"stage": "stage1", "loss": None, "validation": {"P@1": 20.0}},
    {"stage": "stage2", "loss": 1.0, "validation": {"P@1": 30.0, "R@100": 5.0}},
]


def parts(**values):
    """The text of each element that has an id, in a report with these values."""
    page = render(NOTHING | values).removeprefix("<!DOCTYPE html>")
    elements = [one for one in ElementTree.fromstring(page).iter() if one.get("id")]
    return {one.get("id"): " ".join(" ".join(one.itertext()).split()) for one in elements}


def test_a_section_with_nothing_to_show_says_so():
    shown = parts()

    assert "was saved without metrics" in shown["metrics"]
    assert "no learning curves" in shown["learning"]
    assert "neither test nor validation points" in shown["recall"]
    assert "no probabilities" in shown["probabilities"]
    assert "has no index" in shown["index"]


def test_learning_curves_go_through_all_stages():
    shown = parts(learning=learning_values(EPOCHS))

    assert "Stages: stage1 from epoch 1, stage2 from epoch 3." in shown["learning-loss"]
    assert "loss: 1, 3" in shown["learning-loss"]
    assert "loss: 2" not in shown["learning-loss"]  # not recorded
    assert "Last: P@1 30.00, R@100 5.00." in shown["learning-validation"]
    assert "R@100: 3, 5" in shown["learning-validation"]
    assert "R@100: 1" not in shown["learning-validation"]


def test_without_validation_there_is_the_loss_alone():
    epochs = [{"stage": "stage1", "loss": 3.0, "validation": {}}]

    shown = parts(learning=learning_values(epochs))

    assert "learning-loss" in shown
    assert "learning-validation" not in shown


def test_clusters_per_label_are_compared_with_the_paper():
    edges = csr_matrix([[1.0, 1.0], [1.0, 0.0]])  # label 0 has two clusters, label 1 has one
    sizes = size_values(edges, np.array([0, 1]))

    frequent_first, rare_first = (
        parts(index=sizes | edge_values(edges, None, np.array(frequencies)))["fig-7b"]
        for frequencies in ([9, 1], [1, 9])
    )

    assert "have more clusters than rare ones, as in the paper" in frequent_first
    assert "2 in the first decile, 1 in the last" in frequent_first
    assert "do not have more clusters than rare ones, unlike in the paper" in rare_first


def test_a_spread_that_cannot_be_compared_is_reported_as_missing():
    shown = parts(embeddings=map_values(LabelMaps((), (), (0.4,), ()), ["a"]))

    assert "too few labels" in shown["embeddings"]


def test_the_spread_of_labels_is_compared():
    shown = parts(embeddings=map_values(LabelMaps((), (), (0.4, 0.6), (0.3,)), ["a"]))

    assert "spread more widely" in shown["embeddings"]
    assert "0.5 against 0.3" in shown["embeddings"]


def test_components_that_predict_fewer_labels_have_shorter_recall_curves():
    truth = csr_matrix(np.eye(2, 10))
    ids = np.tile(np.arange(10), (2, 1))  # point 0 has label 0, point 1 has label 1
    long, short = (Predictions(ids[:, :k], np.ones((2, k)), 10) for k in (10, 1))

    predictions = {"stage2": long, "ensemble": short}
    recorded = {"stage1": {"R@5": 40.0}, "stage2": {"R@5": 100.0}}
    shown = parts(recall=recall_values(predictions, truth, np.ones(10), recorded))

    curve = shown["fig-5-curve"]
    assert "For stage1, only the values recorded in training are known." in curve
    assert "Of stage2" not in curve
    assert "Last value of each curve: stage2 100.00%, ensemble 50.00%." in curve
    assert "ensemble: 1, 50" in curve
    assert "ensemble: 2" not in curve


def test_decisions_name_the_labels_that_are_missed_most_often():
    truth = csr_matrix([[1, 1, 0]] * 6 + [[0, 1, 0]])
    names = ["seen", "missed", "never true"]
    assigned = Predictions.from_scores([[0, 2]] * 7, [[0.9, 0.8]] * 7, 3, names)

    decisions = decision_values(assigned, truth, np.array([5, 4, 3]))

    assert decisions["missed"] == [["missed", "4", "7", "0", "0", "–", "0.0", "0.0"]]
    assert [row[0] for row in decisions["worst"]] == ["missed", "seen"]
    assert decisions["metrics"]["micro-recall"] == 100 * 6 / 13


def test_the_weakest_groups_come_first_and_small_ones_are_left_out():
    truth = csr_matrix(np.repeat(np.eye(3, dtype=np.float32), (12, 12, 1), axis=0))
    ids = np.array([[0, 1]] * 12 + [[0, 2]] * 12 + [[2, 0]])  # never label 1 for its points
    predictions = Predictions(ids, np.full(ids.shape, 0.5, dtype=np.float32), 3)
    table = LabelTable(("a", "b", "c"), ids=("1", "2", "3"), broader=((), ("1",), ("1",)))
    model = SimpleNamespace(label_table=table, probabilities=None)
    split = SimpleNamespace(labels=truth)

    tables = group_values(model, predictions, split, np.array([500, 3, 1]))

    header, rows = tables["training points"]
    assert header == ["training points", "labels", "pairs", "R@5, %"]
    assert rows == [["2 to 5", "1", "12", "0.0"], ["over 100", "1", "12", "100.0"]]
    assert tables["broader label"][1] == [["a", "2", "13", "7.7"]]
