"""Work on several threads at once, for compiled loops that let go of the interpreter's lock."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import numba

from elias.progress import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Sized


Item = TypeVar("Item")
Countable = TypeVar("Countable", bound="Sized")
Memory = TypeVar("Memory")
Result = TypeVar("Result")

_ROWS_AT_A_TIME = 256


def on_threads(
    work: Callable[[Item, Memory], Result], items: Sequence[Item], memory: Callable[[], Memory]
) -> Iterator[Result]:
    """Yield ``work(item, memory)`` of each item in order, with as many threads as kernels use.

    An idle thread takes the next item, so items of uneven size do no harm. Each thread has the
    memory that one call of ``memory`` made.

    >>> list(on_threads(lambda some, _: 2 * some, [1, 2, 3], dict))
    [2, 4, 6]
    """
    n_threads = min(numba.get_num_threads(), len(items))
    if n_threads <= 1:
        own = memory() if items else None
        for item in items:
            yield work(item, own)  # type: ignore[arg-type]
        return
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
        yield from pool.map(run, items)
    finally:
        # after an error or an interrupt, what has not begun never does
        pool.shutdown(cancel_futures=True)


def over_threads(
    work: Callable[[Countable, Memory], Result],
    items: Sequence[Countable],
    memory: Callable[[], Memory],
    description: str,
    total: int,
) -> Iterator[Result]:
    """Yield what `on_threads` yields, and show the progress, which counts what is in an item.

    >>> doubled = over_threads(lambda some, _: [2 * i for i in some], [[1, 2], [3]], dict, "...", 3)
    >>> list(doubled)
    [[2, 4], [6]]
    """
    with progress(description, total) as advance:
        for item, result in zip(items, on_threads(work, items, memory), strict=True):
            advance(len(item))
            yield result


def over_rows(
    work: Callable[[range, Memory], None],
    n_rows: int,
    memory: Callable[[], Memory],
    description: str,
) -> None:
    """Have all rows worked on, a range of them at a time; few of them by the calling thread.

    >>> seen = []
    >>> over_rows(lambda rows, _: seen.extend(rows), 3, dict, "...")
    >>> seen
    [0, 1, 2]
    """
    if n_rows <= _ROWS_AT_A_TIME:  # one text must not wait for threads to start
        work(range(n_rows), memory())
        return
    starts = range(0, n_rows, _ROWS_AT_A_TIME)
    chunks = [range(start, min(start + _ROWS_AT_A_TIME, n_rows)) for start in starts]
    for _ in over_threads(work, chunks, memory, description, n_rows):
        pass
