"""Training as one call: the corpus made ready, the stages in order, the run on disk."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from elias.config import decisive
from elias.distributed.world import same_everywhere
from elias.metrics import metric_names
from elias.pipeline.answering import ENSEMBLE
from elias.pipeline.deciding import PROBABILITIES, add_probabilities
from elias.pipeline.holding_out import validation_split
from elias.pipeline.measuring import REPORTED, measure, rounded
from elias.pipeline.one_model import ModelTraining
from elias.pipeline.predictor import Elias
from elias.pipeline.reranking import check_rerank
from elias.pipeline.resources import memory_explained, pick_device, threads_shared
from elias.pipeline.resuming import keep_member, parts_of, take_up
from elias.pipeline.together import (
    check_together,
    open_shared_run,
)
from elias.training.trackers import check_trackers
from elias.training.tracking import Run, check_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elias.config import EliasConfig
    from elias.data.corpus import Corpus
    from elias.distributed import World

logger = logging.getLogger(__name__)


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
        training = ModelTraining(config.member(number), corpus, own, place.device, init_from, world)
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
    model.facts["timings"] = rounded(run.timings)
    return model


def _learn_probabilities(model: Elias, corpus: Corpus, run: Run) -> None:
    """Learn what the scores say of relevance from the points that were held out."""
    with run.timed(PROBABILITIES):
        _, held_out = validation_split(corpus, model.config)
        tests = {} if corpus.test is None else {"test": corpus.test}
        told = add_probabilities(model, held_out, tests)
    run.record(PROBABILITIES, **told)
    model.facts["timings"] = rounded(run.timings)


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
