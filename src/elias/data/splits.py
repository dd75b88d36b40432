"""Split points into training, validation and test sets.

Most labels of an XMC corpus have only a few points. A purely random validation split would contain
the only training point of some labels.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from elias.data.stats import corpus_stats
from elias.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.config import ResolvedConfig
    from elias.data.corpus import Corpus, Split

    Rows = NDArray[np.int64]


logger = logging.getLogger(__name__)

DATA_SETTINGS = "data_settings"
"""Metadata key of the options that the training data was read with; absent in older models."""

DEFAULT_TEST_SHARE = 0.2
"""Share of the points used for testing if the source has no splits."""
SETUP_POINTS = 1_000_000
"""Default of ``data.setup_points`` for a corpus on disk."""
_CHUNK = 1 << 16
_SAMPLE_CHUNK = 1 << 20


def hold_out(
    labels: csr_matrix, size: int, seed: int, *, covered: bool = True
) -> tuple[Rows, Rows]:
    """Choose validation points; with ``covered``, every label keeps a training point.

    Points are tried in a seeded random order. With ``covered``, a point is taken only if each of
    its labels also belongs to another point that remains in training. Points without labels
    are never taken.

    Args:
        labels: (N, L) relevance; a stored entry is a relevant label.
        size: Number of points to take. Fewer are taken if ``covered`` does not allow as many.
        seed: Seed of the order; the same seed takes the same points.
        covered: Whether every label must keep a training point.

    Returns:
        The training rows and the validation rows, each sorted.
    """
    n_points = int(labels.shape[0])
    if not labels.has_canonical_format:
        labels = labels.copy()
        labels.sum_duplicates()
    order = np.random.default_rng(seed).permutation(n_points)
    if not covered:
        labelled = order[np.diff(labels.indptr)[order] > 0]
        return _partition(n_points, labelled[:size])
    remaining = np.bincount(labels.indices, minlength=labels.shape[1])
    taken: list[int] = []
    for start in range(0, n_points, _CHUNK):
        # a label's count only falls, so a point that fails here would also fail in the loop
        for row in _sparable(labels, order[start : start + _CHUNK], remaining).tolist():
            if len(taken) >= size:
                return _partition(n_points, np.array(taken, dtype=np.int64))
            ids = labels.indices[labels.indptr[row] : labels.indptr[row + 1]]
            if remaining[ids].min() >= 2:
                remaining[ids] -= 1
                taken.append(row)
    return _partition(n_points, np.array(taken, dtype=np.int64))


def _sparable(labels: csr_matrix, rows: Rows, remaining: NDArray[np.int64]) -> Rows:
    """Return the labelled rows whose labels all belong to at least one other remaining point."""
    chunk = labels[rows]
    on_last_point = remaining[chunk.indices] < 2
    before = np.concatenate([[0], np.cumsum(on_last_point)])
    n_last = before[chunk.indptr[1:]] - before[chunk.indptr[:-1]]
    sparable: NDArray[np.bool_] = (n_last == 0) & (np.diff(chunk.indptr) > 0)
    return rows[sparable]


def _partition(n_points: int, taken: Rows) -> tuple[Rows, Rows]:
    is_taken = np.zeros(n_points, dtype=bool)
    is_taken[taken] = True
    return np.flatnonzero(~is_taken), np.flatnonzero(is_taken)


def sample_setup_points(split: Split, config: ResolvedConfig) -> Rows | None:
    """Sample the points used for vocabulary, clusters and initialisation; None means all points."""
    size = config.data.setup_points or (SETUP_POINTS if split.on_disk else len(split))
    return None if size >= len(split) else sample_points(split.labels, size, config.seed)


def sample_points(labels: csr_matrix, size: int, seed: int) -> Rows:
    """Return ``size`` random rows, ascending, that cover every label that has a point.

    The sample is larger than ``size`` if covering the labels requires more rows. The same seed
    gives the same rows.
    """
    n_points, n_labels = labels.shape
    if size >= n_points:
        return np.arange(n_points, dtype=np.int64)
    order = np.random.default_rng(seed).permutation(n_points)
    rank = np.empty(n_points, dtype=np.int64)
    rank[order] = np.arange(n_points)
    first = np.full(n_labels, n_points, dtype=np.int64)  # the rank of each label's first point
    for start in range(0, n_points, _SAMPLE_CHUNK):
        stop = min(start + _SAMPLE_CHUNK, n_points)
        indptr = labels.indptr[start : stop + 1].astype(np.int64)
        ranks = np.repeat(rank[start:stop], np.diff(indptr))
        np.minimum.at(first, labels.indices[indptr[0] : indptr[-1]], ranks)
    needed = np.unique(first[first < n_points])
    taken = np.zeros(n_points, dtype=bool)
    taken[needed] = True
    spare = np.flatnonzero(~taken)[: max(0, size - len(needed))]
    taken[spare] = True
    return np.sort(order[taken])


def validation_split(corpus: Corpus, config: ResolvedConfig) -> tuple[Split, Split | None]:
    """Return the training and validation splits that `train` uses.

    If the corpus has a validation split, return its own splits. Otherwise hold out points of the
    training split; the same resolved configuration gives the same points. The validation
    split is None if no point is held out.
    """
    if corpus.validation is not None:
        return corpus.train, corpus.validation
    size = config.eval.validation_size
    if size == 0:
        return corpus.train, None
    train = corpus.train
    if 2 * size > len(train):
        raise ConfigError(
            f"eval.validation_size is {size}, more than half of the {len(train)} training "
            "points; lower it, or set it to none to have it derived"
        )
    covered = config.eval.hold_out == "covered"
    train_rows, held_rows = hold_out(train.labels, size, config.seed, covered=covered)
    if len(held_rows) == 0:
        logger.warning("no point can be held out: every point has a label that no other point has")
        return train, None
    if len(held_rows) < size:
        logger.warning(
            "%d points held out for validation instead of %d: every other point has a label that "
            "no other training point has",
            *(len(held_rows), size),
        )
    return train.take(train_rows), train.take(held_rows)


def hold_out_test(corpus: Corpus, test_size: float, seed: int) -> Corpus:
    """Return the corpus with test points drawn from its training split.

    Args:
        corpus: A corpus without a test split, unless ``test_size`` is 0.
        test_size: A number of points, or a share below 1. A corpus with a single
            point is not split by a share.
        seed: The same seed and size give the same points.

    Raises:
        DataError: If the corpus has a test split, or ``test_size`` is out of range.
    """
    if test_size == 0:
        return corpus
    if corpus.test is not None:
        raise DataError(f"{corpus.source}: has its own test split; leave test_size out")
    n_points = len(corpus.train)
    if 0 < test_size < 1:
        if n_points == 1:
            return corpus
        count = min(max(1, round(test_size * n_points)), n_points - 1)
    elif 0 <= test_size < n_points and test_size == int(test_size):  # NaN is in no range
        count = int(test_size)
    else:
        allowed = f"a share below 1, or a whole number below the {n_points} points"
        raise DataError(f"test_size must be {allowed}, not {test_size:g}")
    order = np.random.default_rng(seed).permutation(n_points)
    train, test = _partition(n_points, order[:count])
    note = f"{count} of {n_points} points set aside at random (seed {seed})"
    logger.info("%s: %s", corpus.source, note)
    cut = corpus.with_splits(train=corpus.train.take(train), test=corpus.train.take(test))
    return replace(cut, notes={**corpus.notes, "test": note})


def recorded_size(metadata: Mapping[str, Any]) -> int:
    """Return the number of points in a model's training data, or 0 if it is not recorded."""
    return sum(split["points"] for split in _recorded_splits(metadata).values())


