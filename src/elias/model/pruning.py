"""Pruning the learned graph: weak edges go, the others score what they scored (Table 9)."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from elias.errors import ConfigError
from elias.model.elias import EliasModel
from elias.model.graph import LabelGraph


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
