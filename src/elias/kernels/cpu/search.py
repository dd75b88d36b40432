"""CPU search, compiled by numba: expand beams and rank labels by visiting only the best paths.

The edges of each cluster are sorted by score, once for all rows. The best paths of a row therefore
use the first edges of each cluster. The search estimates a score threshold such that the number of
paths above it is somewhat larger than the number of labels needed. If these paths reach too few
labels, the search lowers the threshold. The result does not depend on the estimate. Rows are
independent and are divided among threads.

To rank labels, the search also scores the labels that it reaches. Since p = σ(w·φ + bias)·ŷ never
exceeds ŷ, it stops as soon as no other label can enter the k best.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numba import njit
from torch import Tensor

from elias.kernels.cpu.rows import ZERO, Array, dot
from elias.kernels.threads import over_ranges, split_range, thread_map

EMPTY = np.float32(-np.inf)
_SATURATED = np.float32(0.0)
_STRIDE = 16  # every 16th path of a cluster is sampled to estimate the threshold
_FIRST_PATHS = 64  # approximate number of paths walked in the first round, or k if that is larger
_MAX_SERIAL_ROWS = 64  # up to this number of rows, one thread is faster than starting several


class OrderedEdges(NamedTuple):
    """The edges of each cluster, best first; ties are ordered by slot."""

    edges: Array
    """(C, E) slot of each edge in the graph. Row c is defined up to ``sizes[c]``."""
    logs: Array
    """(C, E) log scores before the min(1, ·) of Eq. 5."""
    labels: Array
    """(C, E) label of each edge."""
    sizes: Array
    """(C,) number of edges of each cluster."""


class BestPaths(NamedTuple):
    """Scratch memory for the search of one row. Between rows, all scores are -inf."""

    scores: Array
    """(L, 2) score and unsaturated score of the best path to each label, or -inf if none is known.

    The two scores are adjacent in memory, so that walking a path reads one cache line.
    """
    path: Array
    """(L,) the id of the best path to each reached label."""
    reached: Array
    """(L + 1,) the labels reached so far, at the front of the array."""


def expand_beam(
    beam: Tensor,
    beam_log: Tensor,
    edge_labels: Tensor,
    edge_log: Tensor,
    wanted: Tensor,
    n_labels: int,
    shortlist_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields of `elias.kernels.Expansion`, with labels ascending in each row."""
    n_rows = len(beam)
    size = min(shortlist_size, n_labels)
    labels = np.full((n_rows, size), n_labels, dtype=np.int64)
    paths = np.zeros((n_rows, size), dtype=np.int64)
    wanted_paths = np.full(wanted.shape, -1, dtype=np.int64)
    beams = (beam.numpy(), beam_log.detach().float().numpy())
    ordered, n_bits = order_edges(edge_labels, edge_log), (n_labels.bit_length() + 1) // 2
    n_chunks = numba.get_num_threads()  # each has scratch memory of O(L)
    outs = (labels, paths, wanted_paths)

    def expand(chunk: int, _: None) -> None:
        _expand_some((chunk, n_chunks), beams, ordered, wanted.numpy(), n_labels, n_bits, outs)

    list(thread_map(expand, range(n_chunks), lambda: None))
    return torch.from_numpy(labels), torch.from_numpy(paths), torch.from_numpy(wanted_paths)


def order_edges(edge_labels: Int[Tensor, "C E"], edge_log: Float[Tensor, "C E"]) -> OrderedEdges:
    """Return the edges of each cluster, best first, without edges of log score -inf."""
    logs, labels = edge_log.detach().float().numpy(), edge_labels.numpy()
    order, ordered_labels = (np.empty(logs.shape, dtype=np.int32) for _ in range(2))
    ordered_logs = np.empty_like(logs)

    def sort(begin: int, end: int) -> None:
        rows = slice(begin, end)
        # One integer holds score and slot: numpy sorts integers faster than it sorts pairs.
        # 0 - x instead of -x, to avoid a negative zero
        bits = (np.float32(0) - logs[rows]).view(np.int32)
        ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # sorts like the floats
        keys = (ascending.astype(np.int64) << 32) | np.arange(logs.shape[1])
        keys.sort(axis=1)
        slots = keys & 0xFFFFFFFF
        order[rows] = slots
        ordered_logs[rows] = np.take_along_axis(logs[rows], slots, axis=1)
        ordered_labels[rows] = np.take_along_axis(labels[rows], slots, axis=1)

    over_ranges(sort, len(logs))
    return OrderedEdges(order, ordered_logs, ordered_labels, sizes=(logs != EMPTY).sum(axis=1))


