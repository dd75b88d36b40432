"""The numbers behind the paper's Figures 3, 4, 5 and 7, from a model and its predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from elias.metrics import label_deciles, recall_by_decile, score

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.model.graph import LabelGraph
    from elias.predictions import Predictions

    Array = NDArray[np.float64]
    Ints = NDArray[np.int64]

ASSIGNED = 0.25
"""A label is assigned to a cluster where ŝ_{c,ℓ} is above this; so the paper has it (§D)."""
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
N_DECILES = 10
RECALL_AT = 100


@dataclass(frozen=True, slots=True)
class Edges:
    """The stored edges of a graph, one after the other."""

    clusters: Ints
    labels: Ints
    scores: Array
    """ŝ_{c,ℓ}, Eq. 5."""
    n_clusters: int
    n_labels: int

    def above(self, threshold: float) -> Edges:
        """Return the edges that score more than a threshold."""
        kept = self.scores > threshold
        return Edges(
            self.clusters[kept],
            self.labels[kept],
            self.scores[kept],
            self.n_clusters,
            self.n_labels,
        )

    def per_label(self) -> Ints:
        """Return how many edges lead to each label (L,)."""
        return np.bincount(self.labels, minlength=self.n_labels)

    def per_cluster(self) -> Ints:
        """Return how many edges leave each cluster (C,)."""
        return np.bincount(self.clusters, minlength=self.n_clusters)


@torch.no_grad()
def stored_edges(graph: LabelGraph) -> Edges:
    """Return the edges of a graph, cluster by cluster."""
    labels = graph.edge_labels.cpu().numpy()
    scores = graph.edge_log_scores().exp().cpu().numpy().astype(np.float64)
    clusters, slots = np.nonzero(labels < graph.n_labels)
    return Edges(
        clusters.astype(np.int64),
        labels[clusters, slots].astype(np.int64),
        scores[clusters, slots],
        graph.n_clusters,
        graph.n_labels,
    )


@dataclass(frozen=True, slots=True)
class EdgeWeights:
    """How a cluster spreads its budget β over its edges (Fig. 3)."""

    mean: Array
    """Mean ŝ_{c,ℓ} of the clusters' strongest edges, second strongest, and so on (κ,)."""
    low: Array
    """The 10th percentile over clusters (κ,)."""
    high: Array
    """The 90th percentile over clusters (κ,)."""
    thresholds: Array
    kept: Array
    """Share of all stored edges above each threshold."""


THRESHOLDS = np.round(np.arange(0, 1, 0.01), 2)


def edge_weights(edges: Edges) -> EdgeWeights:
    """Return the edge weights by rank within their cluster, the strongest first (Fig. 3)."""
    sizes = edges.per_cluster()
    order = np.lexsort((-edges.scores, edges.clusters))
    rank = np.arange(len(order)) - np.repeat(sizes.cumsum() - sizes, sizes)
    ranked = np.zeros((edges.n_clusters, max(1, int(sizes.max(initial=0)))))
    ranked[edges.clusters[order], rank] = edges.scores[order]
    low, high = np.quantile(ranked, (0.1, 0.9), axis=0)
    return EdgeWeights(
        mean=ranked.mean(axis=0),
        low=low,
        high=high,
        thresholds=THRESHOLDS,
        kept=_shares_above(edges.scores, len(edges.scores)),
    )


def _shares_above(scores: Array, n_all: int) -> Array:
    """Return how many scores are above each of `THRESHOLDS`, of ``n_all``."""
    below = np.searchsorted(np.sort(scores), THRESHOLDS, side="right")
    shares: Array = (len(scores) - below) / max(n_all, 1)
    return shares


def stage1_edges_kept(edges: Edges, partition: Ints) -> Array:
    """Return the share of stage 1's edges that the graph holds above each threshold (Fig. 7a)."""
    ours = partition[edges.labels] == edges.clusters
    return _shares_above(edges.scores[ours], len(partition))


def clusters_per_label(
    edges: Edges, frequencies: Ints, thresholds: Sequence[float]
) -> dict[float, Array]:
    """Return the mean number of clusters of the labels of each decile, by threshold (Fig. 7b)."""
    deciles = label_deciles(frequencies)
    return {t: decile_means(edges.above(t).per_label(), deciles) for t in thresholds}


