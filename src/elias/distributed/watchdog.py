"""Detect immediately that another process has died.

For each other process, a thread waits for its final message in a separate process group. When a
process ends for any reason, the operating system closes its connections, and the wait fails. A
heartbeat would not be reliable, because long compiled loops hold the interpreter lock.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""Seconds that a process has to stop by itself after another process died."""
EXIT_CODE = 3
"""Exit code of a process that does not stop within `GRACE_SECONDS`."""
NEWS_SECONDS = 3.0
"""Seconds to wait after a failed exchange for the threads to report a dead process."""
_FOREVER = timedelta(days=365)


class Watchdog:
    """Threads that each wait for one other process to end."""

    def __init__(self, store: Any, rank: int, names: list[str]) -> None:
        self.lost: dict[int, str] = {}
        """Message about each process that died without calling `stop`, by rank."""
        self._store = store
        self._rank = rank
        self._names = names
        self._stopped = threading.Event()
        self._group: Any = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._others = [other for other in range(len(names)) if other != rank]
        self._threads = [
            threading.Thread(target=self._watch, args=(other,), daemon=True, name="elias-watchdog")
            for other in self._others
        ]
        for thread in self._threads:
            thread.start()

    def wait_for_loss(self, seconds: float = NEWS_SECONDS) -> str:
        """Wait up to ``seconds`` for a process to die. Return a message, or an empty string."""
        end = time.monotonic() + seconds
        while not self.lost and time.monotonic() < end:
            time.sleep(0.02)
        return next(iter(self.lost.values()), "")

    def report_failure(self, reason: str) -> None:
        """Store the reason why this process fails, so that other processes can read it."""
        self._stopped.set()
        self._store.set(f"failed/{self._rank}", reason)

    def stop(self) -> None:
        """Send the final message to all other processes, and wait for their final messages."""
        self._stopped.set()
        sent: list[Any] = [
            dist.isend(torch.ones(1), dst=other, group=self._group) for other in self._others
        ]
        for work in sent:
            work.wait()
        for thread in self._threads:
            thread.join()

    def failure_message(self, rank: int) -> str:
        """Return a message about the failure that ``rank`` reported, or an empty string."""
        key = f"failed/{rank}"
        if not self._store.check([key]):
            return ""
        reason: str = self._store.get(key).decode()
        if reason.startswith("rank "):  # it failed because of another process
            return reason
        return f"rank {rank} ({self._names[rank]}) failed: {reason}"

    def _watch(self, other: int) -> None:
        try:
            work: Any = dist.irecv(torch.zeros(1), src=other, group=self._group)
            work.wait()
            return
        except RuntimeError:
            if self._stopped.is_set():
                return
        try:
            message = self.failure_message(other)
        except RuntimeError:  # the store is not reachable either
            message = ""
        self.lost[other] = message or (
            f"rank {other} ({self._names[other]}) died without an error message, perhaps killed or "
            "out of memory; run the same command again to resume"
        )
        if not self._stopped.wait(GRACE_SECONDS):
            # the main thread may wait inside a library for a message that will never come
            logger.error("%s; stopping rank %d", next(iter(self.lost.values())), self._rank)
            sys.stderr.flush()
            os._exit(EXIT_CODE)
