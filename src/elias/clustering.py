"""Cluster labels by recursive balanced 2-means over their centroids (appendix C.1).

A node is a set of labels, called its members. Each level of the recursion splits every node in two.
Small nodes are processed in parallel, each by one thread. Large nodes, which occur in the first
levels, are processed one after the other, each by all threads. The members of a large node are
divided into a fixed number of blocks, so the result depends on the seed but not on the number of
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, vstack

from elias.kernels.cpu.rows import dot
from elias.kernels.cpu.search import kth_lowest
from elias.kernels.threads import split_range, thread_map, thread_map_progress
from elias.progress import progress

Array: TypeAlias = NDArray[Any]
Parts: TypeAlias = tuple[Array, Array, Array, Array]
"""Centroids: the sparse part in CSR layout (data, indices, indptr), then the dense part."""

_LABELS_PER_TASK = 2_000
_MAX_ITERATIONS = 20
_LARGE_NODE = 2**16  # minimum number of members of a large node
_BLOCKS = 32  # number of blocks of a large node; their sums are added in a fixed order
_CHUNKS = 64  # maximum number of chunks into which the small nodes of a level are divided


def label_centroids(
    labels: csr_matrix, bow: csr_matrix, embedding: NDArray[np.float32] | None = None
) -> tuple[csr_matrix, NDArray[np.float32]]:
    """Return the centroid μ_ℓ of each label: the sum of its points, scaled to length 1 (Eq. 14–15).

    A point is the concatenation of its bag of words and its embedding φ, each scaled to length 1.
    The rows of ``bow`` must already have length 1; ``embedding`` is scaled in place, to save
    memory. The sparse and the dense part of the centroids are returned separately. A label without
    points has a zero centroid.
    """
    n_labels = labels.shape[1]
    # scipy copies the values, so a small dtype saves memory
    ones = np.ones(labels.nnz, dtype=np.bool_)
    to_points = csr_matrix((ones, labels.indices, labels.indptr), shape=labels.shape).T.tocsr()
    bow = bow.astype(np.float32, copy=False)
    dense = np.zeros((n_labels, 0 if embedding is None else embedding.shape[1]), dtype=np.float32)
    if embedding is not None:
        lengths = np.sqrt(np.einsum("ij,ij->i", embedding, embedding))
        embedding /= np.maximum(lengths, 1e-12)[:, None]

    def sum_points(span: range, _: None) -> csr_matrix:
        """Return the sparse part of the centroids in ``span``, and write the other to ``dense``.

        Threads run in parallel, because scipy's products release the GIL.
        """
        rows = slice(span.start, span.stop)
        points = to_points[rows]
        sparse = points @ bow
        square = np.asarray(sparse.multiply(sparse).sum(axis=1)).ravel()
        if embedding is not None:
            dense[rows] = points @ embedding
            square += (dense[rows] ** 2).sum(axis=1)
        scale = (square > 0) / np.sqrt(np.maximum(square, np.float32(1e-24)))
        sparse.data *= np.repeat(scale, np.diff(sparse.indptr))
        dense[rows] *= scale[:, None]
        return sparse

    spans, title = split_range(n_labels, _LABELS_PER_TASK), "Computing label centroids"
    parts = list(thread_map_progress(sum_points, spans, lambda: None, title, n_labels))
    return vstack(parts, format="csr"), dense


def balanced_clusters(
    sparse: csr_matrix, dense: NDArray[np.float32], n_clusters: int, seed: int
) -> NDArray[np.int64]:
    """Return the cluster id (0 … C-1) of each label. Cluster sizes differ by at most one.

    Nodes are split recursively by balanced 2-means, at the median score. If C is not a power of
    two, each half gets labels in proportion to its number of clusters. Labels with a zero centroid
    (no training point) are distributed over the clusters, starting with the smaller clusters.
    """
    n_labels = sparse.shape[0]
    known = (np.diff(sparse.indptr) > 0) | dense.any(axis=1)
    members = np.flatnonzero(known).astype(np.int64)
    clusters = np.empty(n_labels, dtype=np.int64)
    clusters[~known] = np.arange(len(members), n_labels) % n_clusters  # smaller clusters first
    parts = (sparse.data, sparse.indices, sparse.indptr, dense)
    starts, counts = np.array([0, len(members)]), np.array([n_clusters])  # of each node
    depth = int(np.ceil(np.log2(max(2, n_clusters))))
    with progress("Clustering labels", depth * len(members)) as advance:
        while counts.max() > 1:
            seeds = np.random.default_rng([seed, len(counts)]).random((len(counts), 2))
            divided = counts > 1
            first = np.where(divided, (counts + 1) // 2, counts)  # clusters in the first half
            even, extra = np.divmod(np.diff(starts), counts)
            cuts = starts[:-1] + even * first + np.minimum(extra, first)
            for n_done in _halve_level(parts, sparse.shape[1], members, starts, cuts, seeds):
                advance(n_done)
            exists = np.column_stack([divided, np.ones_like(divided)])
            starts = np.append(0, np.column_stack([cuts, starts[1:]])[exists])
            rest = np.where(divided, counts - first, 1)
            counts = np.column_stack([first, rest])[exists]
    clusters[members] = np.repeat(np.arange(n_clusters), np.diff(starts))
    return clusters


def _halve_level(
    parts: Parts, n_columns: int, members: Array, starts: Array, cuts: Array, seeds: Array
) -> Iterator[int]:
    """Split every node of a level in two. Yield the number of labels of each finished task."""
    sizes = np.diff(starts)
    for node in np.flatnonzero(sizes >= _LARGE_NODE).tolist():
        begin, cut, end = int(starts[node]), int(cuts[node]), int(starts[node + 1])
        if begin < cut < end:
            _halve_large(parts, n_columns, members[begin:end], cut - begin, seeds[node])
        yield end - begin
    small = np.flatnonzero(sizes < _LARGE_NODE)
    n_chunks = min(_CHUNKS, len(small))

    def halve_some(nodes: Array, center: Array) -> int:
        _halve_some(parts, members, starts, cuts, seeds, nodes, center)
        return int(sizes[nodes].sum())

    yield from thread_map(
        halve_some,
        # copies are contiguous, so numba compiles one type only
        [small[chunk::n_chunks].copy() for chunk in range(n_chunks)],
        lambda: np.zeros(n_columns, dtype=np.float32),
    )


def _halve_large(parts: Parts, n_columns: int, members: Array, n_first: int, seeds: Array) -> None:
    """Split a large node as `_halve` does, but divide its members among the threads."""
    size, dim = len(members), parts[3].shape[1]
    scores = np.empty(size, dtype=np.float32)
    centers = np.zeros((_BLOCKS, n_columns), dtype=np.float32)
    dense_centers = np.zeros((_BLOCKS, dim), dtype=np.float32)
    weights = _weights(n_first, size)
    first = np.zeros(size, dtype=np.bool_)
    spans, column_spans = _blocks(size), _blocks(n_columns)

    def score_block(block: int, _: None) -> None:
        span = spans[block]
        _score(parts, members[span], centers[0], dense_centers[0], scores[span])

    def add_block(block: int, _: None) -> None:
        centers[block] = 0
        dense_centers[block] = 0
        span = spans[block]
        _add_all(parts, members[span], first[span], weights, centers[block], dense_centers[block])

    def sum_columns(block: int, _: None) -> None:
        columns = centers[:, column_spans[block]]
        for other in columns[1:]:
            columns[0] += other

    def on_each_block(work: Callable[[int, None], None]) -> None:
        list(thread_map(work, range(_BLOCKS), lambda: None))

    _add_two(parts, members, seeds, centers[0], dense_centers[0])
    for _ in range(_MAX_ITERATIONS):
        on_each_block(score_block)
        if _choose_lowest(scores, n_first, first) == 0:
            break
        on_each_block(add_block)
        on_each_block(sum_columns)
        for other in dense_centers[1:]:
            dense_centers[0] += other
    sort_halves(members, first)


def _blocks(size: int) -> list[slice]:
    return [slice(i * size // _BLOCKS, (i + 1) * size // _BLOCKS) for i in range(_BLOCKS)]


@njit(cache=True, nogil=True)
def _weights(n_first: int, size: int) -> tuple[np.float32, np.float32]:
    """Return the weight of a member of the first half, and of a member of the second half.

    The weighted sum of all members is the centre of the first half minus that of the second half.
    """
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
    """Initialise 2-means: add the difference of two random members to the zeroed arrays.

    ``center`` and ``dense_center`` hold the centre of the first half minus that of the second half.
    """
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
    if n_values > center.shape[0] // 8:  # clearing all is faster than clearing single entries
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
        scores[i] = -(total + dot(dense[member], dense_center))


@njit(cache=True, nogil=True)
def _choose_lowest(scores: Array, count: int, chosen: Array) -> int:
    """Mark the ``count`` lowest scores in ``chosen`` and return how many marks changed.

    Ties go to the lower index.
    """
    border = kth_lowest(scores.copy(), count - 1)
    left = count  # number of ties to choose
    for score in scores:
        left -= score < border
    changed = 0
    for i in range(scores.shape[0]):
        is_low = scores[i] < border
        if scores[i] == border and left > 0:
            is_low = True
            left -= 1
        if is_low != chosen[i]:
            changed += 1
            chosen[i] = is_low
    return changed


@njit(cache=True, nogil=True)
def sort_halves(members: Array, first: Array) -> None:
    """Move the members of the first half to the front, keeping the order within each half."""
    second = np.empty(members.shape[0], np.int64)
    n_first, n_second = 0, 0
    for i in range(members.shape[0]):
        if first[i]:
            members[n_first] = members[i]
            n_first += 1
        else:
            second[n_second] = members[i]
            n_second += 1
    for i in range(n_second):
        members[n_first + i] = second[i]


@njit(cache=True, nogil=True)
def _halve(parts: Parts, members: Array, n_first: int, center: Array, seeds: Array) -> None:
    """Split a node by 2-means: move the ``n_first`` members of the first half to the front."""
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
    sort_halves(members, first)


@njit(cache=True, nogil=True)
def _halve_some(
    parts: Parts,
    members: Array,
    starts: Array,
    cuts: Array,
    seeds: Array,
    nodes: Array,
    center: Array,
) -> None:
    for node in nodes:
        begin, cut, end = starts[node], cuts[node], starts[node + 1]
        if cut > begin and cut < end:
            _halve(parts, members[begin:end], cut - begin, center, seeds[node])
