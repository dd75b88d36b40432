"""The training of one model, from the corpus to the ranker."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from elias.data.stats import corpus_stats
from elias.model.layout import DATA_SETTINGS
from elias.pipeline.answering import found_by
from elias.pipeline.fitting_in import refuse_what_cannot_fit
from elias.pipeline.holding_out import validation_split
from elias.pipeline.inputs import bag_of_words, cached_tokens, input_of, setup_rows
from elias.pipeline.machine import resident
from elias.pipeline.measuring import REPORTED, measure, rounded
from elias.pipeline.memory import expected_memory, sizes_of
from elias.pipeline.predictor import Elias
from elias.pipeline.reranking import RERANK
from elias.pipeline.resuming import keeper_of
from elias.pipeline.together import in_turn, let_go, shared_encoder, told
from elias.rerank.reranker import Candidates, Reranker
from elias.training.loop import EpochReport, Points
from elias.training.stages import StageSequence, check_storage

if TYPE_CHECKING:
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
    from elias.training.tracking import Run

logger = logging.getLogger(__name__)


class ModelTraining:
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
        check_storage(self.config, self.device, self.world)
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
            model = self._elias(trained.eval())
            model.first_encoder = first_encoder
            if self.config.rerank.enabled:
                self._add_reranker(model, train_split)
            model.facts["timings"] = rounded(self.run.timings)
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
        self._tell_ranker(model.reranker)
        for component in model.components[1:]:
            self._report(model, component, component)

    def _tell_ranker(self, ranker: Reranker) -> None:
        """Say what was made of the ranker, and what was wanted and could not be."""
        calibrated, named = ranker.calibration is not None, ranker.by_name is not None
        self.run.record("ranker", sharpness=ranker.sharpness, calibrated=calibrated, names=named)
        wanted = self.config.rerank
        if wanted.calibrate and self.held_out is None:
            logger.info("no points are held out, so scores are not calibrated")
        elif wanted.names and calibrated and not named:
            logger.info("the names of labels have no words of the texts, and are left out")

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
            DATA_SETTINGS: dict(self.corpus.reading),
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
