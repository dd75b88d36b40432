"""Pairs of a point and a label, turned around: from the labels of a point to those of a label."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Array: TypeAlias = NDArray[Any]
Groups: TypeAlias = tuple[Array, Array, Array]
"""Sub-problems: where each label's begins, the row of each pair, and its y, +1 or -1."""


def group_pairs(candidates: NDArray[np.integer[Any]], labels: csr_matrix) -> Groups:
    """Return each label's sub-problem: the points that have it as a candidate or are relevant.

    Its rows come in ascending order, with +1 where the label is relevant and -1 elsewhere.

    Args:
        candidates: (N, k) label ids; L and over are padding.
        labels: (N, L) relevance; a stored entry is a relevant label.
    """
    relevant = (labels.indptr, labels.indices)
    counts = np.zeros(labels.shape[1], dtype=np.int64)
    _visit_pairs(candidates, relevant, counts, (np.empty(0, np.int32), np.empty(0, np.int8)))
    starts = np.concatenate([[0], np.cumsum(counts)])
    pairs = (np.empty(starts[-1], dtype=np.int32), np.empty(starts[-1], dtype=np.int8))
    _visit_pairs(candidates, relevant, starts[:-1].copy(), pairs)
    return starts, *pairs


@njit(cache=True)
def _visit_pairs(
    candidates: Array, relevant: tuple[Array, Array], slots: Array, pairs: tuple[Array, Array]
) -> None:
    """Write each pair to the next slot of its label; with no room for pairs, only count them."""
    label_starts, label_ids = relevant
    n_labels = slots.shape[0]
    last_row = np.full(n_labels, -1, dtype=np.int64)
    for row in range(candidates.shape[0]):
        for j in range(label_starts[row], label_starts[row + 1]):
            _note_pair(label_ids[j], row, 1, last_row, slots, pairs)
        for j in range(candidates.shape[1]):
            if candidates[row, j] < n_labels:
                _note_pair(candidates[row, j], row, -1, last_row, slots, pairs)


@njit(cache=True)
def _note_pair(
    label: int, row: int, sign: int, last_row: Array, slots: Array, pairs: tuple[Array, Array]
) -> None:
    rows, signs = pairs
    if last_row[label] == row:
        return
    last_row[label] = row
    if rows.shape[0]:
        rows[slots[label]] = row
        signs[slots[label]] = sign
    slots[label] += 1
