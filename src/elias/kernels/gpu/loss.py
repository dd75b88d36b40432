"""Shortlist loss and its gradients as one Triton kernel.

The kernel finds the positive slots by binary search in the row's ascending positives. The gradient
of a slot depends on this slot only, so it is computed together with the loss.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from elias.kernels.gpu.search import is_among

_BLOCK = 1024


def shortlist_bce(
    logits: Tensor, shortlist_log: Tensor, labels: Tensor, positives: Tensor, n_labels: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss over all shortlists and its gradients with respect to z and log ŷ."""
    n_rows, n_keep = labels.shape
    blocks = triton.cdiv(n_keep, _BLOCK)
    partial = torch.empty((n_rows, blocks), dtype=torch.float32, device=logits.device)
    by_logits = torch.empty((n_rows, n_keep), dtype=torch.float32, device=logits.device)
    by_shortlist = torch.empty_like(by_logits)
    if by_logits.numel():
        _shortlist_bce[(n_rows, blocks)](
            logits.contiguous(),
            shortlist_log.contiguous(),
            labels.contiguous(),
            positives.contiguous(),
            partial,
            by_logits,
            by_shortlist,
            n_keep,
            positives.shape[1],
            n_labels,
            HALVINGS=positives.shape[1].bit_length(),
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return partial.sum(), by_logits, by_shortlist


@triton.jit
def _log1p(x: tensor) -> tensor:
    """Return log(1 + x) for 0 ≤ x ≤ 1, accurate even for tiny x."""
    rounded = 1.0 + x
    return tl.where(rounded == 1.0, x, tl.log(rounded) * (x / (rounded - 1.0)))


@triton.jit
def _log_sigmoid(z: tensor) -> tensor:
    return tl.minimum(z, 0.0) - _log1p(tl.exp(-tl.abs(z)))


@triton.jit
def _one_minus_exp(s: tensor) -> tensor:
    """Return 1 − exp(s) for s ≤ 0, accurate even for tiny |s|."""
    near = 1.0 + s / 2 * (1.0 + s / 3 * (1.0 + s / 4 * (1.0 + s / 5 * (1.0 + s / 6))))
    return tl.where(s > -0.25, -s * near, 1.0 - tl.exp(s))


@triton.jit
def _cross_entropy(z: tensor, shortlist: tensor, relevant: tensor) -> tensor:
    """Return the loss −[y log p + (1−y) log(1−p)] with p = σ(z)·ŷ.

    Also return its derivatives with respect to z and log ŷ.
    """
    log_hit = _log_sigmoid(z)
    log_miss = _log_sigmoid(-z)
    log_p = log_hit + shortlist
    log_second = log_hit + tl.log(_one_minus_exp(shortlist))  # log of σ(z)(1−ŷ); −inf if ŷ = 1
    larger = tl.maximum(log_miss, log_second)
    smaller = tl.minimum(log_miss, log_second)
    log_not_p = larger + _log1p(tl.exp(smaller - larger))
    log_odds = log_p - log_not_p
    loss = tl.where(relevant, -log_p, -log_not_p)
    by_z = tl.where(relevant, -tl.exp(log_miss), tl.exp(log_odds + log_miss))
    by_log = tl.where(relevant, -1.0, tl.exp(tl.minimum(log_odds, 80.0)))
    return loss, by_z, by_log


@triton.jit(do_not_specialize=["n_positives"])
def _shortlist_bce(
    logits: tensor,
    shortlist_log: tensor,
    labels: tensor,
    positives: tensor,
    partial: tensor,
    by_logits: tensor,
    by_shortlist: tensor,
    n_keep: tensor,
    n_positives: tensor,
    n_labels: tensor,
    HALVINGS: constexpr,
    BLOCK: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * n_keep + k
    label = tl.load(labels + at, mask=k < n_keep, other=n_labels)
    stored = label < n_labels
    z = tl.load(logits + at, mask=stored, other=0.0).to(tl.float32)
    shortlist = tl.load(shortlist_log + at, mask=stored, other=0.0).to(tl.float32)
    relevant = is_among(label, positives + row * n_positives, n_positives, HALVINGS)

    loss, by_z, by_log = _cross_entropy(z, shortlist, relevant)
    tl.store(by_logits + at, tl.where(stored, by_z, 0.0), mask=k < n_keep)
    tl.store(by_shortlist + at, tl.where(stored, by_log, 0.0), mask=k < n_keep)
    program = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(partial + program, tl.sum(tl.where(stored, loss, 0.0), axis=0))
