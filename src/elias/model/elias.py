"""The model: encoder, cluster and label classifiers, and the graph between them (§3.1–3.3)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from elias.kernels import (
    IndexGradients,
    expand_beam,
    label_logits,
    log_probabilities,
    path_log,
    rank_rows,
)
from elias.kernels.one_vs_all_loss import (
    LabelUpdate,
    every_label_loss,
    every_label_top,
    with_positives,
)
from elias.kernels.plain import ranking_key
from elias.model.encoder import TextEncoder
from elias.model.graph import LabelGraph
from elias.model.losses import Losses, classification_loss, shortlist_loss


class SearchSizes(NamedTuple):
    """Sizes of the beam and the shortlist in a search."""

    beam_size: int
    """b: number of clusters searched, Eq. 2."""
    shortlist_size: int
    """K: number of labels in the shortlist, Eq. 6."""


class Shortlist(NamedTuple):
    """The labels that a search returns, with the log scores of their best paths."""

    labels: Int[Tensor, "B K"]
    """Shortlisted labels, unordered, padded with ``n_labels``."""
    log_scores: Float[Tensor, "B K"]
    """Log score log ŷ_ℓ of each label's best path, with gradients to clusters and edges; 0 for
    padding."""
    positive_log: Float[Tensor, "B Y"]
    """Log path score of each ``wanted`` label, in the shortlist or not; 0 if no path reaches it."""
    reached: Bool[Tensor, "B Y"]
    """True for each ``wanted`` label that a path reaches."""


class LinearRows(nn.Module):
    """The linear classifiers of all clusters (Ŵ_C) or of all labels (W_L), one per row."""

    def __init__(self, n_rows: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_rows, dim))
        self.bias = nn.Parameter(torch.zeros(n_rows))
        self.reset()

    whole = True
    """True if this process holds all rows; `ShardedRows` sets it to False."""

    def logits(
        self,
        embedding: Float[Tensor, "B D"],
        labels: Int[Tensor, "B K"],
        gradients: IndexGradients | None = None,
    ) -> Float[Tensor, "B K"]:
        """Return the logits w·φ + bias of K rows for each point.

        An id that is at least the number of rows is padding and gives 0.
        """
        return label_logits(embedding, self.weight, self.bias, labels, gradients)

    def all_rows_loss(
        self,
        embedding: Float[Tensor, "B D"],
        positives: Int[Tensor, "B Y"],
        scale: float,
        update: LabelUpdate | None,
        drawn: Bool[Tensor, " L"] | None = None,
    ) -> Float[Tensor, ""]:
        """Return the one-vs-all loss over all rows, see `elias.kernels.one_vs_all_loss`.

        If ``drawn`` is given, it is the loss over these rows and the positives.
        """
        sample = None if drawn is None else with_positives(drawn, positives)
        return every_label_loss(embedding, self.weight, self.bias, positives, scale, update, sample)

    def all_rows_top(
        self, embedding: Float[Tensor, "B D"], top_k: int, blocked: Bool[Tensor, " L"] | None
    ) -> tuple[Int[Tensor, "B k"], Float[Tensor, "B k"]]:
        """Return the k rows with the highest logits for each point, and these logits."""
        return every_label_top(embedding, self.weight, self.bias, top_k, blocked)

    def batch_size(self, n_points: int) -> int:
        """Return the size of the whole batch, of which this process has ``n_points`` points."""
        return n_points

    @torch.no_grad()
    def reset(self, bias: float = 0.0) -> None:
        """Set small random weights and a constant bias."""
        nn.init.uniform_(self.weight, -1, 1).mul_(1 / math.sqrt(self.weight.shape[1]))
        nn.init.constant_(self.bias, bias)


class EliasModel(nn.Module):
    """ELIAS: a text encoder, a graph, and classifiers of clusters and labels.

    Notation for sizes: B texts in a batch, D embedding dimensions, C clusters, E edges per
    cluster, b clusters in a beam, K labels in a shortlist, L labels in total, Y positives per
    point after padding.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        graph: LabelGraph,
        alpha: float,
        labels: LinearRows | None = None,
    ) -> None:
        super().__init__()
        self.alpha = alpha
        self.encoder = encoder
        self.graph = graph
        self.clusters = LinearRows(graph.n_clusters, encoder.dim)  # Ŵ_C
        self.labels = labels or LinearRows(graph.n_labels, encoder.dim)  # W_L

    @property
    def n_labels(self) -> int:
        """Return L, the number of labels."""
        return self.graph.n_labels

    @torch.no_grad()
    def compact(self) -> None:
        """Convert W_L to bfloat16."""
        self.labels.weight = nn.Parameter(self.labels.weight.to(torch.bfloat16))

    def unsaturated_log(self, embedding: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """Return the unsaturated log score of each cluster, which is Eq. 1 without its min(1, ·).

        It is log(α · softmax_c(ŵ_c·φ + bias_c)). It also orders the clusters whose score, by
        Eq. 1, is 1.
        """
        logits = torch.addmm(self.clusters.bias, embedding, self.clusters.weight.T)
        return math.log(self.alpha) + logits.log_softmax(dim=-1)

    def search(
        self,
        cluster_log: Float[Tensor, "B C"],
        beam: Int[Tensor, "B b"],
        shortlist_size: int,
        wanted: Int[Tensor, "B Y"] | None = None,
        blocked: Bool[Tensor, " L"] | None = None,
        gradients: IndexGradients | None = None,
    ) -> Shortlist:
        """Return the K best labels that a beam of clusters leads to, without ``blocked`` ones.

        This is the shortlist of Eq. 4–6.

        ``cluster_log`` is the result of `unsaturated_log`. Paths to ``wanted`` labels are also
        scored. If ``gradients`` is given, it receives the gradients of the edges.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and gradients is None):
            edge_log = self.graph.unsaturated_log(beam)
        if blocked is not None:
            known = self.graph.edge_labels.clamp(max=self.n_labels - 1)
            edge_log = edge_log.masked_fill(blocked[known], -math.inf)
        labels, paths, wanted_paths = expand_beam(
            beam,
            cluster_log.gather(1, beam),
            self.graph.edge_labels,
            edge_log,
            beam.new_empty((len(beam), 0)) if wanted is None else wanted,
            n_labels=self.n_labels,
            shortlist_size=shortlist_size,
        )
        paths = paths.masked_fill(labels >= self.n_labels, -1)
        scores = path_log(
            cluster_log, edge_log, beam, torch.cat([paths, wanted_paths], dim=1), gradients
        )
        width = labels.shape[1]
        return Shortlist(labels, scores[:, :width], scores[:, width:], wanted_paths >= 0)

    @torch.no_grad()
    def training_beam(
        self,
        cluster_log: Float[Tensor, "B C"],
        parents: Int[Tensor, "B Y"],
        size: int,
    ) -> Int[Tensor, "B b"]:
        """Return ``size`` clusters per point: the parents of its positives, then its best clusters.

        This is teacher forcing: the cluster with the strongest edge to each positive is always
        searched. The id C in ``parents`` is padding.
        """
        rank = torch.cat([cluster_log, cluster_log.new_zeros(len(cluster_log), 1)], dim=1)
        rank.scatter_(1, parents, math.inf)
        beam = rank[:, :-1].topk(min(size, cluster_log.shape[1]), dim=1).indices
        # best clusters first, so that the first path found to a label is usually the best
        return beam.gather(1, cluster_log.gather(1, beam).argsort(dim=1, descending=True))

    def losses(
        self,
        embedding: Float[Tensor, "B D"],
        positives: Int[Tensor, "B Y"],
        parents: Int[Tensor, "B Y"],
        sizes: SearchSizes,
        *,
        shortlist_weight: float,
        mean: bool,
        gradients: IndexGradients | None = None,
        widest: Int[Tensor, ""] | None = None,
    ) -> Losses:
        """Return the loss L = L_c + λ·L_s of a batch: classification loss and shortlist loss.

        With ``mean``, L_c is averaged over all B·K slots and L_s over all B·Y slots; the paper's λ
        assumes this. Otherwise both are summed over the slots of a point and averaged over points.
        If ``gradients`` is given, Triton kernels compute the loss, and add the gradients of W_L
        and A to it instead of ``.grad``. ``widest`` is the largest number of positives of a
        point, if ``positives`` has more columns than that.

        If the batch is divided among processes, each loss is divided by the number of points in
        the whole batch. The losses of all processes then add up to the loss of the batch.
        """
        cluster_log = self.unsaturated_log(embedding)
        beam = self.training_beam(cluster_log, parents, sizes.beam_size)
        labels, log_scores, positive_log, reached = self.search(
            cluster_log, beam, sizes.shortlist_size, positives, gradients=gradients
        )
        classification = classification_loss(
            self.labels, embedding, log_scores, labels, positives, self.n_labels, gradients
        )
        shortlist = shortlist_loss(positive_log, reached)
        # The search ignores NaN scores, so the loss would hide them. A NaN logit makes all cluster
        # scores of a point NaN. This term is then NaN, and otherwise 0.
        shortlist = shortlist + 0 * cluster_log[:, 0].detach().sum()
        count = self.labels.batch_size(len(positives))
        classification = classification / (count * labels.shape[1] if mean else count)
        width = positives.shape[1] if widest is None else widest
        shortlist = shortlist / (count * width if mean else count)
        return Losses(classification + shortlist_weight * shortlist, classification, shortlist)

    @torch.no_grad()
    def rank(
        self,
        embedding: Float[Tensor, "B D"],
        sizes: SearchSizes,
        top_k: int,
        blocked: Bool[Tensor, " L"] | None = None,
    ) -> tuple[Int[Tensor, "B k"], Float[Tensor, "B k"]]:
        """Return the k labels with the highest p = σ(w·φ + bias)·ŷ, and their p, best first.

        Labels with equal p are ordered by label id. Unused slots have label ``n_labels`` and p = 0.
        ``blocked`` labels are excluded.
        """
        cluster_log = self.unsaturated_log(embedding)
        beam = cluster_log.topk(min(sizes.beam_size, cluster_log.shape[1]), dim=1).indices
        if self.labels.whole and not embedding.is_cuda:
            tensors = embedding.contiguous(), beam, cluster_log.gather(1, beam)
            points = tuple(tensor.numpy() for tensor in tensors)
            best, p = self.rank_arrays(points, sizes, top_k, blocked)
            return torch.from_numpy(best), torch.from_numpy(p)
        labels, log_scores, *_ = self.search(
            cluster_log, beam, sizes.shortlist_size, blocked=blocked
        )
        logits = self.labels.logits(embedding, labels)
        log_p = log_probabilities(logits.float(), log_scores)
        log_p = log_p.masked_fill(labels >= self.n_labels, -math.inf)
        return best_labels(labels, log_p, top_k, self.n_labels)

    def rank_arrays(
        self, points: Any, sizes: SearchSizes, top_k: int, blocked: Bool[Tensor, " L"] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the result of `rank` on a CPU, given the arrays of φ, the beam and its scores."""
        edges, weight, bias = self.graph.ordered_edges(), self.labels.weight, self.labels.bias
        return rank_rows(points, edges, weight, bias, blocked, sizes.shortlist_size, top_k)


def best_labels(
    labels: Int[Tensor, "B K"], log_p: Float[Tensor, "B K"], top_k: int, n_labels: int
) -> tuple[Int[Tensor, "B k"], Float[Tensor, "B k"]]:
    """Return the k labels with the highest p, and their p, in descending order.

    Labels with equal p are ordered by label id. Labels with p = 0 are replaced by L, the padding.
    """
    keys = ranking_key(log_p, labels)
    order = keys.topk(min(top_k, labels.shape[1]), dim=1).indices
    labels, log_p = labels.gather(1, order), log_p.gather(1, order)
    return labels.masked_fill(log_p == -math.inf, n_labels), log_p.exp()
