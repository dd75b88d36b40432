"""Sizes that a configuration leaves open, derived from the number of points and labels.

Each rule is a function of its own; `derive` applies them in order, so that a size that was given
shapes those that were not, and then checks that all of them fit together and the data.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from elias.errors import ConfigError

if TYPE_CHECKING:
    from elias.config.schema import EliasConfig, IndexConfig


LABELS_PER_CLUSTER = 100
FEWEST_CLUSTERS = 32
FEWEST_LABELS_PER_CLUSTER = 4
EDGES_PER_LABEL = 10
USUAL_BEAM = 20
ROOM_FOR_PARENTS = 5
LARGEST_SHORTLIST = 2000
SMALLEST_SHORTLIST = 100
LARGEST_VALIDATION = 5000
FEW_POINTS = 100
MOST_RERANKED_LABELS = 200_000
MOST_RERANKED_POINTS = 1_000_000


def derive(config: EliasConfig, n_points: int, n_labels: int) -> EliasConfig:
    """Return ``config`` with every open size filled in for N points and L labels.

    >>> from elias.config import EliasConfig
    >>> index = derive(EliasConfig(), n_points=20_000, n_labels=8484).index
    >>> index.n_clusters, index.edges_per_cluster, index.beam_size, index.shortlist_size
    (128, 663, 20, 1000)
    """
    if n_labels < 1:
        raise ConfigError(f"a model needs at least one label, not {n_labels}")
    index = _derive_index(config.index, n_labels)
    _check(index, n_labels)
    held_out = config.eval.validation_size
    if held_out is None:
        held_out = validation_size(n_points)
    enabled = config.rerank.enabled
    if enabled is None:
        enabled = rerank_enabled(n_points, n_labels)
    return replace(
        config,
        encoder=replace(config.encoder, min_count=config.encoder.min_count or min_count(n_points)),
        index=index,
        rerank=replace(config.rerank, enabled=enabled),
        eval=replace(config.eval, validation_size=held_out),
    )


def n_clusters(n_labels: int) -> int:
    """Return C, a power of two: 2^⌈log2(L/100)⌉, but more and smaller clusters for a small L."""
    usual = 1 << math.ceil(math.log2(max(n_labels / LABELS_PER_CLUSTER, 1)))
    most = 1 << math.floor(math.log2(max(n_labels / FEWEST_LABELS_PER_CLUSTER, 1)))
    return min(max(usual, FEWEST_CLUSTERS), most)


def edges_per_cluster(n_labels: int, n_clusters: int) -> int:
    """Return κ, ten edges for every label on average: ⌈10·L/C⌉, at most L."""
    return min(n_labels, math.ceil(EDGES_PER_LABEL * n_labels / n_clusters))


def beam_size(n_clusters: int) -> int:
    """Return b: the paper's 20, or every cluster where there are fewer."""
    return min(USUAL_BEAM, n_clusters)


def train_clusters(beam_size: int) -> int:
    """Return how many clusters training searches: the beam and some room for parents."""
    return beam_size + ROOM_FOR_PARENTS


def shortlist_size(n_labels: int, n_paths: int) -> int:
    """Return K: the paper's 2000, down to L/8 in whole hundreds, within what b·κ paths reach."""
    eighth = n_labels // 800 * 100
    usual = min(LARGEST_SHORTLIST, max(SMALLEST_SHORTLIST, eighth))
    return min(usual, n_labels, n_paths)


def beta(n_labels: int, n_clusters: int) -> float:
    """Return β, 1.5·L/C in whole numbers (the paper's 150 at 100 labels per cluster)."""
    return float(max(1, round(1.5 * n_labels / n_clusters)))


def validation_size(n_points: int) -> int:
    """Return how many points to hold out: a tenth up to 1000, then a twentieth up to 5000."""
    return min(max(n_points // 20, min(n_points // 10, 1000)), LARGEST_VALIDATION)


def min_count(n_points: int) -> int:
    """Return in how many texts a word must stand: 2, or 1 where few words stand in two."""
    return 1 if n_points < FEW_POINTS else 2


def rerank_enabled(n_points: int, n_labels: int) -> bool:
    """Say whether to train the sparse ranker unasked: where a CPU does so in minutes."""
    return n_labels <= MOST_RERANKED_LABELS and n_points <= MOST_RERANKED_POINTS


def _derive_index(index: IndexConfig, n_labels: int) -> IndexConfig:
    if index.kind == "all":
        return _whole(index, n_labels)
    clusters = index.n_clusters or n_clusters(n_labels)
    edges = index.edges_per_cluster or edges_per_cluster(n_labels, clusters)
    beam = index.beam_size or beam_size(clusters)
    shortlist = index.shortlist_size or shortlist_size(n_labels, beam * edges)
    return replace(
        index,
        n_clusters=clusters,
        edges_per_cluster=edges,
        beam_size=beam,
        train_clusters=index.train_clusters or train_clusters(beam),
        shortlist_size=shortlist,
        train_shortlist=index.train_shortlist or shortlist,
        beta=index.beta or beta(n_labels, clusters),
    )


def _whole(index: IndexConfig, n_labels: int) -> IndexConfig:
    """Return the sizes of one cluster that holds every label, each with a score of 1."""
    return replace(
        index,
        n_clusters=1,
        edges_per_cluster=n_labels,
        beam_size=1,
        train_clusters=1,
        shortlist_size=n_labels,
        train_shortlist=n_labels,
        alpha=1.0,
        beta=1.0,
    )


def _check(index: IndexConfig, n_labels: int) -> None:
    """Refuse sizes that do not fit together; only given ones can fail."""
    clusters, edges = index.n_clusters or 0, index.edges_per_cluster or 0
    beam, shortlist = index.beam_size or 0, index.shortlist_size or 0
    limits = [
        ("n_clusters", clusters, n_labels, "the number of labels"),
        ("edges_per_cluster", edges, n_labels, "the number of labels"),
        ("beam_size", beam, clusters, "index.n_clusters"),
        ("shortlist_size", shortlist, n_labels, "the number of labels"),
        ("train_shortlist", index.train_shortlist or 0, n_labels, "the number of labels"),
        ("shortlist_size", shortlist, beam * edges, "index.beam_size * index.edges_per_cluster"),
        (
            "train_shortlist",
            index.train_shortlist or 0,
            (index.train_clusters or 0) * edges,
            "index.train_clusters * index.edges_per_cluster",
        ),
    ]
    for name, value, limit, meaning in limits:
        if value > limit:
            raise ConfigError(
                f"index.{name} is {value}, more than {meaning} ({limit}); "
                "lower it, or set it to none to have it derived"
            )
    if edges * clusters < n_labels:
        raise ConfigError(
            f"index.edges_per_cluster * index.n_clusters is {edges * clusters}, too few for one "
            f"edge for each of {n_labels} labels; raise one of them, or set it to none"
        )
