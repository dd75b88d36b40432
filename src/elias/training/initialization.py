"""Initialise the encoder before training, and clusters, classifiers and edges before a stage.

A label's classifier starts at the mean embedding of its points, so that the model is a
nearest-centroid classifier before the first step. This helps most for labels with one or two
points, which are the majority in a long tail.

With several processes, each embeds a share of the points; rank 0 clusters labels and chooses edges.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, vstack
from torch import Tensor

from elias.clustering import balanced_clusters, label_centroids
from elias.config import ResolvedConfig, ResolvedEncoder, ResolvedStage
from elias.distributed import SingleProcess, World
from elias.distributed.sharded_linear import ShardedRows
from elias.inference.predictor import Elias
from elias.kernels.cpu.cooccurrence import strongest_counts
from elias.model.batch_inference import cluster_all, embed_all
from elias.model.elias import EliasModel, LinearRows
from elias.model.encoder import BagEncoder, TextEncoder, build_encoder
from elias.model.graph import LabelGraph, partition_edges, relabel_graph
from elias.model.one_vs_all import OneVsAll
from elias.progress import progress
from elias.rerank.sparse_ranker import unit_embedding
from elias.text.tokens import Tokens
from elias.training.stage import Points

SCALE = 10.0
"""Initial logit (without bias) of an embedding that lies in the direction of a label's centroid."""
MIN_SPREAD = 0.1
"""Minimum of `Centroids.spread` when weights are scaled, as a share of the distance of the center
from 0. Long texts with the same words have nearly equal embeddings. Without a minimum, small
differences between them would give huge logits."""
NAME_WEIGHT = 2
"""Weight of a label text in the centroid of its label. A point has weight 1."""
INDEXED_POINTS = 10
"""When a model is trained further, a new label gets edges only if it has at least this many points.
Labels with fewer points are predicted better by their names, with their points as examples."""
_CHUNK_POINTS = 2**16  # number of points whose embeddings are broadcast at a time


def initial_encoder(
    config: ResolvedEncoder,
    texts: Sequence[str] | None,
    features: csr_matrix | None,
    init_from: Elias | None,
    world: World = SingleProcess(),
) -> TextEncoder:
    """Return a copy of the encoder of ``init_from``, or a new encoder if ``init_from`` is None.

    For a bag of words, rank 0 builds the vocabulary and broadcasts it.
    """
    if init_from is not None:
        return copy.deepcopy(init_from.model.encoder)
    n_features = None if features is None else features.shape[1]
    build = partial(build_encoder, config, texts, n_features)
    if config.kind != "bag" or texts is None:
        return world.rank0_first(build)
    encoder = world.run_on_rank0(build)
    featurizer = world.broadcast(encoder.featurizer if isinstance(encoder, BagEncoder) else None)
    if encoder is not None:
        return encoder
    assert featurizer is not None
    return BagEncoder(config, featurizer, featurizer.n_features)


class Centroids(NamedTuple):
    """The direction from the center (the mean of all embeddings) to each label's centroid."""

    directions: NDArray[np.float32]
    """(L, D) unit vectors, or zeros for a label without points."""
    center: NDArray[np.float32]
    """(D,) mean embedding of all points, from which directions are measured."""
    spread: float
    """The mean distance of an embedding from the center."""


def find_centroids(labels: csr_matrix, embedding: NDArray[np.float32]) -> Centroids:
    """Return the direction of each label's centroid from the mean embedding of all points."""
    center = embedding.mean(axis=0)
    away = embedding - center
    spread = float(np.linalg.norm(away, axis=1).mean())
    no_words = labels[:, :0]  # use φ alone
    _, directions = label_centroids(labels, no_words, away)
    return Centroids(directions, center, spread)


