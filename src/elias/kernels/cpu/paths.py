"""Scores of paths with their gradients, and which labels are wanted: loops compiled by numba.

Each walks its B·K slots once; a chain of torch operations would write each of its steps to memory.
Rows are shared among threads. What rows add up together is added in blocks of rows first, whose
number does not depend on how many threads there are: so neither does the sum.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

_FULL = np.float32(0.0)
_MOST_BLOCKS = 8


@njit(cache=True, nogil=True)
def _edge_of(path: int, n_edges: int, inverse: float) -> tuple[np.int64, np.int64]:
    """Return (position in the beam, edge) of a path, without a division of integers.

    ``inverse`` is 1 / n_edges. Half a path more than a multiple is further from the next integer
    than a product of doubles is off.
    """
    position = np.int64((np.float64(path) + 0.5) * inverse)
    return position, path - position * n_edges


@njit(parallel=True, cache=True)
def path_log(cluster_log: Array, edge_log: Array, beam: Array, paths: Array, out: Array) -> None:
    """Fill ``out`` with log ŝ_c + log ŝ_{c,ℓ} of the paths, each cut at 0; 0 for a path of -1."""
    n_edges = edge_log.shape[1]
    inverse = 1.0 / n_edges
    for row in prange(paths.shape[0]):
        for slot in range(paths.shape[1]):
            path = paths[row, slot]
            if path < 0:
                out[row, slot] = _FULL
                continue
            position, edge = _edge_of(path, n_edges, inverse)
            cluster = beam[row, position]
            score = min(cluster_log[row, cluster], _FULL)
            out[row, slot] = score + min(edge_log[cluster, edge], _FULL)


def n_blocks(n_slots: int, n_edges: int) -> int:
    """Return into how many blocks `path_log_backward` deals the rows of ``n_slots`` paths.

    Each takes the memory of all ``n_edges`` edges, which is to be less work than the paths are.
    """
    return max(1, min(_MOST_BLOCKS, 4 * n_slots // max(1, n_edges)))


@njit(parallel=True, cache=True)
def path_log_backward(
    scores: tuple[Array, Array],
    beam: Array,
    paths: Array,
    grad: Array,
    by_cluster: Array,
    by_edge: Array,
) -> None:
    """Add each path's gradient to its cluster and its edge, where those are not cut off.

    ``scores`` are those of clusters and edges. ``by_edge`` (blocks, C, E) gets the sums of the
    blocks; without rows it is not filled. All come filled with 0.
    """
    cluster_log, edge_log = scores
    n_edges = edge_log.shape[1]
    inverse = 1.0 / n_edges
    n_rows = paths.shape[0]
    n_blocks = by_edge.shape[0]
    with_edges = by_edge.shape[1] > 0
    for block in prange(n_blocks):
        for row in range(block * n_rows // n_blocks, (block + 1) * n_rows // n_blocks):
            for slot in range(paths.shape[1]):
                path = paths[row, slot]
                if path < 0:
                    continue
                position, edge = _edge_of(path, n_edges, inverse)
                cluster = beam[row, position]
                if cluster_log[row, cluster] <= _FULL:
                    by_cluster[row, cluster] += grad[row, slot]
                if with_edges and edge_log[cluster, edge] <= _FULL:
                    by_edge[block, cluster, edge] += grad[row, slot]


@njit(parallel=True, cache=True)
def add_blocks(blocks: Array, out: Array) -> None:
    """Fill ``out`` (C, E) with the sum of the blocks (blocks, C, E), in their order."""
    for row in prange(out.shape[0]):
        for edge in range(out.shape[1]):
            total = blocks[0, row, edge]
            for block in range(1, blocks.shape[0]):
                total += blocks[block, row, edge]
            out[row, edge] = total


@njit(parallel=True, cache=True)
def is_member(labels: Array, wanted: Array, n_labels: int, n_chunks: int, out: Array) -> None:
    """Say of each label whether it is among the row's wanted ones; both are padded with L.

    The rows are dealt to ``n_chunks`` workers, each with its own memory of L entries.
    """
    for chunk in prange(n_chunks):
        marked = np.zeros(n_labels + 1, dtype=np.bool_)
        for row in range(chunk, labels.shape[0], n_chunks):
            for i in range(wanted.shape[1]):
                marked[wanted[row, i]] = True
            marked[n_labels] = False
            for slot in range(labels.shape[1]):
                out[row, slot] = marked[labels[row, slot]]
            for i in range(wanted.shape[1]):
                marked[wanted[row, i]] = False
