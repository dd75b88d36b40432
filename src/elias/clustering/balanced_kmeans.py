"""Recursive balanced 2-means over label centroids (appendix C.1).

Threads share the nodes of a level. The first levels have few nodes, so there the members of a node
are shared instead, in blocks whose number depends on nothing but the node: a seed gives one
clustering, however many threads there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from elias.kernels.cpu.select import nth_lowest
from elias.kernels.threads import thread_map
from elias.progress import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


Array: TypeAlias = NDArray[Any]
Parts: TypeAlias = tuple[Array, Array, Array, Array]
"""The centroids: sparse values, columns and row starts, and the dense part."""

_MAX_ITERATIONS = 20
_WIDE = 2**16  # a node of this many members is shared among threads
_BLOCKS = 32  # parts of such a node; each has a centre of its own, added up in order
_CHUNKS = 64  # parts of a level of many nodes


def balanced_clusters(
    sparse: csr_matrix, dense: NDArray[np.float32], n_clusters: int, seed: int
) -> NDArray[np.int64]:
    """Return each label's cluster, 0 … C-1, the clusters' sizes equal to within one.

    Labels are halved again and again by 2-means with the median as the border; for a C that is
    no power of two the shares are uneven on the way and even at the end. Labels whose centroid is
    zero (no training point) are spread over the clusters after the others.
    """
    n_labels = sparse.shape[0]
    known = (np.diff(sparse.indptr) > 0) | dense.any(axis=1)
    order = np.concatenate([np.flatnonzero(known), np.flatnonzero(~known)])
    n_known = int(known.sum())
    assignment = np.empty(n_labels, dtype=np.int64)
    assignment[order[n_known:]] = _spread(n_labels - n_known, n_known, n_clusters)
    parts = (sparse.data, sparse.indices, sparse.indptr, dense)
    members = order[:n_known].astype(np.int64)
    starts, counts = np.array([0, n_known]), np.array([n_clusters])
    depth = int(np.ceil(np.log2(max(2, n_clusters))))
    with progress("Clustering labels", depth * n_known) as advance:
        while counts.max() > 1:
            seeds = np.random.default_rng([seed, len(counts)]).random((len(counts), 2))
            first = _first_half(counts)
            cuts = starts[:-1] + _share(np.diff(starts), first, counts)
            for done in _halve_level(parts, sparse.shape[1], members, (starts, cuts), seeds):
                advance(done)
            starts, counts = _children(starts, cuts, first, counts)
    cluster = np.repeat(np.arange(n_clusters), np.diff(starts))
    assignment[members] = cluster
    return assignment


def _first_half(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where(counts > 1, (counts + 1) // 2, counts)


def _share(
    sizes: NDArray[np.int64], first: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return how many members go to the first half, so that clusters end equal to within one."""
    even, extra = np.divmod(sizes, counts)
    return even * first + np.minimum(extra, first)