def find_sharded_centroids(
    labels: csr_matrix, embedding: NDArray[np.float32], world: World
) -> Centroids:
    """Return the result of `find_centroids` for the labels whose rows this process owns.

    ``embedding`` has the embeddings of this process's share of the points. They are broadcast in
    chunks, so that no process ever holds the embeddings of all points.
    """
    n_points = labels.shape[0]
    center = world.sum_array(embedding.sum(axis=0, dtype=np.float64)) / n_points
    center = center.astype(np.float32)
    away = embedding - center
    length = np.linalg.norm(away, axis=1)
    spread = float(world.sum_array(length.sum(dtype=np.float64, keepdims=True))[0] / n_points)
    away /= np.maximum(length, 1e-12)[:, None]
    to_points = labels.tocsc()[:, world.rank :: world.size].T.tocsr()
    sums = np.zeros((to_points.shape[0], embedding.shape[1]), dtype=np.float32)
    share = world.max_share(n_points)
    for owner, first in enumerate(range(0, n_points, share)):
        for start in range(0, min(share, n_points - first), _CHUNK_POINTS):
            chunk = world.broadcast(away[start : start + _CHUNK_POINTS], owner)
            ones = to_points[:, first + start : first + start + len(chunk)]
            ones.data = np.ones_like(ones.data, dtype=np.float32)
            sums += ones @ chunk
    return Centroids(unit_embedding(sums), center, spread)


@torch.no_grad()
def init_from_centroids(
    rows: LinearRows, directions: NDArray[np.float32], centroids: Centroids, bias: float
) -> None:
    """Set each row of weights to its scaled direction, so that the logit at the center is ``bias``.

    An embedding at the mean distance from the center has the logit ``SCALE`` · cosine + ``bias``.
    The cosine compares two directions: that of the embedding, seen from the center, and that of the
    row.
    """
    least = MIN_SPREAD * float(np.linalg.norm(centroids.center))
    weight = directions * np.float32(SCALE / max(centroids.spread, least, 1e-6))
    offset = bias - weight @ centroids.center
    rows.weight.copy_(torch.from_numpy(weight))
    rows.bias.copy_(torch.from_numpy(offset.astype(np.float32)))


def cluster_directions(
    directions: NDArray[np.float32],
    partition: NDArray[np.int64],
    n_clusters: int,
    world: World = SingleProcess(),
) -> NDArray[np.float32]:
    """Return the mean direction of each cluster's labels (C, D), as unit vectors."""
    sums = np.zeros((n_clusters, directions.shape[1]), dtype=np.float32)
    np.add.at(sums, partition[world.rank :: world.size], directions)
    return unit_embedding(world.sum_array(sums))


def build_model(
    config: ResolvedConfig,
    encoder: TextEncoder,
    n_labels: int,
    partition: NDArray[np.int64] | None,
    rows: LinearRows | None = None,
) -> EliasModel:
    """Return an untrained model whose fixed graph is a partition of the labels into clusters.

    If ``partition`` is None, return a one-vs-all model.
    """
    if partition is None:
        return OneVsAll(encoder, n_labels, rows)
    index = config.index
    edges = partition_edges(torch.from_numpy(partition), index.n_clusters)
    return EliasModel(encoder, LabelGraph(edges, n_labels, index.beta), index.alpha, rows)


