"""The loss of a shortlist with its gradients in one pass over the slots, compiled by numba.

Rows are shared among threads and each is summed in a fixed order, so the result does not depend on
the number of threads. Exponentials and logarithms are polynomials in float32, without a branch: so
the compiler works on several slots at once, where a call of the mathematical library takes one.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

_ONE = np.float32(1.0)
_HALF = np.float32(0.5)
_ZERO = np.float32(0.0)
_LOWEST = np.float32(-87.0)  # its exponential is about the smallest normal float32
_PER_OCTAVE = np.float32(1.4426950408889634)
_OCTAVE = np.float32(0.693145751953125)  # log 2 in two parts; n times this one is exact
_OCTAVE_REST = np.float32(1.42860682e-6)
_BIAS = np.int32(127)  # of a float32's exponent, which lies above 23 bits
_FRACTION = np.int32(23)
_FRACTION_BITS = np.int32(0x7FFFFF)
_ROOT_HALF = np.int32(0x3F3504F3)  # the bits of sqrt(1/2)
_LARGEST_EXACT = np.float32(15.0)  # up to here 1-p loses nothing without logarithms
_LARGEST_EXPONENT = 80.0  # keeps exp finite in float32

# Taylor's coefficients of exp(r) after r, highest first: enough for |r| up to half an octave
_E7, _E6, _E5, _E4, _E3 = (np.float32(1 / n) for n in (5040, 720, 120, 24, 6))
# P in log(1 + f) = f - f²/2 + f³·P(f), through Chebyshev's nodes of 1 + f in sqrt(1/2)…sqrt(2)
_L8, _L7, _L6, _L5, _L4, _L3, _L2, _L1, _L0 = (
    np.float32(c)
    for c in (
        0.0697161183,
        -0.114797339,
        0.116854198,
        -0.124256872,
        0.142490581,
        -0.166678026,
        0.200007156,
        -0.24999997,
        0.333333313,
    )
)


@njit(cache=True, nogil=True, error_model="numpy")
def _exponential(x: np.float32) -> tuple[np.float32, np.float32]:
    """Return (2^n, e^r - 1) with e^x = 2^n · e^r, for x up to 0; NaN stays NaN."""
    x = _LOWEST if x < _LOWEST else x
    n = np.floor(x * _PER_OCTAVE + _HALF)
    r = (x - n * _OCTAVE) - n * _OCTAVE_REST
    tail = _E3 + r * (_E4 + r * (_E5 + r * (_E6 + r * _E7)))
    scale = np.int32((np.int32(n) + _BIAS) << _FRACTION).view(np.float32)
    return scale, r + r * r * (_HALF + r * tail)


@njit(cache=True, nogil=True, error_model="numpy")
def _logarithm(x: np.float32) -> np.float32:
    """Return log x of a positive normal number; NaN stays NaN."""
    bits = np.int32(np.float32(x).view(np.int32) - _ROOT_HALF)
    n = np.float32(bits >> _FRACTION)
    f = np.int32((bits & _FRACTION_BITS) + _ROOT_HALF).view(np.float32) - _ONE
    high = _L4 + f * (_L5 + f * (_L6 + f * (_L7 + f * _L8)))
    low = f * f * f * (_L0 + f * (_L1 + f * (_L2 + f * (_L3 + f * high))))
    low += n * _OCTAVE_REST - _HALF * f * f
    return (x - x) + (low + f + n * _OCTAVE)


@njit(cache=True, nogil=True, error_model="numpy")
def _as_negatives(
    z: Array, shortlist_log: Array, loss: Array, by_logits: Array, by_shortlist: Array
) -> None:
    """Fill in -log(1-p) of the slots and its gradients, for z up to `_LARGEST_EXACT`."""
    for k in range(z.shape[0]):
        scale, rest = _exponential(-abs(z[k]))
        small = scale + scale * rest
        larger = _ONE / (_ONE + small)
        smaller = small * larger
        above = z[k] >= _ZERO
        hit = larger if above else smaller  # σ(z)
        miss = smaller if above else larger  # σ(-z)
        scale, rest = _exponential(shortlist_log[k])
        score = scale + scale * rest  # ŷ
        not_p = miss - hit * (scale * rest + (scale - _ONE))
        odds = hit * score / not_p
        loss[k] = -_logarithm(not_p)
        by_shortlist[k] = odds
        by_logits[k] = odds * miss


@njit(cache=True, nogil=True, error_model="numpy")
def _mended(z: float, shortlist_log: float, relevant: bool) -> tuple[float, float, float]:
    """Return loss and gradients of a slot from logarithms throughout."""
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
    return -log_not_p, np.exp(log_odds + log_miss), np.exp(min(log_odds, _LARGEST_EXPONENT))


@njit(parallel=True, cache=True, error_model="numpy")
def shortlist_bce(
    z: Array,
    shortlist_log: Array,
    relevant: Array,
    stored: Array,
    by_logits: Array,
    by_shortlist: Array,
) -> float:
    """Return the loss of all stored slots; fill in its gradients by z and log ŷ."""
    n_rows, n_slots = z.shape
    losses = np.empty(n_rows, dtype=np.float64)
    for row in prange(n_rows):
        loss = np.empty(n_slots, dtype=np.float32)
        _as_negatives(z[row], shortlist_log[row], loss, by_logits[row], by_shortlist[row])
        total = 0.0
        for k in range(n_slots):
            if not stored[row, k]:
                by_logits[row, k] = _ZERO
                by_shortlist[row, k] = _ZERO
                continue
            if relevant[row, k] or z[row, k] > _LARGEST_EXACT:
                found = _mended(
                    np.float64(z[row, k]), np.float64(shortlist_log[row, k]), relevant[row, k]
                )
                total += found[0]
                by_logits[row, k] = found[1]
                by_shortlist[row, k] = found[2]
            else:
                total += loss[k]
        losses[row] = total
    whole = 0.0
    for row in range(n_rows):
        whole += losses[row]
    return whole
