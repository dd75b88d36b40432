"""From a beam to its shortlist, compiled by numba: walk the best paths, not all of them.

A cluster's edges are put in order once for all rows. Then the paths of a row that can matter are
the first few of each cluster: a bar is guessed above which there are some more paths than labels
wanted; it is lowered while they lead to too few different labels. The answer does not depend on
the guess. Rows are shared among threads, and what is found for one depends on no other.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

_EMPTY = np.float32(-np.inf)
_FULL = np.float32(0.0)
_STRIDE = 16  # every so many paths of a cluster one is looked at for the bar


class OrderedEdges(NamedTuple):
    """The edges of each cluster, best first; equal ones in the order of their numbers."""

    edges: Array
    """(C, E) their numbers; each row is filled as far as there are edges."""
    logs: Array
    """(C, E) their scores, before the min(1, ·) of Eq. 5."""
    labels: Array
    """(C, E) where they lead."""
    sizes: Array
    """(C,) how many there are."""


class Best(NamedTuple):
    """Memory of a row's search, an entry a label. Nothing is ``held`` between two rows."""

    held: Array
    """(L, 2) the score of the best path to a label and its unsaturated score, or -inf.

    They lie side by side: a path looks at one place in memory.
    """
    path: Array
    """(L,) the best path to a label that is held."""
    reached: Array
    """(L,) the labels that are held, as many as were reached."""


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


@njit(parallel=True, cache=True)
def order_edges(
    edge_labels: Array, edge_log: Array, edges: Array, logs: Array, labels: Array, sizes: Array
) -> None:
    """Fill in the parts of `OrderedEdges`; edges that score -inf are left out.

    They come one by one: numba takes what a parallel loop writes into a named tuple for unused.
    """
    n_edges = edge_log.shape[1]
    for cluster in prange(edge_log.shape[0]):
        order = np.argsort(-edge_log[cluster], kind="mergesort")
        n_real = 0
        for place in range(n_edges):
            edge = order[place]
            if edge_log[cluster, edge] == _EMPTY:
                continue
            edges[cluster, n_real] = edge
            logs[cluster, n_real] = edge_log[cluster, edge]
            labels[cluster, n_real] = edge_labels[cluster, edge]
            n_real += 1
        sizes[cluster] = n_real