@dataclass
class StageInitializer:
    """Initialiser of the clusters, classifiers and edges of stages."""

    config: ResolvedConfig
    encoder: TextEncoder
    points: Points
    """The points used for initialisation."""
    bow: csr_matrix | None
    """Bags of words of ``points`` on rank 0; None on other ranks."""
    labels_per_point: float
    """Mean number of labels of a training point."""
    world: World = SingleProcess()
    label_texts: Points | None = None
    """Label texts that count as `NAME_WEIGHT` points of their label in centroids, if any."""
    label_bow: csr_matrix | None = None
    """Bags of words of ``label_texts`` on rank 0; None on other ranks."""

    @property
    def _own_tokens(self) -> Tokens:
        """Return this process's share of the tokenized texts."""
        return self.points.tokens.part(self.world.share(len(self.points.tokens)))

    def cluster_labels(self, with_encoder: bool) -> NDArray[np.int64]:
        """Cluster the labels on rank 0, and return each label's cluster on all processes."""
        index, seed = self.config.index, self.config.member_seed
        embedding = self._embed_with_texts() if with_encoder else None

        def cluster() -> NDArray[np.int64]:
            """Cluster the labels by bags of words and, if given, by embeddings (Eq. 14–15)."""
            assert self.bow is not None
            bow, labels = self.bow, self._labels_with_texts()
            if self.label_texts is not None:
                bow = vstack([bow, *[self.label_bow] * NAME_WEIGHT], format="csr")
            sparse, dense = label_centroids(labels, bow, embedding)
            return balanced_clusters(sparse, dense, index.n_clusters, seed)

        return self.world.broadcast_from_rank0(cluster)

    def build_model(self, partition: NDArray[np.int64] | None, stage: ResolvedStage) -> EliasModel:
        """Return the model at the start of a stage that does not learn the graph."""
        n_labels = self.points.labels.shape[1]
        rows = self.label_rows(n_labels)
        model = build_model(self.config, self.encoder, n_labels, partition, rows)
        self._init_classifiers(model, stage, partition)
        return model

    def label_rows(self, n_labels: int) -> LinearRows | None:
        """Return this process's rows of W_L, or None for a single process, which has all rows."""
        if not self.world.shards_labels:
            return None
        return ShardedRows(self.world, n_labels, self.encoder.dim)

    def _init_classifiers(
        self, model: EliasModel, stage: ResolvedStage, partition: NDArray[np.int64] | None
    ) -> None:
        """Initialise the classifiers of labels and, if a partition is given, of clusters."""
        if stage.first_classifiers == "random":
            if self.world.shards_labels and partition is not None:
                model.labels.reset()  # a single process also draws in LinearRows.__init__
            model.labels.reset(self._prior(stage))
            return
        if self.world.shards_labels:
            tokens, labels = self._points_and_label_texts()
            embedding = embed_all(self.encoder, tokens.part(self.world.share(len(tokens))))
            centroids = find_sharded_centroids(labels, embedding, self.world)
        else:
            model.labels.reset(self._prior(stage))
            centroids = find_centroids(self._labels_with_texts(), self._embed_with_texts())
        init_from_centroids(model.labels, centroids.directions, centroids, self._prior(stage))
        if partition is not None:
            clusters = cluster_directions(
                centroids.directions, partition, model.graph.n_clusters, self.world
            )
            init_from_centroids(model.clusters, clusters, centroids, 0.0)

    def _points_and_label_texts(self) -> Points:
        """Return the points, followed by `NAME_WEIGHT` copies of the label texts."""
        if self.label_texts is None:
            return self.points
        n_points, n_texts = len(self.points.tokens), len(self.label_texts.tokens)
        copies = np.tile(np.arange(n_points, n_points + n_texts), NAME_WEIGHT)
        rows = np.concatenate([np.arange(n_points), copies])
        return self.points.take_with(self.label_texts, rows)

    def _labels_with_texts(self) -> csr_matrix:
        """Return the labels of `_points_and_label_texts`."""
        if self.label_texts is None:
            return self.points.labels
        copies = [self.label_texts.labels] * NAME_WEIGHT
        return vstack([self.points.labels, *copies], format="csr")

    def _embed_with_texts(self) -> NDArray[np.float32]:
        """Return φ of `_points_and_label_texts` on rank 0, and no rows on other ranks.

        The copies of a label text are encoded once.
        """
        tokens = self.points.tokens
        if self.label_texts is not None:
            tokens = Tokens.concatenate(tokens, self.label_texts.tokens)
        shard = tokens.part(self.world.share(len(tokens)))
        embedding = self.world.gather_rows(embed_all(self.encoder, shard))
        if self.label_texts is None:
            return embedding
        copies = [embedding[len(self.points.tokens) :]] * (NAME_WEIGHT - 1)
        return np.concatenate([embedding, *copies])

    def init_learned_graph(
        self, model: EliasModel, partition: NDArray[np.int64], stage: ResolvedStage, position: int
    ) -> None:
        """Replace the graph by one with learnable edges, chosen by co-occurrence (Eq. 9–10)."""
        index, world = self.config.index, self.world
        n_clusters, n_edges = model.graph.n_clusters, index.edges_per_cluster
        ranked = cluster_all(model, self._own_tokens, index.beam_size)
        beams, scores = (world.gather_rows(part) for part in ranked)

        def choose_edges() -> tuple[NDArray[np.int64], Tensor]:
            """Return the edges of the learned graph and their initial logits, each (C, κ)."""
            generator = torch.Generator().manual_seed(self.config.member_seed * 1000 + position)
            with progress("Choosing edges", 3) as advance:
                labels = self.points.labels
                counts = edge_counts(beams, scores, labels, partition, n_clusters, n_edges)
                advance()
                edges = strongest_edges(counts, partition, n_edges)
                advance()
                logits = first_logits(edges, counts, index.edge_init, generator)
                advance()
            return edges, logits

        edges, logits = world.broadcast_from_rank0(choose_edges)
        edge_labels = torch.from_numpy(edges)
        model.graph = LabelGraph(edge_labels, model.n_labels, index.beta, edge_logits=logits)
        if not stage.keep_labels:
            self._init_classifiers(model, stage, None)

    @torch.no_grad()
    def add_labels(self, model: EliasModel, is_new: NDArray[np.bool_]) -> EliasModel:
        """Return a trained model with classifiers and edges for new labels.

        The classifier of a new label points to the centroid of the label. It has the mean length
        and the mean logit of the other classifiers. A new label with at least `INDEXED_POINTS`
        points gets edges from the clusters of its points, as many as other labels have on average.
        New labels with fewer points get no edges.

        Args:
            model: The trained model. Label i of the model is label i of the training points.
            is_new: (L,) mask of the new labels. A label of the model that is in the mask is
                reinitialised.
        """
        world, device, n_labels = self.world, model.labels.weight.device, len(is_new)
        new, known = np.flatnonzero(is_new), torch.from_numpy(~is_new[: model.n_labels])
        labels = self.points.labels.tocsc()[:, new].tocsr()
        embedding = world.gather_rows(embed_all(self.encoder, self._own_tokens))
        old_weight, old_bias = model.labels.weight.float().cpu(), model.labels.bias.float().cpu()

        def new_rows() -> tuple[Tensor, Tensor]:
            centroids = find_centroids(labels, embedding)
            center, others = torch.from_numpy(centroids.center), old_weight[known]
            weight = torch.from_numpy(centroids.directions) * others.norm(dim=1).mean()
            return weight, (others @ center + old_bias[known]).mean() - weight @ center

        rows = LinearRows(n_labels, self.encoder.dim)
        rows.weight[: model.n_labels], rows.bias[: model.n_labels] = old_weight, old_bias
        rows.weight[new], rows.bias[new] = world.broadcast_from_rank0(new_rows)
        if isinstance(model, OneVsAll):
            return OneVsAll(model.encoder, n_labels, rows).to(device)
        ranked = cluster_all(model, self._own_tokens, self.config.index.beam_size)
        beams, scores = (world.gather_rows(part) for part in ranked)
        n_points = np.bincount(self.points.labels.indices, minlength=n_labels)
        indexed = np.flatnonzero(is_new & (n_points >= INDEXED_POINTS))

        def counts() -> csr_matrix:
            """Return the `edge_counts` of the new labels that have enough points for the index."""
            indexed_labels = self.points.labels.tocsc()[:, indexed].tocsr()
            any_cluster = np.zeros(len(indexed), dtype=np.int64)
            n_clusters, n_edges = model.graph.edge_labels.shape
            return edge_counts(beams, scores, indexed_labels, any_cluster, n_clusters, n_edges)

        new_ids = torch.arange(model.n_labels).masked_fill(~known, -1)
        graph = relabel_graph(model.graph, new_ids, n_labels)
        if len(indexed):
            graph = add_edges(graph, world.broadcast_from_rank0(counts), indexed)
        model.graph, model.labels = graph.to(device), rows.to(device)
        return model

    def _prior(self, stage: ResolvedStage) -> float:
        """Return the initial bias: the log of the share of scored labels that are positive."""
        n_scored = self.config.index.train_shortlist
        if stage.score_all:
            n_scored = self.points.labels.shape[1]
        return min(0.0, math.log(max(self.labels_per_point, 1e-3) / n_scored))


