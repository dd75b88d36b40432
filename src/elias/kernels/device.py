"""Choose the device, limit threads, announce compilation and explain out-of-memory errors."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numba
import torch
from numba.core.event import Event, Listener, register

from elias.errors import ConfigError, RunError
from elias.progress import NOTE, SECONDS_BEFORE_LINE

if TYPE_CHECKING:
    from collections.abc import Iterator


logger = logging.getLogger(__name__)

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

    A GPU named with its index becomes torch's current device, on which Triton runs its kernels.

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


class _Announcement(Listener):
    """Listener that logs a line if compiling loops takes longer than two seconds in total."""

    def __init__(self) -> None:
        self.depth, self.seconds_left = 0, SECONDS_BEFORE_LINE

    # numba calls both methods with its compiler lock held
    def on_start(self, event: Event) -> None:
        del event
        self.depth += 1
        if self.depth == 1:
            self.start = time.monotonic()
            text = "Compiling loops, in the first run only ..."
            self.timer = threading.Timer(max(self.seconds_left, 0), logger.log, (NOTE, text))
            self.timer.daemon = True
            if self.seconds_left > 0:
                self.timer.start()

    def on_end(self, event: Event) -> None:
        del event
        self.depth -= 1
        if self.depth == 0:
            self.timer.cancel()
            self.seconds_left -= time.monotonic() - self.start


register("numba:compile", _Announcement())


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
