"""Count co-occurrences of clusters and labels, a few clusters at a time (Eq. 9)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from scipy.sparse import csr_matrix

from elias.kernels.cpu.rows import ZERO, Array
from elias.kernels.cpu.search import kth_lowest
from elias.kernels.threads import split_range, thread_map_progress

_CLUSTERS_PER_CHUNK = 32


class RaggedIds(NamedTuple):
    """Concatenated rows of ids. Row i is ``ids[starts[i] : starts[i + 1]]``."""

    starts: Array
    ids: Array


class _Scratch(NamedTuple):
    """Scratch memory of one thread; each array has one entry per label."""

    seen_by: Array
    sums: Array
    touched: Array


def strongest_counts(
    of_cluster: csr_matrix, labels: csr_matrix, partition: Array, most: int
) -> csr_matrix:
    """Return the co-occurrence counts of each cluster with its strongest and its own labels (C, L).

    The count of a pair is the sum of the cluster's scores over the points that have the label.

    Args:
        of_cluster: (C, N) scores of each cluster for its points.
        labels: (N, L) labels of each point.
        partition: (L,) the cluster that each label belongs to. A label that co-occurs with its
            own cluster is always kept.
        most: Number of highest counts kept for each cluster; ties go to the lower label id.
    """
    n_clusters, n_labels = of_cluster.shape[0], labels.shape[1]
    points, scores = RaggedIds(of_cluster.indptr, of_cluster.indices), of_cluster.data
    of_point = RaggedIds(labels.indptr, labels.indices)
    spans = split_range(n_clusters, _CLUSTERS_PER_CHUNK)
    n_own = np.bincount(partition, minlength=n_clusters)

    def count(span: range, scratch: _Scratch) -> tuple[Array, Array, Array]:
        size = most * len(span) + int(n_own[span.start : span.stop].sum())
        out = np.empty(size, np.float32), np.empty(size, np.int32), np.zeros(len(span), np.int64)
        bounds = span.start, span.stop
        _sum_scores(points, scores, of_point, partition, most, bounds, scratch, out)
        n_kept = int(out[2].sum())
        return out[0][:n_kept].copy(), out[1][:n_kept].copy(), out[2]

    def scratch() -> _Scratch:
        return _Scratch(
            np.full(n_labels, -1, np.int32),
            np.empty(n_labels, np.float32),
            np.empty(n_labels, np.int32),
        )

    parts = list(thread_map_progress(count, spans, scratch, "Counting edges", n_clusters))
    values, ids, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
    starts = np.concatenate([[0], np.cumsum(sizes)])
    counts = csr_matrix((values, ids, starts), shape=(n_clusters, n_labels))
    counts.sort_indices()
    return counts


@njit(cache=True, nogil=True)
def _sum_scores(
    points: RaggedIds,
    scores: Array,
    labels: RaggedIds,
    partition: Array,
    most: int,
    span: tuple[int, int],
    scratch: _Scratch,
    out: tuple[Array, Array, Array],
) -> None:
    end = ZERO
    for cluster in range(span[0], span[1]):
        n_touched = 0
        for i in range(points.starts[cluster], points.starts[cluster + 1]):
            point, score = points.ids[i], scores[i]
            for j in range(labels.starts[point], labels.starts[point + 1]):
                label = labels.ids[j]
                if scratch.seen_by[label] == cluster:
                    scratch.sums[label] += score
                else:
                    scratch.seen_by[label] = cluster
                    scratch.sums[label] = score
                    scratch.touched[n_touched] = label
                    n_touched += 1
        touched = scratch.touched[:n_touched]
        n_kept = _keep(touched, scratch.sums, partition, cluster, most, (out[0], out[1], end))
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
    """Write the cluster's strongest labels and its own labels, and return their number."""
    weakest, last_label = _weakest_kept(touched, sums, most)
    values, ids, start = out
    n_kept = 0
    for label in touched:
        strong = sums[label] > weakest or (sums[label] == weakest and label <= last_label)
        if strong or partition[label] == cluster:
            values[start + n_kept] = sums[label]
            ids[start + n_kept] = label
            n_kept += 1
    return n_kept


@njit(cache=True, nogil=True)
def _weakest_kept(touched: Array, sums: Array, most: int) -> tuple[Any, Any]:
    """Return the lowest of the ``most`` highest sums, and the last label id kept with this sum."""
    if touched.shape[0] <= most:
        return np.float32(-np.inf), np.int32(0)
    weakest = -kth_lowest(-sums[touched], most - 1)
    ties = np.empty_like(touched)
    n_above, n_ties = 0, 0
    for label in touched:
        if sums[label] > weakest:
            n_above += 1
        elif sums[label] == weakest:
            ties[n_ties] = label
            n_ties += 1
    return weakest, kth_lowest(ties[:n_ties], most - n_above - 1)
