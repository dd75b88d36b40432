"""Noticing that another process is gone, and which, as soon as its connection closes.

Each process waits for a farewell from each other one, in a thread and in a process group of their
own. The system closes the connections of a process that ends, however it ends, so the wait fails
at once. A heartbeat would need time of the interpreter, which long compiled loops do not give.
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
"""How long a process has to end by itself once another one is gone."""
EXIT_CODE = 3
"""Of a process that had to be ended because it waits for one that is gone."""
_FOREVER = timedelta(days=365)
_AGREE_SECONDS = 3.0  # between a connection's end and what its process said of it


class Watch:
    """Threads that each wait for one other process to end."""

    def __init__(self, store: Any, rank: int, names: list[str]) -> None:
        self.lost: dict[int, str] = {}
        """What is known of each process that is gone without a farewell, in the order noticed."""
        self._store = store
        self._rank = rank
        self._names = names
        self._left = threading.Event()
        self._group: Any = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._threads = [
            threading.Thread(target=self._wait_for, args=(peer,), daemon=True, name="elias-watch")
            for peer in range(len(names))
            if peer != rank
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float = _AGREE_SECONDS) -> str:
        """Return who is gone and why, in a few words; empty where no one is after a while."""
        end = time.monotonic() + seconds
        while not self.lost and time.monotonic() < end:
            time.sleep(0.02)
        return next(iter(self.lost.values()), "")

    def fail(self, why: str) -> None:
        """Leave for the others what ends this process; its end itself they notice."""
        self._left.set()
        self._store.set(f"failed/{self._rank}", why)

    def farewell(self) -> None:
        """Leave in peace, once all have come so far."""
        self._left.set()
        sent = [
            dist.isend(torch.ones(1), dst=peer, group=self._group)
            for peer in range(len(self._names))
            if peer != self._rank
        ]
        for work in sent:
            if work is not None:
                work.wait()
        for thread in self._threads:
            thread.join()

    def _wait_for(self, peer: int) -> None:
        try:
            work = dist.irecv(torch.zeros(1), src=peer, group=self._group)
            assert work is not None
            work.wait()
            return
        except RuntimeError:
            if self._left.is_set():
                return
        self.lost[peer] = self._said_of(peer)
        if not self._left.wait(GRACE_SECONDS):
            self._end()

    def failure_of(self, peer: int) -> str:
        """Return what a process said that ends it; empty where it said nothing."""
        key = f"failed/{peer}"
        if not self._store.check([key]):
            return ""
        said: str = self._store.get(key).decode()
        if said.startswith("rank "):  # it ends because of another one
            return said
        return f"rank {peer} ({self._names[peer]}) failed: {said}"

    def _said_of(self, peer: int) -> str:
        try:
            said = self.failure_of(peer)
        except RuntimeError:  # what the processes met by is gone too
            said = ""
        return said or (
            f"rank {peer} ({self._names[peer]}) is gone without a word (killed, or out of memory?)"
            "; the same command goes on from the last checkpoint"
        )

    def _end(self) -> None:
        """End a process that waits, perhaps inside a library, for what will never come."""
        logger.error("%s; rank %d ends", next(iter(self.lost.values())), self._rank)
        sys.stderr.flush()
        os._exit(EXIT_CODE)
