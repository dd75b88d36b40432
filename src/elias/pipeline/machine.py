"""What memory the machine has: of the host, within a container's limit, and of a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch


class Room(NamedTuple):
    """Bytes of memory."""

    total: int
    """What could ever be had."""
    free: int
    """What can be had now."""


def host_room() -> Room | None:
    """Return the memory of this machine, or of the container it seems to be; None if unknown."""
    found = _meminfo()
    if "MemTotal" not in found:
        return _by_sysconf()
    room = Room(found["MemTotal"], found.get("MemAvailable", found["MemTotal"]))
    limit = _number(Path("/sys/fs/cgroup/memory.max"))
    if limit is None or limit >= room.total:
        return room
    used = _number(Path("/sys/fs/cgroup/memory.current")) or 0
    return Room(limit, min(room.free, max(0, limit - used)))


def device_room(device: torch.device) -> Room | None:
    """Return the memory of a GPU; None for the CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return Room(total, free + torch.cuda.memory_reserved(device))


def resident() -> int:
    """Return the bytes of memory that this process holds; 0 where that is not told."""
    return _table(Path("/proc/self/status")).get("VmRSS", 0)


def shared() -> int:
    """Return the bytes of those that other processes can share: mapped files; 0 if not told."""
    found = _table(Path("/proc/self/status"))
    return found.get("RssFile", 0) + found.get("RssShmem", 0)


def _meminfo() -> dict[str, int]:
    return _table(Path("/proc/meminfo"))


def _table(path: Path) -> dict[str, int]:
    """Return the lines ``name: number kB`` of a file in bytes."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    cells = (line.replace(":", " ").split() for line in lines)
    return {c[0]: int(c[1]) << 10 for c in cells if len(c) == 3 and c[2] == "kB"}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _by_sysconf() -> Room | None:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    return Room(total, total)
