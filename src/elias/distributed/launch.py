"""Join the processes that `torchrun` started."""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from elias.distributed.world import World
from elias.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


TIMEOUT_SECONDS = 600.0
"""Timeout of one collective operation; a process that exceeds it counts as stuck."""
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_rank() -> int | None:
    """Return the rank that `torchrun` assigned; None if it did not start this process."""
    return int(os.environ["RANK"]) if all(name in os.environ for name in _VARIABLES) else None


def process_counts() -> tuple[int, int]:
    """Return the number of processes in total and on this machine; (1, 1) without `torchrun`."""
    if launched_rank() is None:
        return 1, 1
    return int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def joined(device: str = "auto", *, timeout: float = TIMEOUT_SECONDS) -> Iterator[World]:
    """Join the process group that `torchrun` started, for the duration of the block.

    Args:
        device: ``cpu``, ``cuda`` (one GPU per process), or ``auto`` (``cuda`` if available).
        timeout: Timeout of one collective operation, in seconds.

    Raises:
        ConfigError: If this machine has fewer GPUs than processes.
        RunError: If another process died; the message names it.
    """
    own_device = _device(device)
    limit = timedelta(seconds=timeout)
    rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined]
    prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]
    store, rank, size = next(iter(rendezvous("env://", timeout=limit)))
    # torchrun's store outlives its processes: restarted ones must not read keys of dead ones
    store = prefixed(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(
        "nccl" if own_device.type == "cuda" else "gloo",
        store=prefixed("elias", store),
        rank=rank,
        world_size=size,
        timeout=limit,
    )
    world = World(rank, size, own_device, prefixed("elias-talk", store), limit)
    try:
        yield world
        if world.has_left:
            world.wait_for_rank0()
        else:
            world.shutdown()
    except BaseException as error:
        world.report_failure(error)
        raise
    if not world.has_left:
        dist.destroy_process_group()


def _device(name: str) -> torch.device:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not n_gpus):
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        raise ConfigError(f"device {name!r}: with several processes use auto, cpu or cuda")
    if local_rank >= n_gpus:
        raise ConfigError(
            f"device {name!r}: this machine has {n_gpus} GPUs and more processes than that; lower "
            "torchrun's --nproc-per-node, or use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
