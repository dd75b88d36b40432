"""Where training points lie: how many each cluster gets, and t-SNE of labels (Fig. 8–9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from elias.analysis.figures import ASSIGNED, Edges
from elias.model.inference import embed_all
from elias.pipeline.inputs import feature_tokens, input_of
from elias.progress import progress, track

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.data.corpus import Split
    from elias.data.tokens import Tokens
    from elias.model.elias import EliasModel
    from elias.model.encoder import TextEncoder

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float32]

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
