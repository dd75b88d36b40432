"""The processes that train one model, and their collective operations.

`torchrun` starts the processes and sets the environment variables for the rendezvous. Tensors are
sent with NCCL between GPUs and with gloo between CPUs. Python values are always sent with gloo, so
that sending them never waits for a GPU.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from elias.errors import ConfigError, EliasError, Interrupted, RunError

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_SECONDS = 600.0
"""Timeout of one collective operation. A process that exceeds it is considered stuck."""
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SHORTEST_POLL_SECONDS, _POLL_SECONDS, _LONG_POLL_SECONDS = 0.001, 0.05, 0.5
_FINISHED = "over"
_STAY_SECONDS = 1.0
_NOTICE_SECONDS = 5.0  # every live process notices a failed collective in this time
GRACE_SECONDS = 10.0
"""Seconds that a process has to stop by itself after another process died."""
EXIT_CODE = 3
"""Exit code of a process that does not stop within `GRACE_SECONDS`."""
REPORT_SECONDS = 3.0
"""Seconds to wait, after a failed collective operation, until the watchdog reports a dead
process."""
_FOREVER = timedelta(days=365)


class Watchdog:
    """Threads that each wait for one other process to end, to detect at once that it has died.

    Each thread waits in a separate process group for the final message of its process. When a
    process ends for any reason, the operating system closes its connections, and the wait fails.
    Heartbeats would not be reliable, because a process cannot send any during a long compiled loop
    that holds the interpreter lock.
    """

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

    def wait_for_loss(self, seconds: float) -> str:
        """Wait up to ``seconds`` for a process to die; return why it died, or '' if none did."""
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


class World:
    """All processes that train one model, seen from one of them.

    All processes must call the collective operations in the same order. `SingleProcess` has the
    same methods for a process that runs alone.
    """

    shards_labels = True
    """True if the rows of W_L are split among the processes."""
    has_left = False
    """True after `leave`, when rank 0 continues alone."""
    on_failure: Callable[[BaseException], None] | None = None
    """Called with the error that ends this process, before other processes learn of it."""
    _host_group: Any = None

    def __init__(
        self, rank: int, size: int, device: torch.device, store: Any, timeout: timedelta
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.received: Counter[str] = Counter()
        """Bytes that this process has received, by purpose."""
        self._store, self._timeout = store, timeout
        self._rounds = 0
        self._failed = False
        self._host_group = dist.new_group(backend="gloo", timeout=timeout)
        name = f"process {os.getpid()} on {socket.gethostname()}"
        self._names = self._gather_text("name", name)
        local_ranks = self._gather_text("local", os.environ.get("LOCAL_RANK", str(rank)))
        self._local_leaders = [i for i, text in enumerate(local_ranks) if text == "0"]
        self._watchdog = Watchdog(store, rank, self._names)

    @property
    def is_rank0(self) -> bool:
        """Return whether this is rank 0, the process that initialises the model, logs and saves."""
        return self.rank == 0

    def has_lost_process(self) -> bool:
        """Return whether another process has died."""
        return bool(self._watchdog.lost)

    def share(self, count: int) -> slice:
        """Return this process's share of ``count`` items, as a slice."""
        largest = self.max_share(count)
        return slice(min(self.rank * largest, count), min((self.rank + 1) * largest, count))

    def max_share(self, count: int) -> int:
        """Return the size of the largest share of ``count`` items, which rank 0 has."""
        return -(-count // self.size)

    # collective operations on tensors, on their device

    def all_reduce(self, tensor: Tensor, purpose: str = "") -> Tensor:
        """Sum a tensor over all processes in place, and return it."""
        self.received[purpose] += 2 * tensor.nbytes * (self.size - 1) // self.size
        self._checked(dist.all_reduce, tensor)
        return tensor

    def all_gather(self, tensor: Tensor, purpose: str = "") -> Tensor:
        """Return the rows of all processes in rank order. All must pass the same number of rows."""
        gathered = tensor.new_empty((self.size * len(tensor), *tensor.shape[1:]))
        self.received[purpose] += tensor.nbytes * (self.size - 1)
        # torch 2.13 renames this function, and warns if the old name is used
        run: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._checked(run, gathered, tensor.contiguous())
        return gathered

    def reduce_scatter(self, tensor: Tensor, purpose: str = "") -> Tensor:
        """Sum the rows over all processes, and return this process's share of the sum.

        Each share is sent to its owner and summed there in rank order. The sum is exact where at
        most one process has a non-zero value.
        """
        shares = torch.empty_like(tensor)
        self.received[purpose] += tensor.nbytes * (self.size - 1) // self.size
        self._checked(dist.all_to_all_single, shares, tensor.contiguous())
        return shares.view(self.size, -1, *tensor.shape[1:]).sum(dim=0)

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values of rank 0 into the tensors of all processes."""
        for tensor in tensors:
            group = None if tensor.is_cuda else self._host_group
            self._checked(dist.broadcast, tensor, src=0, group=group)

    # collective operations on Python values and arrays, on the host

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return, on all processes, the Python object that process ``source`` passed."""
        values = [value if self.rank == source else None]
        self._checked(dist.broadcast_object_list, values, src=source, group=self._host_group)
        return values[0]  # type: ignore[return-value]

    def sum_array(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of an array over all processes."""
        total = torch.from_numpy(np.array(array))
        self._checked(dist.all_reduce, total, group=self._host_group)
        return total.numpy()

    def gather_rows(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the rows of all processes in rank order on rank 0, and no rows on other ranks."""
        parts: list[Any] | None = [None] * self.size if self.is_rank0 else None
        self._checked(dist.gather_object, rows, parts, dst=0, group=self._host_group)
        return rows[:0] if parts is None else np.concatenate(parts)

    def max_async(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start an element-wise maximum over processes. Return a function that waits for it."""
        maxima = torch.tensor(list(values), dtype=torch.int64)
        options = {"op": dist.ReduceOp.MAX, "group": self._host_group, "async_op": True}
        work: Any = self._checked(dist.all_reduce, maxima, **options)

        def wait() -> list[int]:
            self._checked(work.wait)
            return maxima.tolist()

        return wait

    def check_same(self, metadata: Mapping[str, Any]) -> None:
        """Check that every process has the same metadata as rank 0.

        Raises:
            RunError: If a value differs. The message names the value.
        """
        reference = self.broadcast(dict(metadata))
        for name, value in metadata.items():
            if reference.get(name) != value:
                raise RunError(
                    f"rank {self.rank}: the {name} is {value}, but on rank 0 it is "
                    f"{reference.get(name)}; start all processes with the same files and settings"
                )

    # work that only some processes do while the others wait

    def run_on_rank0(self, work: Callable[[], T]) -> T | None:
        """Run ``work`` on rank 0 and return its result. Other ranks wait and return None.

        They wait without a timeout, but raise an error if a process dies. After `leave`, they do
        not wait.
        """
        if self.has_left:
            return work() if self.is_rank0 else None
        return self._run_on([0], work)

    def broadcast_from_rank0(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 and return its result on all processes."""
        return self.broadcast(self.run_on_rank0(work))  # type: ignore[return-value]

    def rank0_first(self, work: Callable[[], T]) -> T:
        """Run ``work`` on local rank 0 of each machine, then on all other processes.

        The other processes can then read the files that local rank 0 has cached. All processes wait
        for each other without a timeout.
        """
        others = [rank for rank in range(self.size) if rank not in self._local_leaders]
        results = [self._run_on(ranks, work) for ranks in (self._local_leaders, others)]
        return results[1 if self.rank in others else 0]  # type: ignore[return-value]

    def _run_on(self, ranks: Sequence[int], work: Callable[[], T]) -> T | None:
        """Run ``work`` on the given ranks. All processes wait until it is done."""
        self._rounds += 1
        result = None
        if self.rank in ranks:
            try:
                result = work()
            except BaseException as error:
                self._report_failure(error)
                raise
            self._store.set(f"done/{self._rounds}/{self.rank}", "")
        if list(ranks) != [self.rank]:
            self._wait_for_keys([f"done/{self._rounds}/{rank}" for rank in ranks])
        return result

    def _wait_for_keys(self, keys: list[str]) -> None:
        """Wait until the store has all keys. Raise a `RunError` if a process dies before that."""
        pause = _SHORTEST_POLL_SECONDS
        while keys and not self._checked(self._store.check, keys):
            reason = "" if self.is_rank0 else self._checked(self._watchdog.failure_message, 0)
            _raise_if(reason or self._watchdog.wait_for_loss(0.0))
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS)

    # shutdown and failures

    def _shutdown(self) -> None:
        """Wait for all processes to finish their work, then stop the watchdog."""
        self.broadcast(None)
        self._watchdog.stop()

    def leave(self) -> None:
        """End the process group, so that rank 0 continues alone and other processes can exit.

        Rank 0 still needs the key-value store, which `torchrun` hosts on one of the machines.
        `torchrun` exits five minutes after the last process of its machine. Local rank 0 of every
        machine therefore stays alive (`_wait_for_rank0`).
        """
        self._run_on(range(self.size), lambda: None)
        self._shutdown()
        self.has_left = True
        dist.destroy_process_group()

    def _wait_for_rank0(self) -> None:
        """Wait after `leave` until rank 0 is done, if this process is local rank 0 of its machine.

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
        try:
            while not self._store.check([_FINISHED]):
                _raise_if(self._watchdog.failure_message(0))
                time.sleep(_LONG_POLL_SECONDS)
        except RuntimeError:  # the store is gone, and so is rank 0
            return

    def _report_failure(self, error: BaseException) -> None:
        """Report the error that ends this process to the others. Only the first call does so."""
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
        except RuntimeError:  # the store is not reachable either
            return
        if self.is_rank0 and self.size > 1 and not isinstance(error, Interrupted):
            time.sleep(_STAY_SECONDS)  # this process may host the store that the others read

    def _gather_text(self, key: str, text: str) -> list[str]:
        """Store the text of this process, and return the texts of all processes in rank order."""
        self._store.set(f"{key}/{self.rank}", text)
        return [self._store.get(f"{key}/{rank}").decode() for rank in range(self.size)]

    def _checked(self, operation: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run a collective operation.

        If it fails, raise an error that names the process that died or hangs.
        """
        try:
            return operation(*args, **options)
        except RuntimeError as error:
            _raise_if(self._watchdog.wait_for_loss(REPORT_SECONDS))
            silent = self._silent_processes()
            if silent:
                raise RunError(
                    f"{', '.join(silent)} did not answer in {self._timeout.total_seconds():.0f} s; "
                    "find out why it hangs, then run the same command again to resume"
                ) from error
            raise

    def _silent_processes(self) -> list[str]:
        """Return the names of the processes that do not report the failed operation in time."""
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


def _raise_if(reason: str) -> None:
    """Raise a `RunError` with the reason, unless it is empty."""
    if reason:
        raise RunError(reason)


class SingleProcess(World):
    """A process that runs alone. Its collective operations send nothing and return their input."""

    shards_labels = False

    def __init__(self, device: torch.device | None = None) -> None:
        self.rank, self.size, self.device = 0, 1, device or torch.device("cpu")
        self.received = Counter()

    def _checked(self, operation: Callable[..., T], *args: Any, **options: Any) -> Any:
        """Do nothing, because there is no other process."""

    def has_lost_process(self) -> bool:
        """Return False, because there is no other process."""
        return False

    def all_gather(self, tensor: Tensor, purpose: str = "") -> Tensor:
        """Return the tensor, because there is no other process."""
        del purpose
        return tensor

    reduce_scatter = all_gather

    def gather_rows(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the rows, because there is no other process."""
        return rows

    def max_async(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Return a function that returns the values, because there is no other process."""
        return lambda: list(values)

    def run_on_rank0(self, work: Callable[[], T]) -> T:
        """Run ``work`` and return its result, because this is rank 0."""
        return work()

    rank0_first = run_on_rank0

    def leave(self) -> None:
        """Do nothing, because there is no other process."""


def launched_rank() -> int | None:
    """Return the rank of this process, or None if `torchrun` did not start it."""
    return int(os.environ["RANK"]) if all(name in os.environ for name in _VARIABLES) else None


def process_counts() -> tuple[int, int]:
    """Return the number of processes in total and on this machine, or (1, 1) without `torchrun`."""
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
        RunError: If another process died. The message names the process.
    """
    own_device = _device(device)
    limit = timedelta(seconds=timeout)
    rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined]
    prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]
    store, rank, size = next(iter(rendezvous("env://", timeout=limit)))
    # torchrun's store outlives its processes; restarted processes must not read the old keys
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
            world._wait_for_rank0()
        else:
            world._shutdown()
    except BaseException as error:
        world._report_failure(error)
        raise
    if not world.has_left:
        dist.destroy_process_group()


def _device(name: str) -> torch.device:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not n_gpus):
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        raise ConfigError(f"device {name!r}: with several processes, use auto, cpu or cuda")
    if local_rank >= n_gpus:
        raise ConfigError(
            f"device {name!r}: this machine has more processes than GPUs ({n_gpus}); lower "
            "torchrun's --nproc-per-node, or use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
