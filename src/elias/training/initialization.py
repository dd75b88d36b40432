"""Initialise clusters, classifiers and edges before the first step of a stage.

A label's classifier points to the mean embedding of its points, so that before any step the model
already is a nearest-centroid classifier. Labels with one or two points, most of them in a long
tail, gain most.

Of several processes the first one clusters and chooses edges; points are embedded by all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from elias.clustering import balanced_clusters, label_centroids
from elias.distributed.data_parallel import cluster_shared, embed_shared
from elias.distributed.sharded_linear import SharedRows
from elias.model.batch_inference import cluster_all, embed_all
from elias.model.elias import EliasModel
from elias.model.graph import LabelGraph, partition_edges
from elias.model.one_vs_all import OneVsAll
from elias.progress import progress
from elias.training.edges import edge_counts, first_logits, strongest_edges

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.config import ResolvedConfig, StageConfig
    from elias.distributed import World
    from elias.model.elias import LinearRows
    from elias.model.encoder import TextEncoder
    from elias.text.tokens import Tokens
    from elias.training.stage import Points


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


@dataclass
class Setup:
    """Makes what stages begin with."""

    config: ResolvedConfig
    encoder: TextEncoder
    points: Points
    """Those to compute from."""
    bow: csr_matrix | None
    """Their bags of words, for the process that clusters."""
    labels_per_point: float
    """Over all points that are trained on."""
    world: World | None = None

    def partition(self, with_encoder: bool) -> NDArray[np.int64]:
        """Return each label's cluster; of several processes the first one clusters."""
        embedding: NDArray[np.float32] | None = None
        world, tokens = self.world, self.points.tokens
        if world is None:
            embedding = embed_all(self.encoder, tokens) if with_encoder else None
            return self._clusters(embedding)
        if with_encoder:
            embedding = world.collect(*embed_shared(world, self.encoder, tokens))
        partition: NDArray[np.int64] = world.tell_array(
            world.first(lambda: self._clusters(embedding))
        )
        return partition

    def _clusters(self, embedding: NDArray[np.float32] | None) -> NDArray[np.int64]:
        """Cluster the labels on bag of words and, if given, on φ as it stands (Eq. 14–15)."""
        if self.config.index.kind == "all":
            return np.zeros(self.points.labels.shape[1], dtype=np.int64)
        assert self.bow is not None
        sparse, dense = label_centroids(self.points.labels, self.bow, embedding)
        return balanced_clusters(
            sparse, dense, self.config.index.n_clusters, self.config.member_seed
        )

    def model(self, partition: NDArray[np.int64]) -> EliasModel:
        """Return a model on the fixed graph of a partition, its classifiers yet to be started."""
        index = self.config.index
        rows = self.rows(len(partition))
        if index.kind == "all":
            return OneVsAll(self.encoder, len(partition), rows)
        edges = partition_edges(torch.from_numpy(partition), index.n_clusters)
        graph = LabelGraph(edges, len(partition), index.beta)
        return EliasModel(self.encoder, graph, index.alpha, rows)

    def rows(self, n_labels: int) -> LinearRows | None:
        """Return classifiers that are shared out, where there are processes to share with."""
        return None if self.world is None else SharedRows(self.world, n_labels, self.encoder.dim)

    def start(
        self, model: EliasModel, stage: StageConfig, partition: NDArray[np.int64] | None
    ) -> None:
        """Give fresh classifiers to the labels and, on a new partition, to the clusters."""
        tokens = self.points.tokens
        if stage.first_classifiers == "random":
            if self.world is not None and partition is not None:
                model.labels.reset()  # as one process does when it makes them
            model.labels.reset(self._prior())
            return
        if self.world is None:
            model.labels.reset(self._prior())
            found = find_centroids(self.points.labels, embed_all(self.encoder, tokens))
        else:
            found = find_shared_centroids(self.world, self.points.labels, self.encoder, tokens)
        point_at(model.labels, found.directions, found, self._prior())
        if partition is not None:
            n_clusters = model.graph.n_clusters
            clusters = cluster_directions(found, partition, n_clusters, self.world)
            point_at(model.clusters, clusters, found, 0.0)

    def link(
        self,
        model: EliasModel,
        partition: NDArray[np.int64],
        stage: StageConfig,
        position: int,
    ) -> EliasModel:
        """Return the model with a learned graph, its edges from where the points go (Eq. 9–10)."""
        index = self.config.index
        tokens, world = self.points.tokens, self.world
        if world is None:
            walked = cluster_all(model, tokens, index.beam_size)
            edges, logits = self._edges(model, walked, partition, position)
        else:
            gone = cluster_shared(world, model, tokens, index.beam_size)
            found = world.first(lambda: self._edges(model, gone, partition, position))
            edges, logits = (world.tell_array(part) for part in found or (None, None))
        model.graph = LabelGraph(
            torch.from_numpy(edges),
            model.n_labels,
            index.beta,
            edge_logits=torch.from_numpy(logits),
        )
        if not stage.keep_labels:
            self.start(model, stage, None)
        return model

    def _edges(
        self,
        model: EliasModel,
        walked: tuple[NDArray[np.int64], NDArray[np.float32]] | None,
        partition: NDArray[np.int64],
        position: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the edges of the learned graph and their first logits (C, κ each)."""
        index = self.config.index
        assert walked is not None
        generator = torch.Generator().manual_seed(self.config.member_seed * 1000 + position)
        with progress("Choosing edges", 3) as advance:
            counts = edge_counts(
                *walked,
                self.points.labels,
                partition,
                model.graph.n_clusters,
                index.edges_per_cluster,
            )
            advance()
            edges = strongest_edges(counts, partition, index.edges_per_cluster)
            advance()
            logits = first_logits(edges, counts, index.edge_init, generator)
            advance()
        return edges, logits.numpy()

    def _prior(self) -> float:
        """Return the log of the share of relevant labels in a shortlist: where biases start."""
        per_point = max(self.labels_per_point, 1e-3)
        return min(0.0, math.log(per_point / self.config.index.train_shortlist))
