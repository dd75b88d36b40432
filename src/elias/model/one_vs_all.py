"""One-vs-all: score every label with its own classifier (the paper's BERT-OvA)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from elias.kernels.one_vs_all_loss import LabelUpdate
from elias.model.elias import EliasModel, LinearRows, SearchSizes, best_labels
from elias.model.encoder import TextEncoder
from elias.model.graph import LabelGraph
from elias.model.losses import Losses


class OneVsAll(EliasModel):
    """A model without an index: every label has the probability p = σ(w·φ + bias).

    It is an `EliasModel` with one cluster that contains all labels, and a shortlist of all labels,
    but the results are computed in chunks of labels, without a search.
    """

    def __init__(
        self, encoder: TextEncoder, n_labels: int, labels: LinearRows | None = None
    ) -> None:
        edges = torch.arange(n_labels).unsqueeze(0)
        super().__init__(encoder, LabelGraph(edges, n_labels, beta=1.0), alpha=1.0, labels=labels)

    def all_losses(
        self,
        embedding: Float[Tensor, "B D"],
        positives: Int[Tensor, "B Y"],
        *,
        mean: bool,
        update: LabelUpdate | None = None,
        drawn: Bool[Tensor, " L"] | None = None,
    ) -> Losses:
        """Return the losses of a batch of embedded texts, computed in chunks of labels.

        If ``update`` is given, it updates W_L after each chunk. If ``drawn`` is given, only these
        labels and the positives of the batch are scored. With ``mean``, the loss is averaged
        over all B·L slots. Otherwise it is summed over labels and averaged over points. L_s is 0,
        because every label is reached.
        """
        slots = self.labels.batch_size(len(positives)) * (self.n_labels if mean else 1)
        loss = self.labels.all_rows_loss(embedding, positives, 1 / slots, update, drawn)
        return Losses(loss, loss, torch.zeros_like(loss))

    @torch.no_grad()
    def rank(
        self,
        embedding: Float[Tensor, "B D"],
        sizes: SearchSizes,  # noqa: ARG002 - there is no search
        top_k: int,
        blocked: Bool[Tensor, " L"] | None = None,
    ) -> tuple[Int[Tensor, "B k"], Float[Tensor, "B k"]]:
        """Return the k labels with the highest p = σ(w·φ + bias), and their p, in descending order.

        Labels with equal p are ordered by label id. Unused slots have label ``n_labels`` and p = 0.
        """
        labels, logits = self.labels.all_rows_top(embedding, top_k, blocked)
        return best_labels(labels, nn.functional.logsigmoid(logits), top_k, self.n_labels)
