"""Training as one call: the corpus made ready, the stages in order, the run on disk."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from elias.config import decisive
from elias.data.stats import corpus_stats
from elias.distributed.world import same_everywhere
from elias.metrics import inverse_propensities, metric_names, score
from elias.pipeline.answering import ENSEMBLE, found_by
from elias.pipeline.deciding import PROBABILITIES, add_probabilities
from elias.pipeline.fitting_in import refuse_what_cannot_fit
from elias.pipeline.holding_out import validation_split
from elias.pipeline.inputs import bag_of_words, cached_tokens, input_of, setup_rows
from elias.pipeline.machine import resident
from elias.pipeline.memory import expected_memory, sizes_of
from elias.pipeline.predictor import Elias
from elias.pipeline.reranking import CALIBRATE, RERANK, check_rerank
from elias.pipeline.resources import memory_explained, pick_device, threads_shared
from elias.pipeline.resuming import keep_member, keeper_of, parts_of, take_up
from elias.pipeline.together import (
    check_together,
    in_turn,
    let_go,
    open_shared_run,
    shared_encoder,
    told,
)
from elias.rerank.reranker import Candidates, Reranker
from elias.training.loop import EpochReport, Points
from elias.training.stages import StageSequence
from elias.training.trackers import check_trackers
from elias.training.tracking import Run, check_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.config import EliasConfig, StageConfig
    from elias.data.corpus import Corpus, Split
    from elias.data.tokens import Tokens
    from elias.distributed import World
    from elias.model.elias import EliasModel
    from elias.model.encoder import TextEncoder
    from elias.predictions import Predictions
    from elias.training.checkpoints import Checkpoint

logger = logging.getLogger(__name__)

REPORTED = [
    *(f"{name}@{k}" for name in ("P", "nDCG", "PSP") for k in (1, 3, 5)),
    *(f"R@{k}" for k in (10, 20, 100)),
]


def train(
    config: EliasConfig,
    corpus: Corpus,
    *,
    out: str | Path | None = None,
    device: str = "auto",
    init_from: Elias | None = None,
    overwrite: bool = False,
    ignore_memory: bool = False,
) -> Elias:
    """Train ELIAS on a corpus and return the model; with ``out``, keep the run there.

    Args:
        config: What to train; sizes left open are derived from the corpus.
        corpus: The points; without a validation split one is held out of the training split.
        out: The run folder: ``config.json``, ``metrics.jsonl``, ``train.log``, and, when all is
            done, ``model/``. A run that was stopped there goes on from its last checkpoint.
        device: ``auto`` takes a GPU if there is one.
        init_from: A model to start from; it stays as it is. Its encoder is taken, with its sizes
            and its vocabulary or tokenizer. If the labels are its own, so are its clusters and
            classifiers, and a learned graph goes on from the first stage that learns one.
        overwrite: Replace what a former run left in ``out``.
        ignore_memory: Begin a run even if it is expected to need more memory than there is.

    Example:
        >>> from elias import EliasConfig, train
        >>> from elias.data.synthetic import synthetic_corpus
        >>> corpus = synthetic_corpus(n_points=300, n_labels=30)
        >>> config = EliasConfig().override(
        ...     {"encoder.dim": 16, "stages.stage1.epochs": 1, "stages.stage2.epochs": 1}
        ... )
        >>> model = train(config, corpus, device="cpu")
        >>> 1 < model.config.index.n_clusters < 30  # derived from the data
        True
        >>> list(model.facts["metrics"])  # of each component, on validation and test points
        ['stage1', 'stage2', 'rerank', 'calibrate', 'names']
    """
    folder = None if out is None else Path(out)
    check_plan(config, folder, overwrite=overwrite)
    place = _Place(folder, pick_device(device), overwrite, ignore_memory)
    model = _train(config, corpus, place, init_from)
    assert model is not None
    return model


def train_together(
    world: World,
    config: EliasConfig,
    corpus: Corpus,
    *,
    out: str | Path | None = None,
    init_from: Elias | None = None,
    overwrite: bool = False,
    ignore_memory: bool = False,
) -> Elias | None:
    """Do what `train` does with all processes of ``world``, each of which calls this.

    The points of a batch and the rows of W_L are shared out; the model is the same but for
    rounding, whatever the number of processes. ``out`` is on a file system that all of them see.

    Returns:
        The model to the first process, None to the others.
    """
    folder = None if out is None else Path(out)
    check_plan(config, folder if world.is_first else None, overwrite=overwrite)
    check_together(config)
    place = _Place(folder, world.device, overwrite, ignore_memory)
    return _train(config, corpus, place, init_from, world)


class _Place(NamedTuple):
    """Where a run is computed and kept."""

    folder: Path | None
    device: torch.device
    overwrite: bool
    ignore_memory: bool


def _train(
    config: EliasConfig,
    corpus: Corpus,
    place: _Place,
    init_from: Elias | None,
    world: World | None = None,
) -> Elias | None:
    config = starting_config(config, init_from).resolve(len(corpus.train), corpus.n_labels)
    made_of: dict[str, Any] = {}
    if place.folder is not None or world is not None:
        made_of = parts_of(corpus, init_from, place.device)
    if world is not None:
        same_everywhere(world, {**made_of, "configuration": decisive(config.to_dict())})
    with (
        threads_shared(),
        open_shared_run(
            world, place.folder, config, overwrite=place.overwrite, made_of=made_of
        ) as run,
        memory_explained("training"),
    ):
        members = _members(config, corpus, run, place, init_from, world)

        def finished() -> Elias:
            first, *others = members
            model = _together(config, first, others, corpus, run) if others else first
            _learn_probabilities(model, corpus, run)
            if run.model_folder is not None:
                with run.timed("save"):
                    model.save_pretrained(run.model_folder)
            return model

        return finished() if world is None else world.first(finished)


def _members(
    config: EliasConfig,
    corpus: Corpus,
    run: Run,
    place: _Place,
    init_from: Elias | None,
    world: World | None,
) -> list[Elias]:
    """Return all members, those of a run that was stopped as they are, the others trained.

    The processes beside the first only help, and return none.
    """
    n_members = config.ensemble.members
    members, n_done, checkpoint = take_up(run, n_members, place.device, world)
    for number in range(n_done, n_members):
        own = run.member(number)
        training = _Training(config.member(number), corpus, own, place.device, init_from, world)
        training.ignore_memory = place.ignore_memory
        training.is_last = number == n_members - 1
        model = training.run_all(checkpoint)
        checkpoint = None
        if model is not None:
            members.append(model)
            if n_members > 1:
                keep_member(own, model)
    return members


def _together(
    config: EliasConfig, first: Elias, others: Sequence[Elias], corpus: Corpus, run: Run
) -> Elias:
    """Return the ensemble of the members, measured."""
    model = first.joined_by(others, config)
    _, held_out = validation_split(corpus, config)
    with run.timed("ensemble"):
        found = {
            name: measure(model, model.predict_split(split), split, corpus, REPORTED)
            for name, split in (("validation", held_out), ("test", corpus.test))
            if split is not None
        }
    run.record("stage", stage=ENSEMBLE, **found)
    model.facts["metrics"][ENSEMBLE] = found
    model.facts["timings"] = _rounded(run.timings)
    return model


def _learn_probabilities(model: Elias, corpus: Corpus, run: Run) -> None:
    """Learn what the scores say of relevance from the points that were held out."""
    with run.timed(PROBABILITIES):
        _, held_out = validation_split(corpus, model.config)
        tests = {} if corpus.test is None else {"test": corpus.test}
        told = add_probabilities(model, held_out, tests)
    run.record(PROBABILITIES, **told)
    model.facts["timings"] = _rounded(run.timings)


def measure(
    model: Elias, found: Predictions, split: Split, corpus: Corpus, names: list[str]
) -> dict[str, float]:
    """Return the metrics of predictions, in percent, with the model's propensity constants."""
    settings = model.config.eval
    propensity = inverse_propensities(
        corpus.label_frequencies(),
        len(corpus.train),
        settings.propensity_a,
        settings.propensity_b,
    )
    measured = score(found, split.labels, propensity, names)
    return {name: round(value, 4) for name, value in measured.items()}


