"""Every label scored, chunk by chunk: the loss with its gradients, and the k best (one-vs-all).

A chunk of labels is taken through all of its work before the next: neither the B×L logits nor the
L×D gradient of the classifiers is ever held. Plain torch, so alike on a CPU and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import softplus

from elias.kernels.search import sortable

_CHUNK_NUMBERS = 2**24  # logits, or weights, of a chunk: 64 MB in float32
_LAST_ID = 2**31 - 1


LabelUpdate: TypeAlias = Callable[[int, Tensor, Tensor], None]
"""Moves the n classifiers from a first label on by the gradients of weights (n, D) and biases (n,).

It is called as soon as these are known, when the chunk has been read for the last time.
"""


def every_label_loss(
    embedding: Float[Tensor, "B D"],
    weight: Float[Tensor, "L D"],
    bias: Float[Tensor, " L"],
    positives: Int[Tensor, "B Y"],
    *,
    scale: float,
    update: LabelUpdate | None = None,
    chunk_size: int | None = None,
) -> Float[Tensor, ""]:
    """Return scale · Σ −[y log σ(z) + (1−y) log σ(−z)] over all points and labels, z = w·φ + bias.

    Eq. 7 corrected, with every label in the shortlist and every ŷ = 1; its gradient by z is
    scale · (σ(z) − y). ``positives`` are padded with L; a row holds a label once.

    With ``update`` the classifiers move while the loss is computed, and `backward` gives a gradient
    to the embedding alone: so the loss must be what is minimised, not a part or a multiple of it.
    Without, they get a dense gradient as from any loss.
    """
    size = chunk_size or _chunk_size(embedding)
    loss: Tensor = _EveryLabelLoss.apply(  # type: ignore[no-untyped-call]
        embedding, weight, bias, positives, scale, update, size
    )
    return loss


def every_label_top(
    embedding: Float[Tensor, "B D"],
    weight: Float[Tensor, "L D"],
    bias: Float[Tensor, " L"],
    top_k: int,
    blocked: Bool[Tensor, " L"] | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Int[Tensor, "B k"], Float[Tensor, "B k"]]:
    """Return the k labels of highest logit and their logits, descending, equal ones by label id.

    Exact. ``blocked`` labels come last, with a logit of -inf. Fewer than k labels: all of them.
    """
    best = torch.empty((len(embedding), 0), dtype=torch.int64, device=embedding.device)
    for first, last in _chunks(len(weight), chunk_size or _chunk_size(embedding)):
        logits = _logits(embedding, weight[first:last].float(), bias[first:last])
        if blocked is not None:
            logits = logits.masked_fill(blocked[first:last], -torch.inf)
        ids = torch.arange(first, last, device=best.device)
        keys = torch.cat([best, (sortable(logits) << 32) + (_LAST_ID - ids)], dim=1)
        best = keys.topk(min(top_k, keys.shape[1]), dim=1).values
    return _LAST_ID - (best & 0xFFFFFFFF), _from_sortable(best >> 32)


class _EveryLabelLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        embedding: Tensor,
        weight: Tensor,
        bias: Tensor,
        positives: Tensor,
        scale: float,
        update: LabelUpdate | None,
        chunk_size: int,
    ) -> Tensor:
        kept = _Kept(weight, bias) if update is None else None
        move: Any = kept or update
        by_embedding = torch.zeros_like(embedding)
        total = torch.zeros((), device=embedding.device)
        for first, last in _chunks(len(weight), chunk_size):
            rows = weight[first:last].float()
            residual = _logits(embedding, rows, bias[first:last])  # z, then scale · (σ(z) − y)
            place = positives - first
            inside = (place >= 0) & (place < last - first)
            place = place.clamp(0, last - first - 1)
            relevant = inside.float()
            total += softplus(residual).sum() - (residual.gather(1, place) * relevant).sum()
            residual.sigmoid_().scatter_add_(1, place, -relevant).mul_(scale)
            by_embedding.addmm_(residual, rows)
            move(first, residual.T @ embedding, residual.sum(dim=0))
        ctx.save_for_backward(by_embedding, *(kept.gradients if kept else (None, None)))
        return total * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parts = (None if part is None else grads[0] * part for part in ctx.saved_tensors)
        return (*parts, None, None, None, None)


class _Kept:
    """The gradient of the classifiers as a whole, for want of an update."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.gradients = (torch.empty_like(weight), torch.empty_like(bias))

    def __call__(self, first: int, weight_gradient: Tensor, bias_gradient: Tensor) -> None:
        last = first + len(bias_gradient)
        self.gradients[0][first:last] = weight_gradient
        self.gradients[1][first:last] = bias_gradient


def _logits(embedding: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, embedding, rows.T)


def _chunk_size(embedding: Tensor) -> int:
    return max(1, _CHUNK_NUMBERS // max(embedding.shape))


def _chunks(n_labels: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(0, n_labels, size):
        yield first, min(first + size, n_labels)


def _from_sortable(keys: Tensor) -> Tensor:
    """Return the floats that `sortable` made these integers of."""
    size = keys.abs().to(torch.int32).view(torch.float32)
    return torch.where(keys < 0, -size, size)
