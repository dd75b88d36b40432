"""AdamW for large tables of which a step touches few rows.

A row that skipped steps had a gradient of zero in them. Its moments and its decay are those of
dense AdamW, the decay at the rate that each step had. One thing is not: in a step that a row
skips, dense AdamW moves it on by what its old gradients left in the first moment; here it stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from elias.kernels.cpu import rows as cpu_rows

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
    cpu_rows.adamw_rows(
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


def adamw_dense(
    weight: Float[Tensor, "R D"],
    mean: Float[Tensor, "R D"],
    variance: Float[Tensor, "R d"],
    gradient: Float[Tensor, "R D"],
    *,
    step: int,
    rates: AdamWRates,
) -> None:
    """Update weights and moments in place, by the arithmetic of float32 whatever they are held in.

    A ``variance`` one wide holds one second moment for a row, the mean of its squared gradients.
    A weight in bfloat16 is rounded stochastically: rounded to nearest, the many steps smaller
    than half of its last digit would be lost. The first moment is rounded to nearest, since each
    step changes it by a tenth of what it misses.
    """
    exact_mean = mean.float().lerp_(gradient, 1 - rates.beta1)  # in place where it is float32
    squares = gradient.square()
    if variance.shape != gradient.shape:
        squares = squares.mean(dim=1, keepdim=True)
    variance.lerp_(squares, 1 - rates.beta2)
    size = (variance / (1 - rates.beta2**step)).sqrt_().add_(rates.eps)
    exact = weight.float().mul_(1 - rates.lr * rates.decay)
    exact.addcdiv_(exact_mean, size, value=-rates.lr / (1 - rates.beta1**step))
    if weight.dtype == torch.bfloat16:
        mean.copy_(exact_mean)
        weight.copy_(stochastic_round(exact))


def stochastic_round(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return float32 values in bfloat16: the neighbour above or below, on average the value."""
    noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device)
    # bfloat16 is the upper half of float32: what lies below carries over as often as it should
    bits = noise.add_(values.view(torch.int32)).bitwise_and_(-(2**16))
    return bits.view(torch.float32).to(torch.bfloat16)


_PIECE = 2**22  # weights at a time: what is computed beside the table stays small


@torch.no_grad()
def apply_pending_decay(
    weight: Float[Tensor, "R D"],
    means: Sequence[Tensor],
    variances: Sequence[Tensor],
    last_step: Int[Tensor, " R"],
    history: History,
) -> None:
    """Decay the weights and fade the moments of all rows for the steps they skipped, in place.

    The decay of a row waits until it is touched again. Before weights are measured, averaged or
    saved it must not; a training that goes on afterwards differs by rounding alone. A weight in
    bfloat16 is rounded stochastically, as in a step: to nearest, a decay smaller than half of its
    last digit would be lost. A row that skipped nothing keeps its bits.
    """
    if not history.step:
        return
    logs, rates = history.kept_log, history.rates
    n_rows = max(1, _PIECE // weight.shape[1])
    for first in range(0, len(weight), n_rows):
        rows = slice(first, first + n_rows)
        before = last_step[rows].long()
        skipped = (history.step - before).double()
        kept = (logs[history.step] - logs[before]).exp2_().float().unsqueeze(1)
        if weight.dtype == torch.bfloat16:
            weight[rows] = stochastic_round(weight[rows].float().mul_(kept))
        else:
            weight[rows].mul_(kept)
        for moments, beta in ((means, rates.beta1), (variances, rates.beta2)):
            faded = (beta**skipped).float()
            for moment in moments:
                moment[rows].mul_(faded if moment.ndim == 1 else faded.unsqueeze(1))
    last_step.fill_(history.step)
