"""Prepare the corpus, train the stages and the ranker, calibrate scores, and report metrics."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from torch import Tensor

from elias.config import EliasConfig, IndexConfig, ResolvedConfig, ResolvedStage
from elias.data.corpus import Corpus
from elias.data.splits import (
    DATA_SETTINGS,
    TRAINING_SKETCH,
    sample_setup_points,
    text_sketch,
    validation_split,
)
from elias.data.stats import corpus_stats, training_hints
from elias.data.storage import DiskTexts
from elias.distributed import SingleProcess, World
from elias.distributed.sharded_linear import ShardedRows
from elias.errors import ConfigError
from elias.inference.predict import (
    ENSEMBLE,
    SearchOptions,
    add_embedding,
    cached_tokens,
    join_added,
    predict,
    rank_candidates,
    search_share,
    split_inputs,
)
from elias.inference.predictor import Elias
from elias.metrics import EVALUATED, REPORTED, depends_on_ranking, measure, rounded
from elias.model.batch_inference import SEARCH_GRAPHS, embed_all, evaluating
from elias.model.elias import EliasModel
from elias.model.encoder import BagEncoder, TextEncoder
from elias.model.one_vs_all import OneVsAll
from elias.persistence.manifest import MODEL_FOLDER
from elias.predictions import Candidates, Predictions
from elias.rerank.added_labels import AddedLabels, label_vectors
from elias.rerank.calibration import is_word
from elias.rerank.probabilities import PROBABILITIES, fit_probabilities, measure_probabilities
from elias.rerank.reranker import RERANK, Reranker
from elias.rerank.sparse_ranker import RankerFeatures
from elias.text.vectorizer import Featurizer, SplitTexts, bag_of_words
from elias.training.checkpoint import (
    Checkpoint,
    full_checkpoint,
    model_checkpoint,
    rebuild_model,
    restore_state,
    resume,
    save_member,
)
from elias.training.contrastive import paired_labels, train_by_contrast
from elias.training.initialization import INDEXED_POINTS, StageInitializer, initial_encoder
from elias.training.label_texts import (
    LabelPoints,
    enough_covered,
    label_targets,
    labels_with_words,
    text_points,
)
from elias.training.memory import Sizes, estimate_memory
from elias.training.run import Run
from elias.training.stage import EpochReport, Points, StageLoop

if TYPE_CHECKING:
    from elias.text.tokens import Tokens


logger = logging.getLogger(__name__)

REPORTS = "reports"
"""Name of the step that searches and ranks the held-out and the test points to measure a model."""
_POINT_DEVIATION = 0.3  # typical standard deviation of a point's nDCG@5 between two models
_COLLAPSED = 0.9  # warn if a larger share of the texts has the same best label
_COMPARED = 5  # number of labels of each text whose scores are compared over texts
_LEAST_SPREAD = 0.1  # warn if the standard deviation of each label's log-odds is lower
_TINY = 1e-6  # scores are at least this far from 0 and 1 in log-odds
_MIN_COLLAPSED = 20  # minimum number of texts for this warning
_SAMPLED_TEXTS = 1000  # number of texts for estimates about all texts
_MIN_SINGLE = 10  # labels with one training point needed to estimate labels with none
_MIN_HELD_OUT = 10  # labels with only held-out points, for them to be predicted
_MAX_FILLED = 0.7  # share of a GPU's free memory that W_L may use; searching needs the rest


class Trainer:
    """Trainer of one model, or of the members of an ensemble, which also records metrics.

    For each member, `train` calls `prepare` and `train_stages`, and trains the ranker. When all
    members are trained, it fits the probabilities. After the last stage each split is searched
    once, and all components rank the same candidates.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        corpus: Corpus,
        run: Run,
        world: World = SingleProcess(),
        *,
        init_from: Elias | None = None,
        ignore_memory: bool = False,
        on_epoch: Callable[[EpochReport], None] | None = None,
    ) -> None:
        """Split the points into training, validation and test points.

        Args:
            config: The configuration of all members.
            corpus: The points.
            run: Records events, timings and checkpoints.
            world: The processes that train together, and the device of this process.
            init_from: A model to continue training from.
            ignore_memory: Start even if the memory estimate exceeds what is available.
            on_epoch: Called after each epoch; an exception that it raises stops training.
        """
        self.on_epoch = on_epoch
        self.ensemble_config, self.ensemble_run = config, run
        self.corpus, self.device, self.world = corpus, world.device, world
        self.init_from, self.ignore_memory = init_from, ignore_memory
        train, validation = validation_split(corpus, config)
        splits = {"train": train, "validation": validation, "test": corpus.test}
        self.splits = {name: split for name, split in splits.items() if split is not None}
        self._drops_unhelpful = config.eval.drop_unhelpful and "validation" in self.splits
        self._in_ensemble = config.ensemble.members > 1
        self._collapsed: dict[str, ResolvedStage] = {}  # stages whose collapse was reported
        n_held_out = len(self.splits.get("validation", ()))
        self._standard_error = 100 * _POINT_DEVIATION / math.sqrt(max(1, n_held_out))
        self.evaluated = [name for name in self.splits if name != "train"]
        self.setup = sample_setup_points(train, config)
        """Indices of the training points used for vocabulary, clusters and initialisation, or None
        if all points are used."""
        self.continued = init_from if init_from and keeps_labels(init_from, corpus) else None
        """``init_from`` if the corpus starts with its labels, else None."""
        n_given, n_trained = (
            np.bincount(split.labels.indices, minlength=corpus.n_labels)
            for split in (corpus.train, train)
        )
        self.label_counts = n_trained
        """Number of training points of each label (L,)."""
        self.is_earlier = np.zeros(corpus.n_labels, dtype=bool)
        """True for the labels in the index of ``continued`` (L,)."""
        if self.continued is not None:
            self.is_earlier[: self.continued.model.n_labels] = True
            if self.continued.added is not None:
                self.is_earlier[self.continued.added.labels] = False
        self.is_held_out = (n_trained == 0) & (n_given > 0) & ~self.is_earlier
        """True for labels outside `is_earlier` whose points are all held out (L,)."""
        least = 1 if self.continued is None else INDEXED_POINTS
        self.is_beside = (n_trained < least) & ~self.is_earlier & ~self.is_held_out
        """True for other labels with too few training points for the index (L,)."""
        self._start_member(0)

    def _start_member(self, number: int) -> None:
        """Set the configuration and the run of a member, and clear the candidates."""
        self.config = self.ensemble_config.member(number)
        self.run = self.ensemble_run.member(number)
        self.metrics = self.run.metrics()
        self.candidates: dict[str, Candidates] = {}
        """The candidates of each split in the current stage, with φ(x) if it is used later."""
        self._first_embeddings: dict[str, NDArray[np.float32]] = {}
        """φ(x) of each split before training, if the ranker uses it."""
        self._best_added: dict[str, dict[bool, tuple[NDArray[Any], NDArray[Any]]]] = {}
        """The best labels outside the index for each split, see `join_added`."""
        self._validated_epoch = 0  # epoch of the validation candidates, 0 if there are none
        self.featurizer: Featurizer | None = None
        """Converts label texts to bags of words for clustering; None on ranks other than 0."""
        self.uses_all_label_texts = False
        """True if all label texts count in centroids, see `_use_all_label_texts`."""
        self.earlier: Checkpoint | None = None
        """Checkpoint of the best finished stage, which is used if later stages are worse."""

    def train(self) -> Elias | None:
        """Train all unfinished members; return the model on rank 0 and None on other ranks."""
        n_members = self.ensemble_config.ensemble.members
        run, world = self.ensemble_run, self.world
        members, n_finished, checkpoint = resume(run, n_members, self.device, world)
        predictions = world.run_on_rank0(lambda: list(map(self._predict_member, members))) or []
        gpus = [self.device.index or 0] if self.device.type == "cuda" else []
        for number in range(n_finished, n_members):
            self._start_member(number)
            if n_members > 1:
                logger.info("member %d of %d", number + 1, n_members)
            with torch.random.fork_rng(gpus):
                torch.manual_seed(self.config.member_seed)
                # a resumed run prepares the corpus again, with the same result
                with self.run.replaying(checkpoint is not None):
                    self.prepare()
                    start = self._starting_model()
                first_encoder = None
                if self.config.rerank.enabled and self.config.rerank.embedding == "first":
                    first_encoder = copy.deepcopy(self.encoder).to(self.device)
                trained = self.train_stages(start, checkpoint)
            checkpoint = None
            if number == n_members - 1:
                if run.checkpoints is not None and not world.is_rank0:
                    run.checkpoints.written()
                world.leave()
            finished = world.run_on_rank0(partial(self._finish_member, trained, first_encoder))
            if finished is not None:
                members.append(finished[0])
                predictions.append(finished[1])
                if n_members > 1:
                    save_member(self.run, finished[0])
        return world.run_on_rank0(lambda: self._finish(members, predictions))

    # --- prepare: encoder, tokens, bags of words ---

    def prepare(self) -> None:
        """Build the encoder, tokenize all points, and check the memory that training needs.

        The words of each training text are counted once, for the encoder and the bags of words.
        """
        train = self.splits["train"]
        sample = train if self.setup is None else train.take(self.setup)
        symbols = self.config.ranks_every_label
        texts = None if sample.texts is None else SplitTexts(sample.texts, symbols=symbols)
        with self.run.timed("encoder"):
            encoder = initial_encoder(
                self.config.encoder, texts, sample.features, self.init_from, self.world
            )
        with self.run.timed("tokens"):
            splits = dict(self.splits)
            in_memory = self.setup is None and not isinstance(train.texts, DiskTexts)
            if in_memory and isinstance(encoder, BagEncoder):
                splits["train"] = replace(train, texts=texts)
            self.tokens: dict[str, Tokens] = self.world.rank0_first(
                lambda: {name: cached_tokens(split, encoder) for name, split in splits.items()}
            )
            bags = bag_of_words(texts, sample.features) if self.world.is_rank0 else (None, None)
            bow, self.featurizer = bags
        self.label_points = None
        self.label_texts: Points | None = None
        self.contrast_texts: Points | None = None
        loss = self.config.loss
        uses_label_texts = loss.label_text_weight > 0 or loss.label_contrast
        if uses_label_texts and texts and not encoder.reads_features:
            with self.run.timed("label texts"):
                if loss.label_text_weight:
                    self.label_points = self._label_points(encoder, texts, sample.labels)
                if loss.label_contrast and self.continued is None:
                    self.contrast_texts = self._contrast_texts(encoder, texts)
        self.encoder = encoder
        self.points = Points(self.tokens["train"], train.labels)
        self._report_data()
        if bow is not None:  # rank 0 needs most memory
            self._check_memory(bow)
        points = self.points if self.setup is None else self.points.take(self.setup)
        labels_per_point = train.labels.nnz / max(len(train), 1)
        self.initializer = StageInitializer(
            self.config,
            encoder,
            points,
            bow,
            labels_per_point,
            self.world,
            self.label_texts,
            self._label_words(self.label_texts),
        )

    def _label_points(
        self, encoder: TextEncoder, texts: SplitTexts, labels: csr_matrix
    ) -> LabelPoints | None:
        """Return the label texts to train on, or None if label names do not predict the labels."""
        names, weight = self.corpus.label_names, self.config.loss.label_text_weight
        targets = self.world.broadcast_from_rank0(lambda: label_targets(names, texts, labels))
        copies = weight * targets.diagonal()
        # Other labels are scored by their texts. In the index, a label that only held-out points
        # have would be right whenever it is found for one of them, and flatter the label names.
        copies[self.label_counts == 0] = 0
        if self.continued is not None:  # the earlier model was trained on the texts of its labels
            copies[self.is_earlier] = 0
        used = np.flatnonzero(copies)
        self.run.record("label texts", used=len(used), per_epoch=round(float(copies.sum())))
        if copies.sum() < 0.5:
            return None
        self.label_texts = text_points(self.corpus, used, encoder)
        return LabelPoints(self.label_texts.tokens, targets[used], copies[used].astype(np.float64))

    def _contrast_texts(self, encoder: TextEncoder, texts: SplitTexts) -> Points:
        """Return the texts of the labels on which stage 0 trains the encoder."""
        label_texts = self.corpus.label_table.texts()
        known = self.world.broadcast_from_rank0(lambda: labels_with_words(label_texts, texts))
        return text_points(self.corpus, known[self.label_counts[known] > 0], encoder)

    def _label_words(self, label_texts: Points | None) -> csr_matrix | None:
        """Return bags of words of label texts, or None without label texts or a featurizer."""
        if label_texts is None or self.featurizer is None:
            return None
        labels = label_texts.labels.indices.tolist()
        return self.featurizer.transform(self.corpus.label_table.take(labels).texts())

    def _check_memory(self, bow: csr_matrix) -> None:
        """Raise a `RunError` if the run needs more memory than the machine has."""
        tokens, labels = self.points
        n_setup, n_words = bow.shape[0], bow.nnz
        extra = self.label_points
        sizes = Sizes.measure(
            self.encoder,
            labels,
            tokens,
            self.config,
            n_setup,
            n_words / max(1, n_setup),
            0 if extra is None else extra.n_drawn,
            None if extra is None else extra.tokens,
            keeps_checkpoints=self.run.folder is not None,
            validates="validation" in self.splits,
        )
        estimate_memory(sizes, self.config, self.device).check(ignore=self.ignore_memory)

    def _report_data(self) -> None:
        """Record the sizes of the data; warn about labels without points and truncated texts."""
        train = self.splits["train"]
        is_empty = self.label_counts == 0
        is_unseen = is_empty & ~self.is_earlier & ~self.is_held_out
        n_earlier, n_held_out = int((is_empty & self.is_earlier).sum()), int(self.is_held_out.sum())
        self.run.record(
            "data",
            points={name: len(tokens) for name, tokens in self.tokens.items()},
            labels=self.corpus.n_labels,
            labels_without_points=int(is_empty.sum()),
            setup_points=len(train) if self.setup is None else len(self.setup),
            truncated={name: tokens.n_truncated for name, tokens in self.tokens.items()},
            source=None if self.corpus.source is None else str(self.corpus.source.resolve()),
            reading=dict(self.corpus.reading),
        )
        if self.run.number:  # the first member of the ensemble has reported the rest
            return
        for hint in training_hints(train, self.corpus.n_labels):
            logger.warning("%s", hint)
        of_all = f"of {len(is_empty):,} labels have"
        if is_unseen.any():
            message = "%s %s no training points and can only be predicted by their names"
            n_tested = 0
            if "test_size" in self.corpus.reading and "test" in self.splits:
                n_tested = is_unseen[np.unique(self.splits["test"].labels.indices)].sum()
            if n_tested:
                message += f"; the points of {n_tested:,} are in the test split: "
                message += "--test-size 0 trains on all points"
            logger.warning(message, f"{is_unseen.sum():,}", of_all)
        if n_held_out:
            message = "%s %s only held-out points, so training does not see them"
            logger.info(message, f"{n_held_out:,}", of_all)
        if n_earlier:
            message = "%s %s no training points and keep the classifiers of the initial model"
            logger.info(message, f"{n_earlier:,}", of_all)
        warn_of_truncation(self.tokens, self.encoder, train.texts)

    def _starting_model(self) -> EliasModel | None:
        """Return a copy of ``init_from`` with the new labels of the corpus, or None.

        It is None if ``init_from`` has no label of the corpus.
        """
        if self.continued is None:
            return None
        model = copy.deepcopy(self.continued.model)
        model.encoder = self.encoder
        is_new = ~self.is_earlier
        if is_new[model.n_labels :].any() or (is_new & (self.label_counts > 0)).any():
            self.encoder.to(self.device)
            self.encoder.prepare(self.device)
            with self.run.timed("new labels"):
                model = self.initializer.add_labels(model.to(self.device), is_new)
        return model

    # --- stages ---

    def train_stages(
        self, init_from: EliasModel | None = None, resumed: Checkpoint | None = None
    ) -> EliasModel:
        """Train all stages in order, from scratch or from a model with the same labels.

        Classifiers and clusters of ``init_from`` are kept. If it has a learned graph, training
        starts with the first stage that learns a graph. A checkpoint resumes training within its
        stage or, if that stage is finished, with the next one. With several processes, rank 0
        returns the whole model; other ranks return a model with only their rows of W_L.
        """
        self.world.broadcast_tensors(list(self.encoder.state_dict().values()))
        if init_from is not None and self.world.shards_labels:
            init_from.labels = ShardedRows.of(self.world, init_from.labels)
        initial_encoder = {name: t.clone() for name, t in self.encoder.state_dict().items()}
        if resumed is None and self.init_from is None:
            self._train_by_contrast(initial_encoder)
        SEARCH_GRAPHS.clear()  # frees the graphs of other models, such as earlier members
        self.encoder.to(self.device)
        self.encoder.prepare(self.device)
        model, partition = init_from, self._partition_of(init_from)
        if resumed is None:
            first = self._first_stage(init_from)
            before = init_from if self.continued is None else self.continued.model
            if not self.run.number:  # the settings of all members are the same
                warn_of_unused_settings(self.config, first, before)
        else:
            first = resumed.metadata["position"]
            if resumed.metadata.get("all_label_texts"):
                self._use_all_label_texts()
            model = self._rebuild(resumed)
            self.earlier, partition = restore_state(resumed, self.device)
            if "epoch" in resumed.metadata:
                self._train_stage(model, first, partition, resumed)
            first += 1
        for position in range(first, len(self.config.stages)):
            stage = self._stage(position)
            if stage.learn_graph:
                model, partition = self._with_learned_graph(model, partition, position)
            else:
                if not stage.keep_encoder:
                    self.encoder.load_state_dict(initial_encoder)
                keep_labels = stage.keep_labels or model is init_from
                model, partition = self._with_fixed_graph(
                    model, partition, stage, keep_labels=keep_labels
                )
            if self.config.index.label_storage == "compact":
                model.compact()
            model.to(self.device)
            self._train_stage(model, position, partition)
        assert model is not None
        model = self._better_stage(model)
        model.labels.float()
        return self._gathered(model)

    def _first_stage(self, init_from: EliasModel | None) -> int:
        """Return the index of the first stage to train."""
        learning = [i for i, stage in enumerate(self.config.stages) if stage.learn_graph]
        if init_from is None or not init_from.graph.learned or not learning or learning[0] == 0:
            return 0
        skipped = ", ".join(stage.name for stage in self.config.stages[: learning[0]])
        logger.info("%s is skipped, because the initial model has a learned graph", skipped)
        return learning[0]

    def _partition_of(self, model: EliasModel | None) -> NDArray[np.int64] | None:
        """Return the cluster of each label of a model with a fixed graph of the configured size.

        Return None for any other model.
        """
        index = self.config.index
        if (
            model is None
            or model.graph.learned
            or isinstance(model, OneVsAll)
            or model.graph.n_clusters != index.n_clusters
        ):
            return None
        parents = model.graph.strongest_parents().cpu().numpy()
        new = np.flatnonzero(parents == model.graph.n_clusters)  # labels without edges
        parents[new] = np.arange(len(new)) % model.graph.n_clusters
        return np.asarray(parents)

    def _train_by_contrast(self, initial_encoder: dict[str, Tensor]) -> None:
        """Train the encoder to compare texts before the first stage, on rank 0 (stage 0).

        Skip this if fewer than half of the points have a label to compare, see `enough_covered`.
        Restore the initial encoder if it is better on the held-out points.
        """
        encoder, texts, stage = self.encoder, self.contrast_texts, self.config.stages[0]
        labels = self.points.labels
        if texts is None or not enough_covered(labels, paired_labels(labels, texts)):
            return
        seed, metric = self.config.member_seed, self.config.eval.select_by
        message = "contrastive training: loss %.4f"
        with self.run.timed("contrast"):
            encoder.to(self.device)
            before = self._score_of_centroids() if self._drops_unhelpful else None
            loss = self.world.broadcast_from_rank0(
                lambda: train_by_contrast(encoder, self.points, texts, stage, seed)
            )
            self.world.broadcast_tensors(list(encoder.state_dict().values()))
            if before is None:
                logger.info(message, loss)
                return
            after = self._score_of_centroids()
            message += "; on held-out points, %s of the nearest centroids is %.2f (before: %.2f)"
            logger.info(message, loss, metric, after, before)
            if after < before:
                logger.info("contrastive training did not help; using the encoder as it was before")
                encoder.load_state_dict(initial_encoder)
            rerank = self.config.rerank
            if not len(texts.tokens):  # all labels were represented by other points
                return
            if not (rerank.enabled and rerank.calibrate and rerank.names):
                return  # only these can tell that a text seldom has the label it names
            reliable, score = self.initializer, max(before, after)
            self._use_all_label_texts()
            with_all = self._score_of_centroids()
            if with_all > score + self._standard_error:
                logger.info("all label texts raise %s to %.2f, so they are used", metric, with_all)
            else:
                self.initializer, self.uses_all_label_texts = reliable, False

    def _use_all_label_texts(self) -> None:
        """Include all label texts in centroids, not only those whose names predict their labels.

        Classifiers start at these centroids. Later stages keep the classifiers instead of starting
        new ones, which would lose the information of the label texts.
        """
        words = self._label_words(self.contrast_texts)
        self.initializer = replace(
            self.initializer, label_texts=self.contrast_texts, label_bow=words
        )
        self.uses_all_label_texts = True

    def _stage(self, position: int) -> ResolvedStage:
        """Return the settings of a stage, changed if `uses_all_label_texts` is True."""
        stage = self.config.stages[position]
        if not self.uses_all_label_texts:
            return stage
        return replace(stage, first_classifiers="centroids", keep_labels=True)

    def _score_of_centroids(self) -> float:
        """Return the validation metric of ranking labels by the cosine of φ and their centroids."""
        stage, metric = self.config.stages[0], self.config.eval.select_by
        stage = replace(stage, first_classifiers="centroids")
        model = self.initializer.build_model(None, stage).to(self.device)
        predictions = self._stage_predictions(model, self._candidates(model, "validation"))
        self.candidates.clear()
        return self.world.broadcast_from_rank0(
            lambda: self._measure(predictions, "validation", [metric])[metric]
        )

    def _cluster(self, with_encoder: bool) -> NDArray[np.int64]:
        with self.run.timed("clusters"):
            return self.initializer.cluster_labels(with_encoder)

    def _with_fixed_graph(
        self,
        before: EliasModel | None,
        clusters: NDArray[np.int64] | None,
        stage: ResolvedStage,
        *,
        keep_labels: bool,
    ) -> tuple[EliasModel, NDArray[np.int64] | None]:
        """Build the model of a stage with a fixed graph, or of a one-vs-all stage.

        Also return the cluster of each label, or None for one-vs-all. The clusters of the model
        ``before`` are kept, unless the stage clusters the labels again.
        """
        partition = clusters
        if stage.score_all:
            partition = None
        elif clusters is None or stage.cluster_with_encoder:
            partition = self._cluster(stage.cluster_with_encoder)
        model = self.initializer.build_model(partition, stage)
        if before is not None and clusters is partition is not None:
            model.clusters = before.clusters
        if before is not None and keep_labels:
            model.labels = before.labels
        return model, partition

    def _with_learned_graph(
        self, model: EliasModel | None, partition: NDArray[np.int64] | None, position: int
    ) -> tuple[EliasModel, NDArray[np.int64] | None]:
        """Build the model of a stage that learns the graph. Also return the initial clusters.

        A one-vs-all model keeps its classifiers, and its labels are clustered with its encoder.
        """
        stage = self._stage(position)
        if model is None:
            raise ConfigError(
                f"stages.{stage.name}.learn_graph: the first stage cannot learn the graph; add a "
                "stage before it, or start from a trained model with init_from (--init-from)"
            )
        if model.graph.learned:
            return model, partition
        if partition is None:
            partition, labels = self._cluster(with_encoder=True), model.labels
            self.run.save_partition(partition)
            model = self.initializer.build_model(partition, stage)
            model.labels = labels
            model.to(self.device)
        with self.run.timed("edges"):
            self.initializer.init_learned_graph(model, partition, stage, position)
        return model, partition

    def _train_stage(
        self,
        model: EliasModel,
        position: int,
        partition: NDArray[np.int64] | None,
        resumed: Checkpoint | None = None,
    ) -> None:
        """Train one stage, record its metrics and save a checkpoint."""
        run, stage = self.run, self.config.stages[position]
        checkpoints, validate = run.checkpoints, partial(self._validate, stage)
        self.candidates.clear()
        self._validated_epoch = 0

        def checkpoint(progress: Callable[[], Checkpoint] | None = None) -> Checkpoint:
            """Return a checkpoint within the stage, or after the stage if ``progress`` is None."""
            state = None if progress is None else progress()
            current = self._snapshot(model, position)
            return full_checkpoint(current, self.device, partition, self.earlier, state)

        def keep(where: str, progress: Callable[[], Checkpoint]) -> None:
            if checkpoints is not None:
                checkpoints.after_step(run, where, partial(checkpoint, progress))

        with nullcontext() if checkpoints is None else run.interruption.deferred():
            with run.timed(stage.name):
                best_epoch = StageLoop(
                    model=model,
                    stage=stage,
                    config=self.config,
                    points=self.points,
                    rng=np.random.default_rng([self.config.member_seed, position]),
                    validate=validate if "validation" in self.splits else None,
                    report=self._report_epoch,
                    keep=keep,
                    resumed=resumed,
                    world=self.world,
                    position=position,
                    label_points=self.label_points,
                ).run()
            self.report_stage(stage, model, best_epoch)
            best = -math.inf if self.earlier is None else self.earlier.metadata["score"]
            if self._score(stage) > best and position + 1 < len(self.config.stages):
                current = self._snapshot(model, position)
                weights = {name: t.detach().cpu().clone() for name, t in current.tensors.items()}
                self.earlier = Checkpoint(current.metadata, weights)
            if checkpoints is not None:
                checkpoints.after_stage(run, stage.name, checkpoint)

    def _validate(self, stage: ResolvedStage, model: EliasModel) -> dict[str, float]:
        """Return the metrics on the validation points after an epoch."""
        names = list(dict.fromkeys(["P@1", "P@5", "nDCG@5", "R@100", self.config.eval.select_by]))
        self.candidates.clear()
        predictions = self._stage_predictions(model, self._candidates(model, "validation"))
        problem = find_collapse(predictions, self.splits["validation"].labels)
        if problem and stage.name not in self._collapsed:
            self._collapsed[stage.name] = stage
            logger.warning(
                "%s: the encoder may have collapsed; if later epochs are no better, train with %s",
                *(problem, halved_rates(stage, self.config.encoder.kind)),
            )
        return self.world.broadcast_from_rank0(
            lambda: self._measure(predictions, "validation", names)
        )

    def _report_epoch(self, report: EpochReport) -> None:
        if report.validation:
            self._validated_epoch = report.epoch
        self.run.record("epoch", **report._asdict())
        metrics = ", ".join(
            f"{name} {value:.2f}"
            for name, value in report.validation.items()
            if depends_on_ranking(name, self.corpus.n_labels)
        )
        losses = f"{report.loss:.4f}" + (f"; validation {metrics}" if metrics else "")
        title = f"{report.stage} epoch {report.epoch}"
        logger.info("%s: loss %s (%.1f s)", title, losses, report.seconds)
        if self.on_epoch is not None:
            self.on_epoch(report)

    def report_stage(self, stage: ResolvedStage, model: EliasModel, best_epoch: int) -> None:
        """Measure a trained stage, record its metrics, and keep its candidates."""
        with self.run.timed(REPORTS):
            if best_epoch != self._validated_epoch:  # the weights changed after the last validation
                self.candidates.clear()
            predictions = {
                name: self._stage_predictions(model, self._candidates(model, name))
                for name in self.evaluated
            }
            metrics = self.world.broadcast_from_rank0(lambda: self._measure_all(predictions))
        self._report(stage.name, metrics, best_epoch=best_epoch)
        if not model.graph.learned and not isinstance(model, OneVsAll):
            self.run.save_partition(model.graph.strongest_parents().cpu().numpy())

    def _snapshot(self, model: EliasModel, position: int) -> Checkpoint:
        """Return a checkpoint of the model and the score of its stage, without optimizer state."""
        stage = self.config.stages[position]
        checkpoint = model_checkpoint(model, position, stage.name, self._score(stage))
        checkpoint.metadata["all_label_texts"] = self.uses_all_label_texts
        return checkpoint

    def _rebuild(self, checkpoint: Checkpoint) -> EliasModel:
        """Return the model of a checkpoint."""
        n_labels, one_vs_all = self.points.labels.shape[1], self.config.index.kind == "all"
        rows = self.initializer.label_rows(n_labels)
        model = rebuild_model(checkpoint, self.encoder, n_labels, rows, one_vs_all=one_vs_all)
        return model.to(self.device)

    def _score(self, stage: ResolvedStage) -> float:
        """Return the validation metric of a stage, or -inf if `_better_stage` cannot use it."""
        can_return = self._drops_unhelpful and not (self.world.shards_labels or self._in_ensemble)
        if not can_return or stage.name not in self.metrics:
            return -math.inf
        return self.metrics[stage.name]["validation"][self.config.eval.select_by]

    def _better_stage(self, model: EliasModel) -> EliasModel:
        """Return the model of an earlier stage if the last stage is clearly worse.

        Stages are compared on held-out points. The difference must exceed about one standard error
        of nDCG@5.
        """
        last, earlier = self.config.stages[-1], self.earlier
        if earlier is None or self._score(last) >= earlier.metadata["score"]:
            return model
        stages = self.config.stages[: earlier.metadata["position"] + 1]
        loss, error = earlier.metadata["score"] - self._score(last), self._standard_error
        names, metric = (last.name, stages[-1].name), self.config.eval.select_by
        message = "%s is worse than %s on held-out points (its %s is %.2f instead of %.2f)"
        compared = (*names, metric, self._score(last), earlier.metadata["score"])
        if loss <= error:
            message += ", but by less than the standard error of about %.2f, so it is kept"
            logger.info(message, *compared, error)
            return model
        logger.warning(f"{message}, so the model of %s is kept", *compared, stages[-1].name)
        model = self._rebuild(earlier)
        config = replace(self.config, stages=stages)
        if isinstance(model, OneVsAll):
            index = IndexConfig(kind="all", label_storage=config.index.label_storage)
            flat = EliasConfig(index=index, rerank=config.rerank)
            flat = flat.resolve(len(self.points.tokens), model.n_labels)
            config = replace(config, index=flat.index, rerank=flat.rerank)
        self.config = self.initializer.config = config
        self.candidates.clear()
        return model

    def _gathered(self, model: EliasModel) -> EliasModel:
        """Gather the label classifiers W_L on rank 0, on the CPU if they do not fit on the GPU."""
        whole = model.labels.gathered() if isinstance(model.labels, ShardedRows) else None
        if whole is None:
            return model
        model.labels = whole
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            if whole.weight.nbytes > _MAX_FILLED * free:
                message = "the ranker is trained on the CPU: the classifiers do not fit on the GPU"
                logger.warning(message)
                return model.to("cpu")
        return model.to(self.device)

    # --- candidates: each split is searched once after the last stage ---

    def _search(self, model: EliasModel, name: str, top_k: int) -> Candidates:
        """Return the candidates of a split. If W_L is sharded, all processes must call this.

        They include φ(x) if the ranker or labels outside the index use it later.
        """
        rerank = self.config.rerank
        embedding = rerank.embedding if rerank.enabled else "none"
        beside = bool((self.is_beside | self.is_held_out).any()) and not self.encoder.reads_features
        embed = embedding == "encoder" or (embedding == "none" and name != "train" and beside)
        options = SearchOptions(top_k + self.splits[name].max_filtered, embed=embed)
        # on a CPU, the search of few texts depends on the mode; a resumed run must round equally
        with evaluating(model) if self.device.type == "cpu" else nullcontext():
            return search_share(model, self.tokens[name], self.config.index, options)

    def _candidates(self, model: EliasModel, name: str) -> Candidates:
        """Return the candidates of a split, enough for all components. They are cached."""
        if name not in self.candidates:
            n_reranked = self.config.rerank.candidates if self.config.rerank.enabled else 0
            top_k = n_reranked if name == "train" else max(n_reranked, EVALUATED)
            self.candidates[name] = self._search(model, name, top_k)
        return self.candidates[name]

    def _embedded_candidates(self, model: Elias, name: str) -> Candidates:
        """Return the candidates of a split, with embeddings φ(x) if the ranker uses them."""
        candidates, rerank = self._candidates(model.model, name), self.config.rerank
        if not rerank.enabled or rerank.embedding == "none":
            return candidates
        if model.first_encoder is None:
            return self._with_embedding(name, model.model.encoder)
        if name not in self._first_embeddings:
            self._first_embeddings[name] = embed_all(model.first_encoder, self.tokens[name])
        return replace(candidates, embedding=self._first_embeddings[name])

    def _with_embedding(self, name: str, encoder: TextEncoder) -> Candidates:
        """Return the cached candidates of a split with φ(x), which is computed if it is missing."""
        candidates = add_embedding(self.candidates[name], encoder, self.tokens[name])
        self.candidates[name] = candidates
        return candidates

    def _ranker_candidates(self, model: Elias, name: str) -> Candidates:
        """Return the best candidates of a split, without filtered labels, for ranker training."""
        count, split = self.config.rerank.candidates, self.splits[name]
        candidates = self._embedded_candidates(model, name)
        if split.filters is None or not len(split.filters):
            return candidates.take(k=count)
        candidates = candidates.take(k=count + split.max_filtered)
        ranked = split.drop_filtered(self._stage_predictions(model.model, candidates), count)
        return replace(candidates, ids=ranked.ids, scores=ranked.scores)

    def _stage_predictions(self, model: EliasModel, candidates: Candidates) -> Predictions:
        names = self.corpus.label_names
        return Predictions(candidates.ids, candidates.scores, model.n_labels, names)

    # --- ranker ---

    def _finish_member(
        self, trained: EliasModel, first_encoder: TextEncoder | None
    ) -> tuple[Elias, dict[str, Predictions]]:
        """Add the ranker to a trained member. Return the member and its unfiltered predictions."""
        names = self.corpus.label_names
        model = Elias(
            trained.eval(), self.config, names, self._metadata(), first_encoder=first_encoder
        )
        psi: dict[str, csr_matrix] = {}
        if self.config.rerank.enabled:
            with self.run.timed(RERANK):
                model.reranker, psi = self._fit_reranker(model)
            self._report_ranker(model.reranker)
        with self.run.timed("added labels"):
            model.added = self._labels_beside(model)
        with self.run.timed(REPORTS):
            ranked = {name: self._rank_split(model, name, psi.get(name)) for name in self.evaluated}
            for cache in (self.candidates, self._first_embeddings):
                cache.pop("train", None)
            joined = {name: self._join_added(model, name, ranked[name]) for name in self.evaluated}
            for component in model.components[0 if model.added is not None else 1 :]:
                predictions = {name: joined[name][component] for name in self.evaluated}
                self._report(component, self._measure_all(predictions))
        self._drop_unhelpful(model)
        model.metadata["timings"] = rounded(self.run.timings)
        final = joined if self._in_ensemble else ranked  # without added labels, see `_finish`
        return model, {name: final[name][model.last_alone] for name in self.evaluated}

    def _metadata(self) -> dict[str, Any]:
        """Return the metadata of a model. Its metrics and timings are filled in later."""
        source = self.corpus.source
        return {
            "data": corpus_stats(self.corpus).to_dict(),
            "corpus": self.corpus.fingerprint(),
            "source": source and source.resolve().name.encode("utf8", "replace").decode("utf8"),
            DATA_SETTINGS: dict(self.corpus.reading),
            TRAINING_SKETCH: text_sketch(self.corpus.train.texts or []),
            "metrics": self.metrics,
        }

    def _rank_split(
        self, model: Elias, name: str, psi: csr_matrix | None
    ) -> dict[str, Predictions]:
        """Return the predictions of all components for a split, whose features are ``psi``.

        Held-out points are ranked by components that were not fitted on them.
        """
        split, candidates = self.splits[name], self._embedded_candidates(model, name)
        inputs, top_k = split_inputs(split, self.encoder), EVALUATED + split.max_filtered
        # not in an ensemble, because a resumed run cannot cross-fit the members it loads
        reranker = None if self._in_ensemble else model.reranker
        if name != "validation" or reranker is None or not reranker.cross_fitted:
            return rank_candidates(model, candidates, inputs, model.components, top_k, psi)
        assert psi is not None
        count = self.config.rerank.candidates
        ranked = rank_candidates(model, candidates, inputs, model.components[:1], top_k)
        return ranked | reranker.rerank_cross_fitted(candidates, psi, count=count, width=top_k)

    def _fit_reranker(self, model: Elias) -> tuple[Reranker, dict[str, csr_matrix]]:
        """Train the ranker on the training points, and its calibration on held-out points.

        Also return the features of the held-out points, so that ranking can reuse them.
        """
        config, psi = self.config.rerank, {}
        split, n_train = self.splits.get("validation"), len(self.splits["train"])
        inputs = split_inputs(self.splits["train"], self.encoder)
        held_out = () if split is None else split_inputs(split, self.encoder)
        every_label = self.config.ranks_every_label
        # not in an ensemble, where held-out points are not cross-fitted
        refit = not self._in_ensemble and split is not None
        if isinstance(inputs, Sequence):
            inputs = SplitTexts([*inputs, *held_out] if refit else inputs, symbols=every_label)
        earlier = self._earlier_reranker()
        features = RankerFeatures.fit(inputs, config) if earlier is None else earlier.features
        all_psi = features.transform(inputs)
        validation, held_out_psi = None, None
        if split is not None:
            with_held_out = all_psi.shape[0] > n_train
            held_out_psi = all_psi[n_train:] if with_held_out else features.transform(held_out)
            psi["validation"] = held_out_psi
            if every_label and with_held_out and earlier is None:
                psi["validation"] = features.as_new(held_out_psi, all_psi[:n_train])
            candidates = self._ranker_candidates(model, "validation")
            validation = (candidates, psi["validation"], split.labels)
        reranker = Reranker.fit(
            features,
            self._ranker_candidates(model, "train"),
            all_psi[:n_train],
            self.splits["train"].labels,
            config,
            validation=validation,
            filtered=None if split is None else split.filtered_labels(),
            label_names=self.corpus.label_names,
            every_label=every_label,
            refit_psi=held_out_psi if refit else None,
            seed=self.config.member_seed % 2**32,
            earlier=earlier,
        )
        return reranker, psi

    def _earlier_reranker(self) -> Reranker | None:
        """Return the ranker of ``continued`` if this run has the same settings, else None."""
        if self.continued is None:
            return None
        ours, theirs = self.config.rerank, self.continued.config.rerank
        settings = ("embedding", "word_ngrams", "char_ngrams", "loss")
        changed = [name for name in settings if getattr(ours, name) != getattr(theirs, name)]
        if changed and self.continued.reranker is not None:
            keys = ", ".join(f"rerank.{name}" for name in changed)
            logger.warning("the ranker of the initial model is not used: %s differs", keys)
        return None if changed else self.continued.reranker

    def _report_ranker(self, ranker: Reranker) -> None:
        """Record the properties of the ranker, and log why components are missing."""
        calibrated, named = ranker.calibration is not None, ranker.by_name is not None
        self.run.record(
            "ranker",
            cost=ranker.cost,
            sharpness=ranker.sharpness,
            calibrated=calibrated,
            names=named,
        )
        config = self.config.rerank
        if config.calibrate and "validation" not in self.splits:
            logger.info("scores are not calibrated, because no points are held out")
        elif config.names and calibrated and not named:
            logger.info("label names are not used, because they share no words with the texts")

    def _labels_beside(self, model: Elias) -> AddedLabels | None:
        """Return the labels that are scored by their texts instead of the index.

        These labels have no training points. The examples of a label that has only held-out points
        are these points, so it is never predicted for held-out points. Fewer than `_MIN_HELD_OUT`
        of them are not worth the time that they would cost each prediction. If a model is trained
        further, its new labels with fewer than `INDEXED_POINTS` points are included, with these
        points as examples. Labels that were added to it with examples keep their rows.
        """
        splits = {"train": self.is_beside}
        if self.is_held_out.sum() >= _MIN_HELD_OUT:
            splits["validation"] = self.is_held_out
        parts = [self._part_beside(model, name, labels) for name, labels in splits.items()]
        if self.continued is not None and self.continued.added is not None:
            # the texts of earlier examples are no longer given, so keep their vectors
            earlier, ids = self.continued.added, np.arange(self.corpus.n_labels)
            has_examples = np.isin(ids, earlier.labels[earlier.n_examples > 0])
            has_examples &= self.is_beside | self.is_held_out
            has_points = (self.label_counts > 0) | self.is_held_out
            parts = [
                part and part.relabel(np.where(has_examples & ~has_points, -1, ids))
                for part in parts
            ]
            parts.append(earlier.relabel(np.where(has_examples, ids, -1)))
        added = [part for part in parts if part is not None]
        if not added:
            return None
        return reduce(add, added).named(model.label_table, model.model, model.reranker)

    def _part_beside(
        self, model: Elias, name: str, is_beside: NDArray[np.bool_]
    ) -> AddedLabels | None:
        """Return some labels of `_labels_beside`, with points of one split as examples.

        Labels whose names have no letter are left out. Return None if no label remains.
        A new text has some of these labels. The mean number of those without any points is
        estimated as the number of labels with a single training point, divided by the number of
        points (Good and Turing). With fewer than `_MIN_SINGLE` such labels, there is no estimate.
        The mean number of those with held-out points is known.
        """
        table, chosen = model.label_table, np.flatnonzero(is_beside)
        named = np.array([is_word(table[label]) for label in chosen.tolist()], dtype=bool)
        if self.encoder.reads_features or not named.any():
            return None
        split, train = self.splits[name], self.splits["train"]
        labels = split.labels.tocsc()[:, is_beside].tocsr()
        rows = np.flatnonzero(np.diff(labels.indptr))
        texts = [] if split.texts is None else [split.texts[row] for row in rows.tolist()]
        seen = ~(self.is_beside | self.is_held_out)
        new, examples = table.take(chosen[named].tolist()), labels[rows][:, named]
        parts = label_vectors(model.model, table, new, texts, examples, seen=seen)
        added = AddedLabels(chosen[named], *parts).named(table, model.model, model.reranker)
        if self.continued is not None:
            return added
        n_relevant, trust = labels.nnz / len(self.corpus.train), 1.0
        if name == "train":
            n_single = int((self.label_counts == 1).sum())
            if n_single < _MIN_SINGLE:
                return added
            n_relevant, trust = n_single / len(train), 0.5
        # the examples of labels with held-out points are no sample of new texts
        sampled = "validation" if name == "train" and "validation" in self.splits else "train"
        sample = np.arange(min(_SAMPLED_TEXTS, len(self.splits[sampled])))
        sample_texts = self.splits[sampled].take(sample).texts
        assert sample_texts is not None
        if sampled == "validation":
            self._candidates(model.model, sampled)
            embedding = self._with_embedding(sampled, model.model.encoder).embedding
            assert embedding is not None
            embedding = embedding[: len(sample)]
        else:
            embedding = embed_all(model.model.encoder, self.tokens[sampled].take(sample))
        n_relevant *= len(added) / is_beside.sum()
        return added.expecting(n_relevant, embedding, sample_texts, trust)

    def _join_added(
        self, model: Elias, name: str, ranked: dict[str, Predictions]
    ) -> dict[str, Predictions]:
        """Merge labels that are scored by their texts into the predictions for a split."""
        if model.added is None:
            return ranked
        split, encoder = self.splits[name], model.model.encoder
        embedding = self._with_embedding(name, encoder).embedding
        assert embedding is not None
        inputs, best_added = split_inputs(split, encoder), self._best_added.setdefault(name, {})
        options = self._options(name)
        return join_added(model, ranked, inputs, options, embedding, best_added)

    def _options(self, name: str) -> SearchOptions:
        """Return the options of the final predictions for a split."""
        blocked = None
        if name == "validation" and self.is_held_out.any():
            blocked = torch.from_numpy(self.is_held_out)
        top_k = EVALUATED + self.splits[name].max_filtered
        return SearchOptions(top_k, blocked=blocked, room_for_added=self._in_ensemble)

    def _drop_unhelpful(self, model: Elias) -> None:
        """Drop the components of the ranker that do not help on the held-out points.

        Keep all components of a model that is trained further: the held-out points may be its
        training points, so components fitted on them would look better than they are.
        """
        if model.reranker is None or not self._drops_unhelpful or self._earlier_reranker():
            return
        metric = self.config.eval.select_by
        scores = {name: self.metrics[name]["validation"][metric] for name in model.components}
        if model.reranker.refitted:  # the ranker was trained on more points than the stage
            scores[model.components[0]] -= self._standard_error
        best = max(reversed(model.components), key=lambda name: scores[name])
        dropped = model.components[model.components.index(best) + 1 :]
        for name in dropped:
            logger.info(
                "%s is not used, because its %s on held-out points is %.2f, but %.2f for %s",
                *(name, metric, scores[name], scores[best], best),
            )
        is_stage = best == model.components[0]
        model.reranker = None if is_stage else model.reranker.up_to(best)

    # --- ensemble and probabilities ---

    def _finish(self, members: list[Elias], predictions: list[dict[str, Predictions]]) -> Elias:
        """Combine the members into one model, fit its probabilities and save it."""
        run, model = self.ensemble_run, members[0]
        splits = {name: self.splits[name] for name in self.evaluated}
        final = predictions[0]
        if len(members) > 1:
            with run.timed(ENSEMBLE):
                model = members[0].joined_by(members[1:], self.ensemble_config)
                for name, split in splits.items():
                    parts = [part[name] for part in predictions]
                    final[name] = Predictions.merge(parts, k=EVALUATED + split.max_filtered)
                metrics = self._measure_all(final)
            run.record("stage", stage=ENSEMBLE, **metrics)
            model.metadata["metrics"][ENSEMBLE] = metrics

        def measured(name: str) -> tuple[Predictions, csr_matrix]:
            return splits[name].drop_filtered(final[name], EVALUATED), splits[name].labels

        with run.timed(PROBABILITIES):
            held_out = measured("validation") if "validation" in splits else (None, None)
            model.probabilities = fit_probabilities(*held_out)
            last = model.last_alone
            # scores of labels outside the index depend on the probabilities
            if len(members) == 1 and model.added is not None:
                for name in splits:
                    final[name] = self._join_added(model, name, {last: final[name]})[last]
                self._report(last, self._measure_all(final))
            quality: dict[str, Any] = {}
            if model.probabilities is not None:
                predicted = {name: measured(name) for name in splits}
                quality = measure_probabilities(model.probabilities, predicted)
                model.metadata[PROBABILITIES] = quality
            if "validation" in splits and (problem := find_collapse(*measured("validation"))):
                first = next(iter(self._collapsed.values()), self.config.stages[-1])
                logger.warning(
                    "the trained model has collapsed: %s; train again with %s",
                    *(problem, halved_rates(first, self.config.encoder.kind)),
                )
        run.record(PROBABILITIES, **quality)
        model.metadata["timings"] = rounded(run.timings)
        if run.folder is not None:
            with run.timed("save"):
                model.save_pretrained(run.folder / MODEL_FOLDER)
        return model

    def _predict_member(self, member: Elias) -> dict[str, Predictions]:
        """Return the final predictions of a member that a resumed run has loaded."""
        last, encoder, predictions = member.last_alone, member.model.encoder, {}
        for name in self.evaluated:
            split = self.splits[name]
            tokens, inputs = cached_tokens(split, encoder), split_inputs(split, encoder)
            options = self._options(name)
            ranked = predict(member, inputs, [last], options, lambda *_, tokens=tokens: tokens)
            predictions[name] = ranked[last]
        return predictions

    # --- metrics ---

    def _measure(self, predictions: Predictions, name: str, names: list[str]) -> dict[str, float]:
        split = self.splits[name]
        predictions = split.drop_filtered(predictions, EVALUATED)
        return measure(self.config.eval, predictions, split, self.corpus, names)

    def _measure_all(self, predictions: Mapping[str, Predictions]) -> dict[str, dict[str, float]]:
        return {name: self._measure(ranked, name, REPORTED) for name, ranked in predictions.items()}

    def _report(self, title: str, metrics: dict[str, dict[str, float]], **values: int) -> None:
        """Record the metrics of a stage or of another component."""
        self.metrics[title] = metrics
        self.run.record("stage", stage=title, **values, **metrics)


