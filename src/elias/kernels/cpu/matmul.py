"""Matrix products for training on a CPU, in bfloat16 where the CPU has instructions for it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_LARGE = 2**24  # number of multiplications; smaller products are fast enough in float32


@cache
def has_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 faster than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def use_bfloat16(n_multiplications: int) -> bool:
    """Return whether to compute a matrix product in bfloat16 during training.

    bfloat16 is used if the product is large and this CPU multiplies bfloat16 faster than float32.
    """
    return n_multiplications >= _LARGE and has_bfloat16()


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` of float32 matrices, without a gradient.

    A large product rounds both factors and the result to bfloat16 if `has_bfloat16`, which takes a
    third of the time. Sums are accumulated in float32.
    """
    left, right = left.detach(), right.detach()
    if use_bfloat16(left.shape[0] * right.numel()):
        return (left.bfloat16() @ right.bfloat16()).float()
    return left @ right
