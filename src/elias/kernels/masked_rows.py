"""Rows ψ that all labels share, sparse and dense features, and what solvers do with one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Array: TypeAlias = NDArray[Any]
Rows: TypeAlias = tuple[Array, Array, Array, Array]
"""ψ: values, columns (uint32) and row starts of its sparse part, and its dense part (N, D)."""
Buffers: TypeAlias = tuple[Array, Array]
"""A thread's own weights of the sparse and the dense part, float64; zero between labels."""

# Sums may be reordered so that they vectorise; NaN and infinity keep their meaning.
_SUMS = {"reassoc", "contract", "nsz"}


def as_rows(features: csr_matrix, dense: NDArray[np.float32]) -> Rows:
    """Return ψ as plain arrays. Columns are unsigned, for which numba tests no negative index."""
    return (
        np.ascontiguousarray(features.data, dtype=np.float32),
        np.ascontiguousarray(features.indices).astype(np.uint32, copy=False),
        features.indptr.astype(np.int64),
        np.ascontiguousarray(dense, dtype=np.float32),
    )


def squares_of(rows: Rows) -> NDArray[np.float64]:
    """Return ‖ψ‖² + 1 of each row, the bias being a feature of 1."""
    data, _, starts, dense = rows
    total = np.concatenate([[0.0], np.cumsum(data.astype(np.float64) ** 2)])
    dense_squares = np.einsum("nd,nd->n", dense, dense, dtype=np.float64)
    squares: NDArray[np.float64] = 1 + np.diff(total[starts]) + dense_squares
    return squares


@njit(cache=True, nogil=True)
def sparse_dot(data: Array, columns: Array, begin: int, end: int, weight: Array) -> float:
    """Return Σ data·weight[columns] in four sums, so that none waits for the one before."""
    first, second, third, fourth = 0.0, 0.0, 0.0, 0.0
    j = begin
    while j + 3 < end:
        first += data[j] * weight[columns[j]]
        second += data[j + 1] * weight[columns[j + 1]]
        third += data[j + 2] * weight[columns[j + 2]]
        fourth += data[j + 3] * weight[columns[j + 3]]
        j += 4
    while j < end:
        first += data[j] * weight[columns[j]]
        j += 1
    return (first + second) + (third + fourth)


@njit(cache=True, nogil=True, fastmath=_SUMS)
def _dense_dot(dense: Array, row: int, weight: Array) -> float:
    total = 0.0
    for d in range(dense.shape[1]):
        total += dense[row, d] * weight[d]
    return total


@njit(cache=True, nogil=True)
def dot(rows: Rows, row: int, buffers: Buffers) -> float:
    """Return w·ψ of one row."""
    data, columns, starts, dense = rows
    total = sparse_dot(data, columns, starts[row], starts[row + 1], buffers[0])
    return total + _dense_dot(dense, row, buffers[1])


@njit(cache=True, nogil=True)
def add(rows: Rows, row: int, scale: float, buffers: Buffers) -> None:
    """Add so much of one row to w."""
    data, columns, starts, dense = rows
    weight, dense_weight = buffers
    for j in range(starts[row], starts[row + 1]):
        weight[columns[j]] += scale * data[j]
    for d in range(dense.shape[1]):
        dense_weight[d] += scale * dense[row, d]


@njit(cache=True, nogil=True)
def first_state(seed: int, label: int) -> np.uint64:
    """Return where a label's random numbers begin: never 0, and far apart for neighbours."""
    mixed = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(label) + np.uint64(1)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


@njit(cache=True, nogil=True)
def shuffle(order: Array, size: int, state: np.uint64) -> np.uint64:
    """Shuffle the first ``size`` entries in place; return the generator's next state."""
    for i in range(size - 1, 0, -1):
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        j = np.int64(((state >> np.uint64(32)) * np.uint64(i + 1)) >> np.uint64(32))
        order[i], order[j] = order[j], order[i]
    return state
