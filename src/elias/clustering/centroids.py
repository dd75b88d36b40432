"""Compute label centroids: the normalised sum of each label's points.

A first pass counts the nonzero columns of each centroid, so that memory is allocated only once.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from elias.kernels.threads import split_range, thread_map_progress

Array: TypeAlias = NDArray[Any]
Rows: TypeAlias = tuple[Array, Array, Array]
"""A sparse matrix in CSR layout (data, indices, indptr)."""

_LABELS_PER_TASK = 2_000
_ROWS_PER_COPY = 100_000


def label_centroids(
    labels: csr_matrix, bow: csr_matrix, embedding: NDArray[np.float32] | None = None
) -> tuple[csr_matrix, NDArray[np.float32]]:
    """Return the centroid μ_ℓ of each label: the sum of its points, scaled to length 1 (Eq. 14–15).

    A point is the concatenation of its bag of words and its embedding φ, each scaled to length 1.
    The rows of ``bow`` must already have length 1. The sparse and the dense part of the centroids
    are returned separately. A label without points has a zero centroid.
    """
    to_points = _transposed(labels)
    n_labels, n_columns = labels.shape[1], bow.shape[1]
    dense = np.zeros((n_labels, 0 if embedding is None else embedding.shape[1]), dtype=np.float32)
    rows = (bow.data.astype(np.float32, copy=False), bow.indices, bow.indptr)
    starts = np.zeros(n_labels + 1, dtype=np.int64)
    spans = split_range(n_labels, _LABELS_PER_TASK)

    def count_some(span: range, memory: Array) -> None:
        _count_columns(to_points, rows, memory, starts[1:], (span.start, span.stop))

    def sum_some(span: range, memory: Array) -> None:
        borders = (span.start, span.stop)
        _sum_rows(to_points, rows, memory, (data, columns, starts), borders)
        square = _squares(data, starts[span.start : span.stop + 1])
        if embedding is not None:
            _sum_vectors(to_points, embedding, lengths, dense, borders)
            square += (dense[span.start : span.stop] ** 2).sum(axis=1)
        scale = 1 / np.sqrt(np.maximum(square, 1e-24))
        scale[square == 0] = 0
        _scale(data, starts, dense, scale, span.start)

    new_memory = partial(np.full, n_columns, -1, np.int64)
    list(thread_map_progress(count_some, spans, new_memory, "Sizing label centroids", n_labels))
    np.cumsum(starts, out=starts)
    data = np.empty(starts[-1], dtype=np.float32)
    small = max(starts[-1], n_columns) <= np.iinfo(np.int32).max
    columns = np.empty(starts[-1], dtype=np.int32 if small else np.int64)
    lengths = np.ones(0, np.float32) if embedding is None else _lengths(embedding)
    list(thread_map_progress(sum_some, spans, new_memory, "Computing label centroids", n_labels))
    indptr = starts.astype(columns.dtype)
    return csr_matrix((data, columns, indptr), shape=(n_labels, n_columns)), dense


def _transposed(labels: csr_matrix) -> tuple[Array, Array]:
    """Return the points of each label, as the indices and indptr of a CSR matrix."""
    # scipy copies the values, so a small dtype saves memory
    ones = np.ones(labels.nnz, dtype=np.bool_)
    by_label = csr_matrix((ones, labels.indices, labels.indptr), shape=labels.shape).T.tocsr()
    return by_label.indices, by_label.indptr


def _lengths(embedding: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the length of each vector, at least 1e-12. Work in chunks to save memory."""
    lengths = np.empty(len(embedding), dtype=np.float32)
    for span in split_range(len(embedding), _ROWS_PER_COPY):
        some = slice(span.start, span.stop)
        lengths[some] = np.linalg.norm(embedding[some], axis=1)
    return np.maximum(lengths, np.float32(1e-12))


def _squares(data: NDArray[np.float32], starts: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the squared length of each row, summed from its last value to its first."""
    square = np.zeros(len(starts) - 1, dtype=np.float32)
    filled = np.flatnonzero(np.diff(starts))  # rows with values
    if len(filled):
        values = data[starts[0] : starts[-1]][::-1]
        begins = starts[-1] - starts[filled + 1]
        square[filled[::-1]] = np.add.reduceat(values * values, begins[::-1])
    return square


@njit(cache=True, nogil=True)
def _count_columns(
    to_points: tuple[Array, Array],
    rows: Rows,
    seen_by: Array,
    counts: Array,
    span: tuple[int, int],
) -> None:
    """Count the distinct nonzero columns among the points of each label."""
    points, starts = to_points
    _, columns, row_starts = rows
    for label in range(span[0], span[1]):
        count = 0
        for i in range(starts[label], starts[label + 1]):
            for j in range(row_starts[points[i]], row_starts[points[i] + 1]):
                if seen_by[columns[j]] != label:
                    seen_by[columns[j]] = label
                    count += 1
        counts[label] = count


@njit(cache=True, nogil=True)
def _sum_rows(
    to_points: tuple[Array, Array],
    rows: Rows,
    position_of: Array,
    out: Rows,
    span: tuple[int, int],
) -> None:
    """Write the sum of the points of each label as a sparse row.

    The columns of a row are in reverse order of first occurrence, as in scipy's sparse product.
    ``position_of`` maps each column to the position of its sum in ``out``. A position outside the
    row of the current label was set for an earlier label and is ignored.
    """
    points, starts = to_points
    data, columns, row_starts = rows
    out_data, out_columns, out_starts = out
    for label in range(span[0], span[1]):
        begin, end = out_starts[label], out_starts[label + 1]
        position = end
        for i in range(starts[label], starts[label + 1]):
            for j in range(row_starts[points[i]], row_starts[points[i] + 1]):
                column = columns[j]
                known = position_of[column]
                if begin <= known < end:
                    out_data[known] += data[j]
                else:
                    position -= 1
                    position_of[column] = position
                    out_columns[position] = column
                    out_data[position] = data[j]


@njit(cache=True, nogil=True)
def _sum_vectors(
    to_points: tuple[Array, Array],
    embedding: Array,
    lengths: Array,
    out: Array,
    span: tuple[int, int],
) -> None:
    points, starts = to_points
    for label in range(span[0], span[1]):
        for i in range(starts[label], starts[label + 1]):
            length = lengths[points[i]]
            for d in range(out.shape[1]):
                out[label, d] += embedding[points[i], d] / length


@njit(cache=True, nogil=True)
def _scale(data: Array, starts: Array, dense: Array, scale: Array, first: int) -> None:
    for i in range(scale.shape[0]):
        for j in range(starts[first + i], starts[first + i + 1]):
            data[j] *= scale[i]
        for d in range(dense.shape[1]):
            dense[first + i, d] *= scale[i]
