"""Which version of a hot operation runs where."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from elias.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

KERNELS_VARIABLE = "ELIAS_KERNELS"
_CHOICES = ("auto", "torch")


@cache
def has_triton() -> bool:
    """Say whether a GPU is to run Triton kernels; asked only where there is one.

    They are left out where Triton is missing (it comes with the CUDA builds of torch), or where
    ``ELIAS_KERNELS=torch`` is in the environment: a variable, not a part of the configuration,
    since a run must train the same model either way. It is read once.

    Raises:
        ConfigError: The variable holds something else.
    """
    wanted = os.environ.get(KERNELS_VARIABLE, "auto")
    if wanted not in _CHOICES:
        known = " or ".join(_CHOICES)
        raise ConfigError(
            f"{KERNELS_VARIABLE} is {wanted!r} in the environment; set it to {known}, or unset it"
        )
    if wanted == "torch":
        logger.warning(
            "%s is torch: the GPU runs plain torch in place of Triton kernels, which is slower",
            KERNELS_VARIABLE,
        )
        return False
    if find_spec("triton") is None:
        logger.warning(
            "Triton is not installed: the GPU runs plain torch in place of its kernels, which is "
            "slower; install a CUDA build of torch, or the package triton"
        )
        return False
    return True


def runs_triton(tensor: Tensor) -> bool:
    """Say whether operations on this tensor run as Triton kernels; else as plain torch or numba."""
    return tensor.is_cuda and has_triton()
