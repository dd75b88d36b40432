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
from elias.distributed.sharing import embed_shared

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.data.tokens import Tokens
    from elias.distributed import World
    from elias.model.elias import LinearRows
    from elias.model.encoder import TextEncoder

_PIECE_POINTS = 2**16  # whose embeddings travel at a time
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


def find_shared_centroids(
    world: World, labels: csr_matrix, encoder: TextEncoder, tokens: Tokens
) -> Centroids:
    """Return what `find_centroids` does, of the labels whose classifiers this process has.

    Each process embeds its share of the points; the embeddings go to all, a piece at a time, so
    that none ever has them all at once.
    """
    own, counts = embed_shared(world, encoder, tokens)
    total = float(len(tokens))
    center = (world.sum_array(own.sum(axis=0, dtype=np.float64)) / total).astype(np.float32)
    away = own - center
    length = np.linalg.norm(away, axis=1)
    spread = float(world.sum_array(length.sum(dtype=np.float64, keepdims=True))[0] / total)
    away /= np.maximum(length, 1e-12)[:, None]
    to_points = labels.tocsc()[:, world.rank :: world.size].T.tocsr()
    sums = np.zeros((to_points.shape[0], encoder.dim), dtype=np.float32)
    first = 0
    for owner, n_points in enumerate(counts):
        for start in range(0, n_points, _PIECE_POINTS):
            piece = world.copy_of(away[start : start + _PIECE_POINTS], owner)
            ones = to_points[:, first + start : first + start + len(piece)]
            ones.data = np.ones_like(ones.data, dtype=np.float32)
            sums += ones @ piece
        first += n_points
    return Centroids(_unit(sums), center, max(spread, 1e-6))


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
    found: Centroids,
    partition: NDArray[np.int64],
    n_clusters: int,
    world: World | None = None,
) -> NDArray[np.float32]:
    """Return the unit mean direction of each cluster's labels (C, D), over all processes."""
    sums = np.zeros((n_clusters, found.directions.shape[1]), dtype=np.float32)
    if world is None:
        np.add.at(sums, partition, found.directions)
    else:
        np.add.at(sums, partition[world.rank :: world.size], found.directions)
        sums = world.sum_array(sums)
    return _unit(sums)


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    directions: NDArray[np.float32] = rows / np.maximum(length, 1e-12)
    return directions
