"""Pages of mapped files, which count as a process's memory once it has looked at them.

The system takes them back when memory is wanted, but not before: what is told as resident memory
has them all in it, however large the files. So they are given back from time to time. They stay in
the system's page cache, from where they are mapped again at little cost.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from numpy import memmap

LIMIT = 512 << 20
"""Bytes of mapped pages that may gather before they are given back."""
_STATM = Path("/proc/self/statm")  # Linux; elsewhere nothing is given back

_lock = threading.Lock()  # batches are read by a thread of their own
_maps: WeakSet[mmap.mmap] = WeakSet()
_remaining = 0
"""Bytes of pages that were there after the last time: the program's own files, mostly."""


def watch(array: memmap[Any, Any]) -> None:
    """Have the pages of a mapped array given back when there are many."""
    with _lock:
        _maps.add(array._mmap)  # type: ignore[attr-defined]


def ease() -> None:
    """Give the pages of mapped arrays back if many have gathered; called between chunks of work."""
    global _remaining
    if not _maps or not hasattr(mmap, "MADV_DONTNEED") or mapped_bytes() < _remaining + LIMIT:
        return
    with _lock:
        for each in _maps:
            each.madvise(mmap.MADV_DONTNEED)
        _remaining = mapped_bytes()


def mapped_bytes() -> int:
    """Return how much of this process's memory is pages of files; 0 where that is not known."""
    try:
        return int(_STATM.read_bytes().split()[2]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
