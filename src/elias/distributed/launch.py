"""Meeting the other processes that `torchrun` started, and parting from them."""

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
"""How long one exchange of tensors may take before a process counts as stuck."""
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched() -> int | None:
    """Return the rank that `torchrun`, or what sets the same variables, gave; None if none did."""
    return int(os.environ["RANK"]) if all(name in os.environ for name in _NEEDED) else None


def n_launched() -> tuple[int, int]:
    """Return how many processes were launched, and how many of them on this machine; 1 if none."""
    if launched() is None:
        return 1, 1
    return int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def joined(device: str = "auto", *, timeout: float = TIMEOUT_SECONDS) -> Iterator[World]:
    """Meet the other processes that were launched, for the time of the block.

    Args:
        device: ``cpu``, ``cuda``, or ``auto``: a GPU for each process if there are any.
        timeout: Seconds that one exchange may take.

    Raises:
        ConfigError: If there are too few GPUs for the processes of this machine.
        RunError: If the block cannot end because another process is gone; that one is named.
    """
    with staying(join(device, timeout=timeout)) as world:
        yield world


def join(device: str = "auto", *, timeout: float = TIMEOUT_SECONDS) -> World:
    """Meet the other processes, see `joined`, with a block of `staying` still to come."""
    where = _device(device)
    limit = timedelta(seconds=timeout)
    meet: Any = dist.rendezvous  # type: ignore[attr-defined]
    prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]
    store, rank, size = next(iter(meet("env://", timeout=limit)))
    # torchrun's store outlives its processes: those it starts again must not meet the dead
    store = prefixed(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(
        "nccl" if where.type == "cuda" else "gloo",
        store=prefixed("elias", store),
        rank=rank,
        world_size=size,
        timeout=limit,
    )
    return World(rank, size, where, prefixed("elias-talk", store), limit)


@contextmanager
def staying(world: World) -> Iterator[World]:
    """Part from the other processes at the end of the block, or tell them what has gone wrong."""
    try:
        yield world
        if world.parted:
            world.stay()
        else:
            world.farewell()
    except BaseException as error:
        world.fail(error)
        raise
    if not world.parted:
        dist.destroy_process_group()


def _device(name: str) -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not there):
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        raise ConfigError(f"device {name!r}: several processes take auto, cpu or cuda")
    if local >= there:
        raise ConfigError(
            f"device {name!r}: this machine has {there} GPUs and more processes than that; lower "
            "torchrun's --nproc-per-node, or use --device cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
