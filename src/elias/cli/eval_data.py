"""The points that a model is evaluated on, or calibrated with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elias.cli import console
from elias.cli.options import reread_corpus

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from elias.data import Corpus, Split
    from elias.distributed import World
    from elias.inference.predictor import Elias


@dataclass(frozen=True, slots=True)
class Chosen:
    """A corpus over the labels of the model, and which split of it to evaluate."""

    corpus: Corpus
    split: str
    has_training: bool = True
    """Whether the points of its training split are those to count labels in, as PSP does."""

    @property
    def points(self) -> Split:
        """Return the points to evaluate."""
        return self.corpus.split(self.split)

    @property
    def frequencies(self) -> NDArray[np.int64] | None:
        """Return how many training points each label has, where that is known."""
        return self.corpus.label_frequencies() if self.has_training else None


def open_points(
    model: Elias,
    data: Path,
    split: str,
    text: str | None,
    labels: str | None,
    separator: str | None,
    *,
    world: World,
) -> Chosen:
    """Read a corpus as in training, several processes in turn, and choose the points."""
    given = {"text": text, "labels": labels, "separator": separator}
    corpus = world.rank0_first(lambda: reread_corpus(data, model, given))
    return choose_points(corpus, model, split)


def choose_points(corpus: Corpus, model: Elias, split: str) -> Chosen:
    """Choose the points to evaluate: a split of the corpus or of the run, or all of new data.

    Raises:
        DataError: If there is no such split, or the model was trained on all points and the
            training split is not asked for.
    """
    from elias.data.corpus import SPLITS
    from elias.data.splits import restore_splits
    from elias.errors import DataError

    if split not in SPLITS:
        raise DataError(f"--split {split!r}: is not one of {', '.join(SPLITS)}")
    has_training = True
    if list(corpus.splits) == ["train"]:
        cut = restore_splits(corpus, model.label_names, model.metadata)
        has_training = cut is not None
        corpus = cut or corpus
        if split == "test" and corpus.test is None:
            if has_training:
                raise DataError(
                    f"{corpus.source}: the model was trained on all {len(corpus.train):,} points, "
                    "so none is left to test on; give other data, or evaluate with --split train"
                )
            _tell_of_all(corpus, model)
            corpus = corpus.with_splits(test=corpus.train)
    if split == "validation" and corpus.validation is None:
        corpus = corpus.with_splits(validation=_held_out(corpus, model, has_training))
    return Chosen(corpus.align_labels(model.label_names), split, has_training)


def _tell_of_all(corpus: Corpus, model: Elias) -> None:
    from elias.data.splits import recorded_size

    n_points = len(corpus.train)
    told = f"{corpus.source}: no test split is given, so all {n_points:,} points are evaluated"
    console.note(f"{told}, without PSP and PSnDCG, which need the training points")
    if n_points == recorded_size(model.metadata):
        console.warn("the run's data had as many points; if these are they, it was trained on most")


def _held_out(corpus: Corpus, model: Elias, is_the_runs: bool) -> Split:
    """Return the validation points that the model's run held out of its training split."""
    from elias.data.splits import validation_split
    from elias.errors import DataError

    if not is_the_runs:
        raise DataError(
            f"{corpus.source}: has no validation split, and is not what the run was trained on"
        )
    # the training split stays whole: propensities are about all of it
    _, held_out = validation_split(corpus, model.config)
    if held_out is None:
        raise DataError(f"{corpus.source}: has no validation split, and the run held none out")
    return held_out
