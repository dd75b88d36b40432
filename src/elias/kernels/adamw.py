"""Lazy AdamW for tables in which a step touches only some rows: state, history, dense reference.

A row that a step does not touch has a zero gradient in that step. The decay of its moments and
weights is deferred until the row is touched again. The weight decay of each skipped step uses the
learning rate of that step, so the total decay equals that of dense AdamW. One difference remains:
dense AdamW also moves an untouched row by its old momentum; lazy AdamW does not.
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
    """Hyperparameters of one AdamW step; ``decay`` is the weight decay λ."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float


class RowState(NamedTuple):
    """Moments of a table, and the step that last updated each row."""

    mean: Float[Tensor, "R D"]
    variance: Float[Tensor, "R D"]
    last_step: Int[Tensor, " R"]


class LinearState(NamedTuple):
    """Moments of weights and biases, and the step that last updated each row.

    A ``variance`` of width 1 holds one second moment per row, the mean of its squared gradients.
    """

    mean: Float[Tensor, "R D"]
    variance: Float[Tensor, "R d"]
    bias_mean: Float[Tensor, " R"]
    bias_variance: Float[Tensor, " R"]
    last_step: Int[Tensor, " R"]


class EdgeState(NamedTuple):
    """Moments of the edge logits, and the step that last updated each cluster."""

    mean: Float[Tensor, "C E"]
    variance: Float[Tensor, "C E"]
    last_step: Int[Tensor, " C"]


class History:
    """Optimizer steps of a table: their number, the last step's rates, and the cumulative decay.

    The learning rate changes from step to step, so a row that skipped steps must decay by the
    product of (1 − lr_t·λ) over exactly those steps. This product is the quotient of two cumulative
    products. They are stored as logarithms: one float64 per step, on the device of the table.
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
        """Return a tensor whose entry s is Σ_{t≤s} log₂(1 − lr_t·λ).

        Entries beyond the last step are unused.
        """
        return self._logs

    def add(self, rates: AdamWRates) -> None:
        """Add a step with these rates, without waiting for the device."""
        self.step += 1
        self._rates = rates
        self._sum += _log_decay(rates)
        if self.step == len(self._logs):
            self._logs = torch.cat([self._logs, torch.zeros_like(self._logs)])
        self._logs[self.step].fill_(self._sum)

    def replay(self, past: Iterable[AdamWRates]) -> None:
        """Replace the history by these steps, as if `add` had been called for each."""
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
    """Apply dense AdamW in place; compute in float32 regardless of the tensors' dtype.

    A ``variance`` of width 1 holds one second moment per row, the mean of its squared gradients.
    A bfloat16 weight is rounded stochastically, because rounding to nearest would discard updates
    smaller than half a unit in the last place. A bfloat16 first moment is rounded to nearest: each
    step replaces a fraction 1 − β₁ of it, so rounding errors do not accumulate.
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
    """Round float32 to an adjacent bfloat16 value at random; the expectation is the input."""
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
    """Apply the deferred decay of lazy AdamW to the weights and moments of all rows, in place.

    Call it before weights are evaluated, averaged or saved. It changes later training only by
    rounding. A bfloat16 weight is rounded stochastically, as in a step. A row that the last step
    updated does not change.
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
