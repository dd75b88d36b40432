"""One linear classifier under a squared hinge, by dual coordinate descent."""

from __future__ import annotations

import numpy as np
from numba import njit

from elias.kernels.masked_rows import Array, Buffers, Rows, add, dot, shuffle

_STILL = 1e-12  # a projected gradient that is as good as none


@njit(cache=True, nogil=True)
def _sweep(  # noqa: PLR0913 - numba wants plain positional arrays
    rows: Rows,
    squares: Array,
    pairs: tuple[Array, Array],
    duals: tuple[Array, Array],
    order: Array,
    active: int,
    bounds: tuple[float, float, float],
    buffers: Buffers,
) -> tuple[int, float, float, float]:
    """Move each active α_i once to its best value.

    Returns how many stay active, the bias, and the highest and lowest projected gradient. One that
    is at 0 with a gradient above the highest of the sweep before goes behind the active ones.
    """
    members, signs = pairs
    dual, moved = duals
    bias, diagonal, highest_before = bounds
    highest, lowest = -np.inf, np.inf
    at = 0
    while at < active:
        i = order[at]
        row, sign, old = members[i], np.float64(signs[i]), dual[i]
        slope = sign * (dot(rows, row, buffers) + bias) - 1.0 + diagonal * old
        if old == 0.0 and slope > highest_before:
            active -= 1
            order[at], order[active] = order[active], order[at]
            continue
        at += 1
        projected = min(slope, 0.0) if old == 0.0 else slope
        highest, lowest = max(highest, projected), min(lowest, projected)
        if abs(projected) > _STILL:
            dual[i] = max(old - slope / (squares[row] + diagonal), 0.0)
            step = (dual[i] - old) * sign
            moved[i] = True
            bias += step
            add(rows, row, step, buffers)
    return active, bias, highest, lowest


@njit(cache=True, nogil=True)
def solve_hinge(
    rows: Rows,
    squares: Array,
    pairs: tuple[Array, Array],
    buffers: Buffers,
    limits: tuple[float, float, int],
    state: np.uint64,
) -> tuple[float, Array]:
    """Fit one classifier into ``buffers``; return its bias and which rows have a part in it.

    The dual is min ½αᵀ(Q + 1/(2C))α − Σα over α ≥ 0, with Q_ij = y_i·y_j·(ψ_i·ψ_j + 1) and
    w = Σ α_i·y_i·ψ_i. It is swept in a new random order each time, until the projected gradients
    of all points span no more than the tolerance.
    """
    cost, tolerance, most = limits
    size = pairs[0].shape[0]
    duals = (np.zeros(size), np.zeros(size, dtype=np.bool_))
    order = np.arange(size).astype(np.int32)
    active, bias, highest_before = size, 0.0, np.inf
    for _ in range(most):
        state = shuffle(order, active, state)
        bounds = (bias, 0.5 / cost, highest_before)
        active, bias, highest, lowest = _sweep(
            rows, squares, pairs, duals, order, active, bounds, buffers
        )
        highest_before = highest if highest > 0.0 else np.inf
        if highest - lowest <= tolerance:
            if active == size:
                break
            active, highest_before = size, np.inf  # look at all of them again
    return bias, duals[1]
