"""The two losses of §3.3, computed from logarithms in float32."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from elias.kernels.cpu import loss as cpu_loss
from elias.kernels.rows import IndexGradients

_LARGEST_EXPONENT = 80.0  # keeps exp finite in float32
_LARGEST_EXACT = 15.0  # up to here 1−p loses nothing without logarithms
_SLOTS_AT_A_TIME = 2**17  # of which a dozen temporaries are made


def classification_loss(
    logits: Float[Tensor, "B K"],
    shortlist_log: Float[Tensor, "B K"],
    relevant: Bool[Tensor, "B K"],
    stored: Bool[Tensor, "B K"],
) -> Float[Tensor, ""]:
    """Return Σ −[y log p + (1−y) log(1−p)] over stored slots, p = σ(z)·ŷ; Eq. 7 corrected.

    ``logits`` are z, ``shortlist_log`` is log ŷ ≤ 0. With log p = logσ(z) + log ŷ and
    1−p = σ(−z) + σ(z)(1−ŷ), neither logarithm ever meets a rounded probability.
    """
    loss: Tensor = _ShortlistBCE.apply(  # type: ignore[no-untyped-call]
        logits, shortlist_log, relevant, stored
    )
    return loss


class _ShortlistBCE(torch.autograd.Function):
    """The loss and both gradients in one pass; none of them can overflow or turn NaN."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, shortlist_log: Tensor, relevant: Tensor, stored: Tensor
    ) -> Tensor:
        run = _bce_torch if logits.is_cuda else _bce_compiled
        loss, by_logits, by_shortlist = run(logits.float(), shortlist_log, relevant, stored)
        ctx.save_for_backward(by_logits, by_shortlist)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        by_logits, by_shortlist = ctx.saved_tensors
        return grads[0] * by_logits, grads[0] * by_shortlist, None, None


def _bce_compiled(
    z: Tensor, shortlist_log: Tensor, relevant: Tensor, stored: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = torch.empty((2, *z.shape))
    slots = (part.detach().contiguous().numpy() for part in (z, shortlist_log, relevant, stored))
    loss = cpu_loss.shortlist_bce(*slots, *gradients.numpy())
    return torch.tensor(loss, dtype=torch.float32), gradients[0], gradients[1]


def _bce_torch(
    z: Tensor, shortlist_log: Tensor, relevant: Tensor, stored: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    by_logits, by_shortlist = torch.empty_like(z), torch.empty_like(z)
    loss = z.new_zeros(())
    rows = max(1, _SLOTS_AT_A_TIME // max(1, z.shape[1]))
    for i in range(0, len(z), rows):
        some = slice(i, i + rows)
        parts = _negative_slots(z[some], shortlist_log[some])
        _mend(parts, z[some], shortlist_log[some], relevant[some])
        kept = stored[some]
        by_logits[some] = parts.by_logits.mul_(kept)
        by_shortlist[some] = parts.by_shortlist.mul_(kept)
        loss += parts.loss.mul_(kept).sum()
    return loss, by_logits, by_shortlist


class _Slots(NamedTuple):
    """The loss of slots and its gradients."""

    loss: Tensor
    by_logits: Tensor
    by_shortlist: Tensor


def _negative_slots(z: Tensor, shortlist_log: Tensor) -> _Slots:
    """Return −log(1−p) and its gradients, for z up to `_LARGEST_EXACT`."""
    small = torch.exp(-z.abs())
    larger = 1 / (1 + small)
    smaller = small.mul_(larger)
    above = z >= 0
    hit = torch.where(above, larger, smaller)  # σ(z)
    miss = torch.where(above, smaller, larger)  # σ(−z)
    rest = torch.expm1(shortlist_log).neg_()  # 1−ŷ
    not_p = torch.addcmul(miss, hit, rest)
    odds = hit.mul_(shortlist_log.exp()).div_(not_p)
    return _Slots(not_p.log().neg_(), miss.mul_(odds), odds)


def _mend(slots: _Slots, z: Tensor, shortlist_log: Tensor, relevant: Tensor) -> None:
    """Put in place the few slots that are positive, or whose z is too large for `_negative_slots`.

    These are computed from logarithms throughout.
    """
    few = relevant | (z > _LARGEST_EXACT)
    z, shortlist_log, relevant = z[few], shortlist_log[few], relevant[few]
    log_hit, log_miss = logsigmoid(z), logsigmoid(-z)
    log_p = log_hit + shortlist_log
    log_rest = torch.log(-torch.expm1(shortlist_log))  # log(1−ŷ), −inf where ŷ = 1
    log_not_p = torch.logaddexp(log_miss, log_hit + log_rest)
    log_odds = log_p - log_not_p  # of p / (1−p)
    odds = log_odds.clamp(max=_LARGEST_EXPONENT).exp()
    slots.loss[few] = torch.where(relevant, -log_p, -log_not_p)
    slots.by_logits[few] = torch.where(relevant, -log_miss.exp(), (log_odds + log_miss).exp())
    slots.by_shortlist[few] = torch.where(relevant, torch.full_like(odds, -1.0), odds)


def label_loss(
    embedding: Float[Tensor, "B D"],
    shortlist_log: Float[Tensor, "B K"],
    weight: Float[Tensor, "L D"],
    bias: Float[Tensor, " L"],
    labels: Int[Tensor, "B K"],
    positives: Int[Tensor, "B Y"],
    gradients: IndexGradients,
) -> Float[Tensor, ""]:
    """Return `classification_loss` of the shortlist by Triton kernels.

    φ and log ŷ get their gradients; that of the classifiers is left in ``gradients``.
    """
    loss: Tensor = _LabelLoss.apply(  # type: ignore[no-untyped-call]
        embedding, shortlist_log, weight, bias, labels, positives, gradients
    )
    return loss


class _LabelLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        embedding: Tensor,
        shortlist_log: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        positives: Tensor,
        gradients: IndexGradients,
    ) -> Tensor:
        from elias.kernels.gpu import loss as gpu_loss

        found = gpu_loss.label_loss(embedding, weight, bias, shortlist_log, labels, positives)
        by_embedding, by_logits, by_shortlist = found[1:]
        ctx.save_for_backward(by_embedding, by_logits, by_shortlist, embedding, labels)
        ctx.gradients = gradients
        return found.loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by_embedding, by_logits, by_shortlist, embedding, labels = ctx.saved_tensors
        ctx.gradients.add_pairs(labels, grads[0] * by_logits, embedding)
        return grads[0] * by_embedding, grads[0] * by_shortlist, None, None, None, None, None


def shortlist_loss(
    positive_log: Float[Tensor, "B Y"], reached: Bool[Tensor, "B Y"]
) -> Float[Tensor, ""]:
    """Return Σ −log ŷ over the positives that a path reached; Eq. 8."""
    return -torch.where(reached, positive_log, torch.zeros_like(positive_log)).sum()
