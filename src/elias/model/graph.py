"""The learned index: a graph from clusters to labels with weighted edges (§3.1, Eq. 5)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

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
        """Return C."""
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
        all scores are computed once and cached. Otherwise they would take most of the time of a
        search for one text.
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

        Edges are compared by their unsaturated score (Eq. 5 without min). Of equal edges, the one
        from the lower cluster id is chosen.
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
