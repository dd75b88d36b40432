"""The model that is served: read, asked, and exchanged for another while it is asked."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elias.data.readers.files import sanitize
from elias.errors import DataError, EliasError
from elias.inference.graph_view import GraphView, LabelSearch
from elias.inference.predictor import Elias
from elias.serve.batching import Batcher
from elias.serve.settings import MOST_LABELS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elias.inference.explain import Explanation
    from elias.serve.metrics import Measures
    from elias.serve.settings import ServeSettings


logger = logging.getLogger(__name__)

_N_EXAMPLES = 6
_WARM_UP = ("a text to warm up with", "another", "")


class NotReady(Exception):  # noqa: N818 - it is a state of the server, and says so
    """There is no model to ask, not yet or no longer."""


class NotRanked(Exception):  # noqa: N818 - an answer, if not the one hoped for
    """A label to be explained that the model does not rank high enough."""


@dataclass(frozen=True, slots=True)
class PredictQuestion:
    """Texts to label."""

    texts: Sequence[str]
    top_k: int
    threshold: float | str | None = None

    @property
    def size(self) -> int:
        """Return the number of texts."""
        return len(self.texts)

    @property
    def kind(self) -> str:
        """Return what may be computed together."""
        return "predict"


@dataclass(frozen=True, slots=True)
class ExplainQuestion:
    """Texts whose labels are to be explained."""

    texts: Sequence[str]
    top_k: int
    paths: int
    label: int | None = None
    """Explain this label alone, with the first member that finds it."""

    @property
    def size(self) -> int:
        """Return the number of texts."""
        return len(self.texts)

    @property
    def kind(self) -> str:
        """Return what may be computed together."""
        return "explain"


Question = PredictQuestion | ExplainQuestion
Answer = list[Any]


class Served:
    """A model with all that is asked about it."""

    def __init__(self, model: Elias, examples: Sequence[str] = ()) -> None:
        self.model = model
        self.members = model.members
        self.graphs = [GraphView(member.model) for member in self.members]
        self.search = LabelSearch(model.label_names)
        self.loaded_at = time.time()
        self._examples = tuple(examples)

    @cached_property
    def examples(self) -> list[str]:
        """Return texts to try: those that were given, else the names of frequent labels."""
        if self._examples:
            return list(self._examples)
        reranker = self.model.reranker
        if reranker is None:
            ids = list(range(min(_N_EXAMPLES, self.model.n_labels)))
        else:
            ids = np.argsort(-reranker.frequencies, kind="stable")[:_N_EXAMPLES].tolist()
        return [self.model.label_names[i] for i in ids]

    def frequency(self, label: int) -> int | None:
        """Return how many training points a label has, where the model knows."""
        reranker = self.model.reranker
        return None if reranker is None else int(reranker.frequencies[label])

    def name(self, label: int) -> str:
        """Return a label's name."""
        return str(self.model.label_names[label])

    def compute(self, questions: Sequence[Question]) -> list[Answer]:
        """Answer questions of one kind."""
        if isinstance(questions[0], PredictQuestion):
            return self._predict([q for q in questions if isinstance(q, PredictQuestion)])
        return [self._explain(q) for q in questions if isinstance(q, ExplainQuestion)]

    def _predict(self, questions: Sequence[PredictQuestion]) -> list[Answer]:
        texts, _ = sanitize([text for question in questions for text in question.texts])
        found = self.model.predict(texts, top_k=max(question.top_k for question in questions))
        answers, start = [], 0
        for question in questions:
            rows = np.arange(start, start + question.size)
            own = found.take(rows).top(question.top_k)
            if question.threshold is not None:
                own = own.threshold(self.model.threshold(question.threshold))
            answers.append(own.to_dicts())
            start += question.size
        return answers

    def _explain(self, question: ExplainQuestion) -> Answer:
        texts, _ = sanitize(question.texts)
        if question.label is None:
            found = self.model.explain(texts, top_k=question.top_k, paths=question.paths)
            return [_explained(one, 0) for one in found]
        return [self._why(text, question.label, question.paths) for text in texts]

    def _why(self, text: str, label: int, paths: int) -> dict[str, Any]:
        """Explain one label with the first member that ranks it high enough to be averaged."""
        for number, member in enumerate(self.members):
            (found,) = member.explain([text], top_k=MOST_LABELS, paths=paths)
            if any(one.id == label for one in found.labels):
                return _explained(found, number, only=label)
        raise NotRanked(f"label {label} is not among the {MOST_LABELS} best of this text")


