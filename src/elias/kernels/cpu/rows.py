"""The hot loops of a CPU run, compiled by numba. Plain arrays in, plain arrays out.

Each loop is parallel over points or over rows and adds up in a fixed order inside one, so the
result does not depend on the number of threads. `elias.kernels` gives them tensors and gradients.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numba import get_num_threads, njit, prange
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

# Sums may be reordered so that they vectorise; NaN and infinity keep their meaning.
SUMS = {"reassoc", "contract", "nsz"}
_SLOTS = 64  # of a shortlist in work at a time


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
def _add_four(rows: tuple[Array, ...], c: tuple[float, ...], total: Array) -> None:
    """Add four rows at once: the total is read and written once for them."""
    r0, r1, r2, r3 = rows
    for d in range(total.shape[0]):
        total[d] += (c[0] * r0[d] + c[1] * r1[d]) + (c[2] * r2[d] + c[3] * r3[d])


@njit(parallel=True, cache=True, fastmath=SUMS)
def sum_rows(weight: Array, ids: Array, offsets: Array, coefficients: Array, out: Array) -> None:
    """Fill ``out[i] = Σ_j coefficients[j]·weight[ids[j]]`` over j in offsets[i]:offsets[i+1].

    Ids past the last row of weights count for nothing.
    """
    n_rows = out.shape[0]
    for row in prange(n_rows):
        total = out[row]
        total[:] = 0.0
        _add_rows(weight, ids[offsets[row] : offsets[row + 1]], coefficients[offsets[row] :], total)


@njit(cache=True, fastmath=SUMS)
def _add_rows(weight: Array, ids: Array, coefficients: Array, total: Array) -> None:
    n_weights = weight.shape[0]
    j, end = 0, ids.shape[0]
    c = coefficients
    while j < end:
        if j + 4 <= end and max(ids[j], ids[j + 1], ids[j + 2], ids[j + 3]) < n_weights:
            rows = (weight[ids[j]], weight[ids[j + 1]], weight[ids[j + 2]], weight[ids[j + 3]])
            _add_four(rows, (c[j], c[j + 1], c[j + 2], c[j + 3]), total)
            j += 4
            continue
        if ids[j] < n_weights:
            source = weight[ids[j]]
            for d in range(total.shape[0]):
                total[d] += c[j] * source[d]
        j += 1


@njit(parallel=True, cache=True, fastmath=SUMS)
def sum_shortlists(
    weight: Array, labels: Array, coefficients: Array, n_chunks: int, out: Array
) -> None:
    """Do what `sum_rows` does for rows of as many labels each, some slots of all rows at a time.

    Where the labels of a row are ascending, those of all rows are much the same meanwhile, and
    their weights stay in the cache. The rows are dealt to ``n_chunks`` workers.
    """
    n_rows, n_slots = labels.shape
    for chunk in prange(n_chunks):
        begin, end = chunk * n_rows // n_chunks, (chunk + 1) * n_rows // n_chunks
        out[begin:end] = 0.0
        for first in range(0, n_slots, _SLOTS):
            some = slice(first, min(first + _SLOTS, n_slots))
            for row in range(begin, end):
                _add_rows(weight, labels[row, some], coefficients[row, some], out[row])


@njit(parallel=True, cache=True, fastmath=SUMS)
def sum_groups(
    vectors: Array, groups: tuple[Array, ...], coefficients: Array, out: Array, sums: Array
) -> None:
    """Fill in the weighted sum of each group's vectors, and the sum of its coefficients.

    ``groups`` is from `group_by_id`; a coefficient stands at the place that a row came from.
    """
    _, starts, rows, places = groups
    c = coefficients
    for i in prange(out.shape[0]):
        total = out[i]
        total[:] = 0.0
        whole = np.float32(0.0)
        j, end = starts[i], starts[i + 1]
        while j + 4 <= end:
            p0, p1, p2, p3 = places[j], places[j + 1], places[j + 2], places[j + 3]
            four = (
                vectors[rows[j]],
                vectors[rows[j + 1]],
                vectors[rows[j + 2]],
                vectors[rows[j + 3]],
            )
            _add_four(four, (c[p0], c[p1], c[p2], c[p3]), total)
            whole += (c[p0] + c[p1]) + (c[p2] + c[p3])
            j += 4
        while j < end:
            source = vectors[rows[j]]
            for d in range(total.shape[0]):
                total[d] += c[places[j]] * source[d]
            whole += c[places[j]]
            j += 1
        sums[i] = whole


@njit(cache=True, fastmath=SUMS)
def _dot_four(point: Array, rows: tuple[Array, ...]) -> tuple[np.float32, ...]:
    """Return the products of a point with four rows; it is read once for them."""
    r0, r1, r2, r3 = rows
    t0, t1, t2, t3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for d in range(point.shape[0]):
        value = point[d]
        t0 += r0[d] * value
        t1 += r1[d] * value
        t2 += r2[d] * value
        t3 += r3[d] * value
    return t0, t1, t2, t3


@njit(cache=True, fastmath=SUMS)
def _dots(point: Array, weight: Array, bias: Array, labels: Array, out: Array) -> None:
    n_labels = weight.shape[0]
    k, end = 0, labels.shape[0]
    while k < end:
        if k + 4 <= end and max(labels[k], labels[k + 1], labels[k + 2], labels[k + 3]) < n_labels:
            l0, l1, l2, l3 = labels[k], labels[k + 1], labels[k + 2], labels[k + 3]
            found = _dot_four(point, (weight[l0], weight[l1], weight[l2], weight[l3]))
            out[k] = found[0] + bias[l0]
            out[k + 1] = found[1] + bias[l1]
            out[k + 2] = found[2] + bias[l2]
            out[k + 3] = found[3] + bias[l3]
            k += 4
            continue
        out[k] = 0.0
        if labels[k] < n_labels:
            row = weight[labels[k]]
            total = np.float32(0.0)
            for d in range(point.shape[0]):
                total += row[d] * point[d]
            out[k] = total + bias[labels[k]]
        k += 1


@njit(parallel=True, cache=True, fastmath=SUMS)
def shortlist_dots(
    embedding: Array, weight: Array, bias: Array, labels: Array, n_chunks: int, out: Array
) -> None:
    """Do what `gather_dot` does, some slots of all rows at a time, as in `sum_shortlists`."""
    n_rows, n_slots = labels.shape
    for chunk in prange(n_chunks):
        begin, end = chunk * n_rows // n_chunks, (chunk + 1) * n_rows // n_chunks
        for first in range(0, n_slots, _SLOTS):
            some = slice(first, min(first + _SLOTS, n_slots))
            for row in range(begin, end):
                _dots(embedding[row], weight, bias, labels[row, some], out[row, some])


@njit(parallel=True, cache=True)
def _counts(ids: Array, bounds: Array, n_ids: int) -> Array:
    """Return how often each id occurs in each chunk of the list, (chunks, ids)."""
    n_chunks = bounds.shape[0] - 1
    counts = np.zeros((n_chunks, n_ids), dtype=np.int32)
    for chunk in prange(n_chunks):
        for j in range(bounds[chunk], bounds[chunk + 1]):
            if ids[j] < n_ids:
                counts[chunk, ids[j]] += 1
    return counts


@njit(cache=True)
def _first_places(counts: Array) -> tuple[Array, Array]:
    """Return (touched ids ascending, start of each in a grouped list).

    ``counts`` turn into the place at which each chunk begins to write each id.
    """
    n_chunks, n_ids = counts.shape
    touched = np.empty(n_ids, dtype=np.int64)
    starts = np.zeros(n_ids + 1, dtype=np.int64)
    n_touched, place = 0, 0
    for i in range(n_ids):
        before = place
        for chunk in range(n_chunks):
            count = counts[chunk, i]
            counts[chunk, i] = place
            place += count
        if place > before:
            touched[n_touched] = i
            n_touched += 1
            starts[n_touched] = place
    return touched[:n_touched].copy(), starts[: n_touched + 1].copy()


@njit(parallel=True, cache=True)
def _place(
    ids: Array, offsets: Array, first: Array, slots: Array, rows: Array, places: Array
) -> None:
    n_chunks, n_ids = slots.shape
    for chunk in prange(n_chunks):
        for row in range(first[chunk], first[chunk + 1]):
            for j in range(offsets[row], offsets[row + 1]):
                if ids[j] < n_ids:
                    slot = slots[chunk, ids[j]]
                    rows[slot] = row
                    places[slot] = j
                    slots[chunk, ids[j]] = slot + 1


def group_by_id(ids: Array, offsets: Array, n_ids: int) -> tuple[Array, Array, Array, Array]:
    """Turn rows of ids around: for each id that occurs, the rows and places it occurs in.

    Returns (touched ids ascending, start of each in the next two, row, place), rows ascending for
    each id; ids of ``n_ids`` and over are padding. Up to 2^31 ids. Chunks of rows are counted, then
    written side by side.
    """
    n_rows = len(offsets) - 1
    n_chunks = max(1, min(get_num_threads(), n_rows, len(ids) // max(1, n_ids)))
    first = np.arange(n_chunks + 1) * n_rows // n_chunks
    counts = _counts(ids, offsets[first], n_ids)
    touched, starts = _first_places(counts)
    rows = np.empty(starts[-1], dtype=np.int32)
    places = np.empty(starts[-1], dtype=np.int32)
    _place(ids, offsets, first, counts, rows, places)
    return touched, starts, rows, places


@njit(parallel=True, cache=True)
def adamw_rows(
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
