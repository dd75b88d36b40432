"""Run functions that release the GIL, such as compiled loops, on several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import numba

from elias.progress import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Sized


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

    >>> list(thread_map(lambda item, _: 2 * item, [1, 2, 3], dict))
    [2, 4, 6]
    """
    n_threads = min(numba.get_num_threads(), len(items))
    if n_threads <= 1:
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

    pool = ThreadPoolExecutor(n_threads)
    try:
        yield from pool.map(run, items)
    finally:
        # after an error or an interrupt, items that have not started are dropped
        pool.shutdown(cancel_futures=True)


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
