"""Choose the device, limit threads, and explain out-of-memory errors."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numba
import torch

from elias.errors import ConfigError, RunError

if TYPE_CHECKING:
    from collections.abc import Iterator


_TORCH_ON_CPU = "you tried to allocate"
"""Substring of torch's error message for exhausted CPU memory, on every operating system."""


_REMEDIES = {
    "training": "Lower stages.*.batch_size, index.train_shortlist, encoder.max_length or "
    "encoder.dim, or set encoder.gradient_checkpointing=true",
    "predicting": "Not even one text fits; use device cpu or free some memory",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that numpy or torch ran out of memory."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or (isinstance(error, RuntimeError) and _TORCH_ON_CPU in str(error))


def pick_device(device: str) -> torch.device:
    """Return the named device. ``auto`` means a GPU if one is available, else the CPU.

    A GPU named with its index becomes torch's current device, because kernels are launched there.

    Raises:
        ConfigError: There is no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}; use auto, cpu or cuda") from error
    if picked.type == "cpu":
        return picked
    if picked.type != "cuda":
        raise ConfigError(f"device {device!r} is not supported; use auto, cpu or cuda")
    if not torch.cuda.is_available():
        raise ConfigError(f"device {device!r}: no CUDA GPU is available; use cpu or auto")
    if picked.index is not None:
        n_gpus = torch.cuda.device_count()
        if picked.index >= n_gpus:
            raise ConfigError(
                f"device {device!r}: this machine has {n_gpus} GPUs, counted from 0; "
                f"use cuda:{n_gpus - 1} or lower"
            )
        torch.cuda.set_device(picked)
    return picked


@contextmanager
def limit_threads(limit: int | None = None) -> Iterator[None]:
    """Limit numba's threads to torch's number of threads, and both to ``limit`` if given.

    The limit applies to work started by the calling thread.

    >>> with limit_threads():
    ...     numba.get_num_threads() <= torch.get_num_threads()
    True
    """
    torch_before, numba_before = torch.get_num_threads(), numba.get_num_threads()
    count = torch_before if limit is None else min(limit, torch_before)
    available: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    numba.set_num_threads(min(available, count))
    # numba, when it starts its threads, also sets the number of OpenMP threads that torch uses
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        numba.set_num_threads(numba_before)
        if torch.get_num_threads() != torch_before:
            torch.set_num_threads(torch_before)


@contextmanager
def explain_out_of_memory(task: str) -> Iterator[None]:
    """Convert an out-of-memory error into a `RunError` that suggests a remedy.

    ``task`` is "training" or "predicting".

    Raises:
        RunError: The block ran out of memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        first = str(error).partition("\n")[0].rstrip(".") or "allocation failed"
        raise RunError(f"out of memory: {first}. {_REMEDIES[task]}.") from error