def restore_splits(
    corpus: Corpus, label_names: Sequence[str], metadata: Mapping[str, Any]
) -> Corpus | None:
    """Split a corpus in the same way as the training run of a model.

    Args:
        corpus: A corpus with all points in its training split.
        label_names: The labels of the model.
        metadata: The training metadata of the model.

    Returns:
        The corpus with the same test split as in the run, if the run had one; None if the run used
        different data, or data with given splits.
    """
    recorded = _recorded_splits(metadata)
    expected = {"train", "test"} if "test" in recorded else {"train"}
    if set(recorded) != expected or recorded_size(metadata) != len(corpus.train):
        return None
    if list(corpus.label_names) != list(label_names):
        return None
    n_test = recorded["test"]["points"] if "test" in recorded else 0
    settings = metadata.get(DATA_SETTINGS, {})
    cut = hold_out_test(corpus, n_test, seed=settings.get("seed", 0))
    stats = json.loads(json.dumps(corpus_stats(cut).to_dict()["splits"]))
    columns, trained_on = corpus.reading.get("text"), settings.get("text")
    if columns and trained_on and columns != trained_on:  # same points, but other texts
        stats, recorded = _without_texts(stats), _without_texts(recorded)
    return cut if stats == recorded else None


def _without_texts(splits: dict[str, Any]) -> dict[str, Any]:
    """Return those statistics of the splits that do not depend on the texts."""
    return {
        name: {k: value for k, value in stats.items() if "text" not in k and "word" not in k}
        for name, stats in splits.items()
    }


def _recorded_splits(metadata: Mapping[str, Any]) -> dict[str, Any]:
    splits: dict[str, Any] = json.loads(json.dumps(metadata.get("data", {}).get("splits", {})))
    return splits
