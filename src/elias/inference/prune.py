"""Prune edges of the learned graph (Table 9)."""

from __future__ import annotations

from copy import copy
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from elias.errors import ConfigError
from elias.inference.predictor import Elias
from elias.model.elias import EliasModel
from elias.model.graph import LabelGraph
from elias.rerank.probabilities import PROBABILITIES


@torch.no_grad()
def edges_above(graph: LabelGraph, threshold: float) -> Bool[Tensor, "C E"]:
    """Say which edges have ŝ_{c,ℓ} of at least ``threshold``."""
    if not 0 <= threshold <= 1:
        raise ConfigError(f"threshold must be in [0, 1], as edge scores are, not {threshold}")
    return (graph.edge_log_scores().exp() >= threshold) & _stored(graph)


@torch.no_grad()
def strongest_edges_of(graph: LabelGraph, count: int) -> Bool[Tensor, "C E"]:
    """Say which edges are the ``count`` strongest of their cluster.

    Of those that share the highest score, 1, the one with the larger share goes first, then the
    first one stored.
    """
    if count < 1:
        raise ConfigError(f"top_k, the edges kept of a cluster, must be >= 1, not {count}")
    order = graph.unsaturated_log().argsort(dim=1, descending=True, stable=True)
    strong = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order[:, :count], True)
    return strong & _stored(graph)


@torch.no_grad()
def pruned_graph(graph: LabelGraph, strong: Bool[Tensor, "C E"]) -> LabelGraph:
    """Return the graph with its ``strong`` edges and the best of each label, as narrow as can be.

    What the others had of their cluster's softmax stays taken, so that ŝ_{c,ℓ} of those kept is
    what it was. Slots left over hold ``n_labels``.
    """
    if not graph.learned:
        raise ConfigError("the model has no learned graph, so there are no edges to prune")
    stored = _stored(graph)
    kept = (strong & stored) | _best_of_label(graph)
    order = kept.int().argsort(dim=1, descending=True, stable=True)
    order = order[:, : int(kept.sum(dim=1).max())]
    left = kept.gather(1, order)
    return LabelGraph(
        graph.edge_labels.gather(1, order).masked_fill(~left, graph.n_labels),
        graph.n_labels,
        graph.beta,
        edge_logits=graph.edge_logits.detach().gather(1, order).masked_fill(~left, 0.0),
        removed_log=_removed_log(graph, stored & ~kept),
    )


def _removed_log(graph: LabelGraph, gone: Bool[Tensor, "C E"]) -> Tensor | None:
    """Return log Σ exp(a_{c,ℓ}) over the edges that are gone, those gone before among them."""
    before = graph.removed_log
    if not gone.any():
        return before
    removed = graph.edge_logits.detach().float().masked_fill(~gone, -torch.inf).logsumexp(dim=1)
    if before is not None:
        removed = torch.logaddexp(removed, before)
    return removed.clamp(min=torch.finfo(removed.dtype).min)  # only finite numbers are saved


def _best_of_label(graph: LabelGraph) -> Bool[Tensor, "C E"]:
    """Say which edge is the strongest of its label: without any, the label cannot be found."""
    clusters = torch.arange(graph.n_clusters, device=graph.edge_labels.device).unsqueeze(1)
    known = graph.edge_labels.clamp(max=graph.n_labels - 1)
    return (graph.strongest_parents()[known] == clusters) & _stored(graph)


def with_graph(model: EliasModel, graph: LabelGraph) -> EliasModel:
    """Return a model that shares all but the graph with the given one."""
    with torch.device("meta"):  # the classifiers made here are replaced at once
        other = EliasModel(model.encoder, graph, model.alpha)
    other.clusters, other.labels = model.clusters, model.labels
    other.training = model.training
    return other


def _stored(graph: LabelGraph) -> Bool[Tensor, "C E"]:
    return graph.edge_labels < graph.n_labels


PRUNED = "pruned"
"""The key of a model's metadata that says how it was pruned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeCount:
    """How many edges pruning left, over all members."""

    before: int
    after: int
    for_labels: int
    """Those of them that are weak, and stay because their label has no other."""

    @property
    def removed(self) -> float:
        """Return the share of the edges that went."""
        return 1 - self.after / max(self.before, 1)


def prune_edges(
    model: Elias, *, threshold: float | None = None, top_k: int | None = None
) -> tuple[Elias, EdgeCount]:
    """Return the model without its weak edges, and how many went; the given one stays as it is.

    What is left scores what it scored, and every label keeps its strongest edge. Of an ensemble,
    all members are pruned. Metrics of the given model are not those of the new one, so ``metadata``
    goes without them.

    Args:
        model: A model with a learned graph.
        threshold: Keep edges with ŝ_{c,ℓ} (Eq. 5) of at least this.
        top_k: Keep this many edges of each cluster, the strongest.

    Raises:
        ConfigError: If not just one of both is given, or the model has no learned graph.

    Example:
        >>> from elias import EliasConfig, train
        >>> from elias.data.synthetic import synthetic_corpus
        >>> from elias import prune_edges
        >>> corpus = synthetic_corpus(n_points=300, n_labels=30)
        >>> config = EliasConfig().override({"encoder.dim": 16, "stages.stage2.epochs": 3})
        >>> model = train(config, corpus)
        >>> pruned, edges = prune_edges(model, threshold=0.5)
        >>> edges.after < edges.before, len(pruned.predict(corpus.test.texts))
        (True, 75)
    """
    if (threshold is None) == (top_k is None):
        raise ConfigError("pruning takes a threshold or a top_k, and not both")
    pruned = [_pruned(member, threshold, top_k) for member in model.members]
    edges = EdgeCount(
        before=sum(count.before for _, count in pruned),
        after=sum(count.after for _, count in pruned),
        for_labels=sum(count.for_labels for _, count in pruned),
    )
    first, *others = (member for member, _ in pruned)
    whole = copy(model)
    whole.model = first.model
    whole.metadata = first.metadata | {PRUNED: first.metadata[PRUNED] | asdict(edges)}
    whole.others = tuple(others)
    return whole, edges


def _pruned(member: Elias, threshold: float | None, top_k: int | None) -> tuple[Elias, EdgeCount]:
    graph = member.model.graph
    if threshold is not None:
        strong, by = edges_above(graph, threshold), {"threshold": threshold}
    else:
        assert top_k is not None
        strong, by = strongest_edges_of(graph, top_k), {"top_k": top_k}
    left = pruned_graph(graph, strong)
    edges = EdgeCount(
        before=graph.n_edges, after=left.n_edges, for_labels=left.n_edges - int(strong.sum())
    )
    pruned = copy(member)
    pruned.model = with_graph(member.model, left)
    measured = ("metrics", PROBABILITIES)
    pruned.metadata = {name: fact for name, fact in member.metadata.items() if name not in measured}
    pruned.metadata[PRUNED] = by | asdict(edges)
    return pruned, edges
