"""Train a model: prepare the corpus, run the stages, fit the ranker, report."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from elias.config import model_settings
from elias.data.splits import setup_rows, validation_split
from elias.data.stats import corpus_stats
from elias.distributed import SingleProcess
from elias.distributed.sharded_linear import ShardedRows
from elias.errors import DATA_SETTINGS, ConfigError
from elias.inference.predict import ENSEMBLE, cached_tokens, split_inputs
from elias.inference.predictor import Elias
from elias.kernels.device import explain_out_of_memory, has_triton, limit_threads, pick_device
from elias.metrics import REPORTED, measure, metric_names, rounded
from elias.model.elias import EliasModel
from elias.model.graph import LabelGraph
from elias.model.one_vs_all import OneVsAll
from elias.model.search import SEARCH_GRAPHS, embed_all
from elias.predictions import Candidates
from elias.rerank.probabilities import PROBABILITIES, add_probabilities
from elias.rerank.reranker import RERANK, Reranker
from elias.rerank.sparse_ranker import RankerFeatures
from elias.text.vectorizer import Featurizer, unit_rows
from elias.training.checkpoint import (
    WEIGHTS,
    Checkpoint,
    add_prefix,
    checkpoint_writer,
    random_state,
    restore_random_state,
    resume,
    run_inputs,
    save_member,
    strip_prefix,
)
from elias.training.initialization import StageInitializer, initial_encoder
from elias.training.loggers import check_loggers
from elias.training.memory import Sizes, estimate_memory, resident_bytes
from elias.training.run import Run, check_folder, open_run
from elias.training.stage import EpochReport, Points, StageLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.config import EliasConfig, ResolvedConfig, StageConfig
    from elias.data.corpus import Corpus, Split
    from elias.distributed import World
    from elias.model.encoder import TextEncoder
    from elias.predictions import Predictions
    from elias.text.tokens import Tokens
    from elias.training.checkpoint import CheckpointWriter


logger = logging.getLogger(__name__)

_FILLED = 0.7  # of a GPU's free memory, by W_L: searching takes some too


class _Place(NamedTuple):
    """A stage, and what it goes on from."""

    stage: StageConfig
    position: int
    partition: NDArray[np.int64] | None


def check_storage(
    config: EliasConfig, device: torch.device, world: World = SingleProcess()
) -> None:
    """Refuse to train on a device for which a configuration takes kernels that it does not have.

    Raises:
        ConfigError: Says what to change.
    """
    index = config.index
    by_kernels = device.type == "cuda" and has_triton()
    if index.label_storage == "compact" and index.kind == "graph" and not by_kernels:
        raise ConfigError(
            "index.label_storage is 'compact', which with a graph takes a GPU and Triton; set "
            "it to 'full', or train with --device cuda"
        )
    if world.shards_labels and device.type == "cuda" and not by_kernels:
        raise ConfigError(
            "several processes on GPUs take Triton, which is missing, or turned off by "
            "ELIAS_KERNELS; use --device cpu"
        )


@dataclass
class StageSequence:
    """Everything the stages share; `run` goes through them and returns the model."""

    config: ResolvedConfig
    encoder: TextEncoder
    points: Points
    bow: csr_matrix | None
    """Of the points to set up from, for the process that clusters."""
    device: torch.device
    validate: Callable[[EliasModel], dict[str, float]] | None
    report_epoch: Callable[[EpochReport], None]
    report_stage: Callable[[StageConfig, EliasModel, int], None]
    timed: Callable[[str], AbstractContextManager[None]]
    """Notes how long a step of this name takes."""
    keeper: CheckpointWriter | None = None
    """Writes checkpoints."""
    world: World = SingleProcess()
    """The processes that train together."""
    setup_from: Points | None = None
    """Points that clusters, first classifiers and edges are computed from; None: all."""

    @property
    def initializer(self) -> StageInitializer:
        """Return the initializer of this run's stages."""
        return StageInitializer(
            self.config,
            self.encoder,
            self.points if self.setup_from is None else self.setup_from,
            self.bow,
            self.points.labels.nnz / max(len(self.points.tokens), 1),
            self.world,
        )

    def run(
        self, init_from: EliasModel | None = None, resumed: Checkpoint | None = None
    ) -> EliasModel:
        """Train all stages in order, from scratch or from a model over the same labels.

        A model to start from goes on where it is: with its classifiers and clusters, and, if it
        has learned a graph, from the first stage that learns one. A checkpoint goes on in the
        stage it was written in, or after it. With several processes, all return the model, the
        first one whole, the others with their share of W_L.
        """
        check_storage(self.config, self.device, self.world)
        self._begin_alike(init_from)
        first_encoder = {name: t.clone() for name, t in self.encoder.state_dict().items()}
        SEARCH_GRAPHS.clear()  # of models that answered, an ensemble's first member say
        self.encoder.to(self.device)
        self.encoder.prepare(self.device)
        model = init_from
        partition = self._partition_of(init_from)
        if resumed is None:
            first = self._first_stage(init_from)
            self._warn_of_unused(first, init_from)
        else:
            first = resumed.metadata["position"]
            model, partition = self._take_up(resumed)
        for position, stage in list(enumerate(self.config.stages))[first:]:
            if resumed is not None and position == first:
                assert model is not None
                if "epoch" in resumed.metadata:
                    self._train(model, _Place(stage, position, partition), resumed)
                continue
            if stage.learn_graph:
                model = self._learned(model, partition, stage, position)
            else:
                fresh = partition is None or stage.cluster_with_encoder
                partition = self._clusters(partition, stage)
                if not stage.keep_encoder:
                    self.encoder.load_state_dict(first_encoder)
                keep_labels = stage.keep_labels or model is init_from
                model = self._fixed(model, partition, stage, fresh, keep_labels=keep_labels)
            if self.config.index.label_storage == "compact":
                model.compact()
            model.to(self.device)
            self._train(model, _Place(stage, position, partition))
        assert model is not None
        model.labels.float()  # whatever it was trained in
        return self._whole(model)

    def _begin_alike(self, init_from: EliasModel | None) -> None:
        """Have all processes begin with the first one's encoder, W_L shared out."""
        self.world.broadcast_tensors(list(self.encoder.state_dict().values()))
        if init_from is not None and self.world.shards_labels:
            init_from.labels = ShardedRows.of(self.world, init_from.labels)

    def _whole(self, model: EliasModel) -> EliasModel:
        """Give the first process the rows of all; on the CPU where they do not fit its GPU."""
        if not isinstance(model.labels, ShardedRows):
            return model
        whole = model.labels.gathered()
        if whole is None:
            return model
        model.labels = whole
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            if whole.weight.nbytes > _FILLED * free:
                logger.warning("W_L does not fit one GPU: what follows is computed on the CPU")
                return model.to("cpu")
        return model.to(self.device)

    def _first_stage(self, init_from: EliasModel | None) -> int:
        """Return the position of the stage to begin with."""
        if init_from is None or not init_from.graph.learned:
            return 0
        learning = [i for i, stage in enumerate(self.config.stages) if stage.learn_graph]
        if not learning or learning[0] == 0:
            return 0
        left_out = ", ".join(stage.name for stage in self.config.stages[: learning[0]])
        logger.info("the model to start from has learned its graph: %s is left out", left_out)
        return learning[0]

    def _warn_of_unused(self, first: int, init_from: EliasModel | None) -> None:
        """Name the settings that a stage which learns the graph has no use for."""
        for stage in self.config.stages[first:]:
            given = {"keep_encoder": not stage.keep_encoder}
            given["cluster_with_encoder"] = stage.cluster_with_encoder
            unused = [f"stages.{stage.name}.{key}" for key, is_set in given.items() if is_set]
            if stage.learn_graph and unused:
                logger.warning(
                    "%s: no effect, since a stage that learns the graph goes on with the encoder "
                    "and the clusters before it",
                    ", ".join(unused),
                )
        if init_from is None or not self.config.stages[first].learn_graph:
            return
        kept = {"alpha": init_from.alpha}
        if init_from.graph.learned:
            n_clusters, n_edges = init_from.graph.edge_labels.shape
            kept |= {"n_clusters": n_clusters, "edges_per_cluster": n_edges}
            kept["beta"] = init_from.graph.beta
        differ = [key for key, value in kept.items() if getattr(self.config.index, key) != value]
        if differ:
            logger.warning(
                "%s: no effect, since the model to start from goes on with its own index (%s)",
                ", ".join(f"index.{key}" for key in differ),
                ", ".join(f"{kept[key]:g}" for key in differ),
            )

    def _partition_of(self, model: EliasModel | None) -> NDArray[np.int64] | None:
        """Return the fixed partition of a model to start from, if it has one of the right size."""
        if model is None or model.graph.learned:
            return None
        if isinstance(model, OneVsAll) != (self.config.index.kind == "all"):
            return None
        if model.graph.n_clusters != self.config.index.n_clusters:
            return None
        return model.graph.partition().cpu().numpy()

    def _learned(
        self,
        model: EliasModel | None,
        partition: NDArray[np.int64] | None,
        stage: StageConfig,
        position: int,
    ) -> EliasModel:
        if model is not None and model.graph.learned:
            return model
        if model is None or partition is None:
            raise ConfigError(
                f"stages.{stage.name}.learn_graph: the first stage needs the fixed graph, or a "
                "model with a learned one to start from"
            )
        with self.timed("edges"):
            return self.initializer.init_learned_graph(model, partition, stage, position)

    def _train(self, model: EliasModel, place: _Place, resumed: Checkpoint | None = None) -> None:
        """Train one stage, and keep what came of it."""
        with nullcontext() if self.keeper is None else self.keeper.interruption.deferred():
            with self.timed(place.stage.name):
                best_epoch = self._loop(model, place, resumed).run()
            self.report_stage(place.stage, model, best_epoch)
            if self.keeper is not None:
                done = Checkpoint({}, {})
                make = partial(self._checkpoint, model, place, lambda: done)
                self.keeper.after_stage(place.stage.name, make)

    def _loop(self, model: EliasModel, place: _Place, resumed: Checkpoint | None) -> StageLoop:
        keeper = self.keeper

        def keep(where: str, make: Callable[[], Checkpoint]) -> None:
            assert keeper is not None
            keeper.after_step(where, partial(self._checkpoint, model, place, make))

        return StageLoop(
            model=model,
            stage=place.stage,
            config=self.config,
            points=self.points,
            rng=np.random.default_rng([self.config.member_seed, place.position]),
            validate=self.validate,
            report=self.report_epoch,
            keep=None if keeper is None else keep,
            resumed=resumed,
            world=self.world,
            position=place.position,
        )

    def _checkpoint(
        self, model: EliasModel, place: _Place, progress: Callable[[], Checkpoint]
    ) -> Checkpoint:
        """Return the model, where it is, and how far its stage is; no epoch: it is done."""
        done = progress()
        graph = model.graph
        facts = {"alpha": model.alpha, "beta": graph.beta, "learned": graph.learned}
        tensors = add_prefix(WEIGHTS, model.state_dict()) | random_state(self.device)
        if place.partition is not None:
            tensors["partition"] = torch.from_numpy(place.partition)
        return Checkpoint(
            {
                "position": place.position,
                "stage": place.stage.name,
                "model": facts,
                **done.metadata,
            },
            tensors | done.tensors,
        )

    def _take_up(self, kept: Checkpoint) -> tuple[EliasModel, NDArray[np.int64] | None]:
        """Return the model of a checkpoint and its partition; random numbers go on from there."""
        facts, tensors = kept.metadata["model"], strip_prefix(WEIGHTS, kept.tensors)
        n_labels = self.points.labels.shape[1]
        rows = self.initializer.label_rows(n_labels)
        model: EliasModel
        if self.config.index.kind == "all":
            model = OneVsAll(self.encoder, n_labels, rows)
        else:
            graph = LabelGraph(
                tensors["graph.edge_labels"],
                n_labels,
                facts["beta"],
                edge_logits=tensors["graph.edge_logits"] if facts["learned"] else None,
                removed_log=tensors.get("graph.removed_log"),
            )
            model = EliasModel(self.encoder, graph, facts["alpha"], rows)
        if tensors["labels.weight"].dtype == torch.bfloat16:
            model.compact()
        model.load_state_dict(tensors)
        restore_random_state(kept.tensors, self.device)
        where = (
            "after {stage}" if "epoch" not in kept.metadata else "{stage} epoch {epoch} step {step}"
        )
        logger.info("resumed %s", where.format_map(kept.metadata))
        partition = kept.tensors.get("partition")
        return model.to(self.device), None if partition is None else partition.numpy()

    def _clusters(self, before: NDArray[np.int64] | None, stage: StageConfig) -> NDArray[np.int64]:
        """Return the partition that a stage with the fixed graph trains on."""
        if before is not None and not stage.cluster_with_encoder:
            return before
        with self.timed("clusters"):
            return self.initializer.cluster_labels(stage.cluster_with_encoder)

    def _fixed(
        self,
        before: EliasModel | None,
        partition: NDArray[np.int64],
        stage: StageConfig,
        fresh_clusters: bool,
        *,
        keep_labels: bool,
    ) -> EliasModel:
        """Return a model on the partition, with what the stage keeps of the one before."""
        model = self.initializer.build_model(partition)
        self.initializer.init_classifiers(model, stage, partition)
        if before is not None and not fresh_clusters:
            model.clusters = before.clusters
        if before is not None and keep_labels:
            model.labels = before.labels
        return model


