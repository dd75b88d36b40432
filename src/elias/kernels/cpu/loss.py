"""Losses and their gradients in one pass, compiled by numba for the CPU.

Rows or blocks of labels are divided among threads and each is summed in a fixed order, so the
result does not depend on the number of threads. Exponentials and logarithms are branch-free float32
polynomials, which the compiler can vectorise; calls to the maths library would process one slot at
a time.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from elias.kernels.cpu.matmul import product
from elias.kernels.cpu.rows import Array
from elias.kernels.threads import over_ranges

_ONE = np.float32(1.0)
_HALF = np.float32(0.5)
_ZERO = np.float32(0.0)
_LOWEST = np.float32(-87.0)  # its exponential is about the smallest normal float32
_LOG2_E = np.float32(1.4426950408889634)
_LOG_2 = np.float32(0.693145751953125)  # upper part of log 2; integer multiples are exact
_LOG_2_REST = np.float32(1.42860682e-6)
_BIAS = np.int32(127)  # exponent bias of float32
_FRACTION = np.int32(23)  # number of fraction bits of float32
_FRACTION_BITS = np.int32(0x7FFFFF)
_ROOT_HALF = np.int32(0x3F3504F3)  # the bits of sqrt(1/2)
_MAX_EXACT_LOGIT = np.float32(15.0)  # up to this logit, 1-p is accurate without log space
_LABELS_PER_BLOCK = 512  # their sums stay in the L1 cache
_MAX_EXPONENT = 80.0  # keeps exp finite in float32

# Taylor coefficients of exp(r) from r⁷ down to r³, accurate enough for |r| ≤ (log 2) / 2
_E7, _E6, _E5, _E4, _E3 = (np.float32(1 / n) for n in (5040, 720, 120, 24, 6))
# Coefficients of P in log(1 + f) = f - f²/2 + f³·P(f), interpolated at Chebyshev nodes with
# 1 + f between sqrt(1/2) and sqrt(2)
_L8, _L7, _L6, _L5, _L4 = (
    np.float32(c) for c in (0.0697161183, -0.114797339, 0.116854198, -0.124256872, 0.142490581)
)
_L3, _L2, _L1, _L0 = (np.float32(c) for c in (-0.166678026, 0.200007156, -0.24999997, 0.333333313))


def shortlist_bce(
    logits: Tensor, shortlist_log: Tensor, labels: Tensor, positives: Tensor, n_labels: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss over all shortlists and its gradients with respect to z and log ŷ."""
    gradients = torch.empty((2, *logits.shape))
    slots = (logits, shortlist_log, labels)
    z, log_scores, ids = (tensor.detach().contiguous().numpy() for tensor in slots)
    losses, wanted, (by_logits, by_scores) = np.empty(len(z)), positives.numpy(), gradients.numpy()

    def work(begin: int, end: int) -> None:
        _shortlist_bce(
            begin, end, z, log_scores, ids, wanted, n_labels, losses, by_logits, by_scores
        )

    over_ranges(work, len(labels))
    total = sum(losses.tolist())  # in a fixed order
    return torch.tensor(total, dtype=torch.float32), gradients[0], gradients[1]


@njit(cache=True, nogil=True, error_model="numpy")
def _exp(x: np.float32) -> tuple[np.float32, np.float32]:
    """Return (2^n, e^r - 1) such that e^x = 2^n · e^r, for x ≤ 0. NaN stays NaN."""
    x = _LOWEST if x < _LOWEST else x
    n = np.floor(x * _LOG2_E + _HALF)
    r = (x - n * _LOG_2) - n * _LOG_2_REST
    tail = _E3 + r * (_E4 + r * (_E5 + r * (_E6 + r * _E7)))
    scale = np.int32((np.int32(n) + _BIAS) << _FRACTION).view(np.float32)
    return scale, r + r * r * (_HALF + r * tail)


@njit(cache=True, nogil=True, error_model="numpy")
def _log(x: np.float32) -> np.float32:
    """Return log x for a positive normal float32; NaN stays NaN."""
    bits = np.int32(np.float32(x).view(np.int32) - _ROOT_HALF)
    n = np.float32(bits >> _FRACTION)
    f = np.int32((bits & _FRACTION_BITS) + _ROOT_HALF).view(np.float32) - _ONE
    high = _L4 + f * (_L5 + f * (_L6 + f * (_L7 + f * _L8)))
    low = f * f * f * (_L0 + f * (_L1 + f * (_L2 + f * (_L3 + f * high))))
    low += n * _LOG_2_REST - _HALF * f * f
    return (x - x) + (low + f + n * _LOG_2)


@njit(cache=True, nogil=True, error_model="numpy")
def _negatives_loss(
    z: Array, shortlist_log: Array, loss: Array, by_logits: Array, by_shortlist: Array
) -> None:
    """Write the loss -log(1-p) of negative labels, and its gradients with respect to z and log ŷ.

    The results are accurate for z ≤ 15.
    """
    for k in range(z.shape[0]):
        scale, rest = _exp(-abs(z[k]))
        small = scale + scale * rest
        larger = _ONE / (_ONE + small)
        smaller = small * larger
        positive = z[k] >= _ZERO
        hit = larger if positive else smaller  # σ(z)
        miss = smaller if positive else larger  # σ(-z)
        scale, rest = _exp(shortlist_log[k])
        score = scale + scale * rest  # ŷ
        not_p = miss - hit * (scale * rest + (scale - _ONE))
        odds = hit * score / not_p
        loss[k] = -_log(not_p)
        by_shortlist[k] = odds
        by_logits[k] = odds * miss


