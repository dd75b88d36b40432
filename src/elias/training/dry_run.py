"""Estimate the number of parameters, the memory and the epoch time of a run.

The epoch time is extrapolated from a few timed steps, after a warm-up that compiles the kernels. So
is the time of stage 0, if label texts of a sample of the points say that it will be trained.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_matrix

from elias.config import ResolvedConfig, ResolvedStage
from elias.data.corpus import Corpus, Split
from elias.data.splits import sample_setup_points, validation_split
from elias.distributed import SingleProcess
from elias.inference.predict import split_inputs, tokenize
from elias.inference.predictor import Elias
from elias.kernels.device import limit_threads
from elias.model.elias import EliasModel
from elias.model.encoder import TextEncoder
from elias.model.graph import LabelGraph
from elias.model.one_vs_all import OneVsAll
from elias.progress import progress_disabled
from elias.rerank.calibration import is_word
from elias.text.batches import n_batches
from elias.text.vectorizer import SplitTexts, words_of
from elias.training.contrastive import (
    EPOCHS,
    MAX_STEPS,
    PairSampler,
    contrast_batch_size,
    paired_labels,
)
from elias.training.initialization import build_model, initial_encoder
from elias.training.label_texts import enough_covered, labels_with_words, text_points
from elias.training.memory import (
    MemoryCheck,
    MemoryEstimate,
    Sizes,
    estimate_memory,
)
from elias.training.optimizer import Optimizer
from elias.training.stage import Points, StageLoop, torch_on_one_thread
from elias.training.train import check_world

_TIMED_STEPS = 4
_LONG_WARMUP = 20.0  # seconds; after a longer warm-up, a single step is timed
_MIN_TEXTS, _MAX_TEXTS = 1000, 10_000


class DryRun(NamedTuple):
    """The estimated size, memory and time of a run."""

    n_parameters: int
    memory: MemoryEstimate
    fits: list[MemoryCheck]
    remedies: list[str]
    """Suggested changes to the settings. Empty if the run fits into memory."""
    epoch_seconds: dict[str, float]
    """Estimated seconds per epoch, by stage. Empty if no step was timed."""
    n_steps: dict[str, int]
    """Number of steps per epoch, by stage."""
    contrast_seconds: float
    """Estimated seconds of stage 0, without the search for similar texts. 0 if it is skipped."""
    total_seconds: float
    """Estimated seconds of training, if no stage stops early. 0 if no step was timed."""


def estimate_run(
    config: ResolvedConfig,
    corpus: Corpus,
    device: torch.device,
    *,
    init_from: Elias | None = None,
    keeps_checkpoints: bool = True,
) -> DryRun:
    """Estimate the memory of a run. If the run fits, also time a few steps of each stage.

    Under `torchrun`, estimate the memory of each process with its share of W_L, and time no steps.

    Args:
        config: The configuration of the run.
        corpus: The data.
        device: The device to train on.
        init_from: The trained model to start from, if any.
        keeps_checkpoints: Whether the run has a folder and therefore writes checkpoints.

    Raises:
        ConfigError: If the configuration requires kernels that the device does not support.
    """
    check_world(config, SingleProcess(device))
    points, held_out = validation_split(corpus, config)
    rows = sample_setup_points(points, config)
    chosen = points if rows is None else points.take(rows)
    encoder = initial_encoder(config.encoder, chosen.texts, chosen.features, init_from)
    batch = max(stage.batch_size for stage in config.stages)
    n_texts = min(_MAX_TEXTS, max(_MIN_TEXTS, _TIMED_STEPS * batch))
    order = np.random.default_rng(config.seed).permutation(len(points))[:n_texts]
    sample = points.take(np.sort(order))
    with progress_disabled():
        tokens = tokenize(split_inputs(sample, encoder), encoder)
    n_setup = len(points) if rows is None else len(rows)
    n_words = _words_per_text(sample)
    label_texts = [text for text in corpus.label_table.texts() if is_word(text)]
    reads_texts = points.texts is not None and not encoder.reads_features
    n_label_points = round(config.loss.label_text_weight * len(label_texts)) * reads_texts
    with progress_disabled():
        label_tokens = tokenize(label_texts[:_MIN_TEXTS], encoder) if n_label_points else None
    sizes = Sizes.measure(
        *(encoder, points.labels, tokens, config, n_setup, n_words, n_label_points, label_tokens),
        keeps_checkpoints=keeps_checkpoints,
        validates=held_out is not None,
    )
    n_trained = len(points) + n_label_points
    memory = estimate_memory(sizes, config, device)
    fits = memory.fits()
    has_room = all(fit.free_now for fit in fits)
    seconds, contrast_seconds = {}, 0.0
    if has_room and sizes.n_processes == 1:  # otherwise W_L may not fit into this process
        timed = Points(tokens, sample.labels)
        seconds = _time_epochs(config, encoder, timed, n_trained, device)
        if config.loss.label_contrast and reads_texts and init_from is None:
            contrast_seconds = _time_contrast(config, encoder, timed, sample, corpus, points.labels)
    total = sum(seconds[stage.name] * stage.epochs for stage in config.stages if seconds)
    return DryRun(
        n_parameters=n_parameters(config, corpus.n_labels, encoder),
        memory=memory,
        fits=fits,
        remedies=[] if has_room else memory.remedies(fits),
        epoch_seconds=seconds,
        n_steps={stage.name: n_batches(n_trained, stage.batch_size) for stage in config.stages},
        contrast_seconds=contrast_seconds,
        total_seconds=(total + contrast_seconds) * config.ensemble.members,
    )


def n_parameters(config: ResolvedConfig, n_labels: int, encoder: TextEncoder) -> int:
    """Return the number of weights of encoder, cluster classifiers, label classifiers and edges."""
    index = config.index
    n_rows = index.n_clusters + n_labels  # each row has one weight per dimension and a bias
    in_encoder = sum(weight.numel() for weight in encoder.parameters())
    return in_encoder + n_rows * (encoder.dim + 1) + index.n_clusters * index.edges_per_cluster


def _words_per_text(sample: Split) -> float:
    """Return the mean number of distinct words per text, or of features per point without texts."""
    if sample.features is not None:
        return float(sample.features.nnz / max(1, len(sample)))
    assert sample.texts is not None
    texts = sample.texts[:_MIN_TEXTS]
    return sum(len(set(words_of(text))) for text in texts) / max(1, len(texts))


def _time_epochs(
    config: ResolvedConfig,
    encoder: TextEncoder,
    points: Points,
    n_points: int,
    device: torch.device,
) -> dict[str, float]:
    """Return the estimated seconds per epoch of each stage."""
    epoch_seconds = {}
    with limit_threads(), progress_disabled(), torch.random.fork_rng(devices=[]):
        encoder.to(device)
        encoder.prepare(device)
        for each in config.stages:
            stage = replace(each, batch_size=min(each.batch_size, n_points))
            model = build_stage_model(config, stage, encoder, points.labels.shape[1])
            seconds = _step_seconds(config, stage, model.to(device), points)
            del model  # free its memory before the next model is built
            epoch_seconds[stage.name] = seconds * n_batches(n_points, stage.batch_size)
    return epoch_seconds


def _time_contrast(
    config: ResolvedConfig,
    encoder: TextEncoder,
    points: Points,
    sample: Split,
    corpus: Corpus,
    labels: csr_matrix,
) -> float:
    """Return the estimated seconds of stage 0, or 0 if it is skipped.

    Args:
        config: The configuration of the run.
        encoder: The encoder, on its device.
        points: The tokens and labels of the sample.
        sample: A sample of the training points, with texts.
        corpus: The corpus with the label texts.
        labels: The labels of all training points.
    """
    assert sample.texts is not None
    with progress_disabled():
        chosen = labels_with_words(corpus.label_table.texts(), SplitTexts(sample.texts))
        label_texts = text_points(corpus, chosen, encoder)
    device = next(encoder.parameters()).device
    if not enough_covered(labels, paired_labels(labels, label_texts)):
        return 0.0
    n_points = labels.shape[0]
    # the other points of a label may not be in the sample
    twice = points.take(np.tile(np.arange(len(points.tokens)), 2))
    sampler = PairSampler(twice, label_texts, np.random.default_rng(0))
    batch_size = min(
        contrast_batch_size(encoder, points.tokens, config.stages[0].batch_size), n_points
    )
    model = OneVsAll(encoder, 1)
    optimizer = Optimizer(model, config.stages[0])

    def run(n_steps: int) -> float:
        start = time.monotonic()
        for rows in np.arange(n_steps * batch_size).reshape(n_steps, -1) % len(points.tokens):
            pairs = sampler.sample(rows)
            if len(pairs):
                pairs.to(device).loss(encoder).backward()  # type: ignore[no-untyped-call]
                optimizer.step(1.0)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.monotonic() - start) / n_steps

    encoder.train()
    encoder.dropout.eval()
    with limit_threads(), torch_on_one_thread(model), torch.random.fork_rng(devices=[]):
        warmup = run(1)
        seconds = run(1 if warmup > _LONG_WARMUP else _TIMED_STEPS)
    per_epoch = n_batches(n_points, batch_size)
    n_epochs = max(1, min(EPOCHS, MAX_STEPS[config.encoder.kind] // per_epoch))
    return seconds * n_epochs * per_epoch


def _step_seconds(
    config: ResolvedConfig, stage: ResolvedStage, model: EliasModel, points: Points
) -> float:
    def run(n_steps: int) -> float:
        rows = np.arange(n_steps * stage.batch_size) % len(points.tokens)
        loop = StageLoop(
            model=model,
            stage=replace(stage, epochs=1),
            config=config,
            points=points.take(rows),
            rng=np.random.default_rng(0),
            validate=None,
            report=lambda _: None,
        )
        start = time.monotonic()
        loop.run()
        if next(model.parameters()).is_cuda:
            torch.cuda.synchronize()
        return (time.monotonic() - start) / n_steps

    # the warm-up runs the same steps, so that no kernel is compiled later
    warmup = run(_TIMED_STEPS) * _TIMED_STEPS
    return run(1 if warmup > _LONG_WARMUP else _TIMED_STEPS)


def build_stage_model(
    config: ResolvedConfig, stage: ResolvedStage, encoder: TextEncoder, n_labels: int
) -> EliasModel:
    """Build a model to time a stage. Its sizes are real, but clusters and edges are arbitrary."""
    index = config.index
    partition = None if stage.score_all else np.arange(n_labels) % index.n_clusters
    model = build_model(config, encoder, n_labels, partition)
    if stage.learn_graph:
        edges = model.graph.edge_labels
        missing = max(0, index.edges_per_cluster - edges.shape[1])
        others = torch.randint(0, n_labels, (index.n_clusters, missing))
        edges = torch.cat([edges, others], dim=1)
        model.graph = LabelGraph(edges, n_labels, index.beta, edge_logits=torch.zeros(edges.shape))
    if index.label_storage == "compact":
        model.compact()
    return model
