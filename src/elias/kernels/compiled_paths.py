"""Scores of paths with their gradients, and which labels are wanted: loops compiled by numba.

Each walks its B·K slots once on one thread; a chain of torch operations would write each of its
steps to memory.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

_FULL = np.float32(0.0)


@njit(cache=True, nogil=True)
def path_log(cluster_log: Array, edge_log: Array, beam: Array, paths: Array, out: Array) -> None:
    """Fill ``out`` with log ŝ_c + log ŝ_{c,ℓ} of the paths, each cut at 0; 0 for a path of -1."""
    n_edges = edge_log.shape[1]
    for row in range(paths.shape[0]):
        for slot in range(paths.shape[1]):
            path = paths[row, slot]
            if path < 0:
                out[row, slot] = _FULL
                continue
            cluster = beam[row, path // n_edges]
            edge = edge_log[cluster, path % n_edges]
            out[row, slot] = min(cluster_log[row, cluster], _FULL) + min(edge, _FULL)


@njit(cache=True, nogil=True)
def path_log_backward(
    scores: tuple[Array, Array],
    beam: Array,
    paths: Array,
    grad: Array,
    by_cluster: Array,
    by_edge: Array,
) -> None:
    """Add each path's gradient to its cluster and its edge, where those are not cut off.

    ``scores`` are those of clusters and edges; a ``by_edge`` without rows is not filled.
    """
    cluster_log, edge_log = scores
    n_edges = edge_log.shape[1]
    with_edges = by_edge.shape[0] > 0
    for row in range(paths.shape[0]):
        for slot in range(paths.shape[1]):
            path = paths[row, slot]
            if path < 0:
                continue
            cluster = beam[row, path // n_edges]
            if cluster_log[row, cluster] <= _FULL:
                by_cluster[row, cluster] += grad[row, slot]
            if with_edges and edge_log[cluster, path % n_edges] <= _FULL:
                by_edge[cluster, path % n_edges] += grad[row, slot]


@njit(cache=True, nogil=True)
def is_member(labels: Array, wanted: Array, n_labels: int, out: Array) -> None:
    """Say of each label whether it is among the row's wanted ones; both are padded with L."""
    marked = np.zeros(n_labels + 1, dtype=np.bool_)
    for row in range(labels.shape[0]):
        for i in range(wanted.shape[1]):
            marked[wanted[row, i]] = True
        marked[n_labels] = False
        for slot in range(labels.shape[1]):
            out[row, slot] = marked[labels[row, slot]]
        for i in range(wanted.shape[1]):
            marked[wanted[row, i]] = False
