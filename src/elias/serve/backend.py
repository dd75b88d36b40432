"""Load the served model, compute requests in batches, and replace the model while serving."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from elias.data.readers.files import sanitize
from elias.errors import DataError, EliasError
from elias.inference.explain import Explanation, LabelSearch, ranker_terms, word_effects
from elias.inference.predictor import Elias
from elias.labels import LabelTable
from elias.serve.prometheus import ServerMetrics
from elias.serve.schemas import RequestError
from elias.serve.settings import MAX_LABELS, ServeSettings

logger = logging.getLogger(__name__)

_N_EXAMPLES = 6
_WARM_UP = ("a text to warm up with", "another", "")
_SMOOTHING = 0.2
_BATCH_SECONDS = 0.04
"""Target duration of a batch. It is short, so that small requests do not wait long."""
_MIN_BATCH = {"predict": 4, "explain": 2}
"""Minimum number of texts per batch, even if they take longer than `_BATCH_SECONDS`."""
_MAX_RETRY_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Job:
    """A request to predict or explain the labels of texts."""

    kind: Literal["predict", "explain"]
    texts: Sequence[str]
    top_k: int
    threshold: float | str | None = None
    paths: int = 3
    label: int | None = None
    """Id of a single label to explain. If None, the ``top_k`` best labels are explained."""
    words: bool = False
    """True to also measure the effect of each word."""


Result = list[Any]


class ServedModel:
    """A loaded model with the graph of each member, the label search and example texts."""

    def __init__(self, model: Elias, examples: Sequence[str] = ()) -> None:
        self.model = model
        self.members = model.members
        self.search = LabelSearch(model.label_table)
        self.loaded_at = time.time()
        self.batch_overhead = 0.0
        """Constant part of the duration of a batch, in seconds."""
        frequent = np.arange(model.n_labels)
        if model.reranker is not None:
            frequent = np.argsort(-model.reranker.frequencies, kind="stable")
        self.examples = list(examples) or [model.label_names[i] for i in frequent[:_N_EXAMPLES]]

    def compute(self, jobs: Sequence[Job]) -> list[Result]:
        """Return the result of each job. All jobs must be of the same kind."""
        if jobs[0].kind == "predict":
            return self._predict(jobs)
        return [self._explain(job) for job in jobs]

    def _predict(self, jobs: Sequence[Job]) -> list[Result]:
        texts, _ = sanitize([text for job in jobs for text in job.texts])
        predictions = self.model.predict(texts, top_k=max(job.top_k for job in jobs))
        results, start = [], 0
        for job in jobs:
            end = start + len(job.texts)
            part = predictions.take(np.arange(start, end)).top(job.top_k)
            if job.threshold is not None:
                part = self.model.assign(part, job.threshold)
            results.append(part.to_dicts())
            start = end
        return results

    def _explain(self, job: Job) -> Result:
        texts, _ = sanitize(job.texts)
        if job.label is None:
            explanations = self.model.explain(
                texts, top_k=job.top_k, paths=job.paths, words=job.words
            )
            return [_to_dict(explanation, 0) for explanation in explanations]
        return [self._explain_label(text, job.label, job) for text in texts]

    def _explain_label(self, text: str, label: int, job: Job) -> dict[str, Any]:
        """Explain a label with the first member that has it among the `MAX_LABELS` best labels."""
        for i, member in enumerate(self.members):
            (explanation,) = member.explain([text], top_k=MAX_LABELS, paths=job.paths)
            if any(explained.id == label for explained in explanation.labels):
                tree = _to_dict(explanation, i)
                tree["labels"] = [one for one in tree["labels"] if one["id"] == label]
                used = {path["cluster"] for path in tree["labels"][0]["paths"]}
                tree["clusters"] = [one for one in tree["clusters"] if one["id"] in used]
                if job.words:
                    (words,) = word_effects(self.model, text, [label])
                    (terms,) = ranker_terms(member.reranker, text, [label])
                    tree["labels"][0] |= {
                        "words": list(map(asdict, words)),
                        "terms": list(map(asdict, terms)),
                    }
                return tree
        message = (
            f"label {label} is not among the {MAX_LABELS} best of this text; choose one of these"
        )
        raise RequestError(404, message)


def _to_dict(explanation: Explanation, member: int) -> dict[str, Any]:
    """Return the explanation of an ensemble member as a dictionary, without the text."""
    tree = explanation.to_dict()
    del tree["text"]
    return {"member": member, **tree}


@dataclass(slots=True, eq=False)
class _Waiting:
    """A job in the queue. Its texts are computed in parts, over several batches."""

    job: Job
    result: asyncio.Future[Result]
    rows: Result = field(default_factory=list)
    """The results computed so far."""
    n_taken: int = 0
    """Number of texts that are computed or in the current batch."""
    model: ServedModel | None = None
    """The model that computed ``rows``."""

    @property
    def n_waiting(self) -> int:
        """Return the number of texts that are not yet in a batch."""
        return len(self.job.texts) - self.n_taken


class Backend:
    """The served model, the queue of jobs, and the thread that computes one batch at a time.

    Jobs that arrive while a batch is computed form the next batch, without any delay. Large jobs
    are divided among several batches, so that small jobs do not wait for them. A new model is
    loaded on a separate thread and replaces the old one between two batches.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.metrics = ServerMetrics(settings.metrics_folder)
        self.depth = 0
        """Number of texts in the queue."""
        self._served: ServedModel | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="elias-compute")
        self._loading = asyncio.Lock()
        self._queue: list[_Waiting] = []
        self._arrived = asyncio.Event()
        self._closing = False
        self._last_kind = ""
        self._seconds_per_text = {"predict": 0.01, "explain": 0.01}

    @asynccontextmanager
    async def running(self, *_: object) -> AsyncIterator[None]:
        """Compute submitted jobs while the block runs, then finish the queued jobs and stop."""
        self._task = asyncio.create_task(self._run())
        yield
        self._closing = True
        self._arrived.set()
        await self._task
        self._thread.shutdown()
        self.metrics.workers.set(0)

    @property
    def served(self) -> ServedModel:
        """Return the served model.

        Raises:
            RequestError: If no model is loaded yet (503).
        """
        if self._served is None:
            raise _not_ready()
        return self._served

    def check_ready(self) -> None:
        """Raise `RequestError` (503) if the server cannot answer requests."""
        if self._served is None or self._closing or self._task.done():
            raise _not_ready()

    def check_queue(self, n_texts: int = 1) -> None:
        """Raise `RequestError` (429) if the queue has no room for ``n_texts`` more texts."""
        if self.depth + n_texts > self.settings.limits.max_queue:
            message = f"the queue is full; try again in {self.retry_after} s"
            raise RequestError(429, message, {"Retry-After": str(self.retry_after)})

    @property
    def retry_after(self) -> int:
        """Return the estimated seconds until the waiting jobs are computed."""
        seconds = self.depth * self._seconds_per_text["predict"]
        return max(1, min(_MAX_RETRY_SECONDS, math.ceil(seconds)))

    async def submit(self, job: Job) -> Result:
        """Add a job to the queue and wait for its result.

        A job that is cancelled while it waits is not computed.

        Raises:
            RequestError: If no model is loaded yet (503) or the queue is full (429).
        """
        _ = self.served
        self.check_queue(len(job.texts))
        waiting = _Waiting(job, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._change_depth(len(job.texts))
        self._arrived.set()
        return await waiting.result

    def _change_depth(self, change: int) -> None:
        self.depth += change
        self.metrics.queue_depth.set(self.depth)

    async def _run(self) -> None:
        while True:
            batch = self._next_batch()
            if batch:
                await self._compute_batch(batch, self.served)
            elif self._closing:
                return
            else:
                self._arrived.clear()
                await self._arrived.wait()

    def _next_batch(self) -> list[tuple[_Waiting, Job]]:
        """Return the jobs of the next batch, each with a smaller job of the texts to compute now.

        Half of a batch is reserved for the oldest job, so that it is not delayed forever. The other
        half is for the jobs with the fewest texts. A batch has jobs of one kind only. If jobs of
        both kinds wait, the kinds alternate.
        """
        for waiting in list(self._queue):
            if waiting.result.done():  # cancelled or failed
                self._queue.remove(waiting)
                self._change_depth(-waiting.n_waiting)
            elif waiting.n_taken and waiting.model is not self._served:
                self._change_depth(waiting.n_taken)  # start again with the new model
                waiting.n_taken, waiting.rows = 0, []
        kinds = {waiting.job.kind for waiting in self._queue}
        if not kinds:
            return []
        self._last_kind = next((kind for kind in kinds if kind != self._last_kind), self._last_kind)
        oldest, *others = [w for w in self._queue if w.job.kind == self._last_kind]
        others.sort(key=lambda waiting: waiting.n_waiting)
        room = self._batch_size(self._last_kind)
        n_others = sum(waiting.n_waiting for waiting in others)
        batch = [self._take(oldest, max(room - n_others, (room + 1) // 2))]
        for waiting in others:
            room -= len(batch[-1][1].texts)
            if room == 0:
                break
            batch.append(self._take(waiting, room))
        return batch

    def _batch_size(self, kind: str) -> int:
        """Return the number of texts that take about `_BATCH_SECONDS`, within the limits."""
        fitting = int(_BATCH_SECONDS / self._seconds_per_text[kind])
        return min(self.settings.limits.max_batch, max(_MIN_BATCH[kind], fitting))

    def _take(self, waiting: _Waiting, max_texts: int) -> tuple[_Waiting, Job]:
        """Return the next texts of a job as a smaller job. Remove the job if it has no more."""
        start = waiting.n_taken
        part = replace(waiting.job, texts=waiting.job.texts[start : start + max_texts])
        waiting.n_taken += len(part.texts)
        waiting.model = self._served
        self._change_depth(-len(part.texts))
        if waiting.n_waiting == 0:
            self._queue.remove(waiting)
        return waiting, part

    async def _compute_batch(
        self, batch: Sequence[tuple[_Waiting, Job]], served: ServedModel
    ) -> None:
        parts = [part for _, part in batch]
        start = time.perf_counter()
        try:
            loop = asyncio.get_running_loop()
            results = await loop.run_in_executor(self._thread, served.compute, parts)
        except Exception as error:
            if len(batch) > 1:  # compute one by one, because other jobs may succeed
                for one in batch:
                    await self._compute_batch([one], served)
            elif not batch[0][0].result.done():
                batch[0][0].result.set_exception(error)
            return
        n_texts, seconds = sum(len(part.texts) for part in parts), time.perf_counter() - start
        self.metrics.batch_size.observe(n_texts)
        self.metrics.batch_seconds.observe(seconds)
        per_text = max(1e-6, seconds - served.batch_overhead) / n_texts
        kind = parts[0].kind
        self._seconds_per_text[kind] += _SMOOTHING * (per_text - self._seconds_per_text[kind])
        for (waiting, _), rows in zip(batch, results, strict=True):
            waiting.rows += rows
            if len(waiting.rows) == len(waiting.job.texts) and not waiting.result.done():
                waiting.result.set_result(waiting.rows)

    async def load(self) -> None:
        """Load the model, and use it from the next batch on.

        Raises:
            EliasError: If the model cannot be loaded. The old model is then still used.
        """
        async with self._loading:
            start = time.perf_counter()
            loaded = await asyncio.to_thread(self._load_model)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, _warm_up, loaded)
            self._served = loaded
        self.metrics.loaded_at.set(loaded.loaded_at)
        self.metrics.workers.set(1)
        seconds, n_labels = time.perf_counter() - start, loaded.model.n_labels
        logger.info("%s: loaded %d labels in %.1f s", self.settings.model, n_labels, seconds)
        await asyncio.to_thread(_free_memory)

    async def reload(self) -> bool:
        """Reload the model and return whether this succeeded. If not, keep the old model."""
        try:
            await self.load()
        except (EliasError, OSError, MemoryError) as error:
            self.metrics.reloads.labels("failure").inc()
            logger.warning("reload failed, still serving the old model: %s", error)
            return False
        self.metrics.reloads.labels("success").inc()
        return True

    def _load_model(self) -> ServedModel:
        model = Elias.from_pretrained(self.settings.model, device=self.settings.device)
        if model.model.encoder.reads_features:
            raise DataError(
                f"{self.settings.model}: was trained on features, but the server accepts texts; "
                "train a model on texts, or use Elias.predict in Python"
            )
        labels = _without_surrogates(model.label_table)
        for member in (model, *model.others):
            member.label_names = labels
        return ServedModel(model, self.settings.examples)


def _without_surrogates(table: LabelTable) -> LabelTable:
    """Return the table without lone surrogates, which cannot be sent as JSON."""
    ids = None if table.ids is None else tuple(sanitize(table.ids)[0])
    return replace(table, names=tuple(sanitize(table.names)[0]), ids=ids)


def _free_memory() -> None:
    """Free the memory of the old model, and return it to the operating system."""
    gc.collect()
    with suppress(AttributeError, OSError, TypeError):  # only glibc has this function
        ctypes.CDLL(None).malloc_trim(0)


def _not_ready() -> RequestError:
    return RequestError(503, "the model is still loading; try again in 1 s", {"Retry-After": "1"})


def _warm_up(served: ServedModel) -> None:
    """Run the model once, so that the first requests do not wait for compilation and disk reads."""
    served.compute([Job("predict", _WARM_UP * 8, 5)])  # enough to use several threads
    served.compute([Job("explain", _WARM_UP[:1], 5)])
    served.compute([Job("predict", _WARM_UP[:1], 5)])
    start = time.perf_counter()
    served.compute([Job("predict", _WARM_UP[:1], 5)])
    served.batch_overhead = time.perf_counter() - start
