"""Label clusters: recursive balanced 2-means over label centroids (appendix C.1)."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from elias.progress import progress

Array: TypeAlias = NDArray[Any]
Parts: TypeAlias = tuple[Array, Array, Array, Array]
"""The centroids: sparse values, columns and row starts, and the dense part."""

_MAX_ITERATIONS = 20


def label_centroids(
    labels: csr_matrix, bow: csr_matrix, embedding: NDArray[np.float32] | None = None
) -> tuple[csr_matrix, NDArray[np.float32]]:
    """Return μ_ℓ, the unit-length sum of ψ(x) over each label's points, Eq. 14–15.

    ψ = [bow/‖·‖, φ/‖·‖]; the sparse and the dense part come apart, scaled by their common length.
    A label without points has a centroid of zero.
    """
    ones = csr_matrix(
        (np.ones(labels.nnz, dtype=np.float32), labels.indices, labels.indptr), shape=labels.shape
    )
    to_points = ones.T.tocsr()
    sparse = (to_points @ bow).tocsr().astype(np.float32)
    dense = np.zeros((labels.shape[1], 0), dtype=np.float32)
    if embedding is not None:
        length = np.linalg.norm(embedding, axis=1, keepdims=True)
        dense = to_points @ (embedding / np.maximum(length, 1e-12)).astype(np.float32)
    square = np.asarray(sparse.multiply(sparse).sum(axis=1)).ravel() + (dense**2).sum(axis=1)
    scale = 1 / np.sqrt(np.maximum(square, 1e-24))
    scale[square == 0] = 0
    sparse.data *= np.repeat(scale, np.diff(sparse.indptr)).astype(np.float32)
    return sparse, (dense * scale[:, None]).astype(np.float32)


def balanced_clusters(
    sparse: csr_matrix, dense: NDArray[np.float32], n_clusters: int, seed: int
) -> NDArray[np.int64]:
    """Return each label's cluster, 0 … C-1, the clusters' sizes equal to within one.

    Labels are halved again and again by 2-means with the median as the border; for a C that is
    no power of two the shares are uneven on the way and even at the end. Labels whose centroid is
    zero (no training point) are spread over the clusters after the others.
    """
    n_labels = sparse.shape[0]
    known = (np.diff(sparse.indptr) > 0) | (np.abs(dense).sum(axis=1) > 0)
    order = np.concatenate([np.flatnonzero(known), np.flatnonzero(~known)])
    n_known = int(known.sum())
    assignment = np.empty(n_labels, dtype=np.int64)
    assignment[order[n_known:]] = _spread(n_labels - n_known, n_known, n_clusters)
    parts = (sparse.data, sparse.indices, sparse.indptr.astype(np.int64), dense)
    members = order[:n_known].astype(np.int64)
    starts, counts = np.array([0, n_known]), np.array([n_clusters])
    depth = max(1, int(np.ceil(np.log2(max(2, n_clusters)))))
    with progress("Clustering labels", depth) as advance:
        while counts.max() > 1:
            seeds = np.random.default_rng([seed, len(counts)]).random((len(counts), 2))
            first = _first_half(counts)
            cuts = starts[:-1] + _share(np.diff(starts), first, counts)
            _halve_all(parts, sparse.shape[1], members, (starts, cuts), seeds)
            starts, counts = _children(starts, cuts, first, counts)
            advance()
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


@njit(cache=True)
def _add(parts: Parts, member: int, sign: np.float32, center: Array, dense_center: Array) -> None:
    data, indices, indptr, dense = parts
    for j in range(indptr[member], indptr[member + 1]):
        center[indices[j]] += sign * data[j]
    for d in range(dense.shape[1]):
        dense_center[d] += sign * dense[member, d]


@njit(cache=True)
def _clear(parts: Parts, members: Array, center: Array) -> None:
    _, indices, indptr, _ = parts
    for member in members:
        for j in range(indptr[member], indptr[member + 1]):
            center[indices[j]] = 0.0


@njit(cache=True)
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


@njit(cache=True)
def _halve(parts: Parts, members: Array, n_first: int, center: Array, seeds: Array) -> None:
    """Order ``members`` in place so that the first ``n_first`` are nearer to one centre."""
    size = members.shape[0]
    dense_center = np.zeros(parts[3].shape[1], dtype=np.float32)
    scores = np.empty(size, dtype=np.float32)
    one = int(seeds[0] * size)
    other = (one + 1 + int(seeds[1] * (size - 1))) % size
    _add(parts, members[one], np.float32(1.0), center, dense_center)
    _add(parts, members[other], np.float32(-1.0), center, dense_center)
    was_first = np.zeros(size, dtype=np.bool_)
    for _ in range(_MAX_ITERATIONS):
        _score(parts, members, center, dense_center, scores)
        _clear(parts, members, center)
        dense_center[:] = 0.0
        order = np.argsort(scores, kind="mergesort")
        now_first = np.zeros(size, dtype=np.bool_)
        now_first[order[:n_first]] = True
        changed = np.sum(now_first != was_first)
        was_first = now_first
        if changed == 0:
            break
        weight_first = np.float32(1.0 / max(1, n_first))
        weight_rest = np.float32(-1.0 / max(1, size - n_first))
        for i in range(size):
            weight = weight_first if now_first[i] else weight_rest
            _add(parts, members[i], weight, center, dense_center)
    _clear(parts, members, center)
    members[:] = np.concatenate((members[was_first], members[~was_first]))


@njit(parallel=True, cache=True)
def _halve_all(
    parts: Parts, n_columns: int, members: Array, borders: tuple[Array, Array], seeds: Array
) -> None:
    """Halve every node of one level; nodes are dealt to a few workers with their own centre."""
    starts, cuts = borders
    n_nodes = cuts.shape[0]
    n_workers = min(64, n_nodes)
    for worker in prange(n_workers):
        center = np.zeros(n_columns, dtype=np.float32)
        for node in range(worker, n_nodes, n_workers):
            begin, cut, end = starts[node], cuts[node], starts[node + 1]
            if cut > begin and cut < end:
                _halve(parts, members[begin:end], cut - begin, center, seeds[node])
