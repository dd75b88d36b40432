"""The losses of a training step (§3.3, Eq. 7 and 8): classification and shortlist.

`EliasModel.losses` adds them up. The kernels are in `elias.kernels.cpu.loss`,
`elias.kernels.gpu.loss` and `elias.kernels.plain`; the loss of one-vs-all models is in
`elias.kernels.one_vs_all_loss`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from elias.kernels import IndexGradients, shortlist_bce

if TYPE_CHECKING:
    from elias.model.elias import LinearRows


class Losses(NamedTuple):
    """The losses of a training step."""

    total: Float[Tensor, ""]
    classification: Float[Tensor, ""]
    shortlist: Float[Tensor, ""]


def classification_loss(
    rows: LinearRows,
    embedding: Float[Tensor, "B D"],
    shortlist_log: Float[Tensor, "B K"],
    labels: Int[Tensor, "B K"],
    positives: Int[Tensor, "B Y"],
    n_labels: int,
    gradients: IndexGradients | None = None,
) -> Float[Tensor, ""]:
    """Return the binary cross-entropy over all shortlists, with p = σ(z)·ŷ (Eq. 7, corrected).

    It is Σ −[y log p + (1−y) log(1−p)]. z = w·φ + bias are the logits of ``rows`` (W_L), and
    ``shortlist_log`` is log ŷ ≤ 0. ``labels`` and ``positives`` are padded with L; positives ascend
    in each row. The loss is computed in float32; neither it nor its gradients overflow. If
    ``gradients`` is given, it receives the gradient of W_L.
    """
    logits = rows.logits(embedding, labels, gradients)
    return shortlist_bce(logits, shortlist_log, labels, positives, n_labels)


def shortlist_loss(
    positive_log: Float[Tensor, "B Y"], reached: Bool[Tensor, "B Y"]
) -> Float[Tensor, ""]:
    """Return the shortlist loss Σ −log ŷ, over the positives that a path reaches (Eq. 8)."""
    return -torch.where(reached, positive_log, torch.zeros_like(positive_log)).sum()
