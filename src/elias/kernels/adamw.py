"""Lazy AdamW: state and schedule of tables of which a step touches only some rows.

A row that a step does not touch has a zero gradient in that step. Its moments and its weight decay
are applied when the row is touched again, each step's decay at that step's learning rate, so they
equal those of dense AdamW. One difference remains: dense AdamW also moves such a row by its old
momentum; here it stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

_INITIAL_CAPACITY = 1024  # steps; doubled when it is used up
_CHUNK_WEIGHTS = 2**22  # weights per chunk, to keep temporaries small


class AdamWRates(NamedTuple):
    """Hyperparameters of one AdamW step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float


class RowState(NamedTuple):
    """Moments of a table, and the step in which each row was last updated."""

    mean: Float[Tensor, "R D"]
    variance: Float[Tensor, "R D"]
    last_step: Int[Tensor, " R"]


class LinearState(NamedTuple):
    """Moments of weights and biases, and the step in which each row was last updated.

    A ``variance`` of width 1 holds one second moment per row, the mean of its squared gradients.
    """

    mean: Float[Tensor, "R D"]
    variance: Float[Tensor, "R d"]
    bias_mean: Float[Tensor, " R"]
    bias_variance: Float[Tensor, " R"]
    last_step: Int[Tensor, " R"]


class EdgeState(NamedTuple):
    """Moments of the edge logits, and the step in which each cluster was last updated."""

    mean: Float[Tensor, "C E"]
    variance: Float[Tensor, "C E"]
    last_step: Int[Tensor, " C"]


class History:
    """Steps of a table so far: their number, the rates of the last one and the decay of each.

    The learning rate changes from step to step, so a row that skipped steps must decay by the
    product of (1 − lr_t·λ) over exactly those steps. That product is a quotient of two cumulative
    products, which are stored as logarithms: one float64 per step, on the device of the table.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.step = 0
        """Number of steps so far."""
        self._rates: AdamWRates | None = None
        self._sum = 0.0
        self._logs = torch.zeros(_INITIAL_CAPACITY, dtype=torch.float64, device=device)

    @property
    def rates(self) -> AdamWRates:
        """Return the rates of the last step."""
        assert self._rates is not None, "no step was added"
        return self._rates

    @property
    def decay_log(self) -> Float[Tensor, " n"]:
        """Return Σ log₂(1 − lr_t·λ) over the first t steps, at index t; n exceeds the steps."""
        return self._logs

    def add(self, rates: AdamWRates) -> None:
        """Start a step with these rates, without waiting for the device."""
        self.step += 1
        self._rates = rates
        self._sum += _log_decay(rates)
        if self.step == len(self._logs):
            self._logs = torch.cat([self._logs, torch.zeros_like(self._logs)])
        self._logs[self.step].fill_(self._sum)

    def replay(self, past: Iterable[AdamWRates]) -> None:
        """Replace all steps by these, as if each had been added."""
        steps = list(past)
        sums = list(accumulate(map(_log_decay, steps), initial=0.0))
        self.step, self._sum = len(steps), sums[-1]
        self._rates = steps[-1] if steps else None
        capacity = _INITIAL_CAPACITY << (len(steps) // _INITIAL_CAPACITY).bit_length()
        sums += [0.0] * (capacity - len(sums))
        self._logs = torch.tensor(sums, dtype=torch.float64).to(self._logs.device)


def _log_decay(rates: AdamWRates) -> float:
    return math.log2(max(1 - rates.lr * rates.decay, 1e-38))


def adamw_dense(
    weight: Float[Tensor, "R D"],
    mean: Float[Tensor, "R D"],
    variance: Float[Tensor, "R d"],
    gradient: Float[Tensor, "R D"],
    *,
    step: int,
    rates: AdamWRates,
) -> None:
    """Apply dense AdamW in place, computed in float32 whatever the tensors' dtype.

    A ``variance`` of width 1 holds one second moment per row, the mean of its squared gradients.
    A bfloat16 weight is rounded stochastically: rounding to nearest would lose the many steps that
    are smaller than half of its last digit. The first moment is rounded to nearest, since each
    step replaces a tenth of it.
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
    """Round float32 to one of the two nearest bfloat16 values, so that the mean is the value."""
    noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device)
    # bfloat16 is the upper half of float32: the lower half carries over with its own probability
    bits = noise.add_(values.view(torch.int32)).bitwise_and_(-(2**16))
    return bits.view(torch.float32).to(torch.bfloat16)


@torch.no_grad()
def apply_pending_decay(
    weight: Float[Tensor, "R D"],
    means: Sequence[Tensor],
    variances: Sequence[Tensor],
    last_step: Int[Tensor, " R"],
    history: History,
) -> None:
    """Apply pending weight decay to rows that recent steps did not touch (lazy AdamW), in place.

    Their moments decay too. Call it before weights are evaluated, averaged or saved; training that
    continues afterwards differs only by rounding. A bfloat16 weight is rounded stochastically, as
    in a step. A row with nothing pending keeps its bits.
    """
    if not history.step:
        return
    logs, rates = history.decay_log, history.rates
    n_rows = max(1, _CHUNK_WEIGHTS // weight.shape[1])
    for first in range(0, len(weight), n_rows):
        rows = slice(first, first + n_rows)
        previous = last_step[rows].long()
        skipped = (history.step - previous).double()
        decay = (logs[history.step] - logs[previous]).exp2_().float().unsqueeze(1)
        if weight.dtype == torch.bfloat16:
            weight[rows] = stochastic_round(weight[rows].float().mul_(decay))
        else:
            weight[rows].mul_(decay)
        for moments, beta in ((means, rates.beta1), (variances, rates.beta2)):
            fade = (beta**skipped).float()
            for moment in moments:
                moment[rows].mul_(fade if moment.ndim == 1 else fade.unsqueeze(1))
    last_step.fill_(history.step)