@njit(cache=True, nogil=True)
def _compare(
    scores: Array, unsaturated: Array, labels: Array, i: int, pivot: tuple[float, float, int]
) -> int:
    """Return 1 if entry i ranks before the pivot, -1 if after it, 0 if it is the pivot."""
    if scores[i] != pivot[0]:
        return 1 if scores[i] > pivot[0] else -1
    if unsaturated[i] != pivot[1]:
        return 1 if unsaturated[i] > pivot[1] else -1
    if labels[i] != pivot[2]:
        return 1 if labels[i] < pivot[2] else -1
    return 0


@njit(cache=True, nogil=True)
def keep_best(scores: Array, unsaturated: Array, labels: Array, size: int, keep: int) -> None:
    """Move the ``keep`` best of the first ``size`` entries to the front, in unspecified order.

    Quickselect orders entries by higher score, then higher unsaturated score, then lower label id.
    This order has no ties, so the selected set is unique.
    """
    low, high = ZERO, size - 1
    while low < high:
        mid = (low + high) // 2
        pivot = (scores[mid], unsaturated[mid], labels[mid])
        i = low
        j = high
        while i <= j:
            while _compare(scores, unsaturated, labels, i, pivot) > 0:
                i += 1
            while _compare(scores, unsaturated, labels, j, pivot) < 0:
                j -= 1
            if i <= j:
                scores[i], scores[j] = scores[j], scores[i]
                unsaturated[i], unsaturated[j] = unsaturated[j], unsaturated[i]
                labels[i], labels[j] = labels[j], labels[i]
                i += 1
                j -= 1
        if keep - 1 <= j:
            high = j
        elif keep - 1 >= i:
            low = i
        else:
            return