class ModelTraining:
    """The training of one model: the corpus made ready, then the stages."""

    def __init__(
        self,
        config: ResolvedConfig,
        corpus: Corpus,
        run: Run,
        device: torch.device,
        init_from: Elias | None,
        world: World = SingleProcess(),
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
            with self.run.replaying(resumed is not None):
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
                keeper=checkpoint_writer(self.run, self.world),
                world=self.world,
                setup_from=None if self.setup is None else points.take(self.setup),
            )
            first_encoder = self._first_encoder(encoder)
            trained = stages.run(self._first_model(encoder), resumed)
        if self.is_last:
            if self.run.checkpoints is not None and not self.world.is_rank0:
                self.run.checkpoints.join()
            self.world.leave()

        def finished() -> Elias:
            model = self._elias(trained.eval())
            model.first_encoder = first_encoder
            if self.config.rerank.enabled:
                self._add_reranker(model, train_split)
            model.metadata["timings"] = rounded(self.run.timings)
            return model

        return self.world.run_on_rank0(finished)

    def _made_ready(self) -> tuple[Split, TextEncoder, csr_matrix | None]:
        """Return the points to train on, the encoder and bags of words; tokenise all points."""
        train_split, self.held_out = validation_split(self.corpus, self.config)
        self.setup = setup_rows(train_split, self.config)
        chosen = train_split if self.setup is None else train_split.take(self.setup)
        with self.run.timed("encoder"):
            encoder = self._encoder(chosen)
        with self.run.timed("tokens"):
            splits = self._split_by_name(train_split)
            self.tokens = self.world.rank0_first(
                lambda: {name: cached_tokens(split, encoder) for name, split in splits.items()}
            )
            bow = bag_of_words(chosen) if self.world.is_rank0 else None
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
        n_setup = bow.shape[0]
        sizes = Sizes.measure(
            encoder,
            train_split.labels,
            self.tokens["train"],
            self.config,
            n_setup=n_setup,
            words_per_text=bow.nnz / max(1, n_setup),
            n_processes=self.world.size,
        )
        estimate = estimate_memory(
            sizes,
            self.config,
            self.device,
            resident=resident_bytes(),
            keeps_checkpoints=self.run.folder is not None,
            validates=self.held_out is not None,
        )
        estimate.check(ignore=self.ignore_memory)

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
            features = RankerFeatures.fit(
                split_inputs(train_split, model.model.encoder), self.config.rerank
            )
            validation = None
            if self.held_out is not None:
                validation = (
                    *self._candidates(model, features, "validation", self.held_out),
                    self.held_out.labels,
                )
            model.reranker = Reranker.fit(
                features,
                *self._candidates(model, features, "train", train_split),
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

    def _candidates(
        self, model: Elias, features: RankerFeatures, name: str, split: Split
    ) -> tuple[Candidates, csr_matrix]:
        config = self.config.rerank
        tokens = self.tokens[name]
        ranked = model.predict_split(
            split, top_k=config.candidates, tokens=tokens, component=model.components[0]
        )
        candidates = Candidates(ranked.ids, ranked.scores)
        if config.embedding != "none":
            candidates = replace(
                candidates, embedding=embed_all(model.first_encoder or model.model.encoder, tokens)
            )
        return candidates, features.transform(split_inputs(split, model.model.encoder))

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
        metadata = {
            "data": corpus_stats(self.corpus).to_dict(),
            "corpus": self.corpus.fingerprint(),
            DATA_SETTINGS: dict(self.corpus.reading),
            "metrics": self.metrics,
        }
        return Elias(model, self.config, self.corpus.label_names, metadata)

    def _split_by_name(self, train_split: Split) -> dict[str, Split]:
        named = {"train": train_split, "validation": self.held_out, "test": self.corpus.test}
        return {name: split for name, split in named.items() if split is not None}

    def _encoder(self, train_split: Split) -> TextEncoder:
        if self.init_from is not None:
            encoder: TextEncoder = copy.deepcopy(self.init_from.model.encoder)
            return encoder
        n_features = None if train_split.features is None else train_split.features.shape[1]
        return initial_encoder(self.config.encoder, train_split.texts, n_features, self.world)

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
        world = SingleProcess() if model.model.labels.whole else self.world
        return world.broadcast_from_rank0(lambda: measure(model, ranked, split, self.corpus, names))

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
            self.run.save_partition(model.graph.partition().cpu().numpy())


def bag_of_words(split: Split) -> csr_matrix:
    """Return bow(x)/‖·‖ of each point for ψ (Eq. 14): given features, else tf-idf of words."""
    if split.features is not None:
        return unit_rows(split.features)
    assert split.texts is not None
    words = Featurizer.fit(split.texts, char_ngrams=(0, 0), min_count=1)
    return words.transform(split.texts)


def _forked(device: torch.device) -> list[int]:
    return [device.index or 0] if device.type == "cuda" else []


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
        >>> list(model.metadata["metrics"])  # of each component, on validation and test points
        ['stage1', 'stage2', 'rerank', 'calibrate', 'names']
    """
    folder = None if out is None else Path(out)
    check_plan(config, folder, overwrite=overwrite)
    place = _RunTarget(folder, pick_device(device), overwrite, ignore_memory)
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
    check_plan(config, folder if world.is_rank0 else None, overwrite=overwrite)
    check_sharded(config)
    place = _RunTarget(folder, world.device, overwrite, ignore_memory)
    return _train(config, corpus, place, init_from, world)


class _RunTarget(NamedTuple):
    """Where a run is computed and kept."""

    folder: Path | None
    device: torch.device
    overwrite: bool
    ignore_memory: bool


def _train(
    config: EliasConfig,
    corpus: Corpus,
    place: _RunTarget,
    init_from: Elias | None,
    world: World = SingleProcess(),
) -> Elias | None:
    resolved = starting_config(config, init_from).resolve(len(corpus.train), corpus.n_labels)
    inputs: dict[str, Any] = {}
    if place.folder is not None or world.shards_labels:
        inputs = run_inputs(corpus, init_from, place.device)
        world.check_same({**inputs, "configuration": model_settings(resolved.to_dict())})
    with (
        limit_threads(),
        open_run(
            place.folder, resolved, overwrite=place.overwrite, inputs=inputs, world=world
        ) as run,
        explain_out_of_memory("training"),
    ):
        members = _members(resolved, corpus, run, place, init_from, world)

        def finished() -> Elias:
            first, *others = members
            model = _together(resolved, first, others, corpus, run) if others else first
            _learn_probabilities(model, corpus, run)
            if run.model_folder is not None:
                with run.timed("save"):
                    model.save_pretrained(run.model_folder)
            return model

        return world.run_on_rank0(finished)


def _members(
    config: ResolvedConfig,
    corpus: Corpus,
    run: Run,
    place: _RunTarget,
    init_from: Elias | None,
    world: World,
) -> list[Elias]:
    """Return all members, those of a run that was stopped as they are, the others trained.

    The processes beside the first only help, and return none.
    """
    n_members = config.ensemble.members
    members, n_done, checkpoint = resume(run, n_members, place.device, world)
    for number in range(n_done, n_members):
        own = run.member(number)
        training = ModelTraining(config.member(number), corpus, own, place.device, init_from, world)
        training.ignore_memory = place.ignore_memory
        training.is_last = number == n_members - 1
        model = training.run_all(checkpoint)
        checkpoint = None
        if model is not None:
            members.append(model)
            if n_members > 1:
                save_member(own, model)
    return members


def _together(
    config: ResolvedConfig, first: Elias, others: Sequence[Elias], corpus: Corpus, run: Run
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
    model.metadata["metrics"][ENSEMBLE] = found
    model.metadata["timings"] = rounded(run.timings)
    return model


def _learn_probabilities(model: Elias, corpus: Corpus, run: Run) -> None:
    """Learn what the scores say of relevance from the points that were held out."""
    with run.timed(PROBABILITIES):
        _, held_out = validation_split(corpus, model.config)
        splits = {"validation": held_out, "test": corpus.test}
        predicted = {
            name: (model.predict_split(split), split.labels)
            for name, split in splits.items()
            if split is not None
        }
        told = add_probabilities(model, predicted)
    run.record(PROBABILITIES, **told)
    model.metadata["timings"] = rounded(run.timings)


def check_plan(config: EliasConfig, out: Path | None, *, overwrite: bool = False) -> None:
    """Refuse what cannot be trained whatever the corpus is, so before a large one is read."""
    metric_names([config.eval.select_by])
    if config.rerank.embedding == "first" and config.encoder.kind == "bag":
        raise ConfigError(
            "rerank.embedding='first' is φ before training, which a bag encoder starts at random; "
            "use 'none' or 'encoder', or a transformer"
        )
    check_loggers(config.tracking)
    if out is not None:
        check_folder(out, overwrite=overwrite)


def check_sharded(config: EliasConfig) -> None:
    """Refuse settings that work in one process but not in several.

    Raises:
        ConfigError: Names the setting and the value to use.
    """
    encoder = config.encoder
    if encoder.kind == "transformer" and encoder.gradient_checkpointing:
        raise ConfigError(
            "encoder.gradient_checkpointing: with several processes dropout is keyed by point, "
            "which the backward pass cannot recompute; set it to false"
        )
    if encoder.kind == "transformer" and encoder.compile != "off":
        raise ConfigError(
            "encoder.compile: with several processes dropout is keyed by point, and torch.compile "
            "would freeze its first value; set it to 'off'"
        )


def starting_config(config: EliasConfig, init_from: Elias | None) -> EliasConfig:
    """Return the configuration with the encoder of the model to start from, if there is one."""
    if init_from is None:
        return config
    theirs, ours = init_from.config.encoder, config.encoder
    if ours.min_count is None:  # to be derived, or taken from the model
        ours = replace(ours, min_count=theirs.min_count)
    if asdict(ours) != asdict(theirs):
        logger.info("the encoder and its settings are those of the model to start from")
    return replace(config, encoder=theirs)