def edge_counts(
    beams: NDArray[np.int64],
    scores: NDArray[np.float32],
    labels: csr_matrix,
    partition: NDArray[np.int64],
    n_clusters: int,
    n_edges: int,
) -> csr_matrix:
    """Return how often clusters and labels occur together: A' = MᵀY (C, L), Eq. 9.

    M has the scores of each point's best clusters, and Y its labels. With millions of labels the
    full matrix would not fit in memory. The result therefore has, for each cluster, only the
    ``n_edges`` labels with the highest counts and the labels that ``partition`` assigns to it.
    """
    n_points, width = beams.shape
    offsets = np.arange(n_points + 1, dtype=np.int64) * width
    to_clusters = csr_matrix((scores.ravel(), beams.ravel(), offsets), shape=(n_points, n_clusters))
    return strongest_counts(to_clusters.T.tocsr(), labels, partition, n_edges)


def add_edges(graph: LabelGraph, counts: csr_matrix, labels: NDArray[np.int64]) -> LabelGraph:
    """Return the graph with edges to new labels, in additional slots.

    A new label gets edges from the clusters with its highest counts: as many edges as other labels
    have on average, or one in a fixed graph. An edge starts with the mean logit of its cluster.

    Args:
        graph: The graph, whose edges are kept.
        counts: (C, new labels) A' (Eq. 9).
        labels: The id of each new label.
    """
    n_linked = len(torch.unique(graph.edge_labels)) - 1  # one is padding
    per_label = max(1, round(graph.n_edges / max(1, n_linked))) if graph.learned else 1
    entries = counts.tocoo()
    cluster, label, count = entries.row, entries.col, entries.data
    order = np.lexsort((cluster, -count, label))
    best = np.arange(len(order)) - np.searchsorted(label[order], label[order]) < per_label
    order = order[best]
    order = order[np.lexsort((label[order], cluster[order]))]
    cluster, label = cluster[order], label[order]
    slot = np.arange(len(order)) - np.searchsorted(cluster, cluster)
    new = torch.full((graph.n_clusters, int(slot.max(initial=-1)) + 1), graph.n_labels)
    new[cluster, slot] = torch.from_numpy(labels[label])
    old, logits = graph.edge_labels.cpu(), None
    if graph.learned:
        known, exists = graph.edge_logits.detach().float().cpu(), old < graph.n_labels
        mean = (known * exists).sum(dim=1) / exists.sum(dim=1).clamp(min=1)
        logits = torch.cat([known, mean.unsqueeze(1).expand(new.shape)], dim=1)
    return LabelGraph(
        torch.cat([old, new], dim=1),
        graph.n_labels,
        graph.beta,
        edge_logits=logits,
        removed_log=graph.removed_log,
    )


