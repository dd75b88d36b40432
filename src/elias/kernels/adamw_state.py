"""Lazy AdamW for tables in which a step touches only some rows: gradients, state and history.

A row that a step does not touch has a zero gradient in that step. The decay of its moments and
weights is deferred until the row is touched again. The weight decay of each skipped step uses the
learning rate of that step, so the total decay is as in dense AdamW. One difference remains:
dense AdamW also moves an untouched row by its old momentum; lazy AdamW does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

_INITIAL_CAPACITY = 1024  # number of steps; doubled whenever it is reached
_CHUNK_WEIGHTS = 2**22  # weights per chunk, to keep temporaries small


class AdamWRates(NamedTuple):
    """Hyperparameters of one AdamW step. ``decay`` is the weight decay λ."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float


class RowState(NamedTuple):
    """AdamW moments of a table, and the step in which each row was last updated."""

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


class IndexGradients:
    """Gradients of the label classifiers W_L and the edge logits A since the last update.

    The gradient of W_L is stored as (label, embedding) pairs with one coefficient each. This needs
    far less memory than a row per touched label or a dense L×D tensor. The gradient of A is stored
    with respect to the log edge scores log ŝ_{c,ℓ} (Eq. 5). The update backpropagates it through
    the softmax once for all backward passes, since A does not change between updates. Only Triton
    kernels add gradients.
    """

    def __init__(self, edge_logits: Float[Tensor, "C E"] | None) -> None:
        """Create empty gradients. ``edge_logits`` is A, or None if the edges are not learned."""
        self.by_edge: Float[Tensor, "C E"] | None = None
        """The gradient with respect to log ŝ_{c,ℓ}. It is zero for untouched clusters."""
        self.touched: Int[Tensor, " C"] | None = None
        """1 for each cluster with a path in a batch since the last update, else 0."""
        if edge_logits is not None:
            self.by_edge = torch.zeros_like(edge_logits, dtype=torch.float32)
            self.touched = torch.zeros(
                len(edge_logits), dtype=torch.int32, device=edge_logits.device
            )
        self.pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        """(labels, coefficients, embeddings) of each backward pass since the last update."""

    def add_pairs(
        self,
        labels: Int[Tensor, "B K"],
        coefficients: Float[Tensor, "B K"],
        embedding: Float[Tensor, "B D"],
    ) -> None:
        """Add coefficients[i, k] · embedding[i] to the gradient of label labels[i, k]."""
        self.pairs.append((labels, coefficients, embedding.detach()))

    def take_pairs(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return and remove the labels, coefficients and embeddings of all pairs."""
        pairs, self.pairs = self.pairs, []
        if len(pairs) <= 1:
            return pairs[0] if pairs else None
        labels, coefficients, embeddings = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return labels, coefficients, embeddings

    def take_last_pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return and remove the pairs of the last backward pass."""
        return self.pairs.pop()


class History:
    """History of the optimizer steps of a table, needed to apply deferred weight decay.

    The learning rate changes from step to step, so a row that skipped steps must decay by the
    product of (1 − lr_t·λ) over exactly those steps. This product is the quotient of two cumulative
    products. Their logarithms are stored, one float64 per step, on the device of the table.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.step = 0
        """Number of steps so far."""
        self.rates: AdamWRates
        """The rates of the last step. This attribute is not set before the first step."""
        self.decay_log = torch.zeros(_INITIAL_CAPACITY, dtype=torch.float64, device=device)
        """Entry s is Σ_{t≤s} log₂(1 − lr_t·λ); entries beyond the last step are unused."""
        self._sum = 0.0

    def add(self, rates: AdamWRates) -> None:
        """Add a step with these rates, without waiting for the device."""
        self.step += 1
        self.rates = rates
        self._sum += math.log2(max(1 - rates.lr * rates.decay, 1e-38))
        if self.step == len(self.decay_log):
            self.decay_log = torch.cat([self.decay_log, torch.zeros_like(self.decay_log)])
        self.decay_log[self.step].fill_(self._sum)

    def replay(self, past: Iterable[AdamWRates]) -> None:
        """Replace the history by these steps."""
        self.step, self._sum = 0, 0.0
        for rates in past:
            self.add(rates)


def stochastic_round(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Round float32 to bfloat16, up or down at random, so that the expected value is the input."""
    noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device)
    # bfloat16 is the upper half of float32. After the noise is added, the lower half carries into
    # the upper half with the probability that stochastic rounding requires.
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
    rounding errors. A bfloat16 weight is rounded stochastically, as in a step. A row that the last
    step updated does not change.
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
