"""A run without the run: its parameters, its memory, and by a few steps how long an epoch takes."""

from __future__ import annotations

import copy
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from elias.data.splits import validation_split
from elias.distributed import process_counts
from elias.inference.predict import feature_tokens, input_of, setup_rows
from elias.kernels.device import limit_threads
from elias.model.build import build_encoder
from elias.model.elias import EliasModel
from elias.model.graph import LabelGraph, partition_edges
from elias.model.one_vs_all import OneVsAll
from elias.progress import hushed
from elias.text.batches import n_batches
from elias.text.vectorizer import words_of
from elias.training.memory import Expected, Fit, expected_memory, fits, remedies, resident, sizes_of
from elias.training.stage import Points, StageLoop

if TYPE_CHECKING:
    from elias.config import ResolvedConfig, StageConfig
    from elias.data.corpus import Corpus, Split
    from elias.inference.predictor import Elias
    from elias.model.encoder import TextEncoder
    from elias.text.tokens import Tokens


logger = logging.getLogger(__name__)

_WARM_STEPS, _TIMED_STEPS = 2, 4
_LONG = 20.0  # seconds of warming up that are told as they are
_FEWEST_TEXTS, _MOST_TEXTS = 1000, 10_000


class Rehearsal(NamedTuple):
    """What is known of a run before it is begun."""

    n_parameters: int
    expected: Expected
    fits: list[Fit]
    remedies: list[str]
    """What to change; empty where it fits."""
    epoch_seconds: dict[str, float]
    """By stage; empty where it was not tried."""
    n_steps: dict[str, int]
    """Steps of an epoch, by stage."""


def rehearse(
    config: ResolvedConfig,
    corpus: Corpus,
    device: torch.device,
    *,
    init_from: Elias | None = None,
    keeps_checkpoints: bool = True,
) -> Rehearsal:
    """Return what a run takes; a few steps of each stage are timed if it fits.

    Under `torchrun` it is what each process takes with its share of W_L; no step is timed then.

    Args:
        config: Resolved.
        corpus: The points.
        device: Where it would train.
        init_from: A model to start from.
        keeps_checkpoints: Whether it would have a run folder.
    """
    points, held_out = validation_split(corpus, config)
    rows = setup_rows(points, config)
    encoder = _encoder(config, points if rows is None else points.take(rows), init_from)
    batch = max(stage.batch_size for stage in config.stages)
    wanted = max(_FEWEST_TEXTS, (_WARM_STEPS + _TIMED_STEPS) * batch)
    sample = _sample(points, min(_MOST_TEXTS, wanted), config.seed)
    tokens = _tokens(sample, encoder)
    held = resident()
    n_setup = len(points) if rows is None else len(rows)
    n_processes, _ = process_counts()
    sizes = sizes_of(encoder, points.labels, tokens, n_setup, _words(sample), config, n_processes)
    expected = expected_memory(
        sizes,
        config,
        device,
        resident=held,
        keeps_checkpoints=keeps_checkpoints,
        validates=held_out is not None,
    )
    found = fits(expected, device, held)
    fitting = all(fit.possible and fit.free_now for fit in found)
    return Rehearsal(
        n_parameters=n_parameters(config, corpus.n_labels, encoder),
        expected=expected,
        fits=found,
        remedies=[] if fitting else remedies(expected, sizes, config, device, found),
        epoch_seconds=_timed(config, encoder, Points(tokens, sample.labels), len(points), device)
        if fitting and n_processes == 1  # the others' rows of W_L may not fit here
        else {},
        n_steps={stage.name: n_batches(len(points), stage.batch_size) for stage in config.stages},
    )


def n_parameters(config: ResolvedConfig, n_labels: int, encoder: TextEncoder) -> int:
    """Return how many weights the model has: encoder, Ŵ_C, W_L and the edges of A."""
    index = config.index
    n_rows = index.n_clusters + n_labels  # each with a weight for every dimension and a bias
    in_encoder = sum(weight.numel() for weight in encoder.parameters())
    return in_encoder + n_rows * (encoder.dim + 1) + index.n_clusters * index.edges_per_cluster


def _encoder(config: ResolvedConfig, points: Split, init_from: Elias | None) -> TextEncoder:
    if init_from is not None:
        encoder: TextEncoder = copy.deepcopy(init_from.model.encoder)
        return encoder
    n_features = None if points.features is None else points.features.shape[1]
    return build_encoder(config.encoder, points.texts, n_features)


def _sample(points: Split, size: int, seed: int) -> Split:
    """Return random points, so many or all; batches that are larger have some of them again."""
    order = np.random.default_rng(seed).permutation(len(points))[:size]
    return points.take(np.sort(order))


def _tokens(sample: Split, encoder: TextEncoder) -> Tokens:
    given = input_of(sample, encoder)
    with hushed():
        return feature_tokens(given, encoder) if encoder.reads_features else encoder.tokenise(given)


def _words(sample: Split) -> float:
    """Return how many distinct words, or given features, a point has."""
    if sample.features is not None:
        return float(sample.features.nnz / max(1, len(sample)))
    assert sample.texts is not None
    some = sample.texts[:_FEWEST_TEXTS]
    return sum(len(set(words_of(text))) for text in some) / max(1, len(some))


def _timed(
    config: ResolvedConfig,
    encoder: TextEncoder,
    points: Points,
    n_points: int,
    device: torch.device,
) -> dict[str, float]:
    """Return the seconds that an epoch of each stage is going to take."""
    found = {}
    with limit_threads(), hushed(), torch.random.fork_rng(devices=[]):
        encoder.to(device)
        encoder.prepare(device)
        for each in config.stages:
            stage = replace(each, batch_size=min(each.batch_size, n_points))
            model = _model(config, stage, encoder, points.labels.shape[1]).to(device)
            seconds = _step_seconds(config, stage, model, points)
            found[stage.name] = seconds * n_batches(n_points, stage.batch_size)
            del model
    return found


def _step_seconds(
    config: ResolvedConfig, stage: StageConfig, model: EliasModel, points: Points
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
        began = time.monotonic()
        loop.run()
        if next(model.parameters()).is_cuda:
            torch.cuda.synchronize()
        return (time.monotonic() - began) / n_steps

    first = run(_WARM_STEPS)
    return first if first * _WARM_STEPS > _LONG else run(_TIMED_STEPS)


def _model(
    config: ResolvedConfig, stage: StageConfig, encoder: TextEncoder, n_labels: int
) -> EliasModel:
    """Return a model of the right sizes; which labels its clusters hold does not matter here."""
    index = config.index
    if index.kind == "all":
        model: EliasModel = OneVsAll(encoder, n_labels)
    else:
        edges = partition_edges(torch.arange(n_labels) % index.n_clusters, index.n_clusters)
        logits = None
        if stage.learn_graph:
            more = index.edges_per_cluster - edges.shape[1]
            others = torch.randint(0, n_labels, (index.n_clusters, max(0, more)))
            edges = torch.cat([edges, others], dim=1)
            logits = torch.zeros(edges.shape)
        graph = LabelGraph(edges, n_labels, index.beta, edge_logits=logits)
        model = EliasModel(encoder, graph, index.alpha)
    if index.label_storage == "compact":
        model.compact()
    return model
