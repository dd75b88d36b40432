"""Score every label (one-vs-all) to compute the loss and its gradients, or the k best labels.

Labels are processed in chunks, so the B×L logits are never held in memory. If the classifiers are
updated chunk by chunk, their L×D gradient is not held either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from numba import get_num_threads
from torch import Tensor

from elias.kernels import every_label_bce, product
from elias.kernels.plain import ranking_key, split_ranking_key
from elias.kernels.threads import split_range, thread_map, torch_threads

_CHUNK_NUMBERS = 2**24
"""Maximum number of logits, and of weights, in a chunk: 64 MB in float32."""
_CACHED_NUMBERS = 2**18
"""Maximum number of logits, and of weights, in a chunk of the loss on a CPU: 1 MB, which fits into
the cache."""

Rows: TypeAlias = slice | Tensor
"""Consecutive rows of a table, or the indices of any rows."""

LabelUpdate: TypeAlias = Callable[[Rows, Tensor, Tensor], None]
"""Function that updates the classifiers of a chunk of labels.

Its arguments are the labels, and the gradients of the weights (n, D) and the biases (n,). It is
called for each chunk of labels after their weights have been read for the last time. On a CPU,
several threads call it, each for other labels.
"""


def every_label_loss(
    embedding: Float[Tensor, "B D"],
    weight: Float[Tensor, "L D"],
    bias: Float[Tensor, " L"],
    positives: Int[Tensor, "B Y"],
    scale: float,
    update: LabelUpdate | None = None,
    sample: Int[Tensor, " S"] | None = None,
) -> Float[Tensor, ""]:
    """Return the scaled binary cross-entropy over all points and all labels.

    It is scale · Σ −[y log σ(z) + (1−y) log σ(−z)] with the logits z = w·φ + bias, which is Eq. 7
    (corrected) with every label in the shortlist and every ŷ = 1. Its gradient with respect to z is
    scale · (σ(z) − y). ``positives`` is padded with L; a row must not repeat a label.

    If ``update`` is given, it updates the classifiers while the loss is computed, and `backward`
    returns a gradient for the embedding only. The returned loss must then be the whole objective,
    not a term or a multiple of it. Without ``update``, the classifiers get a dense gradient.

    If ``sample`` is given, only these labels are scored, and others have no loss. They must be
    ascending and include all positives.
    """
    return _EveryLabelLoss.apply(embedding, weight, bias, positives, scale, update, sample)


def with_positives(drawn: Bool[Tensor, " L"], positives: Int[Tensor, "B Y"]) -> Int[Tensor, " S"]:
    """Return the labels that were drawn or are positive, ascending.

    >>> with_positives(torch.tensor([True, False, False, False]), torch.tensor([[2, 4]])).tolist()
    [0, 2]
    """
    is_scored = torch.nn.functional.pad(drawn, (0, 1))  # positives are padded with L
    is_scored[positives] = True
    return is_scored[:-1].nonzero().squeeze(1)


def every_label_top(
    embedding: Float[Tensor, "B D"],
    weight: Float[Tensor, "L D"],
    bias: Float[Tensor, " L"],
    top_k: int,
    blocked: Bool[Tensor, " L"] | None = None,
) -> tuple[Int[Tensor, "B k"], Float[Tensor, "B k"]]:
    """Return the k labels with the highest logits, and these logits, in descending order.

    The result is exact; ties are ordered by label id. ``blocked`` labels get the logit -inf and
    come last. If there are fewer than k labels, all are returned.
    """
    best = torch.empty((len(embedding), 0), dtype=torch.int64, device=embedding.device)
    for labels in _chunks(embedding, len(weight)):
        chunk = slice(labels.start, labels.stop)
        logits = torch.addmm(bias[chunk], embedding, weight[chunk].float().T)
        ids = torch.arange(labels.start, labels.stop, device=best.device)
        if blocked is not None:
            logits = logits.masked_fill(blocked[ids], -torch.inf)
        keys = torch.cat([best, _best_keys(logits, ids, top_k)], dim=1)
        best = keys.topk(min(top_k, keys.shape[1]), dim=1).values
    return split_ranking_key(best)


def _best_keys(logits: Tensor, ids: Tensor, top_k: int) -> Tensor:
    """Return the ranking keys of at least the k best labels of each row.

    On a GPU, return the keys of all labels. On a CPU, compute the keys of all labels only in rows
    where the k-th label has the same logit as the next one.
    """
    if logits.is_cuda or top_k >= logits.shape[1]:
        return ranking_key(logits, ids)
    values, columns = logits.topk(top_k + 1, dim=1)
    keys = ranking_key(values[:, :-1], ids[columns[:, :-1]])
    tied = (values[:, -2] == values[:, -1]).nonzero().squeeze(1)
    keys[tied] = ranking_key(logits[tied], ids).topk(top_k, dim=1).values
    return keys


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
        sample: Tensor | None,
    ) -> Tensor:
        dense = (None, None) if update else (torch.zeros_like(weight), torch.zeros_like(bias))
        if sample is not None:
            positives = torch.searchsorted(sample, positives.contiguous())
        by_embedding = torch.zeros_like(embedding)
        total = torch.zeros((), device=embedding.device)

        @torch.no_grad()
        def work(labels: range, _: None = None) -> tuple[Tensor, Tensor]:
            """Return the loss of a chunk and its gradient of the embedding; update the chunk."""
            chunk: Rows = slice(labels.start, labels.stop)
            if sample is not None:
                chunk = sample[chunk]
            rows = weight[chunk].float()
            loss, residual, by_bias = every_label_bce(
                embedding, rows, bias[chunk], positives - labels.start, scale
            )
            gradients = (product(residual.T, embedding), by_bias)
            part = product(residual, rows)
            if update is not None:
                update(chunk, *gradients)
            for whole, gradient in zip(dense, gradients, strict=True):
                if whole is not None:
                    whole[chunk] = gradient
            return loss, part

        most = _CHUNK_NUMBERS if embedding.is_cuda else _CACHED_NUMBERS
        n_labels = len(weight if sample is None else sample)
        chunks = _chunks(embedding, n_labels, most)
        # stochastic rounding of compact weights draws random numbers, so the order matters
        in_order = embedding.is_cuda or weight.dtype != torch.float32
        parts: Iterator[tuple[Tensor, Tensor]] = map(work, chunks)
        if not in_order:
            parts = thread_map(work, chunks, lambda: None)
        n_threads = get_num_threads() if in_order else 1
        with nullcontext() if embedding.is_cuda else torch_threads(n_threads):
            for loss, part in parts:
                total += loss
                by_embedding += part
        ctx.save_for_backward(by_embedding, *dense)
        return total * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parts = (None if part is None else grads[0] * part for part in ctx.saved_tensors)
        return (*parts, None, None, None, None)


def _chunks(embedding: Tensor, n_labels: int, most: int = _CHUNK_NUMBERS) -> list[range]:
    """Return the labels of each chunk: neither its logits nor its weights exceed ``most``."""
    return split_range(n_labels, max(1, most // max(embedding.shape)))
