"""Choose the device and its kernels; limit threads; explain out-of-memory errors."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numba
import torch

from elias.errors import ConfigError, RunError

if TYPE_CHECKING:
    from collections.abc import Iterator

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


_TORCH_ON_CPU = "you tried to allocate"
"""What torch says, on every system, of memory that the CPU does not have."""


_REMEDIES = {
    "training": "Lower stages.*.batch_size, index.train_shortlist, encoder.max_length or "
    "encoder.dim, or set encoder.gradient_checkpointing=true or encoder.capture=false",
    "predicting": "Not even one text at a time fits; use device cpu, or free memory",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether numpy or torch failed for want of memory."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or (isinstance(error, RuntimeError) and _TORCH_ON_CPU in str(error))


def pick_device(device: str) -> torch.device:
    """Return the device called so; ``auto`` is a GPU if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}; use auto, cpu or cuda") from error
    if picked.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not supported; use auto, cpu or cuda")
    if picked.type == "cuda":
        _take_gpu(device, picked)
    return picked


def _take_gpu(name: str, device: torch.device) -> None:
    """Make a GPU the current one, where kernels are launched; refuse one that is not there."""
    if not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: no CUDA GPU can be used here; use cpu or auto")
    if ":" not in name:
        return
    n_gpus = torch.cuda.device_count()
    if device.index >= n_gpus:
        raise ConfigError(
            f"device {name!r}: there are {n_gpus} GPUs here, counted from 0; use cuda:{n_gpus - 1} "
            "or lower"
        )
    torch.cuda.set_device(device)


@contextmanager
def threads_shared(most: int | None = None) -> Iterator[None]:
    """Let the compiled kernels use as many threads as torch does, in this thread of the caller's.

    With ``most``, neither uses more than that.

    >>> with threads_shared():
    ...     numba.get_num_threads() <= torch.get_num_threads()
    True
    """
    torch_before = torch.get_num_threads()
    count = torch_before if most is None else min(most, torch_before)
    before = numba.get_num_threads()
    there: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    numba.set_num_threads(min(there, count))
    if torch.get_num_threads() != count:  # starting its threads, numba sets OpenMP's for all
        torch.set_num_threads(count)
    try:
        yield
    finally:
        numba.set_num_threads(before)
        if torch.get_num_threads() != torch_before:
            torch.set_num_threads(torch_before)


@contextmanager
def memory_explained(what: str) -> Iterator[None]:
    """Turn running out of memory into an error that says what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        first = str(error).partition("\n")[0].rstrip(".") or "no more is there"
        raise RunError(f"out of memory: {first}. {_REMEDIES[what]}.") from error
