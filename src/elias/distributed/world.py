"""The processes that train one model, and their collective operations.

`torchrun` starts the processes and sets the environment variables for the rendezvous. Tensors are
sent with NCCL between GPUs and with gloo between CPUs. Python values are always sent with gloo, so
that exchanging them never waits for a GPU.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from elias.distributed.watchdog import NEWS_SECONDS, Watchdog
from elias.errors import EliasError, Interrupted, RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from numpy.typing import NDArray
    from torch import Tensor


T = TypeVar("T")

_SHORTEST_POLL_SECONDS, _POLL_SECONDS, _LONG_POLL_SECONDS = 0.001, 0.05, 0.5
_FINISHED = "over"
_STAY_SECONDS = 1.0
_NOTICE_SECONDS = 5.0  # time for every live process to notice that an exchange failed


class World:
    """All processes that train one model, seen from one of them.

    All processes must call the methods that exchange data, in the same order.
    `SingleProcess` has the same methods for a process that runs alone.
    """

    shards_labels = True
    """True if the rows of W_L are split among the processes."""

    def __init__(
        self, rank: int, size: int, device: torch.device, store: Any, timeout: timedelta
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.received: Counter[str] = Counter()
        """Bytes that this process has received, by purpose."""
        self.has_left = False
        """True after `leave`, when rank 0 continues alone."""
        self.on_failure: Callable[[BaseException], None] | None = None
        """Called with the error that ends this process, before other processes learn of it."""
        self._store = store
        self._rounds = 0
        self._failed = False
        self._host_group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._watchdog: Watchdog | None = None
        self._timeout = timeout
        name = f"process {os.getpid()} on {socket.gethostname()}"
        self._names = self._exchange_text("name", name)
        local_ranks = self._exchange_text("local", os.environ.get("LOCAL_RANK", str(rank)))
        self._local_leaders = [i for i, text in enumerate(local_ranks) if text == "0"]
        self._watchdog = Watchdog(store, rank, self._names)

    @property
    def is_rank0(self) -> bool:
        """Return whether this is rank 0, the process that initialises, records and saves."""
        return self.rank == 0

    def has_lost_process(self) -> bool:
        """Return whether another process has died."""
        return self._watchdog is not None and bool(self._watchdog.lost)

    def share(self, count: int) -> slice:
        """Return this process's slice of ``count`` items."""
        largest = self.max_share(count)
        return slice(min(self.rank * largest, count), min((self.rank + 1) * largest, count))

    def max_share(self, count: int) -> int:
        """Return the size of the largest share of ``count`` items, which rank 0 has."""
        return -(-count // self.size)

    # tensors, on the device

    def all_reduce(self, tensor: Tensor, purpose: str = "") -> Tensor:
        """Sum a tensor over all processes in place, and return it."""
        self.received[purpose] += 2 * tensor.nbytes * (self.size - 1) // self.size
        self._checked(lambda: dist.all_reduce(tensor))
        return tensor

    def all_gather(self, tensor: Tensor, purpose: str = "") -> Tensor:
        """Return the rows of all processes in rank order; all must pass equally many rows."""
        gathered = tensor.new_empty((self.size * len(tensor), *tensor.shape[1:]))
        self.received[purpose] += tensor.nbytes * (self.size - 1)
        # torch 2.13 has a new name for it, and warns of the old one
        run: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._checked(lambda: run(gathered, tensor.contiguous()))
        return gathered

    def reduce_scatter(self, tensor: Tensor, purpose: str = "") -> Tensor:
        """Sum the rows over all processes, and return this process's share of the sum.

        Each share is sent to its owner and summed there in rank order. The sum is exact where at
        most one process has a non-zero value.
        """
        shares = torch.empty_like(tensor)
        self.received[purpose] += tensor.nbytes * (self.size - 1) // self.size
        self._checked(lambda: dist.all_to_all_single(shares, tensor.contiguous()))
        return shares.view(self.size, -1, *tensor.shape[1:]).sum(dim=0)

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values of rank 0 into the tensors of all processes."""
        for tensor in tensors:
            group = None if tensor.is_cuda else self._host_group
            self._checked(partial(dist.broadcast, tensor, src=0, group=group))

    # values, on the host

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the Python object that process ``source`` passed."""
        values = [value if self.rank == source else None]
        self._checked(
            lambda: dist.broadcast_object_list(values, src=source, group=self._host_group)
        )
        return values[0]  # type: ignore[return-value]

    def sum_array(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of an array over all processes."""
        total = torch.from_numpy(np.array(array))
        self._checked(lambda: dist.all_reduce(total, group=self._host_group))
        return total.numpy()

    def gather_rows(self, rows: NDArray[Any]) -> NDArray[Any] | None:
        """Return the rows of all processes in rank order on rank 0; return None on other ranks."""
        parts: list[Any] | None = [None] * self.size if self.is_rank0 else None
        self._checked(lambda: dist.gather_object(rows, parts, dst=0, group=self._host_group))
        return None if parts is None else np.concatenate(parts)

    def max_async(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start an element-wise maximum over processes; return a function that waits for it."""
        maxima = torch.tensor(list(values), dtype=torch.int64)
        work: Any = self._checked(
            lambda: dist.all_reduce(
                maxima, op=dist.ReduceOp.MAX, group=self._host_group, async_op=True
            )
        )

        def wait() -> list[int]:
            self._checked(work.wait)
            return maxima.tolist()

        return wait

    def check_same(self, metadata: Mapping[str, Any]) -> None:
        """Check that every process has the same metadata as rank 0.

        Raises:
            RunError: If a value differs; the message names it.
        """
        reference = self.broadcast(dict(metadata))
        for name, value in metadata.items():
            if reference.get(name) != value:
                raise RunError(
                    f"rank {self.rank}: its {name} is {value}, that of rank 0 is "
                    f"{reference.get(name)}; all processes must read the same files"
                )

    # turns

    def run_on_rank0(self, work: Callable[[], T]) -> T | None:
        """Run ``work`` on rank 0 and return its result; on other ranks, wait and return None.

        The wait has no timeout, but raises an error if a process dies. After `leave`, other ranks
        do not wait.
        """
        if self.has_left:
            return work() if self.is_rank0 else None
        return self._run_on([0], work)

    def broadcast_from_rank0(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 and return its result on all processes."""
        return self.broadcast(self.run_on_rank0(work))  # type: ignore[return-value]

    def rank0_first(self, work: Callable[[], T]) -> T:
        """Run ``work`` on local rank 0 of each machine, then on its other processes.

        The later processes can thus read files that the first one cached on the machine. All
        processes wait for each other without a timeout.
        """
        first = self._run_on(self._local_leaders, work)
        others = [rank for rank in range(self.size) if rank not in self._local_leaders]
        later = self._run_on(others, work)
        return first if self.rank in self._local_leaders else later  # type: ignore[return-value]

    def _run_on(self, ranks: Sequence[int], work: Callable[[], T]) -> T | None:
        """Run ``work`` on the given ranks; all processes wait until it is done."""
        self._rounds += 1
        result = None
        if self.rank in ranks:
            try:
                result = work()
            except BaseException as error:
                self.report_failure(error)
                raise
            self._store.set(f"done/{self._rounds}/{self.rank}", "")
        if list(ranks) != [self.rank]:
            self._wait_for_keys([f"done/{self._rounds}/{rank}" for rank in ranks])
        return result

    def _wait_for_keys(self, keys: list[str]) -> None:
        """Wait until the store has all keys; raise a `RunError` if a process dies meanwhile."""
        assert self._watchdog is not None
        pause = _SHORTEST_POLL_SECONDS
        while keys and not self._checked(partial(self._store.check, keys)):
            reason = self._checked(partial(self._watchdog.failure_message, 0))
            if reason and not self.is_rank0:
                raise RunError(reason)
            self._raise_if_lost(0.0)
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS)

    # the end

    def shutdown(self) -> None:
        """Wait for all processes to finish their work, then stop the watchdog."""
        self.broadcast(None)
        assert self._watchdog is not None
        self._watchdog.stop()

    def leave(self) -> None:
        """End the process group, so that rank 0 continues alone and other processes can exit.

        `torchrun` may host the store, and exits five minutes after the last process of its
        machine. Local rank 0 of each other machine therefore stays alive (`wait_for_rank0`).
        """
        self._run_on(range(self.size), lambda: None)
        self.shutdown()
        self.has_left = True
        dist.destroy_process_group()

    def wait_for_rank0(self) -> None:
        """After `leave`, wait until rank 0 is done if this process is local rank 0 of a machine.

        Raises:
            RunError: If rank 0 reported a failure.
        """
        if self.is_rank0:
            self._store.set(_FINISHED, "")
            return
        if self.rank not in self._local_leaders:
            return
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        assert self._watchdog is not None
        try:
            while not self._store.check([_FINISHED]):
                reason = self._watchdog.failure_message(0)
                if reason:
                    raise RunError(reason)
                time.sleep(_LONG_POLL_SECONDS)
        except RuntimeError:  # the store is gone, and so is rank 0
            return

    def report_failure(self, error: BaseException) -> None:
        """Report the error that ends this process to other processes; ignore later errors."""
        assert self._watchdog is not None
        if self._failed:
            return
        self._failed = True
        if self.on_failure is not None:
            self.on_failure(error)
        if isinstance(error, Interrupted):
            reason = f"received signal {error.signal_number}"
        else:
            reason = " ".join(str(error).split()) or type(error).__name__
            if not isinstance(error, EliasError):
                reason = f"{type(error).__name__}: {reason}"
        try:
            self._watchdog.report_failure(reason)
        except RuntimeError:  # the store is gone too
            return
        if self.is_rank0 and self.size > 1 and not isinstance(error, Interrupted):
            time.sleep(_STAY_SECONDS)  # this process may host the store that the others read

    def _exchange_text(self, key: str, text: str) -> list[str]:
        """Exchange a text through the store, and return the texts of all processes by rank."""
        self._store.set(f"{key}/{self.rank}", text)
        return [self._store.get(f"{key}/{rank}").decode() for rank in range(self.size)]

    def _checked(self, exchange: Callable[[], T]) -> T:
        """Run an exchange; if it fails, raise an error that names the dead or silent process."""
        try:
            return exchange()
        except RuntimeError as error:
            self._raise_if_lost()
            silent = self._silent_processes()
            if silent:
                raise RunError(
                    f"{', '.join(silent)} did not answer in {self._timeout.total_seconds():.0f} s; "
                    "find out why it hangs, then run the same command again to resume"
                ) from error
            raise

    def _silent_processes(self) -> list[str]:
        """Return the names of processes that have not noticed the failed exchange in time."""
        if self._watchdog is None:
            return []
        self._store.set(f"noticed/{self.rank}", "")
        time.sleep(min(_NOTICE_SECONDS, self._timeout.total_seconds()))
        silent = [
            f"rank {rank} ({name})"
            for rank, name in enumerate(self._names)
            if not self._store.check([f"noticed/{rank}"])
        ]
        if self.is_rank0:
            time.sleep(_STAY_SECONDS)  # this process may host the store that the others read
        return silent

    def _raise_if_lost(self, seconds: float = NEWS_SECONDS) -> None:
        """Wait up to ``seconds`` for a report that a process died; raise if one arrives."""
        reason = "" if self._watchdog is None else self._watchdog.wait_for_loss(seconds)
        if reason:
            raise RunError(reason)


class SingleProcess(World):
    """One process without others: every exchange returns its input."""

    shards_labels = False

    def __init__(self, device: torch.device | None = None) -> None:
        self.rank = 0
        self.size = 1
        self.device = device or torch.device("cpu")
        self.received = Counter()
        self.has_left = False
        self.on_failure = None
        self._watchdog = None

    def all_reduce(self, tensor: Tensor, purpose: str = "") -> Tensor:
        """Return the tensor."""
        del purpose
        return tensor

    def all_gather(self, tensor: Tensor, purpose: str = "") -> Tensor:
        """Return the tensor."""
        del purpose
        return tensor

    def reduce_scatter(self, tensor: Tensor, purpose: str = "") -> Tensor:
        """Return the tensor."""
        del purpose
        return tensor

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing."""

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the value."""
        del source
        return value

    def sum_array(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the array."""
        return array

    def gather_rows(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the rows."""
        return rows

    def max_async(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Return a function that returns the values."""
        return lambda: list(values)

    def rank0_first(self, work: Callable[[], T]) -> T:
        """Run ``work``."""
        return work()

    def _run_on(self, ranks: Sequence[int], work: Callable[[], T]) -> T:
        """Run ``work``."""
        del ranks
        return work()

    def shutdown(self) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """Do nothing: there is no other process."""

    def wait_for_rank0(self) -> None:
        """Do nothing: this is rank 0."""

    def report_failure(self, error: BaseException) -> None:
        """Do nothing: there is no other process to tell."""
