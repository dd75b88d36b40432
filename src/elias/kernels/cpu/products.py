"""Matrix products of training on a CPU, in bfloat16 where the CPU has instructions for it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_LARGE = 2**24  # multiplications; smaller products take so little time that they stay exact


@cache
def has_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 faster than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` of float32 matrices, without a gradient.

    A large product rounds both factors and the result to bfloat16 if `has_bfloat16`: this takes a
    third of the time. Sums are accumulated in float32.
    """
    if left.shape[0] * right.numel() < _LARGE or not has_bfloat16():
        return left.detach() @ right.detach()
    return (left.detach().bfloat16() @ right.detach().bfloat16()).float()