def decile_means(values: NDArray[np.generic], deciles: Ints) -> Array:
    """Return the mean of the labels' values in each decile (10,); NaN where it holds no label."""
    counts = np.bincount(deciles, minlength=N_DECILES)
    sums = np.bincount(deciles, weights=values.astype(np.float64), minlength=N_DECILES)
    means: Array = np.divide(sums, counts, out=np.full(N_DECILES, np.nan), where=counts > 0)
    return means


@dataclass(frozen=True, slots=True)
class TrueScores:
    """What a component scores the true labels of points, decile by decile (Fig. 4)."""

    quantiles: Array
    """(10, 5) `QUANTILES` of the scores; NaN where no true label is found."""
    found: Array
    """(10,) share of the true labels that are among the predictions."""
    pairs: Ints
    """(10,) true labels of all points."""


def true_scores(predictions: Predictions, truth: csr_matrix, frequencies: Ints) -> TrueScores:
    """Return the scores of true labels that are predicted, by decile of the label (Fig. 4)."""
    deciles = label_deciles(frequencies)
    hits = _hits(predictions, truth)
    of_hit = deciles[predictions.ids[hits]]
    scores = predictions.scores[hits]
    quantiles = np.full((N_DECILES, len(QUANTILES)), np.nan)
    for decile in range(N_DECILES):
        own = scores[of_hit == decile]
        if len(own):
            quantiles[decile] = np.quantile(own, QUANTILES)
    pairs = np.bincount(deciles[truth.indices], minlength=N_DECILES)
    counts = np.bincount(of_hit, minlength=N_DECILES)
    return TrueScores(quantiles, counts / np.maximum(pairs, 1), pairs)


def _hits(predictions: Predictions, truth: csr_matrix) -> NDArray[np.bool_]:
    """Say which predictions are true (n, k)."""
    width = predictions.n_labels + 1  # ids reach n_labels, the padding
    rows = np.repeat(np.arange(len(predictions)), np.diff(truth.indptr))
    keys = np.arange(len(predictions))[:, None] * width + predictions.ids
    return np.isin(keys, rows * width + truth.indices)


RECALL_KS = (*range(1, 10), *range(10, 20, 2), *range(20, 50, 5), *range(50, RECALL_AT + 1, 10))


@dataclass(frozen=True, slots=True)
class Recalls:
    """How many of the true labels are found, by predictions looked at and by decile (Fig. 5)."""

    ks: tuple[int, ...]
    curve: Array
    """R@k for each of ``ks``, in percent."""
    by_decile: Array
    """(10,) what each tenth of the labels contributes to R@100, in percent; they sum to it."""


def recalls(predictions: Predictions, truth: csr_matrix, frequencies: Ints) -> Recalls:
    """Return the recall of predictions (Fig. 5)."""
    ks = tuple(k for k in RECALL_KS if k <= max(1, predictions.ids.shape[1]))
    names = [f"R@{k}" for k in ks]
    curve = score(predictions, truth, None, names)
    shares = recall_by_decile(predictions, truth, frequencies, k=RECALL_AT)
    return Recalls(ks, np.array([curve[name] for name in names]), shares)


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """Every epoch of a run, one after the other."""

    loss: Array
    validation: Mapping[str, Array]
    """Each metric on the validation points, NaN where it was not measured."""
    begins: Mapping[int, str]
    """The first epoch of each stage, counted from 1, and the stage's name."""


def learning_curve(epochs: Sequence[Mapping[str, object]]) -> LearningCurve:
    """Return the epochs that a run recorded."""
    begins: dict[int, str] = {}
    measured: dict[str, list[float]] = {}
    losses = []
    for place, epoch in enumerate(epochs, start=1):
        stage = str(epoch.get("stage"))
        if not begins or begins[max(begins)] != stage:
            begins[place] = stage
        losses.append(_float(epoch.get("loss")))
        found = epoch.get("validation")
        for name, value in (found if isinstance(found, dict) else {}).items():
            column = measured.setdefault(name, [])
            column += [np.nan] * (place - 1 - len(column)) + [_float(value)]
    n = len(losses)
    validation = {name: np.array(v + [np.nan] * (n - len(v))) for name, v in measured.items()}
    return LearningCurve(np.array(losses), validation, begins)


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else np.nan
