"""The learned index: a graph from clusters to labels with weighted edges (§3.1, Eq. 5)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from elias.errors import ConfigError
from elias.kernels import edge_log
from elias.kernels.cpu.search import OrderedEdges, order_edges
from elias.kernels.plain import log_shares


class LabelGraph(nn.Module):
    """Row-sparse adjacency A from C clusters to L labels, stored as two C×E tensors.

    Each cluster c stores up to E = κ edges. The learnable logit a_{c,ℓ} of an edge becomes

        ŝ_{c,ℓ} = min(1, β · softmax_ℓ(a_c))                                     Eq. 5

    so a cluster distributes a total score of β over its labels, with at most 1 for each. In a
    *fixed* graph (stage 1), every stored edge scores 1. A slot without an edge holds ``n_labels``.

    Pruned edges keep their share of the softmax, so that the scores of the remaining edges do not
    change. ``removed_log`` holds log Σ exp(a_{c,ℓ}) over the pruned edges of each cluster.
    """

    edge_labels: Tensor
    removed_log: Tensor | None

    def __init__(
        self,
        edge_labels: Int[Tensor, "C E"],
        n_labels: int,
        beta: float,
        *,
        edge_logits: Float[Tensor, "C E"] | None = None,
        removed_log: Float[Tensor, " C"] | None = None,
    ) -> None:
        super().__init__()
        self.n_labels = n_labels
        self.beta = beta
        self.learned = edge_logits is not None
        self.register_buffer("edge_labels", edge_labels)
        self.register_buffer("removed_log", removed_log)
        logits = torch.zeros(edge_labels.shape) if edge_logits is None else edge_logits
        self.edge_logits = nn.Parameter(logits, requires_grad=self.learned)  # a, (C, E)
        self._cached_log: tuple[tuple[object, ...], Tensor] | None = None
        self._cached_order: tuple[Tensor, OrderedEdges] | None = None

    def train(self, mode: bool = True) -> LabelGraph:
        """Set training or evaluation mode. Training mode discards cached scores."""
        if mode:
            self._cached_log = self._cached_order = None
        return super().train(mode)

    @property
    def n_clusters(self) -> int:
        """Return C, the number of clusters."""
        return len(self.edge_labels)

    @property
    def n_edges(self) -> int:
        """Return the number of stored edges."""
        return int((self.edge_labels < self.n_labels).sum())

    def edge_log_scores(self) -> Float[Tensor, "C E"]:
        """Return log ŝ_{c,ℓ} for every edge (Eq. 5). Slots without an edge give -inf."""
        return self.unsaturated_log().clamp(max=0)

    def unsaturated_log(self, beam: Int[Tensor, "B b"] | None = None) -> Float[Tensor, "C E"]:
        """Return the unsaturated log score of each edge, log(β · softmax_ℓ(a_c)).

        This is Eq. 5 without its min(1, ·). Slots without an edge give -inf.

        If ``beam`` is given, scores of clusters outside it may be undefined. In evaluation mode,
        all scores are computed once and cached, because computing them takes most of the time of
        a search for one text.
        """
        if self.training or torch.is_grad_enabled():
            return self._unsaturated_log(beam)
        tensors = (self.edge_logits, self.edge_labels, self.removed_log)
        key: tuple[object, ...] = (self.beta,)
        for tensor in tensors:
            if tensor is not None:
                key += (tensor.data_ptr(), tensor._version, tensor.device)
        if self._cached_log is None or self._cached_log[0] != key:
            self._cached_log = (key, self._unsaturated_log())
        return self._cached_log[1]

    def ordered_edges(self) -> OrderedEdges:
        """Return the edges of each cluster, best first, for the CPU search. They are cached."""
        scores = self.unsaturated_log()
        if self._cached_order is None or self._cached_order[0] is not scores:
            self._cached_order = (scores, order_edges(self.edge_labels, scores))
        return self._cached_order[1]

    def _unsaturated_log(self, beam: Int[Tensor, "B b"] | None = None) -> Float[Tensor, "C E"]:
        if not self.learned:
            empty = self.edge_labels >= self.n_labels
            return torch.zeros(empty.shape, device=empty.device).masked_fill(empty, -math.inf)
        return edge_log(
            self.edge_logits,
            self.edge_labels,
            self.removed_log,
            n_labels=self.n_labels,
            beta=self.beta,
            beam=beam,
        )

    @torch.no_grad()
    def strongest_parents(self) -> Int[Tensor, " L"]:
        """Return the cluster with the strongest edge to each label, or C for a label without edges.

        Edges are compared by their unsaturated score (Eq. 5 without min). Ties go to the
        lower cluster id.
        """
        empty = self.edge_labels >= self.n_labels
        shares = log_shares(self.edge_logits, empty, self.removed_log)
        clusters, _ = (~empty).nonzero(as_tuple=True)
        labels, shares = self.edge_labels[~empty], shares[~empty]
        best = torch.full((self.n_labels,), -math.inf, device=shares.device)
        best.scatter_reduce_(0, labels, shares, "amax")
        winners = shares == best[labels]
        parents = torch.full((self.n_labels,), self.n_clusters, device=shares.device)
        return parents.scatter_reduce_(0, labels[winners], clusters[winners], "amin")


def partition_edges(assignment: Int[Tensor, " L"], n_clusters: int) -> Int[Tensor, "C E"]:
    """Return the labels of each cluster in a partition, padded with ``n_labels``."""
    n_labels = len(assignment)
    order = torch.argsort(assignment, stable=True)
    sizes = torch.bincount(assignment, minlength=n_clusters)
    starts = sizes.cumsum(0) - sizes
    edges = torch.full((n_clusters, int(sizes.max())), n_labels)
    clusters = assignment[order]
    edges[clusters, torch.arange(n_labels) - starts[clusters]] = order
    return edges


# --- edited copies of a graph ---


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
        raise ConfigError(
            "the model has no learned graph, so there are no edges to prune; train it with a stage "
            "that learns the graph"
        )
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


@torch.no_grad()
def relabel_graph(graph: LabelGraph, new_ids: Tensor, n_labels: int) -> LabelGraph:
    """Return the graph with new label ids. A new id of -1 removes the label.

    The scores of the remaining edges do not change. Edges of a cluster to labels with the same new
    id become one edge, whose softmax weight is the sum of their weights.
    """
    lookup = torch.cat([new_ids, new_ids.new_full((1,), -1)]).to(graph.edge_labels.device)
    labels, logits = lookup[graph.edge_labels], graph.edge_logits.detach().float().clone()
    removed = (labels < 0) & (graph.edge_labels < graph.n_labels)
    labels = labels.masked_fill(labels < 0, n_labels)
    removed_log = log_weight_of_removed(graph, removed) if graph.learned else graph.removed_log
    # sort the slots of each cluster by label, and merge each edge into the next one to its label
    order = labels.argsort(dim=1, stable=True)
    labels, logits = labels.gather(1, order), logits.gather(1, order)
    for slot in range(1, labels.shape[1]):
        same = (labels[:, slot] == labels[:, slot - 1]) & (labels[:, slot] < n_labels)
        joined = torch.logaddexp(logits[:, slot], logits[:, slot - 1])
        logits[:, slot] = torch.where(same, joined, logits[:, slot])
        labels[:, slot - 1] = labels[:, slot - 1].masked_fill(same, n_labels)
    return LabelGraph(
        labels,
        n_labels,
        graph.beta,
        edge_logits=logits.masked_fill(labels >= n_labels, 0) if graph.learned else None,
        removed_log=removed_log,
    )


def log_weight_of_removed(
    graph: LabelGraph, removed: Bool[Tensor, "C E"]
) -> Float[Tensor, " C"] | None:
    """Return `LabelGraph.removed_log` for a graph without the ``removed`` edges."""
    if not removed.any():
        return graph.removed_log
    logits = graph.edge_logits.detach().float()
    total = logits.masked_fill(~removed, -torch.inf).logsumexp(dim=1)
    if graph.removed_log is not None:
        total = torch.logaddexp(total, graph.removed_log)
    return total.clamp(min=torch.finfo(total.dtype).min)  # must be finite to be saved
