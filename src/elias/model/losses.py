"""The two losses of §3.3; `elias.kernels` computes the first with its gradients on each device."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from elias.kernels import shortlist_bce


def classification_loss(
    logits: Float[Tensor, "B K"],
    shortlist_log: Float[Tensor, "B K"],
    labels: Int[Tensor, "B K"],
    positives: Int[Tensor, "B Y"],
    n_labels: int,
) -> Float[Tensor, ""]:
    """Return Σ −[y log p + (1−y) log(1−p)] over a shortlist, p = σ(z)·ŷ; Eq. 7 corrected.

    ``logits`` are z, ``shortlist_log`` is log ŷ ≤ 0. Both label tensors are padded with L, the
    positives ascending in each row. The loss is float32 and neither it nor its gradients overflow.
    """
    return shortlist_bce(logits, shortlist_log, labels, positives, n_labels)


def shortlist_loss(
    positive_log: Float[Tensor, "B Y"], reached: Bool[Tensor, "B Y"]
) -> Float[Tensor, ""]:
    """Return Σ −log ŷ over the positives that a path reached; Eq. 8."""
    return -torch.where(reached, positive_log, torch.zeros_like(positive_log)).sum()
