"""The processes that train together: who they are, and how they pass tensors to each other.

`torchrun` starts them and says in the environment where they meet. Tensors travel by NCCL between
GPUs and by gloo between CPUs; what is decided on the host travels by gloo always, so that no GPU
is waited for.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from elias.distributed.watchdog import Watch
from elias.errors import EliasError, Interrupted, RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor


logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHORTEST_POLL_SECONDS, _POLL_SECONDS, _LONG_POLL_SECONDS = 0.001, 0.05, 0.5
_OVER = "over"
_STAY_SECONDS = 1.0
_NOTICE_SECONDS = 5.0  # within which all that can, notice that an exchange has failed


class World:
    """All processes that train one model, as one of them sees them.

    Every method but the plain questions must be called by all of them, in the same order.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, store: Any, limit: timedelta
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.received: Counter[str] = Counter()
        """Bytes that this process has received, by what for."""
        self.parted = False
        """Whether the processes have parted for good, see `part`."""
        self.last_words: Callable[[BaseException], None] | None = None
        """Tells the user what ends this process, before the others hear of it and end too."""
        self._store = store
        self._rounds = 0
        self._failed = False
        self._control: Any = dist.new_group(backend="gloo", timeout=limit)
        me = f"process {os.getpid()} on {socket.gethostname()}"
        self._watch: Watch | None = None
        self._limit = limit
        self._names = self._all_say("name", me)
        local = os.environ.get("LOCAL_RANK", str(rank))
        self._leaders = [i for i, said in enumerate(self._all_say("local", local)) if said == "0"]
        self._watch = Watch(store, rank, self._names)

    @property
    def is_first(self) -> bool:
        """Say whether this is the process that sets up, records and saves."""
        return self.rank == 0

    def has_lost(self) -> bool:
        """Say whether a process is gone."""
        return self._watch is not None and bool(self._watch.lost)

    def share(self, count: int) -> slice:
        """Return which of ``count`` things, in order, are this process's; the last has fewest."""
        most = self.most(count)
        return slice(min(self.rank * most, count), min((self.rank + 1) * most, count))

    def most(self, count: int) -> int:
        """Return how many of ``count`` things the first process has: none has more."""
        return -(-count // self.size)

    # tensors, on the device

    def sum_(self, tensor: Tensor, what: str = "") -> Tensor:
        """Add up a tensor over all processes, in place, and return it."""
        self._count(what, 2 * tensor.nbytes * (self.size - 1) // self.size)
        self._checked(lambda: dist.all_reduce(tensor))
        return tensor

    def gather(self, tensor: Tensor, what: str = "") -> Tensor:
        """Return the rows of all processes, one after the other; all give equally many."""
        found = tensor.new_empty((self.size * len(tensor), *tensor.shape[1:]))
        self._count(what, tensor.nbytes * (self.size - 1))
        self._checked(lambda: _all_gather(found, tensor.contiguous()))
        return found

    def scatter_sum(self, tensor: Tensor, what: str = "") -> Tensor:
        """Return this process's part of the rows, added up over all; the reverse of `gather`.

        Each part is sent to its owner and added there in the order of the processes. Of numbers
        that only one process has, the others giving 0, the sum is exact.
        """
        found = torch.empty_like(tensor)
        self._count(what, tensor.nbytes * (self.size - 1) // self.size)
        self._checked(lambda: dist.all_to_all_single(found, tensor.contiguous()))
        return found.view(self.size, -1, *tensor.shape[1:]).sum(dim=0)

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Give all processes the first one's numbers, in place."""
        for tensor in tensors:
            group = None if tensor.is_cuda else self._control
            self._checked(partial(dist.broadcast, tensor, src=0, group=group))

    # values, on the host

    def tell(self, value: T) -> T:
        """Return what the first process gave, which JSON must be able to hold."""
        text = json.dumps(value).encode() if self.is_first else b""
        found = self.tell_array(np.frombuffer(text, dtype=np.uint8) if self.is_first else None)
        told: T = json.loads(found.tobytes())
        return told

    def tell_array(self, array: NDArray[Any] | None) -> NDArray[Any]:
        """Return the array that the first process gave."""
        about = torch.zeros(9, dtype=torch.int64)
        if self.is_first:
            assert array is not None
            array = np.ascontiguousarray(array)
            kind = np.frombuffer(array.dtype.str.encode().ljust(8), dtype=np.int64)
            about[: array.ndim + 2] = torch.tensor([array.ndim, int(kind[0]), *array.shape])
        self._checked(lambda: dist.broadcast(about, src=0, group=self._control))
        n_axes, kind_code, *shape = about.tolist()
        if array is None or not self.is_first:
            dtype = np.dtype(np.int64(kind_code).tobytes().decode().strip())
            array = np.empty(shape[:n_axes], dtype=dtype)
        flat = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
        if flat.numel():
            self._checked(lambda: dist.broadcast(flat, src=0, group=self._control))
        told: NDArray[Any] = flat.numpy().view(array.dtype).reshape(array.shape)
        return told

    def sum_array(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of an array over all processes."""
        found = torch.from_numpy(np.array(array))
        self._checked(lambda: dist.all_reduce(found, group=self._control))
        total: NDArray[Any] = found.numpy()
        return total

    def collect(self, array: NDArray[Any], counts: Sequence[int]) -> NDArray[Any] | None:
        """Return the rows of all processes, one after the other, to the first; None to others.

        ``counts`` are how many rows each process gives.
        """
        most = max(counts)
        sent = torch.zeros((most, *array.shape[1:]), dtype=torch.from_numpy(array[:0]).dtype)
        sent[: len(array)] = torch.from_numpy(np.ascontiguousarray(array))
        parts = [torch.empty_like(sent) for _ in counts] if self.is_first else None
        self._checked(lambda: dist.gather(sent, parts, dst=0, group=self._control))
        if parts is None:
            return None
        kept = [part[:count] for part, count in zip(parts, counts, strict=True)]
        found: NDArray[Any] = torch.cat(kept).numpy()
        return found

    def copy_of(self, array: NDArray[np.float32] | None, owner: int) -> NDArray[np.float32]:
        """Return the rows (n, D) that ``owner`` gave, to all."""
        shape = torch.zeros(2, dtype=torch.int64)
        if array is not None and self.rank == owner:
            shape = torch.tensor(array.shape)
        self._checked(lambda: dist.broadcast(shape, src=owner, group=self._control))
        sent = torch.empty(*shape.tolist())
        if array is not None and self.rank == owner:
            sent = torch.from_numpy(np.ascontiguousarray(array))
        if sent.numel():
            self._checked(lambda: dist.broadcast(sent, src=owner, group=self._control))
        found: NDArray[np.float32] = sent.numpy()
        return found

    def begin_highest(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begin to find the highest of each value over all processes; return what waits for it."""
        flags = torch.tensor(list(values), dtype=torch.int64)
        work = self._checked(
            lambda: dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._control, async_op=True)
        )

        def wait() -> list[int]:
            assert work is not None
            self._checked(work.wait)
            found: list[int] = flags.tolist()
            return found

        return wait

    # turns

    def first(self, work: Callable[[], T]) -> T | None:
        """Have the first process do something, and return that to it; the others wait.

        They wait as long as it takes, unlike in an exchange, and stop if it is gone. Where the
        processes have parted, it does so alone.
        """
        if self.parted:
            return work() if self.is_first else None
        return self._then([0], work)

    def in_turn(self, work: Callable[[], T]) -> T:
        """Have the first process of each machine do something, then the others there.

        So what one of them leaves in a cache of its machine, the others find. All wait for all, as
        long as it takes.
        """
        done = self._then(self._leaders, work)
        rest = [rank for rank in range(self.size) if rank not in self._leaders]
        later = self._then(rest, work)
        return done if self.rank in self._leaders else later  # type: ignore[return-value]

    def _then(self, ranks: Sequence[int], work: Callable[[], T]) -> T | None:
        """Have some processes do something; all go on when it is done."""
        self._rounds += 1
        done = None
        if self.rank in ranks:
            try:
                done = work()
            except BaseException as error:
                self.fail(error)
                raise
            self._store.set(f"done/{self._rounds}/{self.rank}", "")
        if list(ranks) != [self.rank]:
            self._await([f"done/{self._rounds}/{rank}" for rank in ranks])
        return done

    def _await(self, keys: list[str]) -> None:
        """Wait until all keys are there, or a process is gone."""
        assert self._watch is not None
        pause = _SHORTEST_POLL_SECONDS
        while keys and not self._checked(partial(self._store.check, keys)):
            why = self._checked(partial(self._watch.failure_of, 0))
            if why and not self.is_first:
                raise RunError(why)
            self._refuse_lost(0.0)
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS)

    # the end

    def farewell(self) -> None:
        """Part from the others, whom nothing is expected of any more."""
        self.tell(None)
        assert self._watch is not None
        self._watch.farewell()

    def part(self) -> None:
        """Part from the others for good: they end, and the first goes on alone.

        A process that has ended cannot die. But `torchrun` ends five minutes after the last process
        of its machine, and may be what others meet by; so one process of each other machine stays.
        """
        self._then(range(self.size), lambda: None)
        self.farewell()
        self.parted = True
        dist.destroy_process_group()

    def stay(self) -> None:
        """Wait, after parting, for the first process to be done, where this one has to.

        Raises:
            RunError: If that has failed, and has said so.
        """
        if self.is_first:
            self._store.set(_OVER, "")
            return
        if self.rank not in self._leaders:
            return
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        assert self._watch is not None
        try:
            while not self._store.check([_OVER]):
                why = self._watch.failure_of(0)
                if why:
                    raise RunError(why)
                time.sleep(_LONG_POLL_SECONDS)
        except RuntimeError:  # where the processes met is gone, and so is the first
            return

    def fail(self, error: BaseException) -> None:
        """Tell the others what ends this process; the first time, what comes of it is no news."""
        assert self._watch is not None
        if self._failed:
            return
        self._failed = True
        if self.last_words is not None:
            self.last_words(error)
        if isinstance(error, Interrupted):
            why = f"was asked to stop (signal {error.signal_number})"
        else:
            why = " ".join(str(error).split()) or type(error).__name__
            why = why if isinstance(error, EliasError) else f"{type(error).__name__}: {why}"
        try:
            self._watch.fail(why)
        except RuntimeError:  # where the processes met is gone too
            return
        if self.is_first and self.size > 1 and not isinstance(error, Interrupted):
            time.sleep(_STAY_SECONDS)  # where they met may be in its memory

    def _all_say(self, what: str, text: str) -> list[str]:
        """Return what each process says of itself."""
        self._store.set(f"{what}/{self.rank}", text)
        return [self._store.get(f"{what}/{rank}").decode() for rank in range(self.size)]

    def _count(self, what: str, n_bytes: int) -> None:
        self.received[what] += n_bytes

    def _checked(self, exchange: Callable[[], T]) -> T:
        """Make an exchange; if it fails, name the process that is gone, or that does not answer."""
        try:
            return exchange()
        except RuntimeError as error:
            self._refuse_lost(None)
            silent = self._silent()
            if silent:
                raise RunError(
                    f"{', '.join(silent)} did not answer in {self._limit.total_seconds():.0f} s; "
                    "look what it hangs in, and run the same command to go on"
                ) from error
            raise

    def _silent(self) -> list[str]:
        """Return the names of the processes that have not noticed that an exchange failed."""
        if self._watch is None:
            return []
        self._store.set(f"noticed/{self.rank}", "")
        time.sleep(min(_NOTICE_SECONDS, self._limit.total_seconds()))
        silent = [
            f"rank {rank} ({name})"
            for rank, name in enumerate(self._names)
            if not self._store.check([f"noticed/{rank}"])
        ]
        if self.is_first:
            time.sleep(_STAY_SECONDS)  # where the others look may be in its memory
        return silent

    def _refuse_lost(self, seconds: float | None) -> None:
        """Refuse to go on if a process is gone; wait some time to hear of it."""
        if self._watch is None:
            return
        who = self._watch.wait() if seconds is None else self._watch.wait(seconds)
        if who:
            logger.info("%s", who)  # for the run's log
            raise RunError(who)


def _all_gather(found: Tensor, tensor: Tensor) -> None:
    # torch 2.13 has a new name for it, and warns of the old one
    run: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    run(found, tensor)


def same_everywhere(world: World, facts: Mapping[str, Any]) -> None:
    """Refuse to train where a process has read something else than the first one.

    Raises:
        RunError: If a fact differs; it is named.
    """
    theirs = world.tell(dict(facts))
    different = [name for name, value in facts.items() if theirs.get(name) != value]
    if different:
        name = different[0]
        raise RunError(
            f"rank {world.rank}: its {name} is {facts[name]}, that of rank 0 {theirs.get(name)}; "
            "all processes must read the same files"
        )
