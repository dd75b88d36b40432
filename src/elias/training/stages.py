"""The sequence of stages: cluster, train with the fixed graph, link, train with the learned one."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from elias.clustering import balanced_clusters, label_centroids
from elias.errors import ConfigError
from elias.kernels.device import has_triton
from elias.model.elias import EliasModel
from elias.model.graph import LabelGraph, partition_edges
from elias.model.inference import cluster_all, embed_all
from elias.model.one_vs_all import OneVsAll
from elias.progress import progress
from elias.training.edges import edge_counts, first_logits, strongest_edges
from elias.training.loop import EpochReport, Points, StageLoop
from elias.training.starts import cluster_directions, find_centroids, point_at

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.config import EliasConfig, StageConfig
    from elias.model.encoder import TextEncoder

logger = logging.getLogger(__name__)


@dataclass
class StageSequence:
    """Everything the stages share; `run` goes through them and returns the model."""

    config: EliasConfig
    encoder: TextEncoder
    points: Points
    bow: csr_matrix
    device: torch.device
    validate: Callable[[EliasModel], dict[str, float]] | None
    report_epoch: Callable[[EpochReport], None]
    report_stage: Callable[[StageConfig, EliasModel, int], None]
    timed: Callable[[str], AbstractContextManager[None]]
    """Notes how long a step of this name takes."""

    def run(self, init_from: EliasModel | None = None) -> EliasModel:
        """Train all stages in order, from scratch or from a model over the same labels.

        A model to start from goes on where it is: with its classifiers and clusters, and, if it
        has learned a graph, from the first stage that learns one.
        """
        self._check_storage()
        first_encoder = {name: t.clone() for name, t in self.encoder.state_dict().items()}
        self.encoder.to(self.device)
        self.encoder.prepare(self.device)
        model = init_from
        partition = self._partition_of(init_from)
        first = self._first_stage(init_from)
        self._warn_of_unused(first, init_from)
        for position, stage in list(enumerate(self.config.stages))[first:]:
            if stage.learn_graph:
                model = self._learned(model, partition, stage, position)
            else:
                fresh = partition is None or stage.cluster_with_encoder
                if partition is None or fresh:
                    with self.timed("clusters"):
                        partition = self._partition(stage.cluster_with_encoder)
                if not stage.keep_encoder:
                    self.encoder.load_state_dict(first_encoder)
                keep_labels = stage.keep_labels or model is init_from
                model = self._fixed(model, partition, stage, fresh, keep_labels=keep_labels)
            if self.config.index.label_storage == "compact":
                model.compact()
            model.to(self.device)
            with self.timed(stage.name):
                best_epoch = self._loop(model, stage, position).run()
            self.report_stage(stage, model, best_epoch)
        assert model is not None
        model.labels.float()  # whatever it was trained in
        return model

    def _check_storage(self) -> None:
        index = self.config.index
        by_kernels = self.device.type == "cuda" and has_triton()
        if index.label_storage == "compact" and index.kind == "graph" and not by_kernels:
            raise ConfigError(
                "index.label_storage is 'compact', which with a graph takes a GPU and Triton; set "
                "it to 'full', or train with --device cuda"
            )

    def _first_stage(self, init_from: EliasModel | None) -> int:
        """Return the position of the stage to begin with."""
        if init_from is None or not init_from.graph.learned:
            return 0
        learning = [i for i, stage in enumerate(self.config.stages) if stage.learn_graph]
        if not learning or learning[0] == 0:
            return 0
        left_out = ", ".join(stage.name for stage in self.config.stages[: learning[0]])
        logger.info("the model to start from has learned its graph: %s is left out", left_out)
        return learning[0]

    def _warn_of_unused(self, first: int, init_from: EliasModel | None) -> None:
        """Name the settings that a stage which learns the graph has no use for."""
        for stage in self.config.stages[first:]:
            given = {"keep_encoder": not stage.keep_encoder}
            given["cluster_with_encoder"] = stage.cluster_with_encoder
            unused = [f"stages.{stage.name}.{key}" for key, is_set in given.items() if is_set]
            if stage.learn_graph and unused:
                logger.warning(
                    "%s: no effect, since a stage that learns the graph goes on with the encoder "
                    "and the clusters before it",
                    ", ".join(unused),
                )
        if init_from is None or not self.config.stages[first].learn_graph:
            return
        kept = {"alpha": init_from.alpha}
        if init_from.graph.learned:
            n_clusters, n_edges = init_from.graph.edge_labels.shape
            kept |= {"n_clusters": n_clusters, "edges_per_cluster": n_edges}
            kept["beta"] = init_from.graph.beta
        differ = [key for key, value in kept.items() if getattr(self.config.index, key) != value]
        if differ:
            logger.warning(
                "%s: no effect, since the model to start from goes on with its own index (%s)",
                ", ".join(f"index.{key}" for key in differ),
                ", ".join(f"{kept[key]:g}" for key in differ),
            )

    def _partition_of(self, model: EliasModel | None) -> NDArray[np.int64] | None:
        """Return the fixed partition of a model to start from, if it has one of the right size."""
        if model is None or model.graph.learned:
            return None
        if isinstance(model, OneVsAll) != (self.config.index.kind == "all"):
            return None
        if model.graph.n_clusters != self.config.index.n_clusters:
            return None
        return model.graph.partition().cpu().numpy()

    def _learned(
        self,
        model: EliasModel | None,
        partition: NDArray[np.int64] | None,
        stage: StageConfig,
        position: int,
    ) -> EliasModel:
        if model is not None and model.graph.learned:
            return model
        if model is None or partition is None:
            raise ConfigError(
                f"stages.{stage.name}.learn_graph: the first stage needs the fixed graph, or a "
                "model with a learned one to start from"
            )
        with self.timed("edges"):
            return self._linked(model, partition, stage, position)

    def _loop(self, model: EliasModel, stage: StageConfig, position: int) -> StageLoop:
        return StageLoop(
            model=model,
            stage=stage,
            config=self.config,
            points=self.points,
            rng=np.random.default_rng([self.config.member_seed, position]),
            validate=self.validate,
            report=self.report_epoch,
        )

    def _partition(self, with_encoder: bool) -> NDArray[np.int64]:
        """Cluster the labels on bag of words and, if wanted, on φ as it stands (Eq. 14–15)."""
        if self.config.index.kind == "all":
            return np.zeros(self.points.labels.shape[1], dtype=np.int64)
        embedding = embed_all(self.encoder, self.points.tokens) if with_encoder else None
        sparse, dense = label_centroids(self.points.labels, self.bow, embedding)
        n_clusters = self.config.index.n_clusters
        assert n_clusters is not None
        return balanced_clusters(sparse, dense, n_clusters, self.config.member_seed)

    def _fixed(
        self,
        before: EliasModel | None,
        partition: NDArray[np.int64],
        stage: StageConfig,
        fresh_clusters: bool,
        *,
        keep_labels: bool,
    ) -> EliasModel:
        """Return a model on the partition, with what the stage keeps of the one before."""
        model = self._untrained(partition)
        self._start(model, stage, partition)
        if before is not None and not fresh_clusters:
            model.clusters = before.clusters
        if before is not None and keep_labels:
            model.labels = before.labels
        return model

    def _untrained(self, partition: NDArray[np.int64]) -> EliasModel:
        index = self.config.index
        if index.kind == "all":
            return OneVsAll(self.encoder, len(partition))
        assert index.n_clusters is not None
        assert index.beta is not None
        edges = partition_edges(torch.from_numpy(partition), index.n_clusters)
        graph = LabelGraph(edges, len(partition), index.beta)
        return EliasModel(self.encoder, graph, index.alpha)

    def _start(
        self, model: EliasModel, stage: StageConfig, partition: NDArray[np.int64] | None
    ) -> None:
        """Give fresh classifiers to the labels and, on a new partition, to the clusters."""
        model.labels.reset(self._prior())
        if stage.first_classifiers == "random":
            return
        found = find_centroids(self.points.labels, embed_all(self.encoder, self.points.tokens))
        point_at(model.labels, found.directions, found, self._prior())
        if partition is not None:
            clusters = cluster_directions(found, partition, model.graph.n_clusters)
            point_at(model.clusters, clusters, found, 0.0)

    def _linked(
        self,
        model: EliasModel,
        partition: NDArray[np.int64],
        stage: StageConfig,
        position: int,
    ) -> EliasModel:
        """Return the model with a learned graph, its edges from where the points go (Eq. 9–10)."""
        index = self.config.index
        assert index.beam_size is not None
        assert index.edges_per_cluster is not None
        beams, scores = cluster_all(model, self.points.tokens, index.beam_size)
        generator = torch.Generator().manual_seed(self.config.member_seed * 1000 + position)
        with progress("Choosing edges", 3) as advance:
            counts = edge_counts(beams, scores, self.points.labels, model.graph.n_clusters)
            advance()
            edges = strongest_edges(counts, partition, index.edges_per_cluster)
            advance()
            logits = first_logits(edges, counts, index.edge_init, generator)
            advance()
        assert index.beta is not None
        graph = LabelGraph(torch.from_numpy(edges), model.n_labels, index.beta, edge_logits=logits)
        model.graph = graph
        if not stage.keep_labels:
            self._start(model, stage, None)
        return model

    def _prior(self) -> float:
        """Return the log of the share of relevant labels in a shortlist: where biases start."""
        per_point = max(self.points.labels.nnz / max(len(self.points.tokens), 1), 1e-3)
        assert self.config.index.shortlist_size is not None
        return min(0.0, math.log(per_point / self.config.index.shortlist_size))
