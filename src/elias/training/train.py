"""Train a model on a corpus: check the settings, derive missing ones, and run the `Trainer`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from elias.config import EliasConfig, EncoderConfig, ResolvedConfig, model_settings
from elias.config.pretrained import MINILM
from elias.config.schema import DEFAULT_STAGES
from elias.data.corpus import Corpus, resolve_config
from elias.data.load import load_corpus
from elias.distributed import SingleProcess, World
from elias.errors import ConfigError
from elias.inference.predictor import Elias
from elias.kernels import has_triton
from elias.kernels.device import explain_out_of_memory, limit_threads, pick_device
from elias.metrics import metric_names
from elias.training.checkpoint import run_inputs
from elias.training.loggers import check_loggers
from elias.training.memory import fit_batches
from elias.training.run import check_folder, open_run
from elias.training.trainer import Trainer, keeps_labels

logger = logging.getLogger(__name__)

CONTINUED_EPOCHS = 5
"""Default number of epochs per stage if a model is trained further."""


def train(
    corpus: Corpus | str | Path | Any = None,
    config: EliasConfig | Any = None,
    out: str | Path | None = None,
    *,
    texts: Sequence[str] | None = None,
    labels: Sequence[Sequence[str]] | None = None,
    device: str = "auto",
    init_from: Elias | None = None,
    overwrite: bool = False,
    ignore_memory: bool = False,
) -> Elias:
    """Train ELIAS on a corpus and return the model; save the run in ``out`` if given.

    Args:
        corpus: The points; without a validation split, training points may be held out. A path, a
            DataFrame or another table is read with `load_corpus`.
        config: The configuration; sizes that are not set are derived from the corpus.
        out: The run folder: ``config.json``, ``metrics.jsonl``, ``train.log``, and, at the end,
            ``model/``. An interrupted run in this folder is resumed from its last checkpoint.
        texts: Instead of a corpus, the training texts. No test points are held out.
        labels: The labels of each of the ``texts``, as lists of names.
        device: ``auto`` uses a GPU if there is one.
        init_from: A model to continue training from; it is not modified. Training starts with its
            encoder, including vocabulary or tokenizer. If it has labels of the corpus (by id or
            name), all its labels are kept, with their clusters, edges and classifiers, and the
            other labels of the corpus are added. If it has a learned graph, training starts with
            the first stage that learns a graph.
        overwrite: Replace the files of an earlier run in ``out``.
        ignore_memory: Start even if the memory estimate exceeds what is available.

    The former order of arguments, ``train(config, corpus)``, is deprecated.

    Example:
        >>> from elias import EliasConfig, train
        >>> from elias.data.synthetic import synthetic_corpus
        >>> corpus = synthetic_corpus(n_points=300, n_labels=30)
        >>> config = EliasConfig().override({"encoder.dim": 16, "index.kind": "graph"})
        >>> model = train(corpus, config, device="cpu")
        >>> 1 < model.config.index.n_clusters < 30  # derived from the data
        True
        >>> list(model.metadata["metrics"])  # of each component, on validation and test points
        ['stage1', 'stage2', 'rerank', 'calibrate', 'names']
    """
    if isinstance(corpus, EliasConfig) or isinstance(config, Corpus):
        order = "train(config, corpus) is now train(corpus, config)"
        warnings.warn(order, DeprecationWarning, stacklevel=2)
        corpus, config = config, corpus
    if (corpus is None) == (texts is None):
        raise ConfigError("give train either a corpus, or texts= and labels=")
    if texts is not None:
        corpus = load_corpus(texts=texts, labels=labels, test_size=0)
    elif not isinstance(corpus, Corpus):
        corpus = load_corpus(corpus)
    if config is None:
        config = EliasConfig()
    elif not isinstance(config, EliasConfig):
        remedy = "such as EliasConfig() or EliasConfig.preset(name)"
        raise ConfigError(f"config is {config!r:.60}; give an EliasConfig, {remedy}")
    model = train_together(
        SingleProcess(pick_device(device)),
        config,
        corpus,
        out=out,
        init_from=init_from,
        overwrite=overwrite,
        ignore_memory=ignore_memory,
    )
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
    """Train like `train`, but in all processes of ``world``; every process must call this.

    The points of a batch and the rows of W_L are divided among the processes. Except for rounding,
    the model does not depend on the number of processes. ``out`` must be on a shared file system.

    Returns:
        The model on rank 0, None on other ranks.
    """
    folder = None if out is None else Path(out)
    check_plan(config, folder if world.is_rank0 else None, overwrite=overwrite)
    corpus, config, resolved = plan_training(config, corpus, init_from, world.device)
    is_chosen = init_from is not None or config.encoder != EncoderConfig()
    hint = None if is_chosen else encoder_hint(resolved, corpus, world.device)
    if hint is not None and world.is_rank0:
        logger.info("%s: set encoder.model to %s", hint, MINILM)
    options = {"overwrite": overwrite, "ignore_memory": ignore_memory}
    return train_resolved(world, resolved, corpus, folder, init_from=init_from, **options)


def train_resolved(
    world: World,
    resolved: ResolvedConfig,
    corpus: Corpus,
    folder: Path | None = None,
    *,
    init_from: Elias | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Elias | None:
    """Train with a resolved configuration; the caller must have called `check_plan`.

    ``options`` are further arguments of `Trainer`.
    """
    check_world(resolved, world)
    inputs: dict[str, Any] = {}
    if folder is not None or world.shards_labels:
        inputs = run_inputs(corpus, init_from, world.device)
        world.check_same({**inputs, "configuration": model_settings(resolved.to_dict())})
    with (
        limit_threads(),
        open_run(folder, resolved, overwrite=overwrite, inputs=inputs, world=world) as run,
        explain_out_of_memory("training"),
    ):
        return Trainer(resolved, corpus, run, world, init_from=init_from, **options).train()


def check_plan(config: EliasConfig, out: Path | None, *, overwrite: bool = False) -> None:
    """Raise an error if the configuration or ``out`` is invalid. This needs no corpus."""
    metric_names([config.eval.select_by])
    if config.rerank.embedding == "first" and config.encoder.kind == "bag":
        raise ConfigError(
            "rerank.embedding='first' uses the encoder before training, but a bag encoder starts "
            "with random weights; use 'none' or 'encoder', or a transformer"
        )
    check_loggers(config.tracking)
    if out is not None:
        check_folder(out, overwrite=overwrite)


def check_world(config: EliasConfig, world: World) -> None:
    """Raise an error if a setting does not work on the device or in several processes.

    Raises:
        ConfigError: If there is such a setting. The message names it.
    """
    index, encoder, device = config.index, config.encoder, world.device
    by_kernels = device.type == "cuda" and has_triton()
    if index.label_storage == "compact" and index.kind != "all" and not by_kernels:
        raise ConfigError(
            "index.label_storage is 'compact', which needs a GPU with Triton if the model has a "
            "graph; set it to 'full', or train with device='cuda'"
        )
    if world.shards_labels and device.type == "cuda" and not by_kernels:
        raise ConfigError(
            "several processes on GPUs need Triton, which is not installed or is turned off by "
            "ELIAS_KERNELS; install triton, unset ELIAS_KERNELS, or use device='cpu'"
        )
    if not world.shards_labels or encoder.kind != "transformer":
        return
    if encoder.gradient_checkpointing:
        raise ConfigError(
            "encoder.gradient_checkpointing: does not work with several processes, because their "
            "dropout masks cannot be recomputed in the backward pass; set it to false"
        )
    if encoder.compile != "off":
        raise ConfigError(
            "encoder.compile: does not work with several processes, because torch.compile would "
            "reuse the dropout masks of the first batch; set it to 'off'"
        )


def plan_training(
    config: EliasConfig, corpus: Corpus, init_from: Elias | None, device: torch.device
) -> tuple[Corpus, EliasConfig, ResolvedConfig]:
    """Return the corpus to train on, its configuration and the resolved configuration.

    If a model is trained further, `starting_corpus` and `starting_config` take over its labels and
    settings. Otherwise, derived batch sizes are limited by the memory of the machine.
    """
    if init_from is None:
        resolved = resolve_config(config, corpus)
        return corpus, config, fit_batches(config, resolved, corpus, device)
    corpus = starting_corpus(corpus, init_from)
    config = starting_config(config, corpus, init_from)
    return corpus, config, resolve_config(config, corpus)


def encoder_hint(config: ResolvedConfig, corpus: Corpus, device: torch.device) -> str | None:
    """Return what a pretrained encoder gains on a GPU, for a run with a bag encoder; else None.

    The figures are those of docs/reference/results.md, section "Defaults".
    """
    if device.type != "cuda" or config.encoder.kind != "bag" or corpus.train.texts is None:
        return None
    return (
        "a GPU is available, on which a pretrained transformer can be fine-tuned (P@1 81.1 instead "
        "of 79.8 on mesh-titles, 90.2 instead of 89.1 on eurlex-mini)"
    )


def starting_corpus(corpus: Corpus, init_from: Elias) -> Corpus:
    """Return the corpus with the labels of ``init_from`` first, then its other labels.

    If the two have no label in common, return the corpus unchanged. Training then uses only the
    encoder of ``init_from``.

    Raises:
        DataError: If repeated names cannot be matched.
    """
    joined = corpus.join_labels(init_from.label_names)
    n_new = joined.n_labels - init_from.n_labels
    if n_new == corpus.n_labels:
        logger.info("using only the encoder of the initial model, which has no label of the corpus")
        return corpus
    if n_new:
        logger.info("%d of the %d labels are not in the initial model", n_new, corpus.n_labels)
    return joined


def starting_config(config: EliasConfig, corpus: Corpus, init_from: Elias) -> EliasConfig:
    """Return the configuration to train with, which takes some settings from ``init_from``.

    These are the settings of the encoder and, if the labels of ``init_from`` are kept, the sizes of
    the index and the n-grams of the ranker, whose vocabulary is then kept. The default number of
    epochs is then `CONTINUED_EPOCHS`.

    Args:
        config: The given configuration.
        corpus: The corpus that `starting_corpus` returns.
        init_from: The model to continue from.
    """
    theirs = init_from.config
    if not _agree(config.encoder, theirs.encoder):
        logger.info("using the encoder and the encoder settings of the initial model")
    config = replace(config, encoder=theirs.encoder)
    if not keeps_labels(init_from, corpus):
        return config
    kind = config.index.kind or theirs.index.kind
    if config.stages != DEFAULT_STAGES and any(stage.learn_graph for stage in config.stages):
        kind = "graph"
    index = replace(config.index, kind=kind)
    config = replace(config, index=theirs.index if _agree(index, theirs.index) else index)
    char_ngrams = config.rerank.char_ngrams or theirs.rerank.char_ngrams
    rerank = replace(config.rerank, char_ngrams=char_ngrams)
    stages = (replace(stage, epochs=stage.epochs or CONTINUED_EPOCHS) for stage in config.stages)
    return replace(config, stages=tuple(stages), rerank=rerank)


def _agree(ours: Any, theirs: Any) -> bool:
    """Return whether every setting that is set in ``ours`` has the same value in ``theirs``."""
    settings = {key: value for key, value in asdict(ours).items() if value is not None}
    return asdict(theirs) == asdict(theirs) | settings
