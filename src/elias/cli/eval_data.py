"""Select the points on which a model is evaluated or calibrated."""

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
    """A corpus with the model's label ids, and the name of the split to evaluate."""

    corpus: Corpus
    split: str
    has_training_points: bool = True
    """True if the model was trained on the training split: PSP needs its label frequencies."""

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
    """Read a corpus with the options of the training data, and select the points to evaluate.

    Local rank 0 reads first, so that the other processes find the files that it has cached.
    """
    corpus = world.rank0_first(lambda: read_corpus_as_trained(path, model, columns))
    return choose_points(corpus, model, split)


def choose_points(corpus: Corpus, model: Elias, split: str) -> EvalData:
    """Select the points to evaluate.

    If the corpus has only a training split, restore the splits of the training run. If the corpus
    is not the training data, use all of its points as the test split.

    Raises:
        DataError: If the split does not exist, or if ``split`` is ``test`` and the model was
            trained on all points.
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
