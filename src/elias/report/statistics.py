"""The numbers behind the paper's figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from elias.inference.predict import feature_tokens, input_of
from elias.metrics import label_deciles, recall_by_decile, score
from elias.model.batch_inference import embed_all
from elias.progress import progress, track

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.data.corpus import Split
    from elias.model.elias import EliasModel
    from elias.model.encoder import TextEncoder
    from elias.model.graph import LabelGraph
    from elias.predictions import Predictions
    from elias.text.tokens import Tokens

    Array = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Floats = NDArray[np.float32]

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


MOST_POINTS = 20_000
"""Training points looked at; more make the pictures no clearer."""
N_PANELS = 6
FEWEST_POINTS = 10
"""A label with fewer of its points in the sample shows no shape."""
MOST_CLUSTERS = 5
LIKE_FREQUENCY = (10, 30)
"""Labels with so many points are compared in `spread`: more points spread more by themselves."""
_OWN, _OTHERS = 60, 60  # points drawn of a label, and of each of its clusters
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class PointSample:
    """Some training points: their labels, embeddings, and the clusters they belong to."""

    labels: csr_matrix
    """(n, L)."""
    embedding: Floats
    """(n, D) φ(x)."""
    best: Ints
    """(n,) the cluster with the highest ŝ_c."""
    members: csr_matrix
    """(n, C) where ŝ_c is above `ASSIGNED`: the points "of" a cluster."""


def sample_points(model: EliasModel, split: Split, seed: int) -> PointSample:
    """Return up to `MOST_POINTS` training points, the same for the same seed."""
    rows = np.arange(len(split))
    if len(split) > MOST_POINTS:
        rows = np.sort(np.random.default_rng(seed).permutation(len(split))[:MOST_POINTS])
    points = split.take(rows)
    embedding = embed_all(model.encoder, _tokens(points, model.encoder))
    best, members = _clusters(model, embedding)
    return PointSample(points.labels, embedding, best, members)


def _tokens(split: Split, encoder: TextEncoder) -> Tokens:
    given = input_of(split, encoder)
    if encoder.reads_features:
        return feature_tokens(given, encoder)
    with progress("Reading training texts"):
        return encoder.tokenise(given)


@torch.no_grad()
def _clusters(model: EliasModel, embedding: Floats) -> tuple[Ints, csr_matrix]:
    from scipy.sparse import csr_matrix, vstack

    device = model.clusters.weight.device
    best, members = [], []
    for start in range(0, len(embedding), _CHUNK):
        chunk = torch.from_numpy(embedding[start : start + _CHUNK]).to(device)
        scores = model.unsaturated_log(chunk)
        best.append(scores.argmax(dim=1).cpu().numpy())
        members.append(csr_matrix((scores > np.log(ASSIGNED)).cpu().numpy()))
    return np.concatenate(best), vstack(members, format="csr")


@dataclass(frozen=True, slots=True)
class Panel:
    """One label's training points beside those of its clusters, in the plane."""

    label: int
    clusters: tuple[int, ...]
    """The clusters it is assigned to."""
    own: Floats
    """(m, 2) points of the label, or some of them."""
    others: tuple[Floats, ...]
    """(m, 2) points of each cluster, without the label's own."""


@dataclass(frozen=True, slots=True)
class Clouds:
    """Labels in several clusters (Fig. 8) and labels in one (Fig. 9)."""

    several: tuple[Panel, ...]
    one: tuple[Panel, ...]
    spread_several: float | None
    """Mean spread of the points of labels in several clusters, of like frequency; see `spread`."""
    spread_one: float | None
    n_several: int
    """How many labels that mean is over."""
    n_one: int