def keeps_labels(init_from: Elias, corpus: Corpus) -> bool:
    """Return whether a corpus starts with the labels of a model, as after `join_labels`."""
    return list(corpus.label_names[: init_from.n_labels]) == list(init_from.label_names)


def warn_of_truncation(
    tokens: Mapping[str, Tokens], encoder: Any, texts: Sequence[str] | None
) -> None:
    """Warn about truncated texts, and suggest a number of windows that avoids most truncation.

    Args:
        tokens: The tokens of each split.
        encoder: The encoder, which only truncates texts if it is a transformer.
        texts: The training texts.
    """
    for name, each in tokens.items():
        if each.n_truncated:
            logger.warning(
                "%d of %d %s texts are longer than %d tokens and were truncated",
                *(each.n_truncated, len(each), name, encoder.windows * encoder.max_length),
            )
    if texts is not None and tokens["train"].n_truncated:
        step = -(-len(texts) // _SAMPLED_TEXTS)
        windows = encoder.windows_needed([texts[i] for i in range(0, len(texts), step)])
        if windows > encoder.windows:
            message = "set encoder.windows=%d to read 95%% of the training texts in full"
            logger.warning(message, windows)


def warn_of_unused_settings(
    config: ResolvedConfig, first: int, init_from: EliasModel | None
) -> None:
    """Warn about settings that have no effect in this run.

    These are encoder and cluster settings of stages that learn the graph, and index settings for
    which ``init_from`` keeps its own values.

    Args:
        config: The configuration.
        first: Index of the first stage to train.
        init_from: The model to continue training from, or None.
    """
    for stage in config.stages[first:]:
        defaults = {"keep_encoder": True, "cluster_with_encoder": False}
        changed = [key for key, value in defaults.items() if getattr(stage, key) != value]
        if stage.learn_graph and changed:
            logger.warning(
                "%s: this has no effect, because a stage that learns the graph reuses the "
                "encoder and the clusters of the previous stage",
                ", ".join(f"stages.{stage.name}.{key}" for key in changed),
            )
    if init_from is None or not config.stages[first].learn_graph:
        return
    used, graph = {"alpha": init_from.alpha}, init_from.graph
    if graph.learned:
        n_clusters, n_edges = graph.edge_labels.shape
        used |= {"n_clusters": n_clusters, "edges_per_cluster": n_edges, "beta": graph.beta}
    differ = [key for key, value in used.items() if getattr(config.index, key) != value]
    if differ:
        logger.warning(
            "%s: this has no effect, because the initial model keeps its own values (%s)",
            ", ".join(f"index.{key}" for key in differ),
            ", ".join(f"{used[key]:g}" for key in differ),
        )


def find_collapse(predictions: Predictions, labels: csr_matrix) -> str | None:
    """Return a message if the predictions hardly depend on the text, else None.

    That is so if nearly all texts get the same best label, and either few of them have it, or it
    and the next labels have nearly the same scores for all texts. If most texts have the label,
    scores still depend on the text in a model that has learned something.
    """
    n_points = labels.shape[0]
    if n_points < _MIN_COLLAPSED:
        return None
    first, counts = np.unique(predictions.ids[:, 0], return_counts=True)
    share, label = counts.max() / n_points, first[counts.argmax()]
    if share <= _COLLAPSED:
        return None
    true_share = (labels.indices == label).sum() / n_points
    message = f"{share:.0%} of the held-out texts get the same best label"
    if true_share < share / 2:
        return f"{message}, but only {true_share:.0%} have it"
    ids, scores = predictions.ids[:, :_COMPARED], predictions.scores[:, :_COMPARED]
    odds = np.clip(scores.astype(np.float64), _TINY, 1 - _TINY)
    log_odds = np.log(odds / (1 - odds))
    common, counts = np.unique(ids, return_counts=True)
    common = common[(counts >= n_points / 2) & (common < predictions.n_labels)]
    if max(np.std(log_odds[ids == label]) for label in common) >= _LEAST_SPREAD:
        return None
    lowest, highest = np.percentile(scores[ids == label], (5, 95))
    return f"{message} with nearly the same score ({lowest:.3f} to {highest:.3f})"


def halved_rates(stage: ResolvedStage, encoder_kind: str) -> str:
    """Return the command-line options that halve a stage's learning rates for the encoder."""
    names = ["encoder_lr", "bag_lr"] if encoder_kind == "bag" else ["encoder_lr"]
    return " ".join(
        f"--set stages.{stage.name}.{name}={getattr(stage, name) / 2:g}" for name in names
    )