@njit(cache=True, nogil=True, error_model="numpy")
def _exception_loss(z: float, shortlist_log: float, relevant: bool) -> tuple[float, float, float]:
    """Return the loss and gradients of a slot that is positive or has z > 15, using log space."""
    fall = np.log1p(np.exp(-abs(z)))
    log_hit = min(z, 0.0) - fall
    log_miss = min(-z, 0.0) - fall
    if relevant:
        return -(log_hit + shortlist_log), -np.exp(log_miss), -1.0
    rest = -np.expm1(shortlist_log)
    log_not_p = log_miss
    if rest > 0.0:
        other = log_hit + np.log(rest)
        log_not_p = max(log_miss, other) + np.log1p(np.exp(-abs(log_miss - other)))
    log_odds = log_hit + shortlist_log - log_not_p
    return -log_not_p, np.exp(log_odds + log_miss), np.exp(min(log_odds, _MAX_EXPONENT))


@njit(cache=True, nogil=True, error_model="numpy")
def _shortlist_bce(
    begin: int,
    end: int,
    z: Array,
    shortlist_log: Array,
    labels: Array,
    positives: Array,
    n_labels: int,
    losses: Array,
    by_logits: Array,
    by_shortlist: Array,
) -> None:
    """Write the loss of each row from ``begin`` to ``end`` to ``losses``, and the gradients.

    Padding slots, whose label is L, have no loss and gradients of 0.
    """
    loss = np.empty(z.shape[1], dtype=np.float32)
    is_positive = np.zeros(n_labels + 1, dtype=np.bool_)
    for row in range(begin, end):
        for label in positives[row]:
            is_positive[label] = True
        _negatives_loss(z[row], shortlist_log[row], loss, by_logits[row], by_shortlist[row])
        total = 0.0
        for k in range(z.shape[1]):
            label = labels[row, k]
            if label >= n_labels:
                by_logits[row, k] = _ZERO
                by_shortlist[row, k] = _ZERO
                continue
            if is_positive[label] or z[row, k] > _MAX_EXACT_LOGIT:
                exact = _exception_loss(
                    np.float64(z[row, k]), np.float64(shortlist_log[row, k]), is_positive[label]
                )
                total += exact[0]
                by_logits[row, k] = exact[1]
                by_shortlist[row, k] = exact[2]
            else:
                total += loss[k]
        losses[row] = total
        for label in positives[row]:
            is_positive[label] = False


def every_label_bce(
    embedding: Tensor, weight: Tensor, bias: Tensor, positives: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the one-vs-all loss, its gradient with respect to the logits, and its column sums."""
    residual, sums = product(embedding, weight.T), torch.zeros(len(weight))
    loss = _every_label_bce(
        residual.numpy(),
        bias.detach().contiguous().numpy(),
        positives.contiguous().numpy(),
        np.float32(scale),
        sums.numpy(),
    )
    return torch.tensor(loss, dtype=torch.float32), residual, sums


@njit(cache=True, nogil=True, error_model="numpy")
def _all_negatives(z: Array, bias: Array, scale: np.float32, losses: Array, sums: Array) -> None:
    """Add the loss of each label of a point to ``losses``, as if all labels were negatives.

    ``z`` holds the logits without the bias. It is replaced by the gradients scale · σ(z), which are
    also added to ``sums``.
    """
    for k in range(z.shape[0]):
        logit = z[k] + bias[k]
        power, rest = _exp(-abs(logit))
        small = power + power * rest
        whole = _ONE + small
        larger = _ONE / whole
        smaller = small * larger
        log1p = _log(whole) + (small - (whole - _ONE)) * larger  # adds the lost bits of 1 + small
        losses[k] += max(logit, _ZERO) + log1p
        z[k] = scale * (larger if logit >= _ZERO else smaller)
        sums[k] += z[k]


@njit(cache=True, nogil=True, error_model="numpy")
def _every_label_bce(
    z: Array, bias: Array, positives: Array, scale: np.float32, sums: Array
) -> float:
    """Return the one-vs-all loss. Replace z by its gradient, and add the column sums to ``sums``.

    Every label is first treated as a negative, then the positives are corrected.
    """
    n_rows, n_labels = z.shape
    losses = np.zeros(n_labels, dtype=np.float32)
    total = 0.0
    for row in range(n_rows):
        for label in positives[row]:
            if 0 <= label < n_labels:
                total -= np.float64(z[row, label] + bias[label])
    for first in range(0, n_labels, _LABELS_PER_BLOCK):
        part = slice(first, min(first + _LABELS_PER_BLOCK, n_labels))
        for row in range(n_rows):
            _all_negatives(z[row, part], bias[part], scale, losses[part], sums[part])
    for row in range(n_rows):
        for label in positives[row]:
            if 0 <= label < n_labels:
                z[row, label] -= scale
                sums[label] -= scale
    for label in range(n_labels):
        total += losses[label]
    return total
