"""AdamW on rows that every step touches, and rounding by chance for weights in bfloat16."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from elias.kernels.update import AdamWRates


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
        weight.copy_(round_by_chance(exact))


def round_by_chance(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return float32 values in bfloat16: the neighbour above or below, on average the value."""
    noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device)
    # bfloat16 is the upper half of float32: what lies below carries over as often as it should
    bits = noise.add_(values.view(torch.int32)).bitwise_and_(-(2**16))
    return bits.view(torch.float32).to(torch.bfloat16)
