"""Classifiers start at the centroids of their points."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from elias.clustering import balanced_clusters
from elias.config import EliasConfig, EncoderConfig
from elias.model.batch_inference import embed_all
from elias.model.elias import LinearRows
from elias.model.encoder import BagEncoder
from elias.text.tokens import Tokens
from elias.training import initialization
from elias.training.initialization import (
    NAME_WEIGHT,
    SCALE,
    StageInitializer,
    cluster_directions,
    find_centroids,
    init_from_centroids,
)
from elias.training.stage import Points

LABELS = csr_matrix(np.array([[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0]], dtype=np.float32))
EMBEDDING = np.array([[5, 1], [7, 1], [6, 3], [6, 5]], dtype=np.float32)  # mean (6, 2.5)


def test_a_label_direction_is_its_mean_minus_the_mean_of_all_points():
    centroids = find_centroids(LABELS, EMBEDDING)

    np.testing.assert_allclose(centroids.center, [6, 2.5])
    np.testing.assert_allclose(centroids.directions[0], [0, -1], atol=1e-6)
    np.testing.assert_allclose(centroids.directions[1], [0, 1], atol=1e-6)


def test_a_label_without_points_has_a_zero_direction():
    centroids = find_centroids(LABELS, EMBEDDING)

    assert centroids.directions[2].tolist() == [0, 0]


@pytest.mark.parametrize(("direction", "cosine"), [((0, 1), 1), ((0, -1), -1), ((1, 0), 0)])
def test_the_first_logit_is_the_scaled_cosine_plus_the_bias(direction, cosine):
    centroids = find_centroids(LABELS, EMBEDDING)
    rows = LinearRows(3, 2)

    init_from_centroids(rows, centroids.directions, centroids, bias=-4.0)

    typical = centroids.center + centroids.spread * np.array(direction, dtype=np.float32)
    logit = rows.weight[1] @ torch.from_numpy(typical) + rows.bias[1]
    assert logit.item() == pytest.approx(SCALE * cosine - 4, abs=1e-4)


def test_nearly_equal_embeddings_do_not_get_huge_classifiers():
    rng = np.random.default_rng(0)
    embedding = (np.array([6, 8]) + 1e-3 * rng.standard_normal((4, 2))).astype(np.float32)
    centroids = find_centroids(LABELS, embedding)
    rows = LinearRows(3, 2)

    init_from_centroids(rows, centroids.directions, centroids, bias=-4.0)

    assert rows.weight[:2].norm(dim=1).tolist() == pytest.approx([10, 10], rel=1e-3)
    at_center = rows.weight @ torch.from_numpy(centroids.center) + rows.bias
    assert at_center.tolist() == pytest.approx([-4] * 3, abs=1e-4)


def test_a_cluster_direction_is_the_unit_mean_of_its_labels():
    centroids = find_centroids(LABELS, EMBEDDING)

    directions = cluster_directions(centroids.directions, np.array([1, 1, 0]), n_clusters=3)

    np.testing.assert_allclose(directions[1], [0, 0], atol=1e-6)  # its two labels are opposite
    np.testing.assert_allclose(
        cluster_directions(centroids.directions, np.array([0, 1, 1]), n_clusters=2),
        [[0, -1], [0, 1]],
        atol=1e-6,
    )


@pytest.mark.parametrize("with_encoder", [True, False])
def test_labels_are_clustered_by_their_points_and_twice_their_texts(with_encoder, monkeypatch):
    rng = np.random.default_rng(0)

    def random_points(labels):
        bow = csr_matrix(rng.random((len(labels), 5)).astype(np.float32))
        bow.data /= np.sqrt(bow.power(2).sum(axis=1).A1)[np.repeat(range(len(labels)), 5)]
        return Points(Tokens.from_csr(bow), csr_matrix(labels.astype(np.float32))), bow

    truth = np.eye(8) + (rng.random((8, 8)) < 0.3)
    points, bow = random_points(truth > 0)
    label_texts, label_bow = random_points(np.eye(8)[[1, 4, 5]])
    encoder = BagEncoder(EncoderConfig(dim=4, hidden_dim=4), None, n_features=5)
    config = EliasConfig().override({"index.n_clusters": 2}).resolve(8, 8)
    initializer = StageInitializer(
        config, encoder, points, bow, 1.0, label_texts=label_texts, label_bow=label_bow
    )
    given = []

    def clustered(sparse, dense, *args):
        given.append(np.hstack([sparse.toarray(), dense]))
        return balanced_clusters(sparse, dense, *args)

    monkeypatch.setattr(initialization, "balanced_clusters", clustered)
    initializer.cluster_labels(with_encoder)

    def vectors(points, bow):
        phi = embed_all(encoder, points.tokens)[:, : 4 * with_encoder]
        return np.hstack([bow.toarray(), phi / np.maximum(np.linalg.norm(phi, axis=1), 1)[:, None]])

    expected = points.labels.T @ vectors(points, bow)
    expected += NAME_WEIGHT * (label_texts.labels.T @ vectors(label_texts, label_bow))
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(given[0], expected, atol=1e-5)
