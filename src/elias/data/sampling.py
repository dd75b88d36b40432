"""A choice of points that what is set up before training can be computed from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

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