def clouds(sample: PointSample, edges: Edges, seed: int) -> Clouds:
    """Return some labels that hang under several clusters and some under one (Fig. 8–9)."""
    assigned = edges.above(ASSIGNED)
    n_clusters = assigned.per_label()
    n_points = np.bincount(sample.labels.indices, minlength=edges.n_labels)
    enough = n_points >= FEWEST_POINTS
    several = enough & (n_clusters > 1) & (n_clusters <= MOST_CLUSTERS)
    one = enough & (n_clusters == 1)
    rng = np.random.default_rng(seed)
    chosen = [_some(np.flatnonzero(mask), rng) for mask in (several, one)]
    by_label, by_cluster = sample.labels.tocsc(), sample.members.tocsc()
    panels = []
    for label in track(np.concatenate(chosen).tolist(), "t-SNE"):
        clusters = assigned.clusters[assigned.labels == label].tolist()
        drawn = _drawn(
            _rows(by_label, label), [_rows(by_cluster, cluster) for cluster in clusters], rng
        )
        panels.append(_panel(sample.embedding, label, clusters, drawn, int(rng.integers(2**31))))
    like = (n_points >= LIKE_FREQUENCY[0]) & (n_points <= LIKE_FREQUENCY[1])
    spreads = [
        [spread(sample.embedding[_rows(by_label, i)]) for i in np.flatnonzero(mask & like).tolist()]
        for mask in ((n_clusters > 1), (n_clusters == 1))
    ]
    return Clouds(
        several=tuple(panels[: len(chosen[0])]),
        one=tuple(panels[len(chosen[0]) :]),
        spread_several=_mean(spreads[0]),
        spread_one=_mean(spreads[1]),
        n_several=len(spreads[0]),
        n_one=len(spreads[1]),
    )


def spread(embedding: Floats) -> float:
    """Return how widely directions are spread: 0 where all agree, 1 where they cancel out.

    That is 1 - ‖mean of φ/‖φ‖‖; a cloud of several modes spreads more than one of a single mode.
    """
    lengths = np.linalg.norm(embedding, axis=1, keepdims=True)
    directions = embedding / np.maximum(lengths, 1e-12)
    return float(1 - np.linalg.norm(directions.mean(axis=0)))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _some(labels: Ints, rng: np.random.Generator) -> Ints:
    return np.sort(rng.permutation(labels)[:N_PANELS])


def _rows(columns: csr_matrix, column: int) -> Ints:
    """Return the rows that a column of a CSC matrix holds."""
    rows: Ints = columns.indices[columns.indptr[column] : columns.indptr[column + 1]]
    return rows


def _drawn(own: Ints, others: Sequence[Ints], rng: np.random.Generator) -> list[Ints]:
    """Return some points of a label, and some others of each of its clusters; none twice."""
    drawn = [np.sort(rng.permutation(own)[:_OWN])]
    for members in others:
        left = np.setdiff1d(members, np.concatenate([own, *drawn]))
        drawn.append(np.sort(rng.permutation(left)[:_OTHERS]))
    return drawn


def _panel(
    embedding: Floats, label: int, clusters: Sequence[int], drawn: Sequence[Ints], seed: int
) -> Panel:
    flat = _in_the_plane(embedding[np.concatenate(drawn)], seed)
    own, *others = np.split(flat, np.cumsum([len(rows) for rows in drawn])[:-1])
    return Panel(label, tuple(clusters), own, tuple(others))


def _in_the_plane(embedding: Floats, seed: int) -> Floats:
    """Return t-SNE of the points (n, 2)."""
    from sklearn.manifold import TSNE  # here, not above: it takes a second
    from threadpoolctl import threadpool_limits

    perplexity = min(30.0, max(1.0, (len(embedding) - 1) / 3))
    start = _first_places(embedding, np.random.default_rng(seed))
    # so few points keep one thread busy; several would mostly wait for each other
    with threadpool_limits(1):
        flat = TSNE(perplexity=perplexity, init=start, random_state=seed).fit_transform(embedding)
    return np.asarray(flat, dtype=np.float32)


def _first_places(embedding: Floats, rng: np.random.Generator) -> Floats:
    """Return where t-SNE begins: the two principal components, made small (n, 2).

    Its own way to do so ends in a crash where all points are alike (scikit-learn 1.9.1).
    """
    left, sizes, _ = np.linalg.svd(embedding - embedding.mean(axis=0), full_matrices=False)
    places = rng.normal(scale=1e-6, size=(len(embedding), 2))
    width = min(2, len(sizes))
    if sizes[0] > 0:
        deviation = sizes[0] / np.sqrt(len(embedding))
        places[:, :width] += 1e-4 * left[:, :width] * sizes[:width] / deviation
    return places.astype(np.float32)
