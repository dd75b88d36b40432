"""Work on several threads at once, for compiled loops that let go of the interpreter's lock."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import numba

from elias.progress import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Sized

Item = TypeVar("Item", bound="Sized")
Memory = TypeVar("Memory")
Result = TypeVar("Result")


def over_threads(
    work: Callable[[Item, Memory], Result],
    items: Sequence[Item],
    memory: Callable[[], Memory],
    description: str,
    total: int,
) -> Iterator[Result]:
    """Yield ``work(item, memory)`` of each item in order, with as many threads as kernels use.

    An idle thread takes the next item, so items of uneven size do no harm. Each thread has the
    memory that one call of ``memory`` made. ``description`` and ``total`` are for the progress
    shown, which counts what is in an item.

    >>> doubled = over_threads(lambda some, _: [2 * i for i in some], [[1, 2], [3]], dict, "...", 3)
    >>> list(doubled)
    [[2, 4], [6]]
    """
    n_threads = max(1, min(numba.get_num_threads(), len(items)))
    free: SimpleQueue[Memory] = SimpleQueue()
    for _ in range(n_threads):
        free.put(memory())

    def run(item: Item) -> Result:
        mine = free.get()
        try:
            return work(item, mine)
        finally:
            free.put(mine)

    pool = ThreadPoolExecutor(n_threads)
    try:
        with progress(description, total) as advance:
            for item, result in zip(items, pool.map(run, items), strict=True):
                advance(len(item))
                yield result
    finally:
        # after an error or an interrupt, what has not begun never does
        pool.shutdown(cancel_futures=True)
