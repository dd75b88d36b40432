"""The whole: train everything, save and load it, predict with it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from scipy.sparse import csr_matrix, issparse

from elias.data.features import Featurizer, unit_rows
from elias.data.splits import hold_out
from elias.data.stats import corpus_stats
from elias.data.tokens import Tokens, cached
from elias.errors import ConfigError, DataError, RunError
from elias.metrics import evaluate, inverse_propensities, metric_names, score
from elias.model.building import build_encoder
from elias.model.card import model_card
from elias.model.elias import EliasModel, SearchSizes
from elias.model.inference import BATCH_SIZE, rank_all
from elias.model.pretrained import load_model, save_model
from elias.predictions import Predictions
from elias.training.loop import EpochReport, Points
from elias.training.stages import StageSequence
from elias.training.tracking import MODEL_FOLDER, Run, open_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elias.config import EliasConfig, StageConfig
    from elias.data.corpus import Corpus, Split
    from elias.metrics import Metrics
    from elias.model.encoder import TextEncoder

logger = logging.getLogger(__name__)

Device = Literal["auto", "cpu", "cuda"] | str
EVALUATED = 100  # labels ranked for metrics, as far as R@100 looks
REPORTED = [
    *(f"{name}@{k}" for name in ("P", "nDCG", "PSP") for k in (1, 3, 5)),
    *(f"R@{k}" for k in (10, 20, 100)),
]


class Elias:
    """A trained model with its labels' names: text in, ranked labels out.

    >>> model = Elias.from_pretrained(saved_model)                     # doctest: +SKIP
    >>> model.predict(["cod quotas in the north sea"], top_k=3)[0].labels  # doctest: +SKIP
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
            batch_size: Texts at a time; the answer does not depend on it.
            only: Ids or names of the labels to choose among; all clusters are searched for them.
            without: Ids or names of labels to keep off.
        """
        if top_k < 1:
            raise DataError(f"top_k must be >= 1, not {top_k}")
        tokens = self._tokens(texts)
        sizes = self.sizes
        blocked = self._blocked(only, without)
        if only is not None:
            sizes = SearchSizes(self.model.graph.n_clusters, sizes.shortlist_size)
        with memory_explained("batch_size"):
            return self._rank(tokens, top_k, sizes, batch_size=batch_size, blocked=blocked)

    def _rank(
        self,
        tokens: Tokens,
        top_k: int,
        sizes: SearchSizes | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        blocked: torch.Tensor | None = None,
    ) -> Predictions:
        ranked = rank_all(
            self.model,
            tokens,
            sizes or self.sizes,
            top_k,
            batch_size=batch_size,
            blocked=blocked,
        )
        scores = np.where(ranked.ids < self.n_labels, ranked.scores, -np.inf).astype(np.float32)
        return Predictions(
            ids=ranked.ids, scores=scores, n_labels=self.n_labels, label_names=self.label_names
        )

    def predict_split(
        self, split: Split, *, top_k: int = EVALUATED, tokens: Tokens | None = None
    ) -> Predictions:
        """Return predictions for a split of a corpus, without the pairs its filters forbid.

        ``tokens`` are the split's, where they are at hand.
        """
        if tokens is None:
            tokens = _cached_tokens(split, self.model.encoder)
        filters = np.empty((0, 2), dtype=np.int64) if split.filters is None else split.filters
        most_filtered = int(np.bincount(filters[:, 0], minlength=1).max())
        ranked = self._rank(tokens, top_k + most_filtered)
        return (ranked.drop(filters) if most_filtered else ranked).top(top_k)

    def evaluate(self, corpus: Corpus, *, split: str = "test") -> Metrics:
        """Return the metrics on a split of the corpus, with this model's propensity constants."""
        self.check_labels(corpus)
        predictions = self.predict_split(corpus.split(split))
        settings = self.config.eval
        return evaluate(
            predictions, corpus, split=split, a=settings.propensity_a, b=settings.propensity_b
        )

    def check_labels(self, corpus: Corpus) -> None:
        """Refuse a corpus whose labels are not this model's."""
        if corpus.n_labels != self.n_labels:
            raise DataError(
                f"{corpus.source or 'corpus'}: has {corpus.n_labels} labels, the model "
                f"{self.n_labels}; evaluate on the corpus it was trained on"
            )
        pairs = zip(corpus.label_names, self.label_names, strict=True)
        for i, (theirs, ours) in enumerate(pairs):
            if theirs != ours:
                raise DataError(
                    f"{corpus.source or 'corpus'}: label {i} is {theirs!r}, in the model it is "
                    f"{ours!r}; evaluate on the corpus it was trained on"
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
    def from_pretrained(cls, folder: str | Path, *, device: Device = "auto") -> Elias:
        """Read a saved model; the folder of a finished run will do too."""
        folder = Path(folder)
        if not (folder / "model.safetensors").exists() and (folder / MODEL_FOLDER).is_dir():
            folder = folder / MODEL_FOLDER
        loaded = load_model(folder, pick_device(device))
        return cls(loaded.model, loaded.config, loaded.label_names, dict(loaded.facts))

    def _tokens(self, texts: Sequence[str] | csr_matrix) -> Tokens:
        if issparse(texts):
            return _feature_tokens(csr_matrix(texts), self.model.encoder)
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
        names = {label for label in wanted if isinstance(label, str)}
        found = {name: [i for i, n in enumerate(self.label_names) if n == name] for name in names}
        ids: list[int] = []
        for label in wanted:
            known = found[label] if isinstance(label, str) else [int(label)]
            if not known or not all(0 <= i < self.n_labels for i in known):
                raise DataError(f"the model has no label {label!r}")
            ids.extend(known)
        return ids


def train(
    config: EliasConfig,
    corpus: Corpus,
    *,
    out: str | Path | None = None,
    device: Device = "auto",
    init_from: Elias | None = None,
    overwrite: bool = False,
) -> Elias:
    """Train ELIAS on a corpus and return the model; with ``out``, keep the run there.

    Args:
        config: What to train; sizes left open are derived from the corpus.
        corpus: The points; without a validation split one is held out of the training split.
        out: The run folder: ``config.json``, ``metrics.jsonl``, ``train.log``, and, when all is
            done, ``model/``.
        device: ``auto`` takes a GPU if there is one.
        init_from: A model to start from: its encoder, and its classifiers if the labels are its
            own. Its vocabulary or tokenizer comes with it.
        overwrite: Replace what a former run left in ``out``.
    """
    config = config.resolve(len(corpus.train), corpus.n_labels)
    (_,) = metric_names([config.eval.select_by])
    folder = None if out is None else Path(out)
    with open_run(folder, config, overwrite=overwrite) as run, memory_explained("stages"):
        model = _Training(config, corpus, run, pick_device(device), init_from).run_all()
        if run.model_folder is not None:
            with run.timed("save"):
                model.save_pretrained(run.model_folder)
        return model


class _Training:
    """One call of `train`: the corpus made ready, then the stages."""

    def __init__(
        self,
        config: EliasConfig,
        corpus: Corpus,
        run: Run,
        device: torch.device,
        init_from: Elias | None,
    ) -> None:
        self.config = config
        self.corpus = corpus
        self.run = run
        self.device = device
        self.init_from = init_from
        self.tokens: dict[str, Tokens] = {}
        self.held_out: Split | None = None
        self.metrics: dict[str, dict[str, dict[str, float]]] = {}

    def run_all(self) -> Elias:
        """Train, and return the model with what is known of its making."""
        with torch.random.fork_rng(devices=_forked(self.device)):
            torch.manual_seed(self.config.seed)
            train_split, self.held_out = self._hold_out()
            with self.run.timed("encoder"):
                encoder = self._encoder(train_split)
            with self.run.timed("tokens"):
                self.tokens = {
                    name: _cached_tokens(split, encoder)
                    for name, split in self._split_by_name(train_split).items()
                }
                bow = _bag_of_words(train_split, encoder)
            self._report_data(train_split)
            stages = StageSequence(
                config=self.config,
                encoder=encoder,
                points=Points(self.tokens["train"], train_split.labels),
                bow=bow,
                device=self.device,
                validate=self._validate if self.held_out is not None else None,
                report_epoch=self._report_epoch,
                report_stage=self._report_stage,
                timed=self.run.timed,
            )
            model = stages.run(self._first_model(encoder))
        return self._elias(model)

    def _elias(self, model: EliasModel) -> Elias:
        facts = {
            "data": corpus_stats(self.corpus).to_dict(),
            "metrics": self.metrics,
            "timings": {name: round(value, 2) for name, value in self.run.timings.items()},
        }
        return Elias(model, self.config, self.corpus.label_names, facts)

    def _split_by_name(self, train_split: Split) -> dict[str, Split]:
        named = {"train": train_split, "validation": self.held_out, "test": self.corpus.test}
        return {name: split for name, split in named.items() if split is not None}

    def _hold_out(self) -> tuple[Split, Split | None]:
        """Return the points to train on and those to validate on (SPEC of the hold-out: §4.1)."""
        if self.corpus.validation is not None:
            return self.corpus.train, self.corpus.validation
        size = self.config.eval.validation_size
        assert size is not None
        if size == 0:
            return self.corpus.train, None
        train = self.corpus.train
        train_rows, held_rows = hold_out(train.labels, min(size, len(train)), self.config.seed)
        if len(held_rows) == 0:
            logger.warning("no point can be held out: each has a label found nowhere else")
            return train, None
        if len(held_rows) < size:
            logger.warning(
                "%d points held out for validation instead of %d: the others have a label found "
                "nowhere else",
                len(held_rows),
                size,
            )
        return train.take(train_rows), train.take(held_rows)

    def _encoder(self, train_split: Split) -> TextEncoder:
        if self.init_from is not None:
            encoder: TextEncoder = copy.deepcopy(self.init_from.model.encoder)
            return encoder
        n_features = None if train_split.features is None else train_split.features.shape[1]
        if train_split.texts is None and self.config.encoder.kind != "bag":
            raise ConfigError(
                "encoder.kind: the corpus has features and no text; only 'bag' can read them"
            )
        return build_encoder(self.config.encoder, train_split.texts, n_features)

    def _first_model(self, encoder: TextEncoder) -> EliasModel | None:
        """Return a copy of the model to start from, if its labels are the corpus's."""
        if self.init_from is None:
            return None
        if list(self.init_from.label_names) != list(self.corpus.label_names):
            logger.info("the model to start from has other labels: only its encoder is taken")
            return None
        model = copy.deepcopy(self.init_from.model)
        model.encoder = encoder
        return model

    def _validate(self, model: EliasModel) -> dict[str, float]:
        assert self.held_out is not None
        names = list(dict.fromkeys(["P@1", "P@5", "nDCG@5", "R@100", self.config.eval.select_by]))
        return self._measure(model, "validation", self.held_out, names)

    def _measure(
        self, model: EliasModel, name: str, split: Split, names: list[str]
    ) -> dict[str, float]:
        view = Elias(model, self.config, self.corpus.label_names)
        ranked = view.predict_split(split, tokens=self.tokens[name])
        settings = self.config.eval
        propensity = inverse_propensities(
            self.corpus.label_frequencies(),
            len(self.corpus.train),
            settings.propensity_a,
            settings.propensity_b,
        )
        measured = score(ranked, split.labels, propensity, names)
        return {name: round(value, 4) for name, value in measured.items()}

    def _report_data(self, train_split: Split) -> None:
        counts = np.bincount(train_split.labels.indices, minlength=self.corpus.n_labels)
        self.run.record(
            "data",
            points={name: len(tokens) for name, tokens in self.tokens.items()},
            labels=self.corpus.n_labels,
            labels_without_points=int((counts == 0).sum()),
            truncated={name: tokens.n_truncated for name, tokens in self.tokens.items()},
        )
        if (counts == 0).any():
            logger.warning(
                "%d of %d labels have no training point: they are spread over the clusters and "
                "can hardly be predicted",
                int((counts == 0).sum()),
                len(counts),
            )
        for name, tokens in self.tokens.items():
            if tokens.n_truncated:
                logger.warning(
                    "%d of %d %s texts are longer than encoder.max_length and were cut off",
                    tokens.n_truncated,
                    len(tokens),
                    name,
                )

    def _report_epoch(self, report: EpochReport) -> None:
        self.run.record("epoch", **report._asdict())
        shown = ", ".join(f"{name} {value:.2f}" for name, value in report.validation.items())
        logger.info(
            "%s epoch %d: loss %.4f%s (%.1f s)",
            report.stage,
            report.epoch,
            report.loss,
            f"; validation {shown}" if shown else "",
            report.seconds,
        )

    def _report_stage(self, stage: StageConfig, model: EliasModel, best_epoch: int) -> None:
        found: dict[str, dict[str, float]] = {}
        for name, split in (("validation", self.held_out), ("test", self.corpus.test)):
            if split is not None:
                found[name] = self._measure(model, name, split, REPORTED)
        self.metrics[stage.name] = found
        self.run.record("stage", stage=stage.name, best_epoch=best_epoch, **found)


def _forked(device: torch.device) -> list[int]:
    return [device.index or 0] if device.type == "cuda" else []


def _input_of(split: Split, encoder: TextEncoder) -> Sequence[str] | csr_matrix:
    """Return what the encoder reads of a split: its texts, or its features."""
    given = split.features if encoder.reads_features else split.texts
    if given is None:
        wanted = "features" if encoder.reads_features else "texts"
        raise DataError(f"the model reads {wanted}, and the corpus has none")
    return given


def _feature_tokens(features: csr_matrix, encoder: TextEncoder) -> Tokens:
    if not encoder.reads_features:
        raise DataError("this model reads text; give it a list of texts")
    if features.shape[1] != encoder.n_features:
        raise DataError(
            f"the features have {features.shape[1]} columns, the model reads {encoder.n_features}"
        )
    return Tokens.from_csr(unit_rows(features))


def _cached_tokens(split: Split, encoder: TextEncoder) -> Tokens:
    given = _input_of(split, encoder)
    if issparse(given):
        return _feature_tokens(given, encoder)
    return cached(encoder.fingerprint, given, encoder.tokenise)


def _bag_of_words(split: Split, encoder: TextEncoder) -> csr_matrix:
    """Return bow(x)/‖·‖ of each point for ψ (Eq. 14): given features, else tf-idf of words."""
    if split.features is not None:
        return unit_rows(split.features)
    assert split.texts is not None
    words = Featurizer.fit(split.texts, char_ngrams=(0, 0), min_count=1)
    return words.transform(split.texts)


def pick_device(device: Device) -> torch.device:
    """Return the device called so; ``auto`` is a GPU if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}; use auto, cpu or cuda") from error
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r}: no CUDA GPU can be used here; use cpu or auto")
    return picked


@contextmanager
def memory_explained(what: str) -> Iterator[None]:
    """Turn running out of memory into an error that says what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and (
            "not enough memory" not in str(error)
        ):
            raise
        remedy = {
            "stages": "stages.*.batch_size, index.shortlist_size, encoder.max_length or "
            "encoder.dim (or set encoder.gradient_checkpointing=true)",
            "batch_size": "batch_size",
        }[what]
        first = str(error).partition("\n")[0] or "out of memory"
        raise RunError(f"out of memory: {first} Lower {remedy}.") from error
