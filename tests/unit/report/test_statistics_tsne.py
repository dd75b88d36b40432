"""Points drawn for the t-SNE pictures, and how widely a label's points are spread."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias.report import statistics as module
from elias.report.statistics import Edges, PointSample, clouds, spread

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
def edges():
    return Edges(
        np.array([0, 1, 0, 1]),
        np.array([0, 0, 1, 1]),
        np.array([0.9, 0.5, 1.0, 0.1]),
        n_clusters=2,
        n_labels=2,
    )


def test_labels_are_told_apart_by_how_many_clusters_they_are_assigned_to(sample, edges):
    found = clouds(sample, edges, seed=0)

    assert [(panel.label, panel.clusters) for panel in found.several] == [(0, (0, 1))]
    assert [(panel.label, panel.clusters) for panel in found.one] == [(1, (0,))]
    assert (found.n_several, found.n_one) == (1, 1)


def test_a_point_is_drawn_once_and_its_label_comes_first(sample, edges):
    panel = clouds(sample, edges, seed=0).several[0]

    assert panel.own.shape == (20, 2)
    assert [len(points) for points in panel.others] == [40, 0]


def test_the_same_seed_gives_the_same_picture(sample, edges):
    first, again = (clouds(sample, edges, seed=3).one[0].own for _ in range(2))

    assert np.array_equal(first, again)


def test_points_that_point_every_way_spread_more_than_those_that_agree(sample, edges):
    found = clouds(sample, edges, seed=0)

    assert found.spread_several > 0.5 > 0.1 > found.spread_one


def test_labels_with_few_points_are_not_drawn(sample, edges, monkeypatch):
    monkeypatch.setattr(module, "FEWEST_POINTS", 21)

    found = clouds(sample, edges, seed=0)

    assert (found.several, found.one) == ((), ())


def test_spread_is_0_for_one_direction_and_1_for_opposite_ones():
    assert spread(np.array([[1.0, 0], [5, 0]], dtype=np.float32)) == pytest.approx(0)
    assert spread(np.array([[1.0, 0], [-2, 0]], dtype=np.float32)) == pytest.approx(1)


def test_points_that_are_all_alike_can_be_drawn(sample, edges):
    alike = PointSample(sample.labels, np.ones_like(sample.embedding), sample.best, sample.members)

    found = clouds(alike, edges, seed=0)

    assert np.isfinite(found.one[0].own).all()
