"""Where classifiers start: at the centroid of what they must find, in the space of φ.

A label's classifier points to the mean embedding of its points, so that before any step the model
already is a nearest-centroid classifier. Labels with one or two points, most of them in a long
tail, gain most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from elias.clustering import label_centroids

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.model.elias import LinearRows

SCALE = 10.0  # logits between a text and its own centroid's direction


class Centroids(NamedTuple):
    """The directions of labels in the space of φ."""

    directions: NDArray[np.float32]
    """(L, D) unit vectors; zero for a label without points."""
    center: NDArray[np.float32]
    """(D,) the mean embedding, from which directions are taken."""
    spread: float
    """The typical distance of an embedding from the centre."""


def find_centroids(labels: csr_matrix, embedding: NDArray[np.float32]) -> Centroids:
    """Return the labels' directions from the mean embedding of all points."""
    center = embedding.mean(axis=0)
    away = embedding - center
    spread = float(np.linalg.norm(away, axis=1).mean())
    nothing = labels[:, :0]  # no bag of words here: φ alone
    _, directions = label_centroids(labels, nothing, away)
    return Centroids(directions, center, max(spread, 1e-6))


@torch.no_grad()
def point_at(
    rows: LinearRows, directions: NDArray[np.float32], found: Centroids, bias: float
) -> None:
    """Set each row so that its logit is ``SCALE`` · cosine + ``bias`` for a typical embedding."""
    weight = directions * np.float32(SCALE / found.spread)
    offset = bias - weight @ found.center
    rows.weight.copy_(torch.from_numpy(weight))
    rows.bias.copy_(torch.from_numpy(offset.astype(np.float32)))


def cluster_directions(
    found: Centroids, partition: NDArray[np.int64], n_clusters: int
) -> NDArray[np.float32]:
    """Return the unit mean direction of each cluster's labels (C, D)."""
    sums = np.zeros((n_clusters, found.directions.shape[1]), dtype=np.float32)
    np.add.at(sums, partition, found.directions)
    length = np.linalg.norm(sums, axis=1, keepdims=True)
    directions: NDArray[np.float32] = sums / np.maximum(length, 1e-12)
    return directions