def _rounded(timings: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in timings.items()}


def check_plan(config: EliasConfig, out: Path | None, *, overwrite: bool = False) -> None:
    """Refuse what cannot be trained whatever the corpus is, so before a large one is read."""
    metric_names([config.eval.select_by])
    check_rerank(config)
    check_trackers(config.tracking)
    if out is not None:
        check_folder(out, overwrite=overwrite)


def starting_config(config: EliasConfig, init_from: Elias | None) -> EliasConfig:
    """Return the configuration with the encoder of the model to start from, if there is one."""
    if init_from is None:
        return config
    theirs, ours = init_from.config.encoder, config.encoder
    if ours.min_count is None:  # to be derived, or taken from the model
        ours = replace(ours, min_count=theirs.min_count)
    if ours != theirs:
        logger.info("the encoder and its settings are those of the model to start from")
    return replace(config, encoder=theirs)


class _Training:
    """The training of one model: the corpus made ready, then the stages."""

    def __init__(
        self,
        config: EliasConfig,
        corpus: Corpus,
        run: Run,
        device: torch.device,
        init_from: Elias | None,
        world: World | None = None,
    ) -> None:
        self.config = config
        self.world = world
        self.corpus = corpus
        self.run = run
        self.device = device
        self.init_from = init_from
        self.tokens: dict[str, Tokens] = {}
        self.held_out: Split | None = None
        self.ignore_memory = False
        self.is_last = True
        """Whether no other member is trained after this one."""
        self.setup: NDArray[np.int64] | None = None
        """The points that the encoder, clusters and edges begin from; None: all."""
        self.metrics: dict[str, dict[str, dict[str, float]]] = {}

    def run_all(self, resumed: Checkpoint | None = None) -> Elias | None:
        """Train, and return the model with what is known of its making; to the first process.

        From a checkpoint too, the corpus is made ready from the start: that gives the same again.
        """
        self.metrics = self.run.metrics()
        with torch.random.fork_rng(devices=_forked(self.device)):
            torch.manual_seed(self.config.member_seed)
            with self.run.redoing(resumed is not None):
                train_split, encoder, bow = self._made_ready()
            points = Points(self.tokens["train"], train_split.labels)
            stages = StageSequence(
                config=self.config,
                encoder=encoder,
                points=points,
                bow=bow,
                device=self.device,
                validate=self._validate if self.held_out is not None else None,
                report_epoch=self._report_epoch,
                report_stage=self._report_stage,
                timed=self.run.timed,
                keeper=keeper_of(self.run, self.world),
                world=self.world,
                setup_from=None if self.setup is None else points.take(self.setup),
            )
            first_encoder = self._first_encoder(encoder)
            trained = stages.run(self._first_model(encoder), resumed)
        if self.is_last:
            let_go(self.world, self.run)

        def finished() -> Elias:
            model = self._elias(trained)
            model.first_encoder = first_encoder
            if self.config.rerank.enabled:
                self._add_reranker(model, train_split)
            model.facts["timings"] = _rounded(self.run.timings)
            return model

        return finished() if self.world is None else self.world.first(finished)

    def _made_ready(self) -> tuple[Split, TextEncoder, csr_matrix | None]:
        """Return the points to train on, the encoder and bags of words; tokenise all points."""
        train_split, self.held_out = validation_split(self.corpus, self.config)
        self.setup = setup_rows(train_split, self.config)
        chosen = train_split if self.setup is None else train_split.take(self.setup)
        with self.run.timed("encoder"):
            encoder = self._encoder(chosen)
        with self.run.timed("tokens"):
            splits = self._split_by_name(train_split)
            self.tokens = in_turn(
                self.world,
                lambda: {name: cached_tokens(split, encoder) for name, split in splits.items()},
            )
            clusters = self.world is None or self.world.is_first
            bow = bag_of_words(chosen) if clusters else None
        self._report_data(train_split)
        self._check_memory(train_split, encoder, bow)
        return train_split, encoder, bow

    def _check_memory(
        self, train_split: Split, encoder: TextEncoder, bow: csr_matrix | None
    ) -> None:
        """Refuse a run that is going to take more memory than the machine has.

        Of several processes the first one asks, which takes most.
        """
        if bow is None:
            return
        held, n_setup = resident(), bow.shape[0]
        words = bow.nnz / max(1, n_setup)
        tokens, labels = self.tokens["train"], train_split.labels
        world = 1 if self.world is None else self.world.size
        sizes = sizes_of(encoder, labels, tokens, n_setup, words, self.config, world)
        expected = expected_memory(
            sizes,
            self.config,
            self.device,
            resident=held,
            keeps_checkpoints=self.run.folder is not None,
            validates=self.held_out is not None,
        )
        refuse_what_cannot_fit(
            expected, sizes, self.config, self.device, resident=held, ignore=self.ignore_memory
        )

    def _first_encoder(self, encoder: TextEncoder) -> TextEncoder | None:
        """Return a copy of the encoder as it is before training, where the ranker reads that."""
        rerank = self.config.rerank
        if not rerank.enabled or rerank.embedding != "first":
            return None
        first: TextEncoder = copy.deepcopy(encoder)
        return first.to(self.device)

    def _add_reranker(self, model: Elias, train_split: Split) -> None:
        """Train the ranker on the training points, and its calibration on those held out."""
        with self.run.timed(RERANK):
            validation = None
            if self.held_out is not None:
                held_out = self._candidates(model, "validation", self.held_out)
                validation = (held_out, self.held_out.labels)
            model.reranker = Reranker.fit(
                self._candidates(model, "train", train_split),
                train_split.labels,
                self.config.rerank,
                validation=validation,
                label_names=self.corpus.label_names,
                seed=self.config.member_seed % 2**32,
            )
        if self.config.rerank.calibrate and CALIBRATE not in model.components:
            logger.info("no points are held out, so scores are not calibrated")
        for component in model.components[1:]:
            self._report(model, component, component)

    def _candidates(self, model: Elias, name: str, split: Split) -> Candidates:
        config = self.config.rerank
        tokens = self.tokens[name]
        ranked = model.predict_split(
            split, top_k=config.candidates, tokens=tokens, component=model.components[0]
        )
        found = found_by(model, ranked, input_of(split, model.model.encoder), tokens)
        return found.candidates(config.candidates)

    def _report(self, model: Elias, title: str, component: str | None = None, **facts: int) -> None:
        """Measure what there is of a model, and record it with what else is known of it."""
        found: dict[str, dict[str, float]] = {}
        for name, split in (("validation", self.held_out), ("test", self.corpus.test)):
            if split is not None:
                ranked = model.predict_split(split, tokens=self.tokens[name], component=component)
                found[name] = self._measured(model, ranked, split, REPORTED)
        self.metrics[title] = found
        self.run.record("stage", stage=title, **facts, **found)

    def _elias(self, model: EliasModel) -> Elias:
        facts = {
            "data": corpus_stats(self.corpus).to_dict(),
            "corpus": self.corpus.fingerprint(),
            "metrics": self.metrics,
        }
        return Elias(model, self.config, self.corpus.label_names, facts)

    def _split_by_name(self, train_split: Split) -> dict[str, Split]:
        named = {"train": train_split, "validation": self.held_out, "test": self.corpus.test}
        return {name: split for name, split in named.items() if split is not None}

    def _encoder(self, train_split: Split) -> TextEncoder:
        if self.init_from is not None:
            encoder: TextEncoder = copy.deepcopy(self.init_from.model.encoder)
            return encoder
        n_features = None if train_split.features is None else train_split.features.shape[1]
        return shared_encoder(self.world, self.config.encoder, train_split.texts, n_features)

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
        view = Elias(model, self.config, self.corpus.label_names)
        ranked = view.predict_split(self.held_out, tokens=self.tokens["validation"])
        return self._measured(view, ranked, self.held_out, names)

    def _measured(
        self, model: Elias, ranked: Predictions, split: Split, names: list[str]
    ) -> dict[str, float]:
        """Return the metrics; where W_L is shared out all processes search, and one measures."""
        world = None if model.model.labels.whole else self.world
        return told(world, lambda: measure(model, ranked, split, self.corpus, names))

    def _report_data(self, train_split: Split) -> None:
        counts = np.bincount(train_split.labels.indices, minlength=self.corpus.n_labels)
        self.run.record(
            "data",
            points={name: len(tokens) for name, tokens in self.tokens.items()},
            labels=self.corpus.n_labels,
            labels_without_points=int((counts == 0).sum()),
            setup_points=len(train_split) if self.setup is None else len(self.setup),
            truncated={name: tokens.n_truncated for name, tokens in self.tokens.items()},
            source=None if self.corpus.source is None else str(self.corpus.source.resolve()),
            reading=dict(self.corpus.reading),
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
        view = Elias(model, self.config, self.corpus.label_names)
        self._report(view, stage.name, best_epoch=best_epoch)
        if not model.graph.learned:
            self.run.keep_partition(model.graph.partition().cpu().numpy())


def _forked(device: torch.device) -> list[int]:
    return [device.index or 0] if device.type == "cuda" else []
