"""A trained model as its users meet it: text in, ranked label names out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.sparse import csr_matrix, issparse

from elias.errors import DataError, ModelError, nearest
from elias.metrics import evaluate
from elias.model.card import model_card
from elias.model.elias import EliasModel, SearchSizes
from elias.model.inference import BATCH_SIZE, Ranked, rank_all
from elias.model.pretrained import load_model, save_model
from elias.pipeline.explaining import Explanation, explain
from elias.pipeline.inputs import cached_tokens, feature_tokens
from elias.pipeline.matching import match_labels
from elias.pipeline.resources import (
    is_out_of_memory,
    memory_explained,
    pick_device,
    threads_shared,
)
from elias.predictions import Predictions
from elias.training.tracking import METRICS_FILE, MODEL_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elias.config import EliasConfig
    from elias.data.corpus import Corpus, Split
    from elias.data.tokens import Tokens
    from elias.metrics import Metrics

logger = logging.getLogger(__name__)

EVALUATED = 100  # labels ranked for metrics, as far as R@100 looks
ALL_OF_FEW = 10_000  # labels asked for by `only` that are all scored, whatever the shortlist holds


class Elias:
    """A trained model with its labels' names: text in, ranked labels out.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from elias import Elias, EliasConfig, train
        >>> from elias.data.synthetic import synthetic_corpus
        >>> corpus = synthetic_corpus(n_points=300, n_labels=30)
        >>> config = EliasConfig().override({"encoder.dim": 16, "stages.stage2.epochs": 3})
        >>> model = train(config, corpus)

        It is saved as a folder, and read again from there:

        >>> with TemporaryDirectory() as folder:
        ...     saved = model.save_pretrained(Path(folder) / "model")
        ...     model = Elias.from_pretrained(saved)

        A batch of texts goes in, and a ranking of labels comes out for each:

        >>> predictions = model.predict(corpus.test.texts, top_k=3)
        >>> len(predictions), len(predictions[0].labels)
        (75, 3)
        >>> best, second, third = predictions[0].scores
        >>> best >= second >= third
        np.True_

        The choice can be limited to some labels, or kept off some, by name or by id:

        >>> few = corpus.label_names[:2]
        >>> sorted(model.predict(corpus.test.texts, only=few)[0].labels) == sorted(few)
        True
        >>> 7 in model.predict(corpus.test.texts, without=[7])[0].ids
        False

        How good it is on the test points, in percent:

        >>> sorted(model.evaluate(corpus))[:3]
        ['P@1', 'P@3', 'P@5']
    """

    def __init__(
        self,
        model: EliasModel,
        config: EliasConfig,
        label_names: Sequence[str],
        facts: dict[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.label_names = label_names
        self.facts = facts or {}
        """What is known of its making: data statistics, metrics of each stage, timings."""

    @property
    def n_labels(self) -> int:
        """Return L."""
        return self.model.n_labels

    @property
    def sizes(self) -> SearchSizes:
        """Return how wide the model searches."""
        index = self.config.index
        assert index.beam_size is not None
        assert index.shortlist_size is not None
        return SearchSizes(index.beam_size, index.shortlist_size)

    def predict(
        self,
        texts: Sequence[str] | csr_matrix,
        *,
        top_k: int = 5,
        batch_size: int = BATCH_SIZE,
        only: Iterable[int | str] | None = None,
        without: Iterable[int | str] | None = None,
    ) -> Predictions:
        """Return the ``top_k`` best labels of each text, best first, ties by label id.

        Args:
            texts: A list of texts; for a model trained on features, their CSR matrix.
            top_k: Labels per text; fewer come back where a search reaches fewer.
            batch_size: Texts at a time, fewer where memory runs out; but for rounding, the answer
                does not depend on it.
            only: Ids or names of the labels to choose among. All clusters are searched for them,
                and up to 10,000 of them are all ranked.
            without: Ids or names of labels to keep off.

        Raises:
            DataError: If a text is no string, or a label is not known.
        """
        for name, value in (("top_k", top_k), ("batch_size", batch_size)):
            if not isinstance(value, int) or value < 1:
                raise DataError(f"{name} must be a whole number >= 1, not {value!r}")
        tokens = self._tokens(texts)
        sizes = self.sizes
        blocked = self._blocked(only, without)
        if only is not None:
            assert blocked is not None
            n_wanted = min(int((~blocked).sum()), ALL_OF_FEW)
            shortlist = max(sizes.shortlist_size, n_wanted)
            sizes = SearchSizes(self.model.graph.n_clusters, shortlist)
        return self._rank(tokens, top_k, sizes, batch_size=batch_size, blocked=blocked)

    def explain(
        self, texts: Sequence[str] | csr_matrix, *, top_k: int = 5, paths: int = 3
    ) -> list[Explanation]:
        """Return why each text gets its ``top_k`` best labels: those that `predict` finds.

        Args:
            texts: What `predict` takes.
            top_k: Labels per text.
            paths: Most clusters shown on the way to one label, the best path first.

        Example:
            >>> from elias import EliasConfig, train
            >>> from elias.data.synthetic import synthetic_corpus
            >>> corpus = synthetic_corpus(n_points=300, n_labels=30)
            >>> config = EliasConfig().override({"encoder.dim": 16, "stages.stage2.epochs": 3})
            >>> model = train(config, corpus)
            >>> best = model.explain(corpus.test.texts[:1], top_k=3)[0].labels[0]
            >>> best.paths[0].won
            True
            >>> bool(abs(best.p - best.classifier_score * best.path_score) < 1e-6)
            True
        """
        if not issparse(texts) and not isinstance(texts, str):
            texts = list(texts)
        return explain(
            self.model,
            self._tokens(texts),
            self.predict(texts, top_k=top_k),
            texts=None if issparse(texts) else texts,
            beam_size=self.sizes.beam_size,
            paths=paths,
        )

    def _rank(
        self,
        tokens: Tokens,
        top_k: int,
        sizes: SearchSizes | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        blocked: torch.Tensor | None = None,
    ) -> Predictions:
        sizes = sizes or self.sizes
        with threads_shared(), memory_explained("predicting"):
            ranked = self._rank_in_halves(tokens, top_k, sizes, batch_size, blocked)
        scores = np.where(ranked.ids < self.n_labels, ranked.scores, -np.inf).astype(np.float32)
        return Predictions(
            ids=ranked.ids, scores=scores, n_labels=self.n_labels, label_names=self.label_names
        )

    def _rank_in_halves(
        self,
        tokens: Tokens,
        top_k: int,
        sizes: SearchSizes,
        batch_size: int,
        blocked: torch.Tensor | None,
    ) -> Ranked:
        """Rank, with half the texts at a time whenever memory does not hold them."""
        while True:
            try:
                return rank_all(
                    self.model, tokens, sizes, top_k, batch_size=batch_size, blocked=blocked
                )
            except (MemoryError, RuntimeError) as error:
                if batch_size == 1 or not is_out_of_memory(error):
                    raise
                batch_size //= 2
                logger.warning("out of memory: going on with %d texts at a time", batch_size)

    def predict_split(
        self, split: Split, *, top_k: int = EVALUATED, tokens: Tokens | None = None
    ) -> Predictions:
        """Return predictions for a split of a corpus, without the pairs its filters forbid.

        ``tokens`` are the split's, where they are at hand.
        """
        if tokens is None:
            tokens = cached_tokens(split, self.model.encoder)
        filters = np.empty((0, 2), dtype=np.int64) if split.filters is None else split.filters
        most_filtered = int(np.bincount(filters[:, 0], minlength=1).max())
        ranked = self._rank(tokens, top_k + most_filtered)
        return (ranked.drop(filters) if most_filtered else ranked).top(top_k)

    def evaluate(self, corpus: Corpus, *, split: str = "test") -> Metrics:
        """Return the metrics on a split of the corpus, with this model's propensity constants.

        Labels are matched by name; those that the model does not know count as missed.
        """
        corpus = match_labels(corpus, self.label_names)
        predictions = self.predict_split(corpus.split(split)).among(corpus.label_names)
        settings = self.config.eval
        return evaluate(
            predictions, corpus, split=split, a=settings.propensity_a, b=settings.propensity_b
        )

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the model to a folder that `from_pretrained` reads; it appears whole or not."""
        folder = Path(folder)
        card = model_card(self.config, self.label_names, self.facts)
        save_model(
            folder,
            self.model,
            config=self.config,
            label_names=self.label_names,
            facts=self.facts,
            card=card,
            overwrite=overwrite,
        )
        return folder

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, device: str = "auto") -> Elias:
        """Read a saved model; the folder of a finished run will do too."""
        folder = Path(folder)
        if not (folder / "model.safetensors").exists() and (folder / MODEL_FOLDER).is_dir():
            folder = folder / MODEL_FOLDER
        elif (folder / METRICS_FILE).exists():
            raise ModelError(
                f"{folder}: the run is not finished, so it has no model yet; "
                "the same `elias train` command trains it again"
            )
        loaded = load_model(folder, pick_device(device))
        return cls(loaded.model, loaded.config, loaded.label_names, dict(loaded.facts))

    def _tokens(self, texts: Sequence[str] | csr_matrix) -> Tokens:
        if issparse(texts):
            return feature_tokens(csr_matrix(texts), self.model.encoder)
        if isinstance(texts, str):
            raise DataError("predict takes a list of texts; wrap the text in a list: [text]")
        texts = list(texts)
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise DataError(f"texts[{i}] is {type(text).__name__}, not a string")
        if self.model.encoder.reads_features:
            raise DataError("this model was trained on features; give it their CSR matrix")
        return self.model.encoder.tokenise(texts)

    def _blocked(
        self, only: Iterable[int | str] | None, without: Iterable[int | str] | None
    ) -> torch.Tensor | None:
        if only is None and without is None:
            return None
        blocked = np.zeros(self.n_labels, dtype=bool)
        if only is not None:
            blocked[:] = True
            blocked[self.label_ids(only)] = False
        if without is not None:
            blocked[self.label_ids(without)] = True
        return torch.from_numpy(blocked).to(self.model.labels.weight.device)

    def label_ids(self, labels: Iterable[int | str]) -> list[int]:
        """Return the ids of labels given as ids or names; a name may stand for several."""
        if isinstance(labels, str):
            raise DataError(f"labels must be a list; wrap it: [{labels!r}]")
        wanted = list(labels)
        by_name: dict[str, list[int]] = {name: [] for name in wanted if isinstance(name, str)}
        if by_name:
            for i, name in enumerate(self.label_names):
                if name in by_name:
                    by_name[name].append(i)
        ids: list[int] = []
        for label in wanted:
            if isinstance(label, str):
                known = by_name[label]
                hint = "" if known else nearest(label, self.label_names)
            else:
                known = [int(label)] if 0 <= label < self.n_labels else []
                hint = f"; ids go from 0 to {self.n_labels - 1}"
            if not known:
                raise DataError(f"the model has no label {label!r}{hint}")
            ids.extend(known)
        return ids
