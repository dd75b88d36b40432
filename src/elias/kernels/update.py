"""AdamW on the rows of a table that a step touched, correct for the steps they skipped."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from elias.kernels import compiled


class AdamWRates(NamedTuple):
    """The numbers of one AdamW step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float


class RowState(NamedTuple):
    """The moments of a table, and the step in which each row was last updated."""

    mean: Float[Tensor, "R D"]
    variance: Float[Tensor, "R D"]
    last_step: Int[Tensor, " R"]


def adamw_rows(
    weight: Float[Tensor, "R D"],
    state: RowState,
    touched: Int[Tensor, " r"],
    gradient: Float[Tensor, "r D"],
    *,
    step: int,
    rates: AdamWRates,
) -> None:
    """Update the touched rows in place.

    A row that skipped steps had a gradient of zero in them: its moments fade and its weights
    decay accordingly before the new gradient enters.
    """
    run = _adamw_torch if weight.is_cuda else _adamw_compiled
    run(weight, state, touched, gradient, step, rates)


def _adamw_compiled(
    weight: Tensor, state: RowState, touched: Tensor, gradient: Tensor, step: int, rates: AdamWRates
) -> None:
    last_step = state.last_step.numpy()
    rows = touched.numpy()
    skipped = step - last_step[rows]
    powers = np.arange(int(skipped.max(initial=0)) + 1)
    keeps = (rates.beta1, rates.beta2, 1 - rates.lr * rates.decay)
    numbers = (
        rates.lr / (1 - rates.beta1**step),
        rates.eps,
        1 - rates.beta1,
        1 - rates.beta2,
        1 / (1 - rates.beta2**step),
    )
    compiled.adamw_rows(
        weight.detach().numpy(),
        state.mean.numpy(),
        state.variance.numpy(),
        rows,
        gradient.contiguous().numpy(),
        skipped,
        np.stack([keep**powers for keep in keeps]).astype(np.float32),
        np.array(numbers, dtype=np.float32),
    )
    last_step[rows] = step


def _adamw_torch(
    weight: Tensor, state: RowState, touched: Tensor, gradient: Tensor, step: int, rates: AdamWRates
) -> None:
    skipped = (step - state.last_step[touched]).double().unsqueeze(1)
    mean = state.mean[touched] * (rates.beta1**skipped).float() + (1 - rates.beta1) * gradient
    variance = state.variance[touched] * (rates.beta2**skipped).float()
    variance = variance + (1 - rates.beta2) * gradient.square()
    rows = weight.detach()[touched] * ((1 - rates.lr * rates.decay) ** skipped).float()
    scale = variance.div(1 - rates.beta2**step).sqrt_().add_(rates.eps)
    rows = rows - rates.lr / (1 - rates.beta1**step) * mean / scale
    with torch.no_grad():
        weight[touched] = rows
    state.mean[touched] = mean
    state.variance[touched] = variance
    state.last_step[touched] = step