@njit(cache=True, nogil=True)
def n_sampled(n_beam: int, n_edges: int) -> int:
    """Return how much memory `bar_of` takes for a beam."""
    return n_beam * (n_edges // _STRIDE + 1)


@njit(cache=True, nogil=True)
def bar_of(
    beam: Array, beam_log: Array, ordered: OrderedEdges, n_paths: int, sample: Array
) -> np.float32:
    """Return a score that about ``n_paths`` paths of a row reach; -inf if there are no more."""
    n_clusters = ordered.logs.shape[0]
    count = 0
    for position in range(beam.shape[0]):
        cluster = beam[position]
        if cluster >= n_clusters:
            continue
        score = min(beam_log[position], _FULL)
        for place in range(_STRIDE - 1, ordered.sizes[cluster], _STRIDE):
            sample[count] = -(score + min(ordered.logs[cluster, place], _FULL))
            count += 1
    if n_paths // _STRIDE >= count:
        return _EMPTY
    bar: np.float32 = -np.partition(sample[:count], n_paths // _STRIDE)[n_paths // _STRIDE]
    return bar


@njit(cache=True, nogil=True)
def walk(
    beam: Array,
    beam_log: Array,
    ordered: OrderedEdges,
    bar: np.float32,
    walked: Array,
    best: Best,
    n_reached: int,
    blocked: Array,
) -> int:
    """Walk the paths down to the bar from where each cluster's walk stopped before.

    Returns how many labels have been reached. No path leads to ``blocked`` labels: (L,), or none.
    """
    n_clusters, n_edges = ordered.logs.shape
    held = best.held
    with_blocked = blocked.shape[0] > 0
    for position in range(beam.shape[0]):
        cluster = beam[position]
        if cluster >= n_clusters:
            continue
        cluster_free = beam_log[position]
        cluster_score = min(cluster_free, _FULL)
        place = walked[position]
        while place < ordered.sizes[cluster]:
            edge_free = ordered.logs[cluster, place]
            score = cluster_score + min(edge_free, _FULL)
            if not score >= bar:
                break
            label = ordered.labels[cluster, place]
            free = cluster_free + edge_free
            before = held[label, 0]
            if score > before or (score == before and free > held[label, 1]):
                if with_blocked and blocked[label]:
                    place += 1
                    continue
                if before == _EMPTY:
                    best.reached[n_reached] = label
                    n_reached += 1
                held[label, 0] = score
                held[label, 1] = free
                best.path[label] = position * n_edges + ordered.edges[cluster, place]
            place += 1
        walked[position] = place
    return n_reached


@njit(cache=True, nogil=True)
def _walk_to(
    marked: Array,
    beam: Array,
    beam_log: Array,
    ordered: OrderedEdges,
    walked: Array,
    best: Best,
) -> None:
    """Walk those of the other paths that lead to marked labels."""
    n_clusters, n_edges = ordered.logs.shape
    held = best.held
    for position in range(beam.shape[0]):
        cluster = beam[position]
        if cluster >= n_clusters:
            continue
        for place in range(walked[position], ordered.sizes[cluster]):
            label = ordered.labels[cluster, place]
            if not marked[label]:
                continue
            score = min(beam_log[position], _FULL) + min(ordered.logs[cluster, place], _FULL)
            free = beam_log[position] + ordered.logs[cluster, place]
            before = held[label, 0]
            if score > before or (score == before and free > held[label, 1]):
                held[label, 0] = score
                held[label, 1] = free
                best.path[label] = position * n_edges + ordered.edges[cluster, place]


@njit(cache=True, nogil=True)
def _find_wanted(
    wanted: Array,
    marked: Array,
    beam: Array,
    beam_log: Array,
    ordered: OrderedEdges,
    walked: Array,
    best: Best,
    out: Array,
) -> None:
    """Fill in the best path to each wanted label, and leave the memory of labels as it was."""
    held = best.held
    n_labels = held.shape[0]
    n_missing = 0
    for i in range(wanted.shape[0]):
        if wanted[i] < n_labels and held[wanted[i], 0] == _EMPTY:
            marked[wanted[i]] = True
            n_missing += 1
    if n_missing:
        _walk_to(marked, beam, beam_log, ordered, walked, best)
    for i in range(wanted.shape[0]):
        if wanted[i] < n_labels and held[wanted[i], 0] != _EMPTY:
            out[i] = best.path[wanted[i]]
    for i in range(wanted.shape[0]):
        if wanted[i] < n_labels and marked[wanted[i]]:
            marked[wanted[i]] = False
            held[wanted[i], 0] = _EMPTY


@njit(cache=True, nogil=True)
def _half_of_bits(n_labels: int) -> int:
    """Return half as many bits, rounded up, as label ids need."""
    n_bits = 1
    while n_labels >> n_bits:
        n_bits += 1
    return (n_bits + 1) // 2


@njit(cache=True, nogil=True)
def _sort(labels: Array, spare: Array, starts: Array, n_low: int) -> None:
    """Sort label ids ascending, in place: by their lower bits, then by the upper ones."""
    _sort_by_bits(labels, spare, starts, 0)
    _sort_by_bits(spare[: labels.shape[0]], labels, starts, n_low)


@njit(cache=True, nogil=True)
def _sort_by_bits(labels: Array, out: Array, starts: Array, shift: int) -> None:
    mask = starts.shape[0] - 1
    starts[:] = 0
    for i in range(labels.shape[0]):
        starts[(labels[i] >> shift) & mask] += 1
    place = 0
    for value in range(starts.shape[0]):
        count = starts[value]
        starts[value] = place
        place += count
    for i in range(labels.shape[0]):
        value = (labels[i] >> shift) & mask
        out[starts[value]] = labels[i]
        starts[value] += 1


@njit(cache=True, nogil=True)
def _new_best(n_labels: int) -> Best:
    held = np.full((n_labels, 2), _EMPTY, dtype=np.float32)
    return Best(held, np.empty(n_labels, dtype=np.int32), np.empty(n_labels, dtype=np.int32))


@njit(cache=True, nogil=True)
def _reach(
    beam: Array,
    beam_log: Array,
    ordered: OrderedEdges,
    n_keep: int,
    spare: tuple[Array, Array],
    best: Best,
) -> int:
    """Walk a row's paths from the best down until enough labels are reached, or all paths are."""
    walked, sample = spare
    walked[:] = 0
    nothing = np.empty(0, dtype=np.bool_)
    n_reached = 0
    n_paths = n_keep + n_keep // 2
    bar = np.float32(np.inf)
    while n_reached < n_keep and bar != _EMPTY:
        bar = bar_of(beam, beam_log, ordered, n_paths, sample)
        n_reached = walk(beam, beam_log, ordered, bar, walked, best, n_reached, nothing)
        n_paths *= 2
    return n_reached


@njit(cache=True, nogil=True)
def _expand_some(
    rows: tuple[int, int],
    beams: tuple[Array, Array],
    ordered: OrderedEdges,
    wanted: Array,
    n_labels: int,
    outs: tuple[Array, Array, Array],
) -> None:
    """Expand the beams of every so many rows."""
    out_labels, out_paths, out_wanted = outs
    n_rows, n_beam = beams[0].shape
    n_keep = out_labels.shape[1]
    n_low = _half_of_bits(n_labels)
    best = _new_best(n_labels)
    scores, frees = np.empty(n_labels, dtype=np.float32), np.empty(n_labels, dtype=np.float32)
    marked = np.zeros(n_labels, dtype=np.bool_)
    spare, starts = np.empty(n_keep, dtype=np.int32), np.empty(1 << n_low, dtype=np.int32)
    walked = np.empty(n_beam, dtype=np.int64)
    sample = np.empty(n_sampled(n_beam, ordered.logs.shape[1]), dtype=np.float32)
    for row in range(rows[0], n_rows, rows[1]):
        beam, beam_log = beams[0][row], beams[1][row]
        n_reached = _reach(beam, beam_log, ordered, n_keep, (walked, sample), best)
        _find_wanted(wanted[row], marked, beam, beam_log, ordered, walked, best, out_wanted[row])
        for i in range(n_reached):
            label = best.reached[i]
            scores[i] = best.held[label, 0]
            frees[i] = best.held[label, 1]
            best.held[label, 0] = _EMPTY
        if n_reached > n_keep:
            keep_best(scores, frees, best.reached, n_reached, n_keep)
        n_kept = min(n_reached, n_keep)
        _sort(best.reached[:n_kept], spare, starts, n_low)
        for i in range(n_kept):
            out_labels[row, i] = best.reached[i]
            out_paths[row, i] = best.path[best.reached[i]]


@njit(parallel=True, cache=True)
def expand_beam(
    beams: tuple[Array, Array],
    ordered: OrderedEdges,
    wanted: Array,
    n_labels: int,
    n_chunks: int,
    outs: tuple[Array, Array, Array],
) -> None:
    """Keep the best path of each row to every label, then the best labels.

    ``beams`` are clusters and their scores, ``ordered`` is from `order_edges`. A path is numbered
    ``position in the beam · E + edge``; of equal paths the first is kept. A row's labels come in
    ascending order. The rows are dealt to ``n_chunks`` workers, each with its own memory of L
    entries.
    """
    for chunk in prange(n_chunks):
        _expand_some((chunk, n_chunks), beams, ordered, wanted, n_labels, outs)
