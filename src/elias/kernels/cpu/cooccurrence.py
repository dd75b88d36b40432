"""Counting how strongly clusters and labels go together, a few clusters at a time (Eq. 9)."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

from elias.kernels.cpu.select import nth_lowest
from elias.kernels.threads import thread_map_progress

Array: TypeAlias = NDArray[Any]

_CLUSTERS_AT_A_TIME = 32


class Members(NamedTuple):
    """Rows of ids, one row after the other, row i from ``starts[i]`` on."""

    starts: Array
    ids: Array


class _Memory(NamedTuple):
    """What a thread counts a cluster in: an entry a label."""

    seen_by: Array
    sums: Array
    touched: Array


def strongest_counts(
    points: Members, scores: Array, labels: Members, partition: Array, most: int
) -> tuple[Array, Array, Array]:
    """Return each cluster's ``most`` strongest labels and those of its own, with their counts.

    Args:
        points: Of each cluster.
        scores: Of each point of each cluster, beside ``points.ids``.
        labels: Of each point.
        partition: (L,) the cluster that each label is of; that pair is kept however weak.
        most: Other pairs kept of a cluster; of equal ones those with the lower label id.

    Returns:
        The values, label ids and row starts of a sparse (C, L) matrix, ids in no order.
    """
    n_clusters, n_labels = len(points.starts) - 1, len(partition)
    begins = range(0, n_clusters, _CLUSTERS_AT_A_TIME)
    spans = [range(begin, min(begin + _CLUSTERS_AT_A_TIME, n_clusters)) for begin in begins]
    n_own = np.bincount(partition, minlength=n_clusters)

    def count(span: range, memory: _Memory) -> tuple[Array, Array, Array]:
        room = most * len(span) + int(n_own[span.start : span.stop].sum())
        out = np.empty(room, np.float32), np.empty(room, np.int32), np.zeros(len(span), np.int64)
        _count_some(points, scores, labels, partition, most, (span.start, span.stop), memory, out)
        n_kept = int(out[2].sum())
        return out[0][:n_kept].copy(), out[1][:n_kept].copy(), out[2]

    def memory() -> _Memory:
        return _Memory(
            np.full(n_labels, -1, np.int32),
            np.empty(n_labels, np.float32),
            np.empty(n_labels, np.int32),
        )

    parts = list(thread_map_progress(count, spans, memory, "Counting edges", n_clusters))
    values, ids, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
    return values, ids, np.concatenate([[0], np.cumsum(sizes)])


@njit(cache=True, nogil=True)
def _count_some(
    points: Members,
    scores: Array,
    labels: Members,
    partition: Array,
    most: int,
    span: tuple[int, int],
    memory: _Memory,
    out: tuple[Array, Array, Array],
) -> None:
    end = 0
    for cluster in range(span[0], span[1]):
        n_touched = 0
        for i in range(points.starts[cluster], points.starts[cluster + 1]):
            point, score = points.ids[i], scores[i]
            for j in range(labels.starts[point], labels.starts[point + 1]):
                label = labels.ids[j]
                if memory.seen_by[label] == cluster:
                    memory.sums[label] += score
                else:
                    memory.seen_by[label] = cluster
                    memory.sums[label] = score
                    memory.touched[n_touched] = label
                    n_touched += 1
        n_kept = _keep(
            memory.touched[:n_touched], memory.sums, partition, cluster, most, (out[0], out[1], end)
        )
        out[2][cluster - span[0]] = n_kept
        end += n_kept


@njit(cache=True, nogil=True)
def _keep(
    touched: Array,
    sums: Array,
    partition: Array,
    cluster: int,
    most: int,
    out: tuple[Array, Array, int],
) -> int:
    """Write the cluster's strongest pairs and its own; return how many."""
    border, last_label = _border(touched, sums, most)
    values, ids, place = out
    n_kept = 0
    for label in touched:
        strong = sums[label] > border or (sums[label] == border and label <= last_label)
        if strong or partition[label] == cluster:
            values[place + n_kept] = sums[label]
            ids[place + n_kept] = label
            n_kept += 1
    return n_kept


@njit(cache=True, nogil=True)
def _border(touched: Array, sums: Array, most: int) -> tuple[Any, Any]:
    """Return the weakest sum that stays, and the last label id that stays with just this sum."""
    n_touched = touched.shape[0]
    if n_touched <= most or n_touched == 0:
        return np.float32(-np.inf), np.int32(0)
    falling = np.empty(n_touched, np.float32)
    for i in range(n_touched):
        falling[i] = -sums[touched[i]]
    border = -nth_lowest(falling, most)
    equal = np.empty(n_touched, np.int32)
    n_above = n_equal = 0
    for label in touched:
        if sums[label] > border:
            n_above += 1
        elif sums[label] == border:
            equal[n_equal] = label
            n_equal += 1
    return border, nth_lowest(equal[:n_equal], most - n_above)