@njit(cache=True, nogil=True)
def kth_lowest(values: Array, k: int) -> Any:
    """Return the k-th lowest of the values, counted from 0, and reorder them.

    `np.partition` does the same, but numba takes seconds to compile it.
    """
    low, high = 0, values.shape[0] - 1
    while low < high:
        pivot = values[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while values[i] < pivot:
                i += 1
            while pivot < values[j]:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if k <= j:
            high = j
        elif k >= i:
            low = i
        else:
            break
    return values[k]


@njit(cache=True, nogil=True)
def sample_paths(beam: Array, beam_log: Array, ordered: OrderedEdges) -> Array:
    """Return the negated log scores of every 16th path of a row, for `score_thresholds`."""
    n_clusters, n_edges = ordered.logs.shape
    sample = np.empty(beam.shape[0] * (n_edges // _STRIDE + 1), dtype=np.float32)
    count = 0
    for position in range(beam.shape[0]):
        cluster = beam[position]
        if cluster >= n_clusters:
            continue
        score = min(beam_log[position], _SATURATED)
        for rank in range(_STRIDE - 1, ordered.sizes[cluster], _STRIDE):
            sample[count] = -(score + min(ordered.logs[cluster, rank], _SATURATED))
            count += 1
    return sample[:count]


@njit(cache=True, nogil=True)
def score_thresholds(sample: Array, n_paths: int) -> Array:
    """Return thresholds that about n, 2n, 4n, … paths of a row reach, where n is ``n_paths``.

    The last threshold is -inf, which selects all paths. The lowest thresholds are computed first,
    because this sorts the sample roughly: each next threshold is searched among half as many paths.
    """
    n_rounds = 0
    while n_paths << n_rounds < sample.shape[0] * _STRIDE:
        n_rounds += 1
    thresholds = np.empty(n_rounds + 1, np.float32)
    thresholds[n_rounds], end = EMPTY, sample.shape[0]
    for i in range(n_rounds - 1, -1, -1):
        k = (n_paths << i) // _STRIDE
        thresholds[i], end = -kth_lowest(sample[:end], k), k + 1
    return thresholds


@njit(cache=True, nogil=True)
def walk(
    beam: Array,
    beam_log: Array,
    ordered: OrderedEdges,
    threshold: np.float32,
    walked: Array,
    best: BestPaths,
    n_reached: int,
    blocked: Array,
) -> int:
    """Walk the paths of a row that score at least ``threshold``, and update ``best``.

    ``walked`` holds the number of edges already walked at each position of the beam; the walk
    continues from there. Paths to labels marked in ``blocked`` ((L,) or empty) are skipped. Returns
    the number of labels reached so far.
    """
    n_clusters, n_edges = ordered.logs.shape
    scores, paths, reached = best
    with_blocked = blocked.shape[0] > 0
    for position in range(beam.shape[0]):
        cluster = beam[position]
        if cluster >= n_clusters:
            continue
        cluster_unsaturated = beam_log[position]
        cluster_score = min(cluster_unsaturated, _SATURATED)
        logs, labels = ordered.logs[cluster], ordered.labels[cluster]
        edges, n_sorted = ordered.edges[cluster], ordered.sizes[cluster]
        rank = walked[position]
        while rank < n_sorted:
            edge_unsaturated = logs[rank]
            score = cluster_score + min(edge_unsaturated, _SATURATED)
            if not score >= threshold:
                break
            label = np.uint64(labels[rank])  # a signed index would be checked for its sign
            if with_blocked and blocked[label]:
                rank += 1
                continue
            # The rest has no branches, because the CPU would mispredict one at every third path.
            before, unsaturated_before, path_before = (
                scores[label, 0],
                scores[label, 1],
                paths[label],
            )
            unsaturated = cluster_unsaturated + edge_unsaturated
            reached[n_reached] = label
            n_reached += (before == EMPTY) & (score > EMPTY)
            mask = np.int32(  # all bits are set if the path is better than the best one before
                -np.int32(
                    (score > before) | ((score == before) & (unsaturated > unsaturated_before))
                )
            )
            scores[label, 0] = max(score, before)
            old = np.float32(unsaturated_before).view(np.int32)
            new = np.float32(unsaturated).view(np.int32)
            scores[label, 1] = np.int32(old ^ ((old ^ new) & mask)).view(np.float32)
            path = np.int32(position * n_edges + edges[rank])
            paths[label] = path_before ^ ((path_before ^ path) & mask)
            rank += 1
        walked[position] = rank
    return n_reached


@njit(cache=True, nogil=True)
def _find_wanted(
    wanted: Array,
    others: Array,
    beam: Array,
    beam_log: Array,
    ordered: OrderedEdges,
    walked: Array,
    best: BestPaths,
    n_reached: int,
    out: Array,
) -> None:
    """Write the best path to each wanted label to ``out``.

    ``others`` is a scratch mask (L,), True for labels to skip. This function clears it for the
    wanted labels and restores it to all True.
    """
    scores = best.scores
    n_labels = scores.shape[0]
    n_missing = 0
    for i in range(wanted.shape[0]):
        if wanted[i] < n_labels and scores[wanted[i], 0] == EMPTY:
            others[wanted[i]] = False
            n_missing += 1
    if n_missing:
        walk(beam, beam_log, ordered, EMPTY, walked, best, n_reached, others)
    for i in range(wanted.shape[0]):
        if wanted[i] < n_labels and scores[wanted[i], 0] != EMPTY:
            out[i] = best.path[wanted[i]]
    for i in range(wanted.shape[0]):
        if wanted[i] < n_labels and not others[wanted[i]]:
            others[wanted[i]] = True
            scores[wanted[i], 0] = EMPTY


@njit(cache=True, nogil=True)
def _counting_sort(labels: Array, out: Array, starts: Array, shift: int) -> None:
    """Sort label ids stably by the digit at bit ``shift``, which has len(starts) values."""
    mask = starts.shape[0] - 1
    starts[:] = 0
    for i in range(labels.shape[0]):
        starts[(labels[i] >> shift) & mask] += 1
    slot = 0
    for value in range(starts.shape[0]):
        count = starts[value]
        starts[value] = slot
        slot += count
    for i in range(labels.shape[0]):
        value = (labels[i] >> shift) & mask
        out[starts[value]] = labels[i]
        starts[value] += 1


@njit(cache=True, nogil=True)
def new_best_paths(n_labels: int) -> BestPaths:
    """Return scratch memory for L labels."""
    scores = np.full((n_labels, 2), EMPTY, dtype=np.float32)
    path, reached = np.empty(n_labels, dtype=np.int32), np.empty(n_labels + 1, dtype=np.int32)
    return BestPaths(scores, path, reached)


@njit(cache=True, nogil=True)
def _reach(
    beam: Array,
    beam_log: Array,
    ordered: OrderedEdges,
    n_keep: int,
    walked: Array,
    best: BestPaths,
) -> int:
    """Walk a row's paths, best first, until ``n_keep`` labels are reached or no path is left."""
    walked[:] = 0
    nothing = np.empty(0, dtype=np.bool_)
    n_reached = ZERO
    for threshold in score_thresholds(sample_paths(beam, beam_log, ordered), n_keep + n_keep // 2):
        n_reached = walk(beam, beam_log, ordered, threshold, walked, best, n_reached, nothing)
        if n_reached >= n_keep:
            break
    return n_reached


@njit(cache=True, nogil=True)
def _expand_some(
    rows: tuple[int, int],
    beams: tuple[Array, Array],
    ordered: OrderedEdges,
    wanted: Array,
    n_labels: int,
    n_bits: int,
    outs: tuple[Array, Array, Array],
) -> None:
    """Expand the beams of every ``rows[1]``-th row, starting at row ``rows[0]``.

    ``n_bits`` is half the number of bits of a label id, rounded up.
    """
    out_labels, out_paths, out_wanted = outs
    n_rows, n_beam = beams[0].shape
    n_keep = out_labels.shape[1]
    best = new_best_paths(n_labels)
    scores, unsaturated = np.empty(n_labels, dtype=np.float32), np.empty(n_labels, dtype=np.float32)
    others = np.ones(n_labels, dtype=np.bool_)
    spare, starts = np.empty(n_keep, dtype=np.int32), np.empty(1 << n_bits, dtype=np.int32)
    walked = np.empty(n_beam, dtype=np.int64)
    for row in range(rows[0], n_rows, rows[1]):
        beam, beam_log = beams[0][row], beams[1][row]
        n_reached = _reach(beam, beam_log, ordered, n_keep, walked, best)
        _find_wanted(
            wanted[row], others, beam, beam_log, ordered, walked, best, n_reached, out_wanted[row]
        )
        for i in range(n_reached):
            label = best.reached[i]
            scores[i] = best.scores[label, 0]
            unsaturated[i] = best.scores[label, 1]
            best.scores[label, 0] = EMPTY
        if n_reached > n_keep:
            keep_best(scores, unsaturated, best.reached, n_reached, n_keep)
        n_kept = min(n_reached, n_keep)
        # radix sort of the label ids: first by their lower bits, then by their upper bits
        _counting_sort(best.reached[:n_kept], spare, starts, ZERO)
        _counting_sort(spare[:n_kept], best.reached[:n_kept], starts, n_bits)
        for i in range(n_kept):
            out_labels[row, i] = best.reached[i]
            out_paths[row, i] = best.path[best.reached[i]]


class _Index(NamedTuple):
    """Arrays of the label index that `rank_rows` reads."""

    edges: OrderedEdges
    weight: Array
    bias: Array
    blocked: Array
    """(L,) True for labels excluded from the results; an empty array excludes none."""


class _Scratch(NamedTuple):
    """Scratch memory of one thread; each array has one entry per label."""

    best: BestPaths
    scores: Array
    unsaturated: Array


# caches the scratch memory of a thread, because allocating it would dominate the time of one text
_thread = threading.local()


def rank_rows(
    points: tuple[Array, Array, Array],
    edges: OrderedEdges,
    weight: Float[Tensor, "L D"],
    bias: Float[Tensor, " L"],
    blocked: Bool[Tensor, " L"] | None,
    shortlist_size: int,
    top_k: int,
) -> tuple[Array, Array]:
    """Return the k labels with the highest p in the shortlist of `expand_beam`, and their p.

    Ties are ordered by label id. Empty slots hold label L and p = 0. ``blocked`` labels are
    excluded. ``points`` is (embedding, beam, beam_log).
    """
    n_rows, n_labels = len(points[0]), len(weight)
    excluded = np.zeros(0, dtype=np.bool_) if blocked is None else blocked.numpy()
    index = _Index(edges, weight.detach().numpy(), bias.detach().numpy(), excluded)
    width = min(top_k, shortlist_size, n_labels)
    labels = np.full((n_rows, width), n_labels, dtype=np.int64)
    log_p = np.full((n_rows, width), EMPTY, dtype=np.float32)
    arrays = (*points, index)
    sizes, out = (shortlist_size, _FIRST_PATHS), (labels, log_p)
    if n_rows <= _MAX_SERIAL_ROWS or numba.get_num_threads() == 1:
        scratch = getattr(_thread, "scratch", None)
        if scratch is None or len(scratch.scores) != n_labels:
            scratch = _thread.scratch = _new_scratch(n_labels)
        _rank_rows(*arrays, sizes, (0, n_rows), scratch, out)
    else:

        def rank_some(rows: range, scratch: _Scratch) -> None:
            _rank_rows(*arrays, sizes, (rows.start, rows.stop), scratch, out)

        spans = split_range(n_rows, -(-n_rows // (4 * numba.get_num_threads())))
        list(thread_map(rank_some, spans, lambda: _new_scratch(n_labels)))
    torch.from_numpy(log_p).exp_()  # in place; torch and numpy round differently
    return labels, log_p


@njit(cache=True, nogil=True)
def find_beams(
    embedding: Array, weight: Array, bias: Array, log_alpha: float, beam: Array, beam_log: Array
) -> None:
    """Write the best clusters of points to ``beam``, and their unsaturated log scores (Eq. 1)."""
    logits = np.empty(weight.shape[0], np.float32)
    for row in range(embedding.shape[0]):
        highest = EMPTY
        for c in range(weight.shape[0]):
            logits[c] = dot(weight[c], embedding[row]) + bias[c]
            highest = max(highest, logits[c])
        total = np.float32(0)
        for c in range(weight.shape[0]):
            total += np.exp(logits[c] - highest)
        beam[row], beam_log[row] = weight.shape[0], EMPTY
        for c in range(weight.shape[0]):
            log_share = logits[c] - highest - np.log(total)
            _insert(beam[row], beam_log[row], c, np.float32(log_alpha + log_share))
        _sort_heap(beam[row], beam_log[row])


def log_probabilities(logits: Tensor, log_scores: Tensor) -> Tensor:
    """Return log σ(logit) + log ŷ of each label, bit-identical to the scores of `rank_rows`."""
    log_p = np.empty(logits.numel(), dtype=np.float32)
    _log_p(logits.reshape(-1).numpy(), log_scores.reshape(-1).numpy(), log_p)
    return torch.from_numpy(log_p).view(logits.shape)


def _new_scratch(n_labels: int) -> _Scratch:
    scores, unsaturated = (np.empty(n_labels, dtype=np.float32) for _ in range(2))
    return _Scratch(new_best_paths(n_labels), scores, unsaturated)


@njit(cache=True, nogil=True)
def _rank_rows(
    embedding: Array,
    beam: Array,
    beam_log: Array,
    index: _Index,
    sizes: tuple[int, int],
    span: tuple[int, int],
    scratch: _Scratch,
    outs: tuple[Array, Array],
) -> None:
    walked = np.empty(beam.shape[1], dtype=np.int64)
    for row in range(span[0], span[1]):
        walked[:] = 0
        top = (outs[0][row], outs[1][row])
        row_beam = (beam[row], beam_log[row])
        n_reached = _choose(embedding[row], row_beam, index, scratch, sizes, walked, top)
        for i in range(n_reached):
            scratch.best.scores[scratch.best.reached[i], 0] = EMPTY


@njit(cache=True, nogil=True)
def _choose(
    point: Array,
    beam: tuple[Array, Array],
    index: _Index,
    scratch: _Scratch,
    sizes: tuple[int, int],
    walked: Array,
    out: tuple[Array, Array],
) -> int:
    """Write the top k labels of a point to ``out``, and return the number of labels reached.

    Labels are scored in rounds. The paths of a round score lower than paths of earlier rounds. The
    search stops as soon as no other label can enter the top k. Until then, the top k are a heap
    with the worst label at the root.
    """
    shortlist_size, n_first = sizes
    best, sample = scratch.best, sample_paths(beam[0], beam[1], index.edges)
    top, top_log = out
    done, n_reached = ZERO, ZERO
    for threshold in score_thresholds(sample, max(n_first, top.shape[0])):
        n_reached = walk(
            beam[0], beam[1], index.edges, threshold, walked, best, n_reached, index.blocked
        )
        take = min(n_reached, shortlist_size) - done
        if take < n_reached - done:
            _keep_some(scratch, done, n_reached, take)
        for i in range(done, done + take):  # without branches, the CPU reads several rows at a time
            label = best.reached[i]
            scratch.scores[i] = dot(index.weight[label], point) + index.bias[label]
        for i in range(done, done + take):
            label, logit = best.reached[i], scratch.scores[i]
            path_log = best.scores[label, 0]
            if min(logit, _SATURATED) + path_log >= top_log[0]:  # log σ(z) never exceeds min(z, 0)
                _insert(top, top_log, label, _log_sigmoid(logit) + path_log)
        done += take
        if top_log[0] >= threshold or done == shortlist_size:
            break
    _sort_heap(top, top_log)
    return n_reached


@njit(cache=True, nogil=True)
def _keep_some(scratch: _Scratch, begin: int, end: int, keep: int) -> None:
    """Move the ``keep`` best labels of ``reached[begin:end]`` to the front of this range."""
    for i in range(begin, end):
        label = scratch.best.reached[i]
        scratch.scores[i - begin] = scratch.best.scores[label, 0]
        scratch.unsaturated[i - begin] = scratch.best.scores[label, 1]
    labels = scratch.best.reached[begin:end]
    keep_best(scratch.scores, scratch.unsaturated, labels, end - begin, keep)


@njit(cache=True, nogil=True)
def _log_sigmoid(logit: np.float32) -> np.float32:
    z = np.float64(logit)
    return np.float32(min(z, 0.0) - np.log1p(np.exp(-abs(z))))


@njit(cache=True, nogil=True)
def _log_p(logits: Array, log_scores: Array, out: Array) -> None:
    for i in range(out.shape[0]):
        out[i] = _log_sigmoid(logits[i]) + log_scores[i]


@njit(cache=True, nogil=True)
def _before(label: int, log_p: np.float32, other: int, other_log_p: np.float32) -> bool:
    """Return whether a label ranks before another: by higher p, then by lower id."""
    return bool(log_p > other_log_p or (log_p == other_log_p and label < other))


@njit(cache=True, nogil=True)
def _insert(top: Array, top_log: Array, label: int, log_p: np.float32) -> None:
    """Insert a label if it ranks before the root of the heap, which is the worst label."""
    if log_p > EMPTY and _before(label, log_p, top[0], top_log[0]):
        _sift(top, top_log, label, log_p)


@njit(cache=True, nogil=True)
def top_labels(ids: Array, scores: Array, top_k: int, n_labels: int) -> tuple[Array, Array]:
    """Return the k best labels of each row and their scores, by score and then by label id.

    A score of -inf is padding. In the result, padding has the label L.
    """
    top = np.full((ids.shape[0], min(top_k, ids.shape[1])), n_labels, dtype=np.int64)
    top_scores = np.full(top.shape, EMPTY, dtype=np.float32)
    for row in range(top.shape[0]):
        for i in range(ids.shape[1]):
            _insert(top[row], top_scores[row], ids[row, i], scores[row, i])
        _sort_heap(top[row], top_scores[row])
    return top, top_scores


@njit(cache=True, nogil=True)
def _sort_heap(top: Array, top_log: Array) -> None:
    """Sort the entries of a heap, best first."""
    for size in range(top.shape[0] - 1, 0, -1):
        label, log_p = top[size], top_log[size]
        top[size], top_log[size] = top[0], top_log[0]
        _sift(top[:size], top_log[:size], label, log_p)


@njit(cache=True, nogil=True)
def _sift(top: Array, top_log: Array, label: int, log_p: np.float32) -> None:
    """Replace the root of a heap by a label, and move it down until the order is restored."""
    at, child = 0, 1
    while child < top.shape[0]:
        right = child + 1
        if right < top.shape[0] and _before(top[child], top_log[child], top[right], top_log[right]):
            child = right
        if not _before(label, log_p, top[child], top_log[child]):
            break
        top[at], top_log[at] = top[child], top_log[child]
        at, child = child, 2 * child + 1
    top[at], top_log[at] = label, log_p
