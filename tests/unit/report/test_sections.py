"""Figures show the numbers they are given, and leave out what is not known."""

import numpy as np
from scipy.sparse import csr_matrix

from elias.predictions import Predictions
from elias.report.sections import (
    clusters_figure,
    learning_figures,
    map_figures,
    recall_figures,
)
from elias.report.statistics import LabelMaps, Recalls, true_scores

EPOCHS = [
    {"stage": "stage1", "loss": 3.0, "validation": {"P@1": 10.0}},
    {"stage": "stage1", "loss": None, "validation": {"P@1": 20.0}},
    {"stage": "stage2", "loss": 1.0, "validation": {"P@1": 30.0, "R@100": 5.0}},
]


def test_learning_curves_go_through_all_stages():
    loss, validation = learning_figures(EPOCHS)

    assert "Stages: stage1 from epoch 1, stage2 from epoch 3." in loss
    assert "loss: 1, 3</title>" in loss
    assert "loss: 2" not in loss  # not recorded
    assert "Last: P@1 30.00, R@100 5.00." in validation
    assert "R@100: 3, 5</title>" in validation
    assert "R@100: 1" not in validation


def test_without_validation_there_is_the_loss_alone():
    (loss,) = learning_figures([{"stage": "stage1", "loss": 3.0, "validation": {}}])

    assert 'id="learning-loss"' in loss


def test_clusters_per_label_are_compared_with_the_paper():
    falling, rising = np.arange(10.0)[::-1], np.arange(10.0)

    assert "have more clusters than rare ones, as in the paper" in clusters_figure({0.25: falling})
    assert "do not have more clusters" in clusters_figure({0.25: rising})


def test_a_spread_that_cannot_be_compared_is_said_to_be_missing():
    *_, text = map_figures(LabelMaps((), (), (0.4,), ()), ["a"])

    assert "too few labels" in text


def test_the_spread_of_labels_is_compared():
    *_, text = map_figures(LabelMaps((), (), (0.4, 0.6), (0.3,)), ["a"])

    assert "spread more widely" in text
    assert "0.5 against 0.3" in text


def test_components_that_predict_fewer_labels_have_shorter_recall_curves():
    tenths = np.full(10, 1.0)
    long = Recalls([1, 10, 100], np.array([10.0, 20.0, 30.0]), tenths)
    short = Recalls([1, 10], np.array([11.0, 21.0]), tenths)
    truth = csr_matrix(np.eye(2))
    scores = true_scores(Predictions(np.array([[0], [1]]), np.ones((2, 1)), 2), truth, np.ones(2))

    curve, *_ = recall_figures(
        {"stage2": long, "ensemble": short},
        dict.fromkeys(("stage2", "ensemble"), scores),
        {},
        "test",
    )

    assert "Last value of each curve: stage2 30.00%, ensemble 21.00%." in curve
    assert "ensemble: 10, 21</title>" in curve
    assert "ensemble: 100" not in curve
