"""The model: encoder, cluster and label classifiers, and the graph between them (§3.1–3.3)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from elias.kernels import expand_beam, label_logits
from elias.kernels.cpu.rank import Index, log_probabilities, rank_beams
from elias.kernels.device import runs_triton
from elias.kernels.one_vs_all import LabelUpdate, every_label_loss, every_label_top
from elias.kernels.paths import is_member, path_log
from elias.kernels.rows import IndexGradients
from elias.kernels.search import sortable
from elias.model.encoder import TextEncoder
from elias.model.graph import LabelGraph
from elias.model.losses import classification_loss, label_loss, shortlist_loss
from elias.text.batches import TokenBatch

_LAST_ID = 2**31 - 1


class SearchSizes(NamedTuple):
    """How wide a search is."""

    beam_size: int
    """b: clusters kept, Eq. 2."""
    shortlist_size: int
    """K: labels kept, Eq. 6."""


class Shortlist(NamedTuple):
    """The labels a search keeps, with the logarithm of their path score."""

    labels: Int[Tensor, "B K"]
    """In no order, padded with ``n_labels``."""
    log_scores: Float[Tensor, "B K"]
    """log ŷ_ℓ of the best path; carries gradients to clusters and edges. 0 in padded slots."""
    positive_log: Float[Tensor, "B Y"]
    """log ŷ_ℓ of the wanted labels, before the cut to K; 0 where not reached."""
    reached: Bool[Tensor, "B Y"]
    """Which of the wanted labels a path leads to."""


class Losses(NamedTuple):
    """What a training step is about, for the optimiser and for the log."""

    total: Float[Tensor, ""]
    classification: Float[Tensor, ""]
    shortlist: Float[Tensor, ""]


class LinearRows(nn.Module):
    """One linear classifier per row: Ŵ_C over clusters, or W_L over labels."""

    def __init__(self, n_rows: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_rows, dim))
        self.bias = nn.Parameter(torch.zeros(n_rows))
        self.reset()

    whole = True
    """Whether all rows are here, not in other processes too (`elias.distributed`)."""

    def logits(
        self,
        embedding: Float[Tensor, "B D"],
        labels: Int[Tensor, "B K"],
        gradients: IndexGradients | None = None,
    ) -> Float[Tensor, "B K"]:
        """Return w·φ + bias of K rows for each point; a row past the last gives 0."""
        return label_logits(embedding, self.weight, self.bias, labels, gradients)

    def every_loss(
        self,
        embedding: Float[Tensor, "B D"],
        positives: Int[Tensor, "B Y"],
        scale: float,
        update: LabelUpdate | None,
    ) -> Float[Tensor, ""]:
        """Return the loss of all rows, see `elias.kernels.one_vs_all`."""
        return every_label_loss(
            embedding, self.weight, self.bias, positives, scale=scale, update=update
        )

    def every_top(
        self, embedding: Float[Tensor, "B D"], top_k: int, blocked: Bool[Tensor, " L"] | None
    ) -> tuple[Int[Tensor, "B k"], Float[Tensor, "B k"]]:
        """Return the k rows of highest logit among all, and the logits."""
        return every_label_top(embedding, self.weight, self.bias, top_k, blocked)

    def batch_size(self, n_points: int) -> int:
        """Return how many points the whole batch has, of which ``n_points`` are at hand."""
        return n_points

    @torch.no_grad()
    def reset(self, bias: float = 0.0) -> None:
        """Start over with small random weights."""
        nn.init.uniform_(self.weight, -1, 1).mul_(1 / math.sqrt(self.weight.shape[1]))
        nn.init.constant_(self.bias, bias)


class EliasModel(nn.Module):
    """ELIAS for one text encoder and one graph.

    Notation: B texts, D embedding width, C clusters, E edges per cluster, b beam, K shortlist,
    L labels, Y positives of the row that has most.
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
        """Return L."""
        return self.graph.n_labels

    @torch.no_grad()
    def compact(self) -> None:
        """Hold W_L in bfloat16 from here on."""
        self.labels.weight = nn.Parameter(self.labels.weight.to(torch.bfloat16))

    def cluster_log_scores(self, embedding: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """Return log ŝ_c = min(0, log α + logsoftmax_c(ŵ_c·φ + bias_c)), Eq. 1."""
        return self.unsaturated_log(embedding).clamp(max=0)

    def unsaturated_log(self, embedding: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """Return log(α · softmax_c(ŵ_c·φ + bias_c)), Eq. 1 before its min(1, ·).

        The order of the clusters is that of their scores, and no two tie at 1.
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
        """Expand a beam of clusters into the K best labels, Eq. 4–6; no path to blocked ones.

        ``cluster_log`` is `unsaturated_log`. With ``gradients`` the edges' gradient goes there.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and gradients is None):
            edge_log = self._unblocked(self.graph.unsaturated_log(beam), blocked)
        if wanted is None:
            wanted = beam.new_empty((len(beam), 0))
        found = expand_beam(
            beam,
            cluster_log.gather(1, beam),
            self.graph.edge_labels,
            edge_log,
            wanted,
            n_labels=self.n_labels,
            shortlist_size=shortlist_size,
        )
        reached = found.wanted_paths >= 0
        stored = found.labels < self.n_labels
        paths = found.paths.masked_fill(~stored, -1)
        without_gradient = runs_triton(beam) and not torch.is_grad_enabled()
        if gradients is not None or without_gradient or not beam.is_cuda:
            paths = torch.cat([paths, found.wanted_paths], dim=1)
            scores = path_log(cluster_log, edge_log, beam, paths, gradients)
            width = stored.shape[1]
            return Shortlist(found.labels, scores[:, :width], scores[:, width:], reached)
        return Shortlist(
            labels=found.labels,
            log_scores=self._path_log(cluster_log, edge_log, beam, found.paths, stored),
            positive_log=self._path_log(cluster_log, edge_log, beam, found.wanted_paths, reached),
            reached=reached,
        )

    def _path_log(
        self, cluster_log: Tensor, edge_log: Tensor, beam: Tensor, paths: Tensor, valid: Tensor
    ) -> Tensor:
        """Return log ŝ_c + log ŝ_{c,ℓ} of the given paths, with gradients; 0 if not valid."""
        n_edges = edge_log.shape[1]
        paths = paths.clamp(min=0)
        cluster = beam.gather(1, paths // n_edges)
        edge = edge_log[cluster, paths % n_edges]
        scores = cluster_log.gather(1, cluster).clamp(max=0) + edge.clamp(max=0)
        return torch.where(valid, scores, torch.zeros((), device=edge.device))

    @torch.no_grad()
    def training_beam(
        self,
        cluster_log: Float[Tensor, "B C"],
        parents: Int[Tensor, "B Y"],
        size: int,
    ) -> Int[Tensor, "B b"]:
        """Return each row's parents of its positives and then its best clusters, ``size`` in all.

        Teacher forcing: a positive's strongest parent is always searched. A parent slot of C is
        empty.
        """
        rank = torch.cat([cluster_log, cluster_log.new_zeros(len(cluster_log), 1)], dim=1)
        rank.scatter_(1, parents, math.inf)
        beam = rank[:, :-1].topk(min(size, cluster_log.shape[1]), dim=1).indices
        # Best clusters first: the search then seldom finds a better path to a label it has.
        return beam.gather(1, cluster_log.gather(1, beam).argsort(dim=1, descending=True))

    def losses(
        self,
        tokens: TokenBatch,
        positives: Int[Tensor, "B Y"],
        parents: Int[Tensor, "B Y"],
        sizes: SearchSizes,
        *,
        shortlist_weight: float,
        mean: bool,
        gradients: IndexGradients | None = None,
    ) -> Losses:
        """Return L = L_c + λ·L_s for a batch.

        ``mean``: L_c over all B·K slots and L_s over all B·Y slots, as the paper's λ wants it;
        else both are summed over a point's slots and averaged over points. With ``gradients``
        Triton kernels compute it, and W_L and A get theirs there instead of in ``.grad``.

        Where these points are one process's share of a batch, the shares' losses add up to the
        batch's: they are averaged over all of its points.
        """
        return self.losses_of(
            self.encoder(tokens).float(),
            positives,
            parents,
            sizes,
            shortlist_weight=shortlist_weight,
            mean=mean,
            gradients=gradients,
        )

    def losses_of(
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
        """Return `losses` of texts that the encoder has read: all but the encoder.

        ``widest`` is Y, where the positives are padded further than the row that has most.
        """
        cluster_log = self.unsaturated_log(embedding)
        beam = self.training_beam(cluster_log, parents, sizes.beam_size)
        found = self.search(cluster_log, beam, sizes.shortlist_size, positives, gradients=gradients)
        weight, bias = self.labels.weight, self.labels.bias
        if gradients is not None and self.labels.whole:
            classification = label_loss(
                embedding, found.log_scores, weight, bias, found.labels, positives, gradients
            )
        else:
            logits = self.labels.logits(embedding, found.labels, gradients)
            relevant = is_member(found.labels, positives, self.n_labels)
            stored = found.labels < self.n_labels
            classification = classification_loss(logits, found.log_scores, relevant, stored)
        shortlist = shortlist_loss(found.positive_log, found.reached)
        # A search finds no path of score NaN, so its loss would be 0. Softmax spreads a NaN over
        # its row: one column shows it, and adds 0 otherwise.
        shortlist = shortlist + 0 * cluster_log[:, 0].detach().sum()
        count = self.labels.batch_size(len(positives))
        classification = classification / (count * found.labels.shape[1] if mean else count)
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
        """Return the k labels of highest p = σ(w·φ + bias)·ŷ and their p, descending.

        Ties go to the lower label id; missing slots hold ``n_labels`` and 0. ``blocked`` labels
        take no place in the shortlist.
        """
        cluster_log = self.unsaturated_log(embedding)
        beam = cluster_log.topk(min(sizes.beam_size, cluster_log.shape[1]), dim=1).indices
        if self.labels.whole and not embedding.is_cuda:
            return self._rank_compiled(embedding, cluster_log, beam, sizes, top_k, blocked)
        found = self.search(cluster_log, beam, sizes.shortlist_size, blocked=blocked)
        logits = self.labels.logits(embedding, found.labels)
        log_p = log_probabilities(logits.float(), found.log_scores)
        dropped = found.labels >= self.n_labels
        return best_labels(
            found.labels, log_p.masked_fill(dropped, -math.inf), top_k, self.n_labels
        )

    def _rank_compiled(
        self,
        embedding: Float[Tensor, "B D"],
        cluster_log: Float[Tensor, "B C"],
        beam: Int[Tensor, "B b"],
        sizes: SearchSizes,
        top_k: int,
        blocked: Bool[Tensor, " L"] | None,
    ) -> tuple[Int[Tensor, "B k"], Float[Tensor, "B k"]]:
        edges = self.graph.ordered_edges()
        none = torch.zeros(0, dtype=torch.bool)
        tables = (self.labels.weight, self.labels.bias, none if blocked is None else blocked)
        index = Index(edges, *(table.detach().numpy() for table in tables))
        beam_log = cluster_log.gather(1, beam)
        return rank_beams(
            embedding.contiguous(), beam, beam_log, index, sizes.shortlist_size, top_k
        )

    def _unblocked(
        self, edge_log: Float[Tensor, "C E"], blocked: Bool[Tensor, " L"] | None
    ) -> Float[Tensor, "C E"]:
        """Return the edges' scores without a path to blocked labels."""
        if blocked is None:
            return edge_log
        known = self.graph.edge_labels.clamp(max=self.n_labels - 1)
        return edge_log.masked_fill(blocked[known], -math.inf)


def best_labels(
    labels: Int[Tensor, "B K"], log_p: Float[Tensor, "B K"], top_k: int, n_labels: int
) -> tuple[Int[Tensor, "B k"], Float[Tensor, "B k"]]:
    """Return the k best by log p and their p, equal ones by label id; L and 0 where it is -inf."""
    order = _top_of(labels, log_p, min(top_k, labels.shape[1]))
    labels, log_p = labels.gather(1, order), log_p.gather(1, order)
    return labels.masked_fill(log_p == -math.inf, n_labels), log_p.exp()


def _top_of(
    labels: Int[Tensor, "B K"], log_p: Float[Tensor, "B K"], top_k: int
) -> Int[Tensor, "B k"]:
    """Return the places of the k best, descending, equal ones by label id, without a full sort."""
    keys = (sortable(log_p) << 32) + (_LAST_ID - labels)
    return keys.topk(top_k, dim=1).indices