def _explained(found: Explanation, member: int, only: int | None = None) -> dict[str, Any]:
    tree = found.to_dict()
    del tree["text"]
    if only is not None:
        tree["labels"] = [label for label in tree["labels"] if label["id"] == only]
        used = {path["cluster"] for label in tree["labels"] for path in label["paths"]}
        tree["clusters"] = [cluster for cluster in tree["clusters"] if cluster["id"] in used]
    return {"member": member, **tree}


class Backend:
    """The served model and the thread that computes with it.

    Models are read on another thread and take the old one's place between two batches.
    """

    def __init__(self, settings: ServeSettings, measures: Measures) -> None:
        self.settings = settings
        self.measures = measures
        self._served: Served | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="elias-compute")
        self._reading = asyncio.Lock()
        limits = settings.limits
        self._batcher: Batcher[Question, Answer] = Batcher(
            lambda questions: self.served.compute(questions),
            self._thread,
            max_batch=limits.max_batch,
            max_queue=limits.max_queue,
            measures=measures,
        )

    @property
    def served(self) -> Served:
        """Return the model being served.

        Raises:
            NotReady: While there is none.
        """
        if self._served is None:
            raise NotReady("the model is still being read")
        return self._served

    @property
    def is_ready(self) -> bool:
        """Say whether questions will be answered."""
        return self._served is not None and self._batcher.is_running

    @property
    def retry_after(self) -> int:
        """Return the seconds after which what waits now should be done."""
        return self._batcher.retry_after

    def full_for(self) -> int | None:
        """Return the seconds until there is room in the queue, or None if there is some."""
        full = self._batcher.depth >= self.settings.limits.max_queue
        return self.retry_after if full else None

    def start(self) -> None:
        """Begin to compute what is asked."""
        self._batcher.start()

    async def close(self) -> None:
        """Answer what was accepted, and end."""
        await self._batcher.close()
        self._thread.shutdown()
        self.measures.workers.set(0)

    async def ask(self, question: Question) -> Answer:
        """Answer a question in its turn.

        Raises:
            NotReady: If there is no model yet.
            Overloaded: If too much waits already.
        """
        _ = self.served
        return await self._batcher.ask(question)

    async def load(self) -> None:
        """Read the model from its folder and serve it from the next batch on.

        Raises:
            EliasError: If it cannot be read; what was served stays.
        """
        async with self._reading:
            start = time.perf_counter()
            fresh = await asyncio.to_thread(self._read)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, _warm_up, fresh)
            self._served = fresh
        self.measures.loaded_at.set(fresh.loaded_at)
        self.measures.workers.set(1)
        seconds = time.perf_counter() - start
        logger.info("%s: %d labels, read in %.1f s", *self._described(fresh), seconds)
        await asyncio.to_thread(gc.collect)  # the old model has cycles, and is large

    async def reload(self) -> bool:
        """Read the model again; say whether that was done. If not, the old one stays."""
        try:
            await self.load()
        except (EliasError, OSError, MemoryError) as error:
            self.measures.reloads.labels("failure").inc()
            logger.warning("not reloaded, the old model is served still: %s", error)
            return False
        self.measures.reloads.labels("success").inc()
        return True

    def _read(self) -> Served:
        model = Elias.from_pretrained(self.settings.model, device=self.settings.device)
        if model.model.encoder.reads_features:
            raise DataError(
                f"{self.settings.model}: was trained on features, and the server takes texts; "
                "train a model on texts, or use Elias.predict in Python"
            )
        return Served(model, self.settings.examples)

    def _described(self, served: Served) -> tuple[Path | str, int]:
        return self.settings.model, served.model.n_labels


def _warm_up(served: Served) -> None:
    """Have everything compiled and paged in that the first requests would wait for."""
    served.compute([PredictQuestion(_WARM_UP, 5)])
    served.compute([PredictQuestion(_WARM_UP * 8, 5)])  # more than few: several threads
    served.compute([ExplainQuestion(_WARM_UP[:1], 5, 3)])
