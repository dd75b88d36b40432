"""Run functions that release the GIL, such as compiled loops, on several threads."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import numba
import torch

from elias.progress import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Sized

_PARTS_PER_THREAD = 2  # in `over_ranges`; a thread that is interrupted leaves parts to the others

_of_this_thread = threading.local()
_starting = threading.Lock()

Item = TypeVar("Item")
SizedItem = TypeVar("SizedItem", bound="Sized")
Scratch = TypeVar("Scratch")
Result = TypeVar("Result")


def split_range(stop: int, size: int) -> list[range]:
    """Split 0 … stop-1 into ranges of ``size`` numbers. The last range may be shorter.

    >>> split_range(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return [range(stop)[begin : begin + size] for begin in range(0, stop, size)]


def thread_map(
    work: Callable[[Item, Scratch], Result], items: Sequence[Item], scratch: Callable[[], Scratch]
) -> Iterator[Result]:
    """Yield ``work(item, memory)`` for each item in order, using as many threads as numba does.

    An idle thread takes the next item, so items may differ in size. ``scratch()`` allocates the
    memory passed to ``work``. It is called once per thread, so concurrent calls never share memory.
    torch uses one thread in each of them. If ``work`` itself calls this function, the inner call
    uses no other threads.

    >>> list(thread_map(lambda item, _: 2 * item, [1, 2, 3], dict))
    [2, 4, 6]
    """
    n_threads = min(numba.get_num_threads(), len(items))
    if n_threads <= 1 or hasattr(_of_this_thread, "is_in_pool"):
        memory = scratch() if items else None
        for item in items:
            yield work(item, memory)  # type: ignore[arg-type]
        return
    free: SimpleQueue[Scratch] = SimpleQueue()
    for _ in range(n_threads):
        free.put(scratch())

    def run(item: Item) -> Result:
        memory = free.get()
        try:
            return work(item, memory)
        finally:
            free.put(memory)

    with _starting:
        pool = _pool()
    futures: list[Future[Result]] = []
    try:
        futures.extend(pool.submit(run, item) for item in items)
        futures.reverse()
        while futures:
            yield futures[-1].result()
            futures.pop()
    finally:
        # after an error or an interrupt, items that have not started are dropped
        for future in futures:
            future.cancel()
        wait(futures)


def over_ranges(work: Callable[[int, int], object], stop: int) -> None:
    """Call ``work(begin, end)`` for consecutive parts of 0 … ``stop``-1 on several threads."""
    n_parts = _PARTS_PER_THREAD * numba.get_num_threads()
    parts = split_range(stop, max(1, -(-stop // n_parts)))
    for _ in thread_map(lambda part, _: work(part.start, part.stop), parts, lambda: None):
        pass


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch's threads for this thread, and for threads that start meanwhile."""
    numba.get_num_threads()  # the first call in a process sets torch's number of threads, too
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def _pool() -> ThreadPoolExecutor:
    """Return the threads of `thread_map`. Starting new ones for each call takes 0.3 ms."""
    n_threads: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    started = threading.Barrier(n_threads)

    def start(_: int) -> None:
        _of_this_thread.is_in_pool = True
        torch.get_num_threads()  # the first call in a thread sets its number of threads
        started.wait()

    pool = ThreadPoolExecutor(n_threads, thread_name_prefix="elias-kernels")
    try:
        with torch_threads(1):
            list(pool.map(start, range(n_threads)))
    except BaseException:  # a thread could not be started: release those that wait for it
        started.abort()
        raise
    return pool


def _forget_pool() -> None:
    """Start new threads when they are needed: a forked process has none."""
    global _starting
    _starting = threading.Lock()  # the lock may have been held when the process was forked
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def thread_map_progress(
    work: Callable[[SizedItem, Scratch], Result],
    items: Sequence[SizedItem],
    scratch: Callable[[], Scratch],
    description: str,
    total: int,
) -> Iterator[Result]:
    """Run `thread_map` with a progress bar that advances by the length of each item.

    >>> items = [[1, 2], [3]]
    >>> list(thread_map_progress(lambda item, _: [2 * i for i in item], items, dict, "...", 3))
    [[2, 4], [6]]
    """
    with progress(description, total) as advance:
        for item, result in zip(items, thread_map(work, items, scratch), strict=True):
            advance(len(item))
            yield result
