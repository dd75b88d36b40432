"""AdamW on the rows of a table that a step touched.

A row that skipped steps had a gradient of zero in them. Its moments and its decay are those of
dense AdamW, the decay at the rate that each step had. One thing is not: in a step that a row
skips, dense AdamW moves it on by what its old gradients left in the first moment; here it stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from elias.kernels import compiled

_FIRST_STEPS = 1024  # that there is room for, doubled when it is used up


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


class History:
    """The steps of a table so far: how many, the rates of the last, the decay of each.

    Rates warm up and fall, so what a row that skipped steps must decay by is the product of
    (1 − lr_t·λ) over just those. It is the quotient of two products from the first step on, which
    are kept as logarithms: one float64 a step, on the device of the table.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.step = 0
        """How many steps there were."""
        self._rates: AdamWRates | None = None
        self._sum = 0.0
        self._logs = torch.zeros(_FIRST_STEPS, dtype=torch.float64, device=device)

    @property
    def rates(self) -> AdamWRates:
        """The rates of the last step."""
        assert self._rates is not None, "no step was added"
        return self._rates

    @property
    def kept_log(self) -> Float[Tensor, " n"]:
        """Σ log₂(1 − lr_t·λ) over the first t steps, at place t; more places than steps."""
        return self._logs

    def add(self, rates: AdamWRates) -> None:
        """Begin a step with these rates, whatever rows it touches; no device is waited for."""
        self.step += 1
        self._rates = rates
        self._sum += _log_kept(rates)
        if self.step == len(self._logs):
            self._logs = torch.cat([self._logs, torch.zeros_like(self._logs)])
        self._logs[self.step].fill_(self._sum)

    def replay(self, past: Iterable[AdamWRates]) -> None:
        """Have had these steps and no others, as if each had been added."""
        steps = list(past)
        sums = list(accumulate(map(_log_kept, steps), initial=0.0))
        self.step, self._sum = len(steps), sums[-1]
        self._rates = steps[-1] if steps else None
        room = _FIRST_STEPS << (len(steps) // _FIRST_STEPS).bit_length()
        sums += [0.0] * (room - len(sums))
        self._logs = torch.tensor(sums, dtype=torch.float64).to(self._logs.device)


def _log_kept(rates: AdamWRates) -> float:
    return math.log2(max(1 - rates.lr * rates.decay, 1e-38))


def adamw_rows(
    weight: Float[Tensor, "R D"],
    state: RowState,
    touched: Int[Tensor, " r"],
    gradient: Float[Tensor, "r D"],
    history: History,
) -> None:
    """Update the touched rows in place, in the step that ``history`` ends with.

    For the steps a row skipped, its moments fade and its weights decay before the new gradient
    enters; its old momentum does not move it.
    """
    run = _adamw_torch if weight.is_cuda else _adamw_compiled
    run(weight, state, touched, gradient, history)


def _adamw_compiled(
    weight: Tensor, state: RowState, touched: Tensor, gradient: Tensor, history: History
) -> None:
    step, rates = history.step, history.rates
    last_step = state.last_step.numpy()
    rows = touched.numpy()
    skipped = step - last_step[rows]
    powers = np.arange(int(skipped.max(initial=0)) + 1)
    logs = history.kept_log.numpy()
    fades = (
        rates.beta1**powers,
        rates.beta2**powers,
        np.exp2(logs[step] - logs[step - powers]),
    )
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
        np.stack(fades).astype(np.float32),
        np.array(numbers, dtype=np.float32),
    )
    last_step[rows] = step


def _adamw_torch(
    weight: Tensor, state: RowState, touched: Tensor, gradient: Tensor, history: History
) -> None:
    step, rates, logs = history.step, history.rates, history.kept_log
    before = state.last_step[touched]
    skipped = (step - before).double().unsqueeze(1)
    kept = (logs[step] - logs[before]).exp2().unsqueeze(1)
    mean = state.mean[touched] * (rates.beta1**skipped).float() + (1 - rates.beta1) * gradient
    variance = state.variance[touched] * (rates.beta2**skipped).float()
    variance = variance + (1 - rates.beta2) * gradient.square()
    rows = weight.detach()[touched] * kept.float()
    scale = variance.div(1 - rates.beta2**step).sqrt_().add_(rates.eps)
    rows = rows - rates.lr / (1 - rates.beta1**step) * mean / scale
    with torch.no_grad():
        weight[touched] = rows
    state.mean[touched] = mean
    state.variance[touched] = variance
    state.last_step[touched] = step
