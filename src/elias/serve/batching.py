"""Questions of many requests, computed together on one thread."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from concurrent.futures import Executor

    from elias.serve.metrics import Measures


_SMOOTHING = 0.2
_LONGEST_RETRY = 60


class Sized(Protocol):
    """A question: how many texts it holds, and what it may be computed together with."""

    @property
    def size(self) -> int:
        """Return the number of texts."""

    @property
    def kind(self) -> Hashable:
        """Return what the questions of one batch have in common."""


Q = TypeVar("Q", bound=Sized)
A = TypeVar("A")


class Overloaded(Exception):  # noqa: N818 - it is a state of the server, and says so
    """More waits already than the queue may hold."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


@dataclass(eq=False, slots=True)
class _Waiting(Generic[Q, A]):
    question: Q
    answer: asyncio.Future[A] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Batcher(Generic[Q, A]):
    """Joins what waits into batches, and hands one after the other to a thread.

    There is no timer: what comes in while a batch is computed is the next one.

    Args:
        compute: Answers questions of one kind, in their order.
        executor: Where it runs; one thread, so that batches follow each other.
        max_batch: Texts in a batch, unless a single question has more.
        max_queue: Texts that may wait.
        measures: What is told of it.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Q]], Sequence[A]],
        executor: Executor,
        *,
        max_batch: int,
        max_queue: int,
        measures: Measures,
    ) -> None:
        self._compute = compute
        self._executor = executor
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._measures = measures
        self._queue: deque[_Waiting[Q, A]] = deque()
        self._depth = 0
        self._arrived = asyncio.Event()
        self._closing = False
        self._seconds_per_text = 0.01
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to compute what comes in."""
        self._loop = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Compute what was accepted, and end."""
        self._closing = True
        self._arrived.set()
        if self._loop is not None:
            await self._loop

    @property
    def depth(self) -> int:
        """Return how many texts wait."""
        return self._depth

    @property
    def is_running(self) -> bool:
        """Say whether what is asked will be computed."""
        return self._loop is not None and not self._loop.done() and not self._closing

    async def ask(self, question: Q) -> A:
        """Wait for the answer; who is cancelled while waiting is not computed.

        Raises:
            Overloaded: If too much waits already.
        """
        if self._depth + question.size > self._max_queue:
            raise Overloaded(self.retry_after)
        waiting: _Waiting[Q, A] = _Waiting(question)
        self._queue.append(waiting)
        self._count(question.size)
        self._arrived.set()
        return await waiting.answer

    @property
    def retry_after(self) -> int:
        """Return the seconds after which what waits now should be done."""
        return max(1, min(_LONGEST_RETRY, math.ceil(self._depth * self._seconds_per_text)))

    def _count(self, change: int) -> None:
        self._depth += change
        self._measures.queue_depth.set(self._depth)

    async def _run(self) -> None:
        while True:
            batch = self._take()
            if batch:
                await self._answer(batch)
            elif self._closing:
                return
            else:
                self._arrived.clear()
                await self._arrived.wait()

    def _take(self) -> list[_Waiting[Q, A]]:
        """Return the next questions of one kind that someone still waits for."""
        batch: list[_Waiting[Q, A]] = []
        size = 0
        while self._queue:
            first = self._queue[0]
            gone = first.answer.done()
            fits = size + first.question.size <= self._max_batch
            if batch and not gone and (not fits or first.question.kind != batch[0].question.kind):
                break
            self._queue.popleft()
            self._count(-first.question.size)
            if not gone:
                batch.append(first)
                size += first.question.size
        return batch

    async def _answer(self, batch: Sequence[_Waiting[Q, A]]) -> None:
        questions = [waiting.question for waiting in batch]
        loop = asyncio.get_running_loop()
        start = time.perf_counter()
        try:
            answers = await loop.run_in_executor(self._executor, self._compute, questions)
        except Exception as error:
            if len(batch) == 1:
                _settle(batch[0], error)
                return
            for waiting in batch:  # one question must not spoil the others
                await self._answer([waiting])
            return
        self._measured(sum(question.size for question in questions), time.perf_counter() - start)
        for waiting, answer in zip(batch, answers, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(answer)

    def _measured(self, n_texts: int, seconds: float) -> None:
        self._measures.batch_size.observe(n_texts)
        self._measures.batch_seconds.observe(seconds)
        newest = seconds / max(n_texts, 1)
        self._seconds_per_text += _SMOOTHING * (newest - self._seconds_per_text)


def _settle(waiting: _Waiting[Q, A], error: Exception) -> None:
    if not waiting.answer.done():
        waiting.answer.set_exception(error)