def _children(
    starts: NDArray[np.int64],
    cuts: NDArray[np.int64],
    first: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    new_starts, new_counts = [0], []
    for i, count in enumerate(counts):
        if count > 1:
            new_starts.append(int(cuts[i]))
            new_counts.append(int(first[i]))
        new_starts.append(int(starts[i + 1]))
        new_counts.append(int(count - first[i]) if count > 1 else 1)
    return np.array(new_starts), np.array(new_counts)


def _spread(n_rest: int, n_known: int, n_clusters: int) -> NDArray[np.int64]:
    """Return clusters for labels that have no centroid, the smaller clusters first."""
    return (n_known + np.arange(n_rest)) % n_clusters


def _halve_level(
    parts: Parts,
    n_columns: int,
    members: Array,
    borders: tuple[Array, Array],
    seeds: Array,
) -> Iterator[int]:
    """Halve all nodes of one level; yield how many members that dealt with, now and then."""
    starts, cuts = borders
    sizes = np.diff(starts)
    for node in np.flatnonzero(sizes >= _WIDE).tolist():
        begin, cut, end = int(starts[node]), int(cuts[node]), int(starts[node + 1])
        if begin < cut < end:
            _halve_wide(parts, n_columns, members[begin:end], cut - begin, seeds[node])
        yield end - begin
    narrow = np.flatnonzero(sizes < _WIDE)
    n_chunks = min(_CHUNKS, len(narrow))

    def halve_some(nodes: Array, center: Array) -> int:
        _halve_some(parts, members, (starts, cuts), seeds, nodes, center)
        return int(sizes[nodes].sum())

    yield from thread_map(
        halve_some,
        [narrow[chunk::n_chunks] for chunk in range(n_chunks)],
        lambda: np.zeros(n_columns, dtype=np.float32),
    )


def _halve_wide(parts: Parts, n_columns: int, members: Array, n_first: int, seeds: Array) -> None:
    """Do what `_halve` does, the members shared among threads."""
    size, dim = len(members), parts[3].shape[1]
    scores = np.empty(size, dtype=np.float32)
    centers = np.zeros((_BLOCKS, n_columns), dtype=np.float32)
    dense_centers = np.zeros((_BLOCKS, dim), dtype=np.float32)
    weights = _weights(n_first, size)
    first = np.zeros(size, dtype=np.bool_)
    spans = [slice(i * size // _BLOCKS, (i + 1) * size // _BLOCKS) for i in range(_BLOCKS)]
    ranges = [
        slice(i * n_columns // _BLOCKS, (i + 1) * n_columns // _BLOCKS) for i in range(_BLOCKS)
    ]

    def score_block(block: int, _: None) -> None:
        span = spans[block]
        _score(parts, members[span], centers[0], dense_centers[0], scores[span])

    def add_block(block: int, _: None) -> None:
        centers[block] = 0
        dense_centers[block] = 0
        span = spans[block]
        _add_all(parts, members[span], first[span], weights, centers[block], dense_centers[block])

    def join_range(block: int, _: None) -> None:
        columns = centers[:, ranges[block]]
        for other in columns[1:]:
            columns[0] += other

    _add_two(parts, members, seeds, centers[0], dense_centers[0])
    for _ in range(_MAX_ITERATIONS):
        _for_each(score_block)
        if _choose_lowest(scores, n_first, first) == 0:
            break
        _for_each(add_block)
        _for_each(join_range)
        for other in dense_centers[1:]:
            dense_centers[0] += other
    _sort_halves(members, first)


def _for_each(work: Callable[[int, None], None]) -> None:
    """Run the work for each block."""
    for _ in thread_map(work, range(_BLOCKS), lambda: None):
        pass


@njit(cache=True, nogil=True)
def _weights(n_first: int, size: int) -> tuple[np.float32, np.float32]:
    """Return what a member of each half adds to the difference of the two centres."""
    return np.float32(1.0 / max(1, n_first)), np.float32(-1.0 / max(1, size - n_first))


@njit(cache=True, nogil=True)
def _add(parts: Parts, member: int, weight: np.float32, center: Array, dense_center: Array) -> None:
    data, indices, indptr, dense = parts
    for j in range(indptr[member], indptr[member + 1]):
        center[indices[j]] += weight * data[j]
    for d in range(dense.shape[1]):
        dense_center[d] += weight * dense[member, d]


@njit(cache=True, nogil=True)
def _add_two(
    parts: Parts, members: Array, seeds: Array, center: Array, dense_center: Array
) -> None:
    """Start from the difference of two members."""
    size = members.shape[0]
    one = int(seeds[0] * size)
    other = (one + 1 + int(seeds[1] * (size - 1))) % size
    _add(parts, members[one], np.float32(1.0), center, dense_center)
    _add(parts, members[other], np.float32(-1.0), center, dense_center)


@njit(cache=True, nogil=True)
def _add_all(
    parts: Parts,
    members: Array,
    first: Array,
    weights: tuple[np.float32, np.float32],
    center: Array,
    dense_center: Array,
) -> None:
    for i in range(members.shape[0]):
        weight = weights[0] if first[i] else weights[1]
        _add(parts, members[i], weight, center, dense_center)


@njit(cache=True, nogil=True)
def _clear(parts: Parts, members: Array, center: Array) -> None:
    _, indices, indptr, _ = parts
    n_values = 0
    for member in members:
        n_values += indptr[member + 1] - indptr[member]
    if n_values > center.shape[0] // 8:  # one stretch of memory is faster than places in it
        center[:] = 0.0
        return
    for member in members:
        for j in range(indptr[member], indptr[member + 1]):
            center[indices[j]] = 0.0


@njit(cache=True, nogil=True)
def _score(parts: Parts, members: Array, center: Array, dense_center: Array, scores: Array) -> None:
    data, indices, indptr, dense = parts
    for i in range(members.shape[0]):
        member = members[i]
        total = np.float32(0.0)
        for j in range(indptr[member], indptr[member + 1]):
            total += data[j] * center[indices[j]]
        for d in range(dense.shape[1]):
            total += dense[member, d] * dense_center[d]
        scores[i] = -total


@njit(cache=True, nogil=True)
def _choose_lowest(scores: Array, count: int, chosen: Array) -> int:
    """Mark the ``count`` lowest scores, of equal ones the first; return how many marks changed."""
    border = nth_lowest(scores.copy(), count)
    left = count  # for those on the border
    for score in scores:
        if score < border:
            left -= 1
    changed = 0
    for i in range(scores.shape[0]):
        now = scores[i] < border
        if scores[i] == border and left > 0:
            now = True
            left -= 1
        if now != chosen[i]:
            changed += 1
            chosen[i] = now
    return changed


@njit(cache=True, nogil=True)
def _sort_halves(members: Array, first: Array) -> None:
    """Move those of the first half to the front, each half in its order."""
    before = members.copy()
    place = 0
    for wanted in (True, False):
        for i in range(before.shape[0]):
            if first[i] == wanted:
                members[place] = before[i]
                place += 1


@njit(cache=True, nogil=True)
def _halve(parts: Parts, members: Array, n_first: int, center: Array, seeds: Array) -> None:
    """Order ``members`` in place so that the first ``n_first`` are nearer to one centre."""
    size = members.shape[0]
    dense_center = np.zeros(parts[3].shape[1], dtype=np.float32)
    scores = np.empty(size, dtype=np.float32)
    first = np.zeros(size, dtype=np.bool_)
    weights = _weights(n_first, size)
    _add_two(parts, members, seeds, center, dense_center)
    for _ in range(_MAX_ITERATIONS):
        _score(parts, members, center, dense_center, scores)
        _clear(parts, members, center)
        dense_center[:] = 0.0
        if _choose_lowest(scores, n_first, first) == 0:
            break
        _add_all(parts, members, first, weights, center, dense_center)
    _clear(parts, members, center)
    _sort_halves(members, first)


@njit(cache=True, nogil=True)
def _halve_some(
    parts: Parts,
    members: Array,
    borders: tuple[Array, Array],
    seeds: Array,
    nodes: Array,
    center: Array,
) -> None:
    starts, cuts = borders
    for node in nodes:
        begin, cut, end = starts[node], cuts[node], starts[node + 1]
        if cut > begin and cut < end:
            _halve(parts, members[begin:end], cut - begin, center, seeds[node])
