"""The learned index: which labels hang under which clusters, and how strongly (§3.1, Eq. 5)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from elias.kernels.cpu.search import OrderedEdges
from elias.kernels.device import runs_triton
from elias.kernels.paths import edge_log
from elias.kernels.search import ordered_edges


class LabelGraph(nn.Module):
    """Row-sparse adjacency A from C clusters to L labels, as two tensors of C×E.

    Each cluster c stores up to E = κ edges. The learnable logit a_{c,ℓ} of an edge becomes

        ŝ_{c,ℓ} = min(1, β · softmax_ℓ(a_c))                                     Eq. 5

    so a cluster spreads a budget of β over its labels, at most 1 on each. While the graph is
    *fixed* (stage 1) every stored edge scores 1. A slot without an edge holds ``n_labels``.

    Edges that were pruned keep their part of the softmax, so that the others score what they
    scored: ``removed_log`` holds log Σ exp(a_{c,ℓ}) over those of each cluster.
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
        self._kept: tuple[tuple[object, ...], Tensor] | None = None
        self._ordered: tuple[Tensor, OrderedEdges] | None = None

    def train(self, mode: bool = True) -> LabelGraph:
        """Begin or end training; what was kept for searching is forgotten when it begins."""
        if mode:
            self._kept = self._ordered = None
        return super().train(mode)

    @property
    def n_clusters(self) -> int:
        """Return C."""
        return len(self.edge_labels)

    @property
    def n_edges(self) -> int:
        """Return how many edges are stored."""
        return int((self.edge_labels < self.n_labels).sum())

    def edge_log_scores(self) -> Float[Tensor, "C E"]:
        """Return log ŝ_{c,ℓ} for every edge, Eq. 5; -inf where no edge is stored."""
        return self.unsaturated_log().clamp(max=0)

    def unsaturated_log(self, beam: Int[Tensor, "B b"] | None = None) -> Float[Tensor, "C E"]:
        """Return log(β · softmax_ℓ(a_c)), Eq. 5 before its min(1, ·); -inf where no edge is.

        With a ``beam`` the scores of clusters outside it may be left undefined. A model that only
        searches computes all of them once: for one text it would be most of the work.
        """
        if self.training or torch.is_grad_enabled():
            return self._unsaturated_log(beam)
        tensors = (self.edge_logits, self.edge_labels, self.removed_log)
        now = (self.beta, *((t.data_ptr(), t._version, t.device) for t in tensors if t is not None))
        if self._kept is None or self._kept[0] != now:
            self._kept = (now, self._unsaturated_log())
        return self._kept[1]

    def ordered_edges(self) -> OrderedEdges:
        """Return the edges of each cluster, best first; computed once, like what they score."""
        scores = self.unsaturated_log()
        if self._ordered is None or self._ordered[0] is not scores:
            self._ordered = (scores, ordered_edges(self.edge_labels, scores))
        return self._ordered[1]

    def _unsaturated_log(self, beam: Int[Tensor, "B b"] | None = None) -> Float[Tensor, "C E"]:
        empty = self.edge_labels >= self.n_labels
        if not self.learned:
            return torch.zeros(empty.shape, device=empty.device).masked_fill(empty, -math.inf)
        no_gradient = not torch.is_grad_enabled() and self.removed_log is None
        if no_gradient and runs_triton(self.edge_logits):
            return edge_log(
                self.edge_logits,
                self.edge_labels,
                n_labels=self.n_labels,
                beta=self.beta,
                beam=beam,
            )
        return math.log(self.beta) + self._log_shares(empty)

    def _log_shares(self, empty: Bool[Tensor, "C E"]) -> Float[Tensor, "C E"]:
        """Return log softmax_ℓ(a_c), edges that were pruned counted in; -inf where no edge is."""
        logits = self.edge_logits.float().masked_fill(empty, -math.inf)
        shares = logits.log_softmax(dim=-1)
        if self.removed_log is not None:
            stored = logits.logsumexp(dim=-1)
            kept = nn.functional.logsigmoid(stored - self.removed_log)  # of the whole, in logs
            shares = shares + kept.unsqueeze(-1)
        return shares.masked_fill(empty, -math.inf)

    def partition(self) -> Int[Tensor, " L"]:
        """Return each label's cluster, where the graph is the fixed partition of stage 1."""
        clusters = torch.arange(self.n_clusters, device=self.edge_labels.device).unsqueeze(1)
        kept = self.edge_labels < self.n_labels
        assignment = torch.zeros(self.n_labels, dtype=torch.int64, device=kept.device)
        assignment[self.edge_labels[kept]] = clusters.expand_as(kept)[kept]
        return assignment

    @torch.no_grad()
    def strongest_parents(self) -> Int[Tensor, " L"]:
        """Return the cluster whose edge to each label scores highest; C for a label without any.

        Strongest by the normalised score of Eq. 5; of equal ones the higher logit's share, then
        the first cluster.
        """
        empty = self.edge_labels >= self.n_labels
        shares = self._log_shares(empty)
        cluster = torch.arange(self.n_clusters, device=shares.device).unsqueeze(1)
        kept = ~empty
        labels, shares, clusters = (
            part[kept] for part in (self.edge_labels, shares, cluster.expand_as(empty))
        )
        best = torch.full((self.n_labels,), -math.inf, device=shares.device)
        best.scatter_reduce_(0, labels, shares, "amax")
        winners = shares == best[labels]
        parents = torch.full((self.n_labels,), self.n_clusters, device=shares.device)
        return parents.scatter_reduce_(0, labels[winners], clusters[winners], "amin")


def partition_edges(assignment: Int[Tensor, " L"], n_clusters: int) -> Int[Tensor, "C E"]:
    """Return the edges of a partition: each cluster's labels, padded with ``n_labels``."""
    n_labels = len(assignment)
    order = torch.argsort(assignment, stable=True)
    sizes = torch.bincount(assignment, minlength=n_clusters)
    starts = sizes.cumsum(0) - sizes
    edges = torch.full((n_clusters, int(sizes.max())), n_labels)
    clusters = assignment[order]
    edges[clusters, torch.arange(n_labels) - starts[clusters]] = order
    return edges
