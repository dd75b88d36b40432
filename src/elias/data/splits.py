"""Split points into training, validation and test sets.

Most labels of an extreme corpus have a handful of points; a careless hold-out takes the only one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from elias.errors import ConfigError, DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.config import EliasConfig
    from elias.data.corpus import Corpus, Split


logger = logging.getLogger(__name__)

_CHUNK = 1 << 16


def hold_out(
    labels: csr_matrix, size: int, seed: int, *, covered: bool = True
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose validation points, if ``covered`` such whose labels all keep another training point.

    Points are tried in a seeded random order and taken while every label of theirs is still on
    a point that stays; all alike if not ``covered``. Points without labels are never taken.

    Args:
        labels: (N, L) relevance; a stored entry is a relevant label.
        size: How many points to take. Fewer are taken when no more can be spared.
        seed: Decides the order; the same seed takes the same points.
        covered: Whether no label may lose its last training point.

    Returns:
        The rows that stay for training and the rows held out, each sorted; together all N.

    Raises:
        DataError: If ``size`` is not between 0 and N.
    """
    n_points = int(labels.shape[0])
    _check_size("size", size, n_points)
    if not labels.has_canonical_format:
        labels = labels.copy()
        labels.sum_duplicates()
    order = np.random.default_rng(seed).permutation(n_points)
    if not covered:
        labelled = order[np.diff(labels.indptr)[order] > 0]
        return _cut(n_points, labelled[:size])
    remaining = np.bincount(labels.indices, minlength=labels.shape[1])
    taken: list[int] = []
    for start in range(0, n_points, _CHUNK):
        if len(taken) >= size:
            break
        # a label's count only falls, so a point refused here would be refused below too
        candidates = _sparable(labels, order[start : start + _CHUNK], remaining)
        taken += _take(labels, candidates, remaining, size - len(taken))
    return _cut(n_points, np.array(taken, dtype=np.int64))


def random_split(
    n_points: int, test_size: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut ``n_points`` rows into training rows and exactly ``test_size`` test rows, each sorted.

    >>> train, test = random_split(10, 3, seed=0)
    >>> len(train), len(test)
    (7, 3)
    """
    _check_size("test_size", test_size, n_points)
    order = np.random.default_rng(seed).permutation(n_points)
    return _cut(n_points, order[:test_size])


def _sparable(
    labels: csr_matrix, rows: NDArray[np.int64], remaining: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the rows that have labels, all of them on at least one point more."""
    chunk = labels[rows]
    on_the_last_point = remaining[chunk.indices] < 2
    before = np.concatenate([[0], np.cumsum(on_the_last_point)])
    n_last = before[chunk.indptr[1:]] - before[chunk.indptr[:-1]]
    kept: NDArray[np.bool_] = (n_last == 0) & (np.diff(chunk.indptr) > 0)
    return rows[kept]


def _take(
    labels: csr_matrix, rows: NDArray[np.int64], remaining: NDArray[np.int64], size: int
) -> list[int]:
    """Take up to ``size`` rows one after the other, lowering ``remaining`` in place."""
    taken: list[int] = []
    for row in rows.tolist():
        if len(taken) >= size:
            break
        ids = labels.indices[labels.indptr[row] : labels.indptr[row + 1]]
        if remaining[ids].min() >= 2:
            remaining[ids] -= 1
            taken.append(row)
    return taken


def _cut(n_points: int, taken: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    is_taken = np.zeros(n_points, dtype=bool)
    is_taken[taken] = True
    return np.flatnonzero(~is_taken), np.flatnonzero(is_taken)


def _check_size(name: str, size: int, n_points: int) -> None:
    if not 0 <= size <= n_points:
        raise DataError(f"{name} must be between 0 and the {n_points} points, not {size}")


_ROWS = 1 << 20  # rows looked at at a time


def sample_points(labels: csr_matrix, size: int, seed: int) -> NDArray[np.int64]:
    """Return ``size`` random rows, ascending, among them one of each label that has any.

    More than ``size`` where the labels need more. The same seed gives the same rows.
    """
    n_points, n_labels = labels.shape
    if size >= n_points:
        return np.arange(n_points, dtype=np.int64)
    order = np.random.default_rng(seed).permutation(n_points)
    rank = np.empty(n_points, dtype=np.int64)
    rank[order] = np.arange(n_points)
    first = np.full(n_labels, n_points, dtype=np.int64)  # the rank of each label's first point
    for start in range(0, n_points, _ROWS):
        stop = min(start + _ROWS, n_points)
        indptr = labels.indptr[start : stop + 1].astype(np.int64)
        ranks = np.repeat(rank[start:stop], np.diff(indptr))
        np.minimum.at(first, labels.indices[indptr[0] : indptr[-1]], ranks)
    needed = np.unique(first[first < n_points])
    taken = np.zeros(n_points, dtype=bool)
    taken[needed] = True
    spare = np.flatnonzero(~taken)[: max(0, size - len(needed))]
    taken[spare] = True
    return np.sort(order[taken])


def validation_split(corpus: Corpus, config: EliasConfig) -> tuple[Split, Split | None]:
    """Return the points to train on and those to validate on, as `train` takes them.

    The corpus's own splits where it has a validation split; else points held out of the training
    split, the same for the same (resolved) configuration; None where none are held out.
    """
    if corpus.validation is not None:
        return corpus.train, corpus.validation
    size = config.eval.validation_size
    assert size is not None
    if size == 0:
        return corpus.train, None
    train = corpus.train
    if 2 * size > len(train):
        raise ConfigError(
            f"eval.validation_size is {size}, more than half of the {len(train)} training "
            "points; lower it, or set it to none to have it derived"
        )
    train_rows, held_rows = hold_out(
        train.labels, size, config.seed, covered=config.eval.hold_out == "covered"
    )
    if len(held_rows) == 0:
        logger.warning("no point can be held out: each has a label found nowhere else")
        return train, None
    if len(held_rows) < size:
        logger.warning(
            "%d points held out for validation instead of %d: the others have a label found "
            "nowhere else",
            len(held_rows),
            size,
        )
    return train.take(train_rows), train.take(held_rows)
