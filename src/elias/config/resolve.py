"""Resolve a configuration: derive every size that is None from the data.

`fill_sizes` derives the sizes one after another, so that a derived size can depend on given sizes.
`check_sizes` checks that the sizes are consistent with each other and with the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from elias.config.schema import EliasConfig, EncoderConfig, EvalConfig, IndexConfig, RerankConfig
from elias.errors import ConfigError

T = TypeVar("T")


LABELS_PER_CLUSTER = 100
MIN_CLUSTERS = 32
MIN_LABELS_PER_CLUSTER = 4
EDGES_PER_LABEL = 10
BEAM_SIZE = 20
EXTRA_TRAIN_CLUSTERS = 5  # room for the parents of a text's labels
MIN_SHORTLIST, MAX_SHORTLIST = 100, 2000
MAX_VALIDATION = 5000
MAX_RERANKED_LABELS, MAX_RERANKED_POINTS = 200_000, 1_000_000  # minutes on a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedEncoder(EncoderConfig):
    """An `EncoderConfig` in which no size is None."""

    min_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedIndex(IndexConfig):
    """An `IndexConfig` in which no size is None."""

    n_clusters: int
    edges_per_cluster: int
    beam_size: int
    shortlist_size: int
    beta: float
    train_clusters: int
    train_shortlist: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRerank(RerankConfig):
    """A `RerankConfig` in which ``enabled`` is not None."""

    enabled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedEval(EvalConfig):
    """An `EvalConfig` in which the number of held-out points is not None."""

    validation_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EliasConfig):
    """An `EliasConfig` in which no size is None; `EliasConfig.resolve` returns it.

    Training, inference and saved models use this type. Its JSON format is the same as for
    `EliasConfig`.
    """

    encoder: ResolvedEncoder
    index: ResolvedIndex
    rerank: ResolvedRerank
    eval: ResolvedEval


def fill_sizes(config: EliasConfig, n_points: int, n_labels: int) -> ResolvedConfig:
    """Return ``config`` with every size that is None derived from N points and L labels.

    This function does not check that the sizes are consistent; `EliasConfig.resolve` does.

    >>> from elias.config import EliasConfig
    >>> index = fill_sizes(EliasConfig(), n_points=20_000, n_labels=8484).index
    >>> index.n_clusters, index.edges_per_cluster, index.beam_size, index.shortlist_size
    (128, 663, 20, 1000)
    """
    held_out, enabled = config.eval.validation_size, config.rerank.enabled
    if held_out is None:
        held_out = validation_size(n_points)
    if enabled is None:
        enabled = n_labels <= MAX_RERANKED_LABELS and n_points <= MAX_RERANKED_POINTS
    # in a small corpus few words are in two texts
    min_count = config.encoder.min_count or (1 if n_points < 100 else 2)
    return _narrow(
        ResolvedConfig,
        config,
        encoder=_narrow(ResolvedEncoder, config.encoder, min_count=min_count),
        index=_fill_index(config.index, n_labels),
        rerank=_narrow(ResolvedRerank, config.rerank, enabled=enabled),
        eval=_narrow(ResolvedEval, config.eval, validation_size=held_out),
    )


def _narrow(cls: type[T], config: Any, **values: Any) -> T:
    """Convert ``config`` to its subclass ``cls``, and replace the fields in ``values``."""
    return cls(**{field.name: getattr(config, field.name) for field in fields(config)} | values)


def n_clusters(n_labels: int) -> int:
    """Return C = 2^⌈log2(L/100)⌉; for a small L, return a larger power of two."""
    clusters = 1 << math.ceil(math.log2(max(n_labels / LABELS_PER_CLUSTER, 1)))
    most = 1 << math.floor(math.log2(max(n_labels / MIN_LABELS_PER_CLUSTER, 1)))
    return min(max(clusters, MIN_CLUSTERS), most)


def shortlist_size(n_labels: int, n_paths: int) -> int:
    """Return K: L/8 in whole hundreds, at most 2000 (as in the paper) and at most b·κ paths."""
    eighth = n_labels // 800 * 100
    return min(MAX_SHORTLIST, max(MIN_SHORTLIST, eighth), n_labels, n_paths)


def validation_size(n_points: int) -> int:
    """Return the number of points to hold out: a tenth up to 1000, then a twentieth up to 5000."""
    return min(max(n_points // 20, min(n_points // 10, 1000)), MAX_VALIDATION)


def _fill_index(index: IndexConfig, n_labels: int) -> ResolvedIndex:
    if index.kind == "all":  # one cluster that holds every label, each with a score of 1
        return _narrow(
            ResolvedIndex,
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
    clusters = index.n_clusters or n_clusters(n_labels)
    edges = index.edges_per_cluster or min(n_labels, -(-EDGES_PER_LABEL * n_labels // clusters))
    beam = index.beam_size or min(BEAM_SIZE, clusters)
    shortlist = index.shortlist_size or shortlist_size(n_labels, beam * edges)
    return _narrow(
        ResolvedIndex,
        index,
        n_clusters=clusters,
        edges_per_cluster=edges,
        beam_size=beam,
        train_clusters=index.train_clusters or beam + EXTRA_TRAIN_CLUSTERS,
        shortlist_size=shortlist,
        train_shortlist=index.train_shortlist or shortlist,
        # the paper's 150 at 100 labels per cluster
        beta=index.beta or float(max(1, round(1.5 * n_labels / clusters))),
    )


def check_sizes(index: ResolvedIndex, n_labels: int) -> None:
    """Raise `ConfigError` if sizes are inconsistent; derived sizes are always consistent."""
    clusters, edges = index.n_clusters, index.edges_per_cluster
    labels = (n_labels, "the number of labels")
    paths = (index.beam_size * edges, "index.beam_size * index.edges_per_cluster")
    train_paths = (index.train_clusters * edges, "index.train_clusters * index.edges_per_cluster")
    for name, value, (limit, meaning) in (
        ("n_clusters", clusters, labels),
        ("edges_per_cluster", edges, labels),
        ("beam_size", index.beam_size, (clusters, "index.n_clusters")),
        ("shortlist_size", index.shortlist_size, labels),
        ("train_shortlist", index.train_shortlist, labels),
        ("shortlist_size", index.shortlist_size, paths),
        ("train_shortlist", index.train_shortlist, train_paths),
    ):
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
