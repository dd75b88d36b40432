"""Which version of a hot operation runs where."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@cache
def has_triton() -> bool:
    """Say whether Triton is installed; it comes with the CUDA builds of torch."""
    return find_spec("triton") is not None


def runs_triton(tensor: Tensor) -> bool:
    """Say whether operations on this tensor run as Triton kernels; else as plain torch or numba."""
    return tensor.is_cuda and has_triton()
