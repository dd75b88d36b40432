"""Choose the points that a model is evaluated on or calibrated with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elias.cli import console
from elias.cli.options import read_corpus_as_trained
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from elias.data import Corpus, Split
    from elias.distributed import World
    from elias.inference.predictor import Elias


@dataclass(frozen=True, slots=True)
class EvalData:
    """A corpus over the model's labels, and the split of it to evaluate."""

    corpus: Corpus
    split: str
    has_training_points: bool = True
    """True if the training split is the model's, so that label frequencies (PSP) are known."""

    @property
    def points(self) -> Split:
        """Return the points to evaluate."""
        return self.corpus.split(self.split)

    @property
    def frequencies(self) -> NDArray[np.int64] | None:
        """Return the number of training points of each label, if known."""
        return self.corpus.label_frequencies() if self.has_training_points else None


def load_eval_data(
    model: Elias, path: Path, split: str, columns: Mapping[str, str | None], world: World
) -> EvalData:
    """Read a corpus as in training, one process after the other, and choose the points."""
    corpus = world.rank0_first(lambda: read_corpus_as_trained(path, model, columns))
    return choose_points(corpus, model, split)


def choose_points(corpus: Corpus, model: Elias, split: str) -> EvalData:
    """Choose the points to evaluate: a split of the corpus or of the run, or all of new data.

    Raises:
        DataError: If there is no such split, or the model was trained on all points and the
            training split was not requested.
    """
    from elias.data.corpus import SPLITS
    from elias.data.splits import restore_splits

    if split not in SPLITS:
        raise DataError(f"--split {split!r}: is not one of {', '.join(SPLITS)}")
    has_training = True
    if list(corpus.splits) == ["train"]:
        restored = restore_splits(corpus, model.label_names, model.metadata)
        has_training = restored is not None
        corpus = restored or corpus
        if split == "test" and corpus.test is None:
            if has_training:
                raise DataError(
                    f"{corpus.source}: the model was trained on all {len(corpus.train):,} points, "
                    "so none is left to test on; give other data, or evaluate with --split train"
                )
            _note_all_points(corpus, model)
            corpus = corpus.with_splits(test=corpus.train)
    if split == "validation" and corpus.validation is None:
        corpus = corpus.with_splits(validation=_validation_points(corpus, model, has_training))
    return EvalData(corpus.align_labels(model.label_names), split, has_training)


def _note_all_points(corpus: Corpus, model: Elias) -> None:
    from elias.data.splits import recorded_size

    n_points = len(corpus.train)
    console.note(
        f"{corpus.source}: no test split is given, so all {n_points:,} points are evaluated, "
        "without PSP and PSnDCG, which need the training points"
    )
    if n_points == recorded_size(model.metadata):
        console.warn(
            "the training data had the same number of points; if these are the same points, the "
            "model was trained on most of them"
        )


def _validation_points(corpus: Corpus, model: Elias, is_training_data: bool) -> Split:
    """Return the validation points that the training run held out of its training split."""
    from elias.data.splits import validation_split

    if not is_training_data:
        raise DataError(
            f"{corpus.source}: has no validation split, and the model was not trained on it"
        )
    # The training split stays whole: propensities are computed on all of it.
    _, held_out = validation_split(corpus, model.config)
    if held_out is None:
        raise DataError(f"{corpus.source}: has no validation split, and the run held none out")
    return held_out