def strongest_edges(
    counts: csr_matrix, partition: NDArray[np.int64], edges_per_cluster: int
) -> NDArray[np.int64]:
    """Return the κ labels with the highest counts in each cluster (C, κ), padded with L.

    To make every label reachable, a label that no cluster selects gets an edge from its cluster in
    the partition. The edge replaces the weakest one of that cluster.
    """
    n_clusters, n_labels = counts.shape
    order = np.argsort(partition, kind="stable")
    borders = np.searchsorted(partition[order], np.arange(n_clusters + 1))
    required = np.zeros(n_labels, dtype=bool)
    edges = np.full((n_clusters, edges_per_cluster), n_labels, dtype=np.int64)
    outdated = np.ones(n_clusters, dtype=bool)
    while outdated.any():
        for cluster in np.flatnonzero(outdated).tolist():
            members = order[borders[cluster] : borders[cluster + 1]]
            chosen = _choose(counts, cluster, members[required[members]], edges_per_cluster)
            edges[cluster] = n_labels
            edges[cluster, : len(chosen)] = chosen
        linked = np.zeros(n_labels + 1, dtype=bool)  # the last entry is for padding
        linked[edges] = True
        outdated[:] = False
        outdated[partition[~linked[:-1]]] = True
        required |= ~linked[:-1]
    return edges


def _choose(
    counts: csr_matrix, cluster: int, required: NDArray[np.int64], n_edges: int
) -> NDArray[np.int64]:
    """Return ``n_edges`` labels of a cluster: required ones, then those with the highest counts."""
    begin, end = counts.indptr[cluster], counts.indptr[cluster + 1]
    labels = counts.indices[begin:end].astype(np.int64)
    strength = counts.data[begin:end].astype(np.float64)
    if len(required):
        is_free = ~np.isin(labels, required)
        labels, strength = labels[is_free], strength[is_free]
    order = np.lexsort((labels, -strength))[: max(0, n_edges - len(required))]
    return np.sort(np.concatenate([required, labels[order]]))


def first_logits(
    edges: NDArray[np.int64], counts: csr_matrix, method: str, generator: torch.Generator
) -> Tensor:
    """Return the initial logits of the edges (C, κ).

    They are ½·log(count + 0.1), where count is the entry of ``counts`` for the edge (Eq. 10). If
    ``method`` is ``random``, they are random.
    """
    if method == "random":
        return torch.rand(edges.shape, generator=generator)
    n_clusters, n_labels = counts.shape
    padded = csr_matrix(
        (counts.data, counts.indices, counts.indptr), shape=(n_clusters, n_labels + 1)
    )
    rows = np.repeat(np.arange(n_clusters), edges.shape[1])
    values = np.asarray(padded[rows, edges.ravel()]).reshape(edges.shape)
    return torch.from_numpy((0.5 * np.log(values + 0.1)).astype(np.float32))
