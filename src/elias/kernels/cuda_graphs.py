"""CUDA graphs: work recorded once and repeated by one launch.

A GPU finishes the kernels of a small batch sooner than the host can launch them one by one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_RUNS_BEFORE = 3  # kernels are compiled and loaded then, not while they are recorded
_MOST_GRAPHS = 32  # other shapes run as they are

Found = TypeVar("Found")
Record: TypeAlias = Callable[[Callable[[], Found]], tuple[Callable[[], object], Found]]
"""Does some work; returns what repeats it, and what it found, always in the same memory."""


class Recorder:
    """Records work as CUDA graphs that share their memory.

    So what one of them found is gone when the next is repeated. What the work reads must stay where
    it is, and shapes as they are.
    """

    def __init__(self, device: torch.device) -> None:
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(device)
        self._pool: Any = None

    def __call__(self, work: Callable[[], Found]) -> tuple[Callable[[], object], Found]:
        """Do the work, record it, and return what repeats it and where it leaves its results."""
        if self._pool is None:
            pool: Any = torch.cuda.graph_pool_handle
            self._pool = pool()
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        graph: Any = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                found = self._record(graph, work)
        finally:
            current.wait_stream(self._stream)
        return graph.replay, found

    def _record(self, graph: Any, work: Callable[[], Found]) -> Found:
        _free_cached()  # what other streams keep cached, these runs cannot use
        for _ in range(_RUNS_BEFORE):
            work()
        _free_cached()  # nor a graph what they leave
        # thread_local: the thread that makes the next batches may go on pinning memory
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            found = work()
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            _forget_capture(self._stream.device)
            raise
        graph.capture_end()
        return found


def _free_cached() -> None:
    in_use: Any = torch.cuda.is_initialized
    if in_use():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _forget_capture(device: torch.device) -> None:
    """Let random numbers be drawn again after a recording that failed."""
    generator: Any = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(generator.clone_state())


class Recorded(Generic[Found]):
    """Work on tensors, recorded for each of their shapes once that has come often enough.

    Where recording fails, memory included, it goes on without, and says so. So it does where other
    work finds too little memory beside the graphs.
    """

    def __init__(
        self,
        work: Callable[..., Found],
        record: Record[Found],
        whole: Callable[..., Found] | None = None,
        *,
        times_before: int = 1,
        most: int = _MOST_GRAPHS,
    ) -> None:
        """Prepare; nothing is recorded yet.

        Args:
            work: On tensors.
            record: Records work, and does it.
            whole: The same work, if ``work`` leaves something behind where it fails half-way.
            times_before: How often a shape runs as it is before it is recorded.
            most: How many shapes are recorded.
        """
        self._work, self._record, self._whole = work, record, whole or work
        self._times_before, self._most = times_before, most
        self._runs: dict[object, tuple[list[Tensor], Callable[[], object], Found]] = {}
        self._met: Counter[object] = Counter()
        self._stopped = False

    @property
    def has_graphs(self) -> bool:
        """Whether anything is recorded."""
        return bool(self._runs)

    @property
    def given_up(self) -> bool:
        """Whether there is nothing recorded, nor will be."""
        return self._stopped and not self._runs

    def __call__(self, *inputs: Tensor, **options: bool) -> Found:
        """Return what the work finds; the next call may overwrite it."""
        key = (*(part.shape for part in inputs), *options.items())
        if key not in self._runs and not self._new(key, inputs, options):
            return self.once(*inputs, **options)
        own, repeat, found = self._runs[key]
        for part, given in zip(own, inputs, strict=True):
            part.copy_(given, non_blocking=True)
        repeat()
        return found

    def once(self, *inputs: Tensor, **options: bool) -> Found:
        """Do the work without recording it."""
        if not self._runs:
            return self._work(*inputs, **options)
        try:
            return self._whole(*inputs, **options)
        except torch.OutOfMemoryError:
            logger.warning(
                "encoder.capture: too little memory beside the CUDA graphs; going on without them"
            )
            self.forget()
        _free_cached()
        return self._work(*inputs, **options)

    def forget(self) -> None:
        """Give the memory of all that was recorded back."""
        self._runs.clear()
        self._stopped = True

    def _new(self, key: object, inputs: tuple[Tensor, ...], options: dict[str, bool]) -> bool:
        """Record the work for one more shape; say whether that was done."""
        if self._stopped or self._met[key] < self._times_before:
            self._met[key] += 1
            return False
        if len(self._runs) == self._most:
            logger.info("encoder.capture: texts of more than %d shapes", self._most)
            self._stopped = True
            return False
        own = [part.clone() for part in inputs]
        try:
            self._runs[key] = own, *self._record(lambda: self._work(*own, **options))
        except Exception as error:  # whatever a driver may say
            reason = str(error).strip().split("\n")[0]
            name = type(error).__name__
            logger.warning(
                "encoder.capture: no CUDA graph (%s: %s); going on without", name, reason
            )
            self._stopped = True
            return False
        return True
