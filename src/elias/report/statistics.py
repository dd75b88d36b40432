"""Compute the numbers behind the figures of the paper.

The edges of a graph are given as a CSR matrix (C, L) of their scores ŝ_{c,ℓ} (Eq. 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csc_matrix, csr_matrix, vstack

from elias.data.corpus import Split
from elias.inference.predict import cached_tokens
from elias.metrics import label_deciles, recall_by_decile, score
from elias.model.batch_inference import embed_all
from elias.model.elias import EliasModel
from elias.model.graph import LabelGraph
from elias.predictions import Predictions
from elias.progress import track
from elias.rerank.reranker import relevant_candidates
from elias.rerank.sparse_ranker import unit_embedding

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

ASSIGNED = 0.25
"""Score above which a label or a point counts as a member of a cluster (§D of the paper)."""
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
N_DECILES = 10
RECALL_AT = 100
CURVE_KS = (*range(1, 10), *range(10, 20, 2), *range(20, 50, 5), *range(50, RECALL_AT + 1, 10))
"""Values of k on the curve of R@k (Fig. 5)."""
THRESHOLDS = np.round(np.arange(0, 1, 0.01), 2)
"""Thresholds on edge scores (Fig. 3 and 7a)."""
MAX_POINTS = 20_000
"""Maximum number of training points that are embedded."""
N_PANELS = 6
MIN_DRAWN = 10
"""Minimum number of sampled points that a label must have to be drawn."""
MAX_CLUSTERS = 5
SPREAD_FREQUENCIES = (10, 30)
"""Minimum and maximum number of points of the labels whose `spread` is compared.

