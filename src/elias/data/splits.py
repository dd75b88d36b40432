"""Cutting points into splits, seeded.

Most labels of an extreme corpus have a handful of points; a careless hold-out takes the only one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from elias.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

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
