"""The served model: load it, run it on requests, and replace it while serving."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from elias.data.readers.files import sanitize
from elias.errors import DataError, EliasError
from elias.inference.graph_view import GraphView, LabelSearch
from elias.inference.predictor import Elias
from elias.serve.batching import Batcher, overloaded
from elias.serve.errors import RequestError
from elias.serve.settings import MAX_LABELS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elias.inference.explain import Explanation
    from elias.serve.metrics import Metrics
    from elias.serve.settings import ServeSettings


logger = logging.getLogger(__name__)

_N_EXAMPLES = 6
_WARM_UP = ("a text to warm up with", "another", "")


@dataclass(frozen=True, slots=True)
class Job:
    """The texts of one request, to predict or explain their labels."""

    kind: Literal["predict", "explain"]
    texts: Sequence[str]
    top_k: int
    threshold: float | str | None = None
    paths: int = 3
    label: int | None = None
    """Id of the only label to explain, with the first ensemble member that ranks it."""

    @property
    def size(self) -> int:
        """Return the number of texts."""
        return len(self.texts)


Result = list[Any]


class ServedModel:
    """A loaded model with the graph of each member, the label search and example texts."""

    def __init__(self, model: Elias, examples: Sequence[str] = ()) -> None:
        self.model = model
        self.members = model.members
        self.graphs = [GraphView(member.model) for member in self.members]
        self.search = LabelSearch(model.label_names)
        self.loaded_at = time.time()
        self._examples = tuple(examples)

    @cached_property
    def examples(self) -> list[str]:
        """Return the configured example texts, or names of frequent labels if there are none."""
        if self._examples:
            return list(self._examples)
        reranker = self.model.reranker
        if reranker is None:
            return [str(name) for name in self.model.label_names[:_N_EXAMPLES]]
        ids = np.argsort(-reranker.frequencies, kind="stable")[:_N_EXAMPLES].tolist()
        return [self.name(i) for i in ids]

    def frequency(self, label: int) -> int | None:
        """Return the number of training points of a label, if known."""
        reranker = self.model.reranker
        return None if reranker is None else int(reranker.frequencies[label])

    def name(self, label: int) -> str:
        """Return the name of a label."""
        return str(self.model.label_names[label])

    def compute(self, jobs: Sequence[Job]) -> list[Result]:
        """Return the result of each job; all jobs must be of the same kind."""
        if jobs[0].kind == "predict":
            return self._predict(jobs)
        return [self._explain(job) for job in jobs]

    def _predict(self, jobs: Sequence[Job]) -> list[Result]:
        texts, _ = sanitize([text for job in jobs for text in job.texts])
        predictions = self.model.predict(texts, top_k=max(job.top_k for job in jobs))
        results, start = [], 0
        for job in jobs:
            part = predictions.take(np.arange(start, start + job.size)).top(job.top_k)
            if job.threshold is not None:
                part = part.threshold(self.model.threshold(job.threshold))
            results.append(part.to_dicts())
            start += job.size
        return results

    def _explain(self, job: Job) -> Result:
        texts, _ = sanitize(job.texts)
        if job.label is None:
            explanations = self.model.explain(texts, top_k=job.top_k, paths=job.paths)
            return [_to_dict(explanation, 0) for explanation in explanations]
        return [self._explain_label(text, job.label, job.paths) for text in texts]

    def _explain_label(self, text: str, label: int, paths: int) -> dict[str, Any]:
        """Explain one label with the first ensemble member that has it in its top `MAX_LABELS`."""
        for number, member in enumerate(self.members):
            (explanation,) = member.explain([text], top_k=MAX_LABELS, paths=paths)
            if any(explained.id == label for explained in explanation.labels):
                return _to_dict(explanation, number, label)
        raise RequestError(404, f"label {label} is not among the best {MAX_LABELS} of this text")


def _to_dict(explanation: Explanation, member: int, label: int | None = None) -> dict[str, Any]:
    """Return an explanation without its text, for all labels or only one."""
    tree = explanation.to_dict()
    del tree["text"]
    if label is not None:
        tree["labels"] = [one for one in tree["labels"] if one["id"] == label]
        used = {path["cluster"] for one in tree["labels"] for path in one["paths"]}
        tree["clusters"] = [cluster for cluster in tree["clusters"] if cluster["id"] in used]
    return {"member": member, **tree}


class Backend:
    """The served model and the thread that runs it.

    A new model is loaded on a separate thread and replaces the old one between two batches.
    """

    def __init__(self, settings: ServeSettings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self._served: ServedModel | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="elias-compute")
        self._loading = asyncio.Lock()
        self._batcher: Batcher[Job, Result] = Batcher(
            lambda jobs: self.served.compute(jobs),
            self._thread,
            max_batch=settings.limits.max_batch,
            max_queue=settings.limits.max_queue,
            metrics=metrics,
        )

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
        if self._served is None or not self._batcher.is_running:
            raise _not_ready()

    def check_queue(self) -> None:
        """Raise `RequestError` (429) if the queue is full."""
        if self._batcher.depth >= self.settings.limits.max_queue:
            raise overloaded(self.retry_after)

    @property
    def retry_after(self) -> int:
        """Return the estimated seconds until the waiting jobs are computed."""
        return self._batcher.retry_after

    def start(self) -> None:
        """Start computing submitted jobs."""
        self._batcher.start()

    async def close(self) -> None:
        """Compute the accepted jobs, then stop."""
        await self._batcher.close()
        self._thread.shutdown()
        self.metrics.workers.set(0)

    async def submit(self, job: Job) -> Result:
        """Wait for the result of a job.

        Raises:
            RequestError: If no model is loaded yet (503) or the queue is full (429).
        """
        _ = self.served
        return await self._batcher.submit(job)

    async def load(self) -> None:
        """Load the model, and use it from the next batch on.

        Raises:
            EliasError: If the model cannot be loaded; the old model stays in use.
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
        logger.info("%s: %d labels, loaded in %.1f s", self.settings.model, n_labels, seconds)
        await asyncio.to_thread(gc.collect)  # the old model is large and has reference cycles

    async def reload(self) -> bool:
        """Reload the model and return True on success; on failure, keep the old model."""
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
                f"{self.settings.model}: was trained on features, and the server takes texts; "
                "train a model on texts, or use Elias.predict in Python"
            )
        return ServedModel(model, self.settings.examples)


def _not_ready() -> RequestError:
    return RequestError(503, "the model is still loading", {"Retry-After": "1"})


def _warm_up(served: ServedModel) -> None:
    """Run the model, so that the first requests do not wait for compilation and page-in."""
    served.compute([Job("predict", _WARM_UP, 5)])
    served.compute([Job("predict", _WARM_UP * 8, 5)])  # enough texts for several threads
    served.compute([Job("explain", _WARM_UP[:1], 5)])
