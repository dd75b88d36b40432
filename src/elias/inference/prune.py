"""Prune edges of the learned graph (Table 9)."""

from __future__ import annotations

from copy import copy
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from elias.errors import ConfigError
from elias.inference.edit_labels import copy_with, log_weight_of_removed
from elias.inference.predictor import Elias
from elias.model.elias import EliasModel
from elias.model.graph import LabelGraph

PRUNED = "pruned"
"""Metadata key under which a pruned model stores the pruning rule and the edge counts."""


@torch.no_grad()
def edges_above(graph: LabelGraph, threshold: float) -> Bool[Tensor, "C E"]:
    """Return a mask of the edges whose score ŝ_{c,ℓ} is at least ``threshold``."""
    if not 0 <= threshold <= 1:
        raise ConfigError(f"threshold must be in [0, 1], like the edge scores, not {threshold}")
    return (graph.edge_log_scores().exp() >= threshold) & _is_edge(graph)


@torch.no_grad()
def strongest_edges_of(graph: LabelGraph, count: int) -> Bool[Tensor, "C E"]:
    """Return a mask of the ``count`` strongest edges of each cluster.

    Edges are sorted by β·softmax before min(1, ·), so that edges with the maximum score of 1 are
    ordered too. Ties are broken by slot.
    """
    if count < 1:
        raise ConfigError(f"top_k, the edges to keep per cluster, must be >= 1, not {count}")
    order = graph.unsaturated_log().argsort(dim=1, descending=True, stable=True)
    strong = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order[:, :count], True)
    return strong & _is_edge(graph)


@torch.no_grad()
def pruned_graph(graph: LabelGraph, strong: Bool[Tensor, "C E"]) -> LabelGraph:
    """Return the graph with only the ``strong`` edges and the strongest edge of each label.

    The scores ŝ_{c,ℓ} of the remaining edges do not change, because the softmax still includes the
    removed edges of the cluster. The new graph has as few slots per cluster as possible. Empty
    slots hold L.
    """
    if not graph.learned:
        raise ConfigError("the model has no learned graph, so there are no edges to prune")
    # a label without edges could never be predicted
    clusters = torch.arange(graph.n_clusters, device=graph.edge_labels.device).unsqueeze(1)
    labels = graph.edge_labels.clamp(max=graph.n_labels - 1)
    is_best = graph.strongest_parents()[labels] == clusters
    remains = (strong | is_best) & _is_edge(graph)
    removed = ~remains & _is_edge(graph)
    order = remains.int().argsort(dim=1, descending=True, stable=True)
    order = order[:, : int(remains.sum(dim=1).max())]
    filled = remains.gather(1, order)
    return LabelGraph(
        graph.edge_labels.gather(1, order).masked_fill(~filled, graph.n_labels),
        graph.n_labels,
        graph.beta,
        edge_logits=graph.edge_logits.detach().gather(1, order).masked_fill(~filled, 0.0),
        removed_log=log_weight_of_removed(graph, removed),
    )


def _is_edge(graph: LabelGraph) -> Bool[Tensor, "C E"]:
    """Return a mask of the slots that hold an edge."""
    return graph.edge_labels < graph.n_labels


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeCount:
    """Number of edges before and after pruning, summed over all members."""

    before: int
    after: int
    for_labels: int
    """Number of weak edges that were kept because they are the strongest edge of their label."""

    @property
    def removed(self) -> float:
        """Return the fraction of edges that were removed."""
        return 1 - self.after / max(self.before, 1)


def prune_edges(
    model: Elias, *, threshold: float | None = None, top_k: int | None = None
) -> tuple[Elias, EdgeCount]:
    """Return a copy of the model without its weak edges, and the edge counts.

    The remaining edges keep their scores, and every label keeps its strongest edge. All members of
    an ensemble are pruned. The ``metadata`` of the copy have no metrics, because those of the
    original model do not apply to it.

    Args:
        model: A model with a learned graph.
        threshold: Keep edges whose score ŝ_{c,ℓ} (Eq. 5) is at least this.
        top_k: Keep the ``top_k`` strongest edges of each cluster.

    Raises:
        ConfigError: If both or neither of ``threshold`` and ``top_k`` are given, or the model has
            no learned graph.

    Example:
        >>> from elias import EliasConfig, train
        >>> from elias.data.synthetic import synthetic_corpus
        >>> from elias import prune_edges
        >>> corpus = synthetic_corpus(n_points=300, n_labels=30)
        >>> config = EliasConfig().override({"encoder.dim": 16, "index.kind": "graph"})
        >>> model = train(corpus, config)
        >>> pruned, edges = prune_edges(model, threshold=0.5)
        >>> edges.after < edges.before, len(pruned.predict(corpus.test.texts))
        (True, 75)
    """
    if (threshold is None) == (top_k is None):
        raise ConfigError("give either threshold or top_k to prune edges")
    members, counts = zip(
        *(_prune_member(member, threshold, top_k) for member in model.members), strict=True
    )
    total = EdgeCount(
        **{name: sum(asdict(count)[name] for count in counts) for name in asdict(counts[0])}
    )
    first, *others = members
    pruned = copy(model)
    pruned.model, pruned.others, pruned.folder = first.model, tuple(others), None
    pruned.metadata = first.metadata | {PRUNED: first.metadata[PRUNED] | asdict(total)}
    return pruned, total


def _prune_member(
    member: Elias, threshold: float | None, top_k: int | None
) -> tuple[Elias, EdgeCount]:
    model, graph = member.model, member.model.graph
    if threshold is not None:
        strong, rule = edges_above(graph, threshold), {"threshold": threshold}
    else:
        assert top_k is not None
        strong, rule = strongest_edges_of(graph, top_k), {"top_k": top_k}
    remaining = pruned_graph(graph, strong)
    n_remaining = remaining.n_edges
    count = EdgeCount(
        before=graph.n_edges, after=n_remaining, for_labels=n_remaining - int(strong.sum())
    )
    with torch.device("meta"):  # the new classifiers are replaced below
        new = EliasModel(model.encoder, remaining, model.alpha)
    new.clusters, new.labels, new.training = model.clusters, model.labels, model.training
    pruned = copy_with(member, model=new)
    pruned.metadata[PRUNED] = rule | asdict(count)
    return pruned, count
