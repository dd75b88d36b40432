"""Group the jobs of concurrent requests into batches, and compute these on one thread."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from elias.serve.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from concurrent.futures import Executor

    from elias.serve.metrics import Metrics


_SMOOTHING = 0.2
_MAX_RETRY_SECONDS = 60


class Job(Protocol):
    """Texts of one request, which can share a batch with jobs of the same kind."""

    @property
    def size(self) -> int:
        """Return the number of texts."""

    @property
    def kind(self) -> Hashable:
        """Return the kind of job; all jobs of a batch have the same kind."""


J = TypeVar("J", bound=Job)
R = TypeVar("R")


class _Waiting(Generic[J, R]):
    def __init__(self, job: J) -> None:
        self.job = job
        self.result: asyncio.Future[R] = asyncio.get_running_loop().create_future()


def overloaded(retry_after: int) -> RequestError:
    """Return the error (429) for a full queue."""
    headers = {"Retry-After": str(retry_after)}
    return RequestError(429, f"the queue is full; try again in {retry_after} s", headers)


class Batcher(Generic[J, R]):
    """Group waiting jobs into batches and compute one batch at a time.

    There is no timer: jobs that arrive while a batch is computed form the next batch.

    Args:
        compute: Function from jobs of one kind to their results, in the same order.
        executor: Executor that runs ``compute``; one thread, so that batches do not overlap.
        max_batch: Maximum texts per batch, unless a single job has more.
        max_queue: Maximum number of texts waiting.
        metrics: Metrics that record queue depth, batch sizes and durations.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[J]], Sequence[R]],
        executor: Executor,
        *,
        max_batch: int,
        max_queue: int,
        metrics: Metrics,
    ) -> None:
        self._compute = compute
        self._executor = executor
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._metrics = metrics
        self._queue: deque[_Waiting[J, R]] = deque()
        self._arrived = asyncio.Event()
        self._closing = False
        self._seconds_per_text = 0.01
        self._task: asyncio.Task[None] | None = None
        self.depth = 0
        """Number of texts waiting."""

    def start(self) -> None:
        """Start computing submitted jobs."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Compute the accepted jobs, then stop."""
        self._closing = True
        self._arrived.set()
        if self._task is not None:
            await self._task

    @property
    def is_running(self) -> bool:
        """Return whether new jobs will be computed."""
        return self._task is not None and not self._task.done() and not self._closing

    @property
    def retry_after(self) -> int:
        """Return the estimated seconds until the waiting jobs are computed."""
        return max(1, min(_MAX_RETRY_SECONDS, math.ceil(self.depth * self._seconds_per_text)))

    async def submit(self, job: J) -> R:
        """Wait for the result of a job; a job that is cancelled while waiting is not computed.

        Raises:
            RequestError: If the queue is full (429).
        """
        if self.depth + job.size > self._max_queue:
            raise overloaded(self.retry_after)
        waiting: _Waiting[J, R] = _Waiting(job)
        self._queue.append(waiting)
        self._change_depth(job.size)
        self._arrived.set()
        return await waiting.result

    def _change_depth(self, change: int) -> None:
        self.depth += change
        self._metrics.queue_depth.set(self.depth)

    async def _run(self) -> None:
        while True:
            batch = self._next_batch()
            if batch:
                await self._compute_batch(batch)
            elif self._closing:
                return
            else:
                self._arrived.clear()
                await self._arrived.wait()

    def _next_batch(self) -> list[_Waiting[J, R]]:
        """Return the next jobs of one kind that have not been cancelled."""
        batch: list[_Waiting[J, R]] = []
        size = 0
        while self._queue:
            first = self._queue[0]
            cancelled = first.result.done()
            if batch and not cancelled:
                fits = size + first.job.size <= self._max_batch
                if not fits or first.job.kind != batch[0].job.kind:
                    break
            self._queue.popleft()
            self._change_depth(-first.job.size)
            if not cancelled:
                batch.append(first)
                size += first.job.size
        return batch

    async def _compute_batch(self, batch: Sequence[_Waiting[J, R]]) -> None:
        jobs = [waiting.job for waiting in batch]
        start = time.perf_counter()
        try:
            loop = asyncio.get_running_loop()
            results = await loop.run_in_executor(self._executor, self._compute, jobs)
        except Exception as error:
            if len(batch) > 1:  # compute one by one: the other jobs may succeed
                for waiting in batch:
                    await self._compute_batch([waiting])
            elif not batch[0].result.done():
                batch[0].result.set_exception(error)
            return
        self._record(sum(job.size for job in jobs), time.perf_counter() - start)
        for waiting, result in zip(batch, results, strict=True):
            if not waiting.result.done():
                waiting.result.set_result(result)

    def _record(self, n_texts: int, seconds: float) -> None:
        self._metrics.batch_size.observe(n_texts)
        self._metrics.batch_seconds.observe(seconds)
        latest = seconds / max(n_texts, 1)
        self._seconds_per_text += _SMOOTHING * (latest - self._seconds_per_text)
