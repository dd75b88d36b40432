"""One linear classifier under the logistic loss of Eq. 17, by dual coordinate descent."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from elias.kernels.masked_rows import Array, Buffers, Rows, add, dot, shuffle

_STEPS = 50  # of Newton's method for one coordinate; three or four are usual
_FIRST = -4.0  # where the logits of α/C begin: each point has a small part in w


@njit(cache=True, nogil=True)
def _share(logit: float) -> float:
    """Return σ(u), which never overflows."""
    faint = math.exp(-abs(logit))
    return (1.0 if logit >= 0 else faint) / (1.0 + faint)


@njit(cache=True, nogil=True)
def _best_logit(logit: float, curvature: float, slope: float, precision: float) -> float:
    """Return the root of u + A·σ(u) + B, which rises by 1 at least, so that there is just one.

    Newton's steps are kept between −B − A and −B, where the root must lie.
    """
    low, high = -slope - curvature, -slope
    for _ in range(_STEPS):
        share = _share(logit)
        value = logit + curvature * share + slope
        if abs(value) <= precision:
            break
        if value > 0:
            high = min(high, logit)
        else:
            low = max(low, logit)
        step = logit - value / (1.0 + curvature * share * (1.0 - share))
        logit = step if low < step < high else 0.5 * (low + high)
    return logit


@njit(cache=True, nogil=True)
def solve_logistic(
    rows: Rows,
    squares: Array,
    pairs: tuple[Array, Array],
    buffers: Buffers,
    limits: tuple[float, float, int],
    state: np.uint64,
) -> tuple[float, Array]:
    """Fit one classifier into ``buffers``; return its bias and which rows have a part in it.

    The dual of ½‖w‖² + C·Σ log(1 + exp(−y_i·w·ψ_i)) is the least of ½αᵀQα + Σ α_i·log α_i +
    (C − α_i)·log(C − α_i) over 0 < α < C, with Q_ij = y_i·y_j·(ψ_i·ψ_j + 1) and w = Σ α_i·y_i·ψ_i.
    Its slope in α_i is y_i·w·ψ_i + u_i, u_i being the logit of α_i/C; in u_i the best value of one
    coordinate is the root of a function that rises by 1 at least, and no α comes to its bounds.
    Swept in a new random order each time, until no slope that was met is over the tolerance.
    """
    cost, tolerance, most = limits
    members, signs = pairs
    size = members.shape[0]
    logits = np.full(size, _FIRST)
    order = np.arange(size).astype(np.int32)
    bias = 0.0
    for i in range(size):
        part = cost * _share(_FIRST) * signs[i]
        bias += part
        add(rows, members[i], part, buffers)
    for _ in range(most):
        state = shuffle(order, size, state)
        steepest = 0.0
        for at in range(size):
            i = order[at]
            row, sign, old = members[i], np.float64(signs[i]), cost * _share(logits[i])
            margin = sign * (dot(rows, row, buffers) + bias)
            slope = margin + logits[i]
            steepest = max(steepest, abs(slope))
            if abs(slope) <= 0.01 * tolerance:
                continue
            square = squares[row]
            logits[i] = _best_logit(
                logits[i], square * cost, margin - square * old, 0.001 * tolerance
            )
            step = (cost * _share(logits[i]) - old) * sign
            bias += step
            add(rows, row, step, buffers)
        if steepest <= tolerance:
            break
    return bias, np.ones(size, dtype=np.bool_)