The range is narrow because the spread grows with the number of points.
"""
_DRAWN = 60  # maximum points of a label, and of each of its clusters
_CHUNK = 1024


@torch.no_grad()
def graph_edges(graph: LabelGraph) -> csr_matrix:
    """Return the edges of a graph, without padding."""
    labels = graph.edge_labels.cpu().numpy()
    scores = graph.edge_log_scores().exp().cpu().numpy().astype(np.float64)
    is_edge = labels < graph.n_labels
    ends = np.append(0, is_edge.sum(axis=1).cumsum())
    shape = (graph.n_clusters, graph.n_labels)
    return csr_matrix((scores[is_edge], labels[is_edge], ends), shape=shape)


def ranked_edge_scores(edges: csr_matrix) -> Array:
    """Return the edge scores of each cluster (C, κ), highest first (Fig. 3).

    If a cluster has fewer than κ edges, its row is padded with zeros.
    """
    sizes = np.diff(edges.indptr)
    ranked = np.zeros((len(sizes), max(1, int(sizes.max(initial=0)))))
    ranked[np.arange(ranked.shape[1]) < sizes[:, None]] = edges.data
    return -np.sort(-ranked, axis=1)


def shares_above(scores: Array) -> Array:
    """Return the share of edge scores above each of `THRESHOLDS` (Fig. 3)."""
    below = np.searchsorted(np.sort(scores), THRESHOLDS, side="right")
    shares: Array = (len(scores) - below) / max(len(scores), 1)
    return shares


def stage1_edges_above(edges: csr_matrix, partition: Ints) -> Array:
    """Return the share of stage 1 edges with a score above each threshold (Fig. 7a).

    ``partition`` is the cluster of each label in stage 1 (L,).
    """
    return shares_above(np.asarray(edges[partition, np.arange(len(partition))]).ravel())


def clusters_per_label(
    edges: csr_matrix, frequencies: Ints, thresholds: Sequence[float]
) -> dict[float, Array]:
    """Return the mean number of clusters per label in each decile, by threshold (Fig. 7b).

    The mean of a decile without labels is NaN.
    """
    deciles = label_deciles(frequencies)
    sizes = np.bincount(deciles, minlength=N_DECILES)
    counts = {threshold: (edges > threshold).getnnz(axis=0) for threshold in thresholds}
    with np.errstate(invalid="ignore"):
        return {t: np.bincount(deciles, n, minlength=N_DECILES) / sizes for t, n in counts.items()}


class TrueScores(NamedTuple):
    """Probabilities (or scores) of the true labels of points, by label decile (Fig. 4)."""

    quantiles: Array
    """(10, 5) `QUANTILES` of the probabilities in each decile; NaN if there are none."""
    recall: Array
    """(10,) share of the true labels of each decile that are predicted."""
    pairs: Ints
    """(10,) number of true labels in each decile, counted once per point."""


def true_scores(predictions: Predictions, truth: csr_matrix, frequencies: Ints) -> TrueScores:
    """Summarise the predicted probabilities of true labels by label-frequency decile (Fig. 4).

    Use scores if the model has no probabilities.
    """
    deciles = label_deciles(frequencies)
    hits = relevant_candidates(predictions.ids, truth)  # (n, k)
    values = predictions.scores if predictions.probabilities is None else predictions.probabilities
    hit_deciles, scores = deciles[predictions.ids[hits]], values[hits]
    quantiles = np.full((N_DECILES, len(QUANTILES)), np.nan)
    for decile in np.unique(hit_deciles):
        quantiles[decile] = np.quantile(scores[hit_deciles == decile], QUANTILES)
    pairs = np.bincount(deciles[truth.indices], minlength=N_DECILES)
    counts = np.bincount(hit_deciles, minlength=N_DECILES)
    return TrueScores(quantiles, counts / np.maximum(pairs, 1), pairs)


class Recalls(NamedTuple):
    """Recall by number of predictions and by label decile, in percent (Fig. 5)."""

    ks: list[int]
    curve: Array
    """R@k for each of ``ks``."""
    by_decile: Array
    """(10,) contribution of each decile to R@100. Their sum is R@100."""


def recalls(predictions: Predictions, truth: csr_matrix, frequencies: Ints) -> Recalls:
    """Return recall by number of predictions and by label decile, in percent (Fig. 5)."""
    ks = [k for k in CURVE_KS if k <= max(1, predictions.ids.shape[1])]
    curve = score(predictions, truth, None, [f"R@{k}" for k in ks])
    shares = recall_by_decile(predictions, truth, frequencies, k=RECALL_AT)
    return Recalls(ks, np.array(list(curve.values())), shares)


class PointSample(NamedTuple):
    """A sample of training points with their labels, embeddings and clusters."""

    labels: csr_matrix
    """(n, L) labels of the points."""
    embedding: Floats
    """(n, D) embeddings φ(x)."""
    best: Ints
    """(n,) cluster with the highest score ŝ_c."""
    members: csr_matrix
    """(n, C) clusters with a score ŝ_c above `ASSIGNED`."""


@torch.no_grad()
def embed_sample(model: EliasModel, split: Split, seed: int) -> PointSample:
    """Embed up to `MAX_POINTS` random training points, and find their clusters."""
    if len(split) > MAX_POINTS:
        rows = np.random.default_rng(seed).permutation(len(split))[:MAX_POINTS]
        split = split.take(np.sort(rows))
    embedding = embed_all(model.encoder, cached_tokens(split, model.encoder))
    best, members = [], []
    for chunk in torch.split(torch.from_numpy(embedding), _CHUNK):
        scores = model.unsaturated_log(chunk.to(model.clusters.weight.device))
        best.append(scores.argmax(dim=1).cpu().numpy())
        members.append(csr_matrix((scores > np.log(ASSIGNED)).cpu().numpy()))
    return PointSample(split.labels, embedding, np.concatenate(best), vstack(members, format="csr"))


class LabelMap(NamedTuple):
    """Training points of a label and of its clusters, projected to the plane by t-SNE."""

    label: int
    clusters: tuple[int, ...]
    points: Floats
    """(m, 2) points of the label."""
    cluster_points: tuple[Floats, ...]
    """(m, 2) points of each cluster that do not have the label."""


class LabelMaps(NamedTuple):
    """Maps of labels in several clusters (Fig. 8) and in one cluster (Fig. 9), with spreads."""

    several: tuple[LabelMap, ...]
    one: tuple[LabelMap, ...]
    spreads_several: tuple[float, ...]
    """`spread` of each label in several clusters. The number of points of the label is in the range
    `SPREAD_FREQUENCIES`."""
    spreads_one: tuple[float, ...]
    """`spread` of each label in one cluster, for labels with points in the same range."""


def label_maps(sample: PointSample, edges: csr_matrix, seed: int) -> LabelMaps:
    """Map random labels in several clusters (Fig. 8) and in one cluster (Fig. 9) by t-SNE."""
    assigned = (edges > ASSIGNED).tocsc()
    by_label, by_cluster = sample.labels.tocsc(), sample.members.tocsc()
    n_clusters, n_points = np.diff(assigned.indptr), np.diff(by_label.indptr)
    several, one = (n_clusters > 1) & (n_clusters <= MAX_CLUSTERS), n_clusters == 1
    rng = np.random.default_rng(seed)
    is_drawn = n_points >= MIN_DRAWN
    chosen = [
        np.sort(rng.permutation(np.flatnonzero(is_drawn & mask))[:N_PANELS])
        for mask in (several, one)
    ]
    maps = []
    for label in track(np.concatenate(chosen).tolist(), "t-SNE"):
        clusters = _column_rows(assigned, label).tolist()
        with_label = _column_rows(by_label, label)
        drawn = [np.sort(rng.permutation(with_label)[:_DRAWN])]
        for cluster in clusters:
            others = np.concatenate([with_label, *drawn])
            left = np.setdiff1d(_column_rows(by_cluster, cluster), others)
            drawn.append(np.sort(rng.permutation(left)[:_DRAWN]))
        plane = _tsne(sample.embedding[np.concatenate(drawn)], int(rng.integers(2**31)))
        points, *rest = np.split(plane, np.cumsum([len(rows) for rows in drawn])[:-1])
        maps.append(LabelMap(label, tuple(clusters), points, tuple(rest)))
    low, high = SPREAD_FREQUENCIES
    compared = (n_points >= low) & (n_points <= high)
    spreads = [
        tuple(
            spread(sample.embedding[_column_rows(by_label, label)])
            for label in np.flatnonzero(compared & mask).tolist()
        )
        for mask in (n_clusters > 1, one)
    ]
    n_several = len(chosen[0])
    return LabelMaps(tuple(maps[:n_several]), tuple(maps[n_several:]), *spreads)


def spread(embedding: Floats) -> float:
    """Return the spread of embeddings, 1 - ‖mean of φ/‖φ‖‖.

    It is 0 if all directions are equal, and 1 if they cancel out.
    """
    return float(1 - np.linalg.norm(unit_embedding(embedding).mean(axis=0)))


def _column_rows(matrix: csc_matrix, column: int) -> Ints:
    """Return the rows with an entry in a column."""
    rows: Ints = matrix.indices[matrix.indptr[column] : matrix.indptr[column + 1]]
    return rows


def _tsne(embedding: Floats, seed: int) -> Floats:
    """Project points to the plane (n, 2)."""
    from sklearn.manifold import TSNE  # imported here because it takes a second
    from threadpoolctl import threadpool_limits

    perplexity = min(30.0, max(1.0, (len(embedding) - 1) / 3))
    # principal components need two dimensions, and fail in scikit-learn 1.9.1 if points are equal
    init = "pca" if min(embedding.shape) > 1 and np.ptp(embedding, axis=0).any() else "random"
    # one thread is faster for so few points
    with threadpool_limits(1):
        plane = TSNE(perplexity=perplexity, init=init, random_state=seed).fit_transform(embedding)
    return np.asarray(plane, dtype=np.float32)
