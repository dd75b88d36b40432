"""The hot loops of a CPU run, compiled by numba. Plain arrays in, plain arrays out.

Each loop is parallel over points or over rows and adds up in a fixed order inside one, so the
result does not depend on the number of threads. `elias.kernels` gives them tensors and gradients.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

# Sums may be reordered so that they vectorise; NaN and infinity keep their meaning.
SUMS = {"reassoc", "contract", "nsz"}
_EMPTY = np.float32(-np.inf)
_FULL = np.float32(0.0)


@njit(cache=True, nogil=True)
def _before(
    scores: Array, frees: Array, labels: Array, i: int, pivot: tuple[float, float, int]
) -> int:
    """Say whether entry i ranks before the pivot (1), after it (-1), or is the pivot (0)."""
    if scores[i] != pivot[0]:
        return 1 if scores[i] > pivot[0] else -1
    if frees[i] != pivot[1]:
        return 1 if frees[i] > pivot[1] else -1
    if labels[i] != pivot[2]:
        return 1 if labels[i] < pivot[2] else -1
    return 0


@njit(cache=True, nogil=True)
def keep_best(scores: Array, frees: Array, labels: Array, size: int, keep: int) -> None:
    """Move the ``keep`` best of the first ``size`` entries to the front, in no order.

    Quickselect on (score, unsaturated score, label ascending), a strict order, so that the choice
    is unique.
    """
    low = 0
    high = size - 1
    while low < high:
        mid = (low + high) // 2
        pivot = (scores[mid], frees[mid], labels[mid])
        i = low
        j = high
        while i <= j:
            while _before(scores, frees, labels, i, pivot) > 0:
                i += 1
            while _before(scores, frees, labels, j, pivot) < 0:
                j -= 1
            if i <= j:
                scores[i], scores[j] = scores[j], scores[i]
                frees[i], frees[j] = frees[j], frees[i]
                labels[i], labels[j] = labels[j], labels[i]
                i += 1
                j -= 1
        if keep - 1 <= j:
            high = j
        elif keep - 1 >= i:
            low = i
        else:
            return


@njit(cache=True)
def _reach(
    beam: Array, beam_log: Array, edge_labels: Array, edge_log: Array, best: tuple[Array, ...]
) -> int:
    """Walk every path of one row, noting the best to each label; return how many were reached.

    A label's score and unsaturated score lie side by side: a path looks at one place in memory.
    """
    held, best_path, reached = best
    n_clusters, n_edges = edge_labels.shape
    n_reached = 0
    for position in range(beam.shape[0]):
        cluster = beam[position]
        if cluster >= n_clusters:
            continue
        cluster_free = beam_log[position]
        cluster_score = min(cluster_free, _FULL)
        for edge in range(n_edges):
            edge_free = edge_log[cluster, edge]
            if edge_free == _EMPTY:
                continue
            label = edge_labels[cluster, edge]
            score = cluster_score + min(edge_free, _FULL)
            free = cluster_free + edge_free
            before = held[label, 0]
            if score > before or (score == before and free > held[label, 1]):
                if before == _EMPTY:
                    reached[n_reached] = label
                    n_reached += 1
                held[label, 0] = score
                held[label, 1] = free
                best_path[label] = position * n_edges + edge
    return n_reached


@njit(parallel=True, cache=True)
def expand_beam(  # noqa: PLR0913 - numba wants plain positional arrays
    beam: Array,
    beam_log: Array,
    edge_labels: Array,
    edge_log: Array,
    wanted: Array,
    n_labels: int,
    n_chunks: int,
    outs: tuple[Array, Array, Array],
) -> None:
    """Follow all edges of each row's beam, keep the best path per label, then the best labels.

    A path is numbered ``position in the beam · E + edge``; of equal paths the first is kept. The
    rows are dealt to ``n_chunks`` workers, each with its own memory of L entries.
    """
    out_labels, out_paths, out_wanted = outs
    n_rows = beam.shape[0]
    n_keep = out_labels.shape[1]
    for chunk in prange(n_chunks):
        held = np.full((n_labels, 2), _EMPTY, dtype=np.float32)
        best_path = np.empty(n_labels, dtype=np.int32)
        reached = np.empty(n_labels, dtype=np.int32)
        scores = np.empty(n_labels, dtype=np.float32)
        frees = np.empty(n_labels, dtype=np.float32)
        best = (held, best_path, reached)
        for row in range(chunk, n_rows, n_chunks):
            n_reached = _reach(beam[row], beam_log[row], edge_labels, edge_log, best)
            for i in range(wanted.shape[1]):
                label = wanted[row, i]
                seen = label < n_labels and held[label, 0] != _EMPTY
                out_wanted[row, i] = best_path[label] if seen else -1
            for i in range(n_reached):
                scores[i] = held[reached[i], 0]
                frees[i] = held[reached[i], 1]
                held[reached[i], 0] = _EMPTY
            if n_reached > n_keep:
                keep_best(scores, frees, reached, n_reached, n_keep)
            for i in range(min(n_reached, n_keep)):
                out_labels[row, i] = reached[i]
                out_paths[row, i] = best_path[reached[i]]


@njit(parallel=True, cache=True, fastmath=SUMS)
def gather_dot(embedding: Array, weight: Array, bias: Array, labels: Array, out: Array) -> None:
    """Fill ``out[i, k] = weight[labels[i, k]]·embedding[i] + bias``; a padded label gives 0."""
    n_rows, n_keep = labels.shape
    n_labels, dim = weight.shape
    for row in prange(n_rows):
        point = embedding[row]
        for k in range(n_keep):
            label = labels[row, k]
            if label >= n_labels:
                out[row, k] = 0.0
                continue
            total = np.float32(0.0)
            for d in range(dim):
                total += weight[label, d] * point[d]
            out[row, k] = total + bias[label]


@njit(cache=True, fastmath=SUMS)
def _add_four(weight: Array, ids: Array, coefficients: Array, j: int, total: Array) -> None:
    """Add four rows at once: the total is read and written once for them."""
    c0, c1, c2, c3 = coefficients[j], coefficients[j + 1], coefficients[j + 2], coefficients[j + 3]
    s0, s1, s2, s3 = weight[ids[j]], weight[ids[j + 1]], weight[ids[j + 2]], weight[ids[j + 3]]
    for d in range(total.shape[0]):
        total[d] += (c0 * s0[d] + c1 * s1[d]) + (c2 * s2[d] + c3 * s3[d])


@njit(parallel=True, cache=True, fastmath=SUMS)
def sum_rows(weight: Array, ids: Array, offsets: Array, coefficients: Array, out: Array) -> None:
    """Fill ``out[i] = Σ_j coefficients[j]·weight[ids[j]]`` over j in offsets[i]:offsets[i+1].

    Ids past the last row of weights count for nothing.
    """
    n_rows, dim = out.shape
    n_weights = weight.shape[0]
    for row in prange(n_rows):
        total = out[row]
        for d in range(dim):
            total[d] = 0.0
        j, end = offsets[row], offsets[row + 1]
        while j < end:
            if j + 4 <= end and max(ids[j], ids[j + 1], ids[j + 2], ids[j + 3]) < n_weights:
                _add_four(weight, ids, coefficients, j, total)
                j += 4
                continue
            if ids[j] < n_weights:
                source = weight[ids[j]]
                for d in range(dim):
                    total[d] += coefficients[j] * source[d]
            j += 1


@njit(parallel=True, cache=True, fastmath=SUMS)
def grouped_dot(
    embedding: Array, weight: Array, bias: Array, groups: tuple[Array, ...], out: Array
) -> None:
    """Do what `gather_dot` does, label by label: each row of weights is read once.

    ``groups`` is from `group_by_id`; ``out`` has a place for each slot, 0 in padded ones.
    """
    touched, starts, points, places = groups
    dim = weight.shape[1]
    for i in prange(touched.shape[0]):
        row = weight[touched[i]]
        for j in range(starts[i], starts[i + 1]):
            point = embedding[points[j]]
            total = np.float32(0.0)
            for d in range(dim):
                total += row[d] * point[d]
            out[places[j]] = total + bias[touched[i]]


@njit(cache=True)
def _first_places(ids: Array, n_ids: int) -> tuple[Array, Array, Array]:
    """Return (touched ids ascending, start of each in a grouped list, start by id)."""
    counts = np.zeros(n_ids, dtype=np.int64)
    for j in range(ids.shape[0]):
        if ids[j] < n_ids:
            counts[ids[j]] += 1
    touched = np.flatnonzero(counts)
    starts = np.zeros(touched.shape[0] + 1, dtype=np.int64)
    for i in range(touched.shape[0]):
        starts[i + 1] = starts[i] + counts[touched[i]]
        counts[touched[i]] = starts[i]
    return touched, starts, counts


@njit(cache=True)
def group_by_id(ids: Array, offsets: Array, n_ids: int) -> tuple[Array, Array, Array, Array]:
    """Turn rows of ids around: for each id that occurs, the rows and places it occurs in.

    Returns (touched ids ascending, start of each in the next two, row, place); ids of ``n_ids``
    and over are padding.
    """
    touched, starts, slot_of = _first_places(ids, n_ids)
    rows = np.empty(starts[-1], dtype=np.int32)
    places = np.empty(starts[-1], dtype=np.int64)
    for row in range(offsets.shape[0] - 1):
        for j in range(offsets[row], offsets[row + 1]):
            if ids[j] < n_ids:
                slot = slot_of[ids[j]]
                rows[slot] = row
                places[slot] = j
                slot_of[ids[j]] = slot + 1
    return touched, starts, rows, places


@njit(parallel=True, cache=True)
def adamw_rows(  # noqa: PLR0913 - numba wants plain positional arrays
    weight: Array,
    mean: Array,
    variance: Array,
    touched: Array,
    grad: Array,
    skipped: Array,
    fades: Array,
    rates: Array,
) -> None:
    """Apply AdamW in place to the touched rows.

    ``fades`` (3, n) holds what ``skipped`` steps leave of mean, variance and weight; ``rates`` the
    step of the weight, ε, the shares of the new gradient and its square, and the correction of the
    variance. No fast mathematics here: with it, the loop just compiled and the same loop from the
    cache were seen to round differently.
    """
    rate, floor, new1, new2, correction = rates[0], rates[1], rates[2], rates[3], rates[4]
    dim = weight.shape[1]
    for i in prange(touched.shape[0]):
        row = touched[i]
        fade1 = fades[0, skipped[i]]
        fade2 = fades[1, skipped[i]]
        shrink = fades[2, skipped[i]]
        w = weight[row]
        m = mean[row]
        v = variance[row]
        g = grad[i]
        for d in range(dim):
            m[d] = fade1 * m[d] + new1 * g[d]
            v[d] = fade2 * v[d] + new2 * g[d] * g[d]
            w[d] = shrink * w[d] - rate * m[d] / (np.sqrt(v[d] * correction) + floor)
