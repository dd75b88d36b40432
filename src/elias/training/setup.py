"""What a stage begins with: clusters, classifiers and edges, computed from points before any step.

Of several processes the first one clusters and chooses edges; points are embedded by all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from elias.clustering import balanced_clusters, label_centroids
from elias.distributed.rows import SharedRows
from elias.distributed.sharing import cluster_shared, embed_shared
from elias.model.elias import EliasModel
from elias.model.graph import LabelGraph, partition_edges
from elias.model.inference import cluster_all, embed_all
from elias.model.one_vs_all import OneVsAll
from elias.progress import progress
from elias.training.edges import edge_counts, first_logits, strongest_edges
from elias.training.starts import (
    cluster_directions,
    find_centroids,
    find_shared_centroids,
    point_at,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.config import EliasConfig, StageConfig
    from elias.distributed import World
    from elias.model.elias import LinearRows
    from elias.model.encoder import TextEncoder
    from elias.training.loop import Points


@dataclass
class Setup:
    """Makes what stages begin with."""

    config: EliasConfig
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
        n_clusters = self.config.index.n_clusters
        assert n_clusters is not None
        return balanced_clusters(sparse, dense, n_clusters, self.config.member_seed)

    def model(self, partition: NDArray[np.int64]) -> EliasModel:
        """Return a model on the fixed graph of a partition, its classifiers yet to be started."""
        index = self.config.index
        rows = self.rows(len(partition))
        if index.kind == "all":
            return OneVsAll(self.encoder, len(partition), rows)
        assert index.n_clusters is not None
        assert index.beta is not None
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
        assert index.beam_size is not None
        assert index.beta is not None
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
        assert index.edges_per_cluster is not None
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
        assert self.config.index.train_shortlist is not None
        return min(0.0, math.log(per_point / self.config.index.train_shortlist))
