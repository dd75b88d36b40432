"""AdamW for all rows or, lazily, for the rows that a step touches, compiled by numba."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from elias.kernels import plain
from elias.kernels.adamw_state import AdamWRates, History, RowState
from elias.kernels.cpu.rows import Array
from elias.kernels.threads import over_ranges


def adamw_rows(
    weight: Tensor, state: RowState, touched: Tensor, gradient: Tensor, history: History
) -> None:
    """Apply lazy AdamW to the ``touched`` rows, in place."""
    step, rates = history.step, history.rates
    last_step, rows = state.last_step.numpy(), touched.numpy()
    skipped = step - last_step[rows]
    powers = np.arange(int(skipped.max(initial=0)) + 1)
    logs = history.decay_log.numpy()
    fades = (rates.beta1**powers, rates.beta2**powers, np.exp2(logs[step] - logs[step - powers]))
    tables = (weight.detach().numpy(), state.mean.numpy(), state.variance.numpy())
    touched_rows = (rows, gradient.contiguous().numpy(), skipped)
    factors = (np.stack(fades).astype(np.float32), _step_rates(step, rates))

    def work(begin: int, end: int) -> None:
        _adamw_rows(begin, end, *tables, *touched_rows, *factors)

    over_ranges(work, len(rows))
    last_step[rows] = step


def adamw_dense(
    weight: Tensor, mean: Tensor, variance: Tensor, gradient: Tensor, step: int, rates: AdamWRates
) -> None:
    """Apply AdamW to all rows in place. Compact tables (bfloat16) are updated in plain torch."""
    if weight.dtype != torch.float32 or variance.shape != weight.shape:
        plain.adamw_dense(weight, mean, variance, gradient, step, rates)
        return
    fades = (rates.beta1, rates.beta2, 1 - rates.lr * rates.decay)
    _adamw_row(  # all rows have the same factors, so the table can be one row
        weight.detach().view(-1).numpy(),
        mean.view(-1).numpy(),
        variance.view(-1).numpy(),
        gradient.contiguous().view(-1).numpy(),
        np.array(fades, dtype=np.float32),
        _step_rates(step, rates),
    )


def _step_rates(step: int, rates: AdamWRates) -> Array:
    numbers = (
        rates.lr / (1 - rates.beta1**step),
        rates.eps,
        1 - rates.beta1,
        1 - rates.beta2,
        1 / (1 - rates.beta2**step),
    )
    return np.array(numbers, dtype=np.float32)


@njit(cache=True, nogil=True, error_model="numpy")
def _adamw_rows(
    begin: int,
    end: int,
    weight: Array,
    mean: Array,
    variance: Array,
    touched: Array,
    grad: Array,
    skipped: Array,
    fades: Array,
    rates: Array,
) -> None:
    """Update the touched rows from ``begin`` to ``end``.

    ``skipped`` is the number of steps since each row's last update. ``fades[:, s]`` holds the decay
    factors of mean, variance and weight after s steps. ``rates`` holds the bias-corrected
    learning rate, ε, 1 − β₁, 1 − β₂ and the bias correction of the variance.
    Fastmath is off: with it, a freshly compiled loop and the same loop loaded from numba's cache
    could round differently.
    """
    for i in range(begin, end):
        row = touched[i]
        _adamw_row(weight[row], mean[row], variance[row], grad[i], fades[:, skipped[i]], rates)


@njit(cache=True, nogil=True, error_model="numpy")
def _adamw_row(w: Array, m: Array, v: Array, g: Array, fades: Array, rates: Array) -> None:
    """Update one row. ``fades`` holds its decay factors, and ``rates`` is as in `_adamw_rows`."""
    rate, floor, new1, new2, correction = rates[0], rates[1], rates[2], rates[3], rates[4]
    fade1, fade2, shrink = fades[0], fades[1], fades[2]
    for d in range(w.shape[0]):
        m[d] = fade1 * m[d] + new1 * g[d]
        v[d] = fade2 * v[d] + new2 * g[d] * g[d]
        w[d] = shrink * w[d] - rate * m[d] / (np.sqrt(v[d] * correction) + floor)
