"""From the beam of a text to its best labels in one compiled pass, for a CPU.

p = σ(w·φ + bias)·ŷ is never above ŷ. So labels are scored in the order of their paths, the best
few first, twice as many each time, until no label that is left can come before the k found: mostly
long before the whole shortlist has been read.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, TypeAlias

import numba
import numpy as np
import torch
from jaxtyping import Float, Int
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from elias.kernels.compiled import SUMS, keep_best
from elias.kernels.threads import on_threads

Array: TypeAlias = NDArray[Any]

_EMPTY = np.float32(-np.inf)
_FULL = np.float32(0.0)
_FIRST = 64  # labels scored at first


class Index(NamedTuple):
    """What a search reads, as arrays."""

    edge_labels: Array
    edge_log: Array
    weight: Array
    bias: Array


class _Scratch(NamedTuple):
    """Memory of one thread, an entry a label. Nothing is ``held`` between two texts."""

    held: Array
    reached: Array
    scores: Array
    frees: Array


class _Kept(threading.local):
    """The scratch memory of this thread: making it would be much of the work for one text."""

    scratch: _Scratch | None = None


_kept = _Kept()


def rank_beams(
    embedding: Float[Tensor, "B D"],
    beam: Int[Tensor, "B b"],
    beam_log: Float[Tensor, "B b"],
    index: Index,
    shortlist_size: int,
    top_k: int,
) -> tuple[Int[Tensor, "B k"], Float[Tensor, "B k"]]:
    """Return the k labels of highest p among the K that `expand_beam` would keep, and their p.

    Equal ones are ordered by label id; missing slots hold L and 0.
    """
    n_rows, n_labels = len(embedding), len(index.weight)
    width = min(top_k, shortlist_size, n_labels)
    labels = np.full((n_rows, width), n_labels, dtype=np.int64)
    log_p = np.full((n_rows, width), _EMPTY, dtype=np.float32)
    arrays = (embedding.numpy(), beam.numpy(), beam_log.numpy())

    def rank_some(rows: range, scratch: _Scratch) -> None:
        span = (rows.start, rows.stop)
        _rank_rows(*arrays, index, (shortlist_size, _FIRST), span, scratch, (labels, log_p))

    if n_rows == 1 or numba.get_num_threads() == 1:
        rank_some(range(n_rows), _own_scratch(n_labels))
    else:
        step = max(1, -(-n_rows // (4 * numba.get_num_threads())))
        spans = [range(i, min(i + step, n_rows)) for i in range(0, n_rows, step)]
        for _ in on_threads(rank_some, spans, lambda: _new_scratch(n_labels)):
            pass
    return torch.from_numpy(labels), torch.from_numpy(log_p).exp()


def log_probabilities(
    logits: Float[Tensor, "B K"], log_scores: Float[Tensor, "B K"]
) -> Float[Tensor, "B K"]:
    """Return log p = log σ(logit) + log ŷ, on a CPU to the bit as `rank_beams` has it."""
    if logits.is_cuda:
        return torch.nn.functional.logsigmoid(logits) + log_scores
    log_p = np.empty(logits.numel(), dtype=np.float32)
    _log_p(logits.reshape(-1).numpy(), log_scores.reshape(-1).numpy(), log_p)
    return torch.from_numpy(log_p).view(logits.shape)


def _own_scratch(n_labels: int) -> _Scratch:
    if _kept.scratch is None or len(_kept.scratch.reached) != n_labels:
        _kept.scratch = _new_scratch(n_labels)
    return _kept.scratch


def _new_scratch(n_labels: int) -> _Scratch:
    held = np.full((n_labels, 2), _EMPTY, dtype=np.float32)
    parts = (np.empty(n_labels, dtype) for dtype in (np.int32, np.float32, np.float32))
    return _Scratch(held, *parts)


@njit(cache=True, nogil=True)
def _rank_rows(  # noqa: PLR0913 - numba wants plain positional arrays
    embedding: Array,
    beam: Array,
    beam_log: Array,
    index: Index,
    sizes: tuple[int, int],
    span: tuple[int, int],
    scratch: _Scratch,
    outs: tuple[Array, Array],
) -> None:
    for row in range(span[0], span[1]):
        n_reached = _reach(beam[row], beam_log[row], index, scratch)
        top = (outs[0][row], outs[1][row])
        _choose(embedding[row], index, scratch, n_reached, sizes, top)


@njit(cache=True, nogil=True)
def _reach(beam: Array, beam_log: Array, index: Index, scratch: _Scratch) -> int:
    """Walk every path, and list the labels reached with the score of their best path."""
    edge_labels, edge_log = index.edge_labels, index.edge_log
    held, reached = scratch.held, scratch.reached
    n_reached = 0
    for position in range(beam.shape[0]):
        cluster = beam[position]
        cluster_free = beam_log[position]
        cluster_score = min(cluster_free, _FULL)
        for edge in range(edge_labels.shape[1]):
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
    for i in range(n_reached):
        label = reached[i]
        scratch.scores[i] = held[label, 0]
        scratch.frees[i] = held[label, 1]
        held[label, 0] = _EMPTY
    return n_reached


@njit(cache=True, nogil=True)
def _choose(
    point: Array,
    index: Index,
    scratch: _Scratch,
    n_reached: int,
    sizes: tuple[int, int],
    out: tuple[Array, Array],
) -> None:
    """Score labels, those of the best paths first, while one of them may still be among the top."""
    shortlist_size, first = sizes
    top, top_log = out
    n_left = min(n_reached, shortlist_size)
    n_top = top.shape[0]
    done, block = 0, max(first, n_top)
    while done < n_left:
        take = min(block, n_left - done)
        labels = scratch.reached[done:n_reached]
        scores = scratch.scores[done:n_reached]
        if take < n_reached - done:
            keep_best(scores, scratch.frees[done:n_reached], labels, n_reached - done, take)
        lowest = _FULL
        for i in range(take):
            label = labels[i]
            logit = _dot(index.weight[label], point) + index.bias[label]
            _insert(top, top_log, label, _log_sigmoid(logit) + scores[i])
            lowest = min(lowest, scores[i])
        if top_log[n_top - 1] > lowest:
            return
        done += take
        block *= 2


@njit(cache=True, nogil=True, fastmath=SUMS)
def _dot(row: Array, point: Array) -> np.float32:
    total = np.float32(0.0)
    for d in range(point.shape[0]):
        total += row[d] * point[d]
    return total


@njit(cache=True, nogil=True)
def _log_sigmoid(logit: np.float32) -> np.float32:
    z = np.float64(logit)
    return np.float32(min(z, 0.0) - np.log1p(np.exp(-abs(z))))


@njit(cache=True, nogil=True)
def _log_p(logits: Array, log_scores: Array, out: Array) -> None:
    for i in range(out.shape[0]):
        out[i] = _log_sigmoid(logits[i]) + log_scores[i]


@njit(cache=True, nogil=True)
def _insert(top: Array, top_log: Array, label: int, log_p: np.float32) -> None:
    """Put a label at its place, if it has one; equal ones are ordered by label id."""
    place = top.shape[0]
    while place > 0 and (
        log_p > top_log[place - 1]
        or (log_p == top_log[place - 1] and log_p > _EMPTY and label < top[place - 1])
    ):
        place -= 1
    if place == top.shape[0]:
        return
    for i in range(top.shape[0] - 1, place, -1):
        top[i] = top[i - 1]
        top_log[i] = top_log[i - 1]
    top[place] = label
    top_log[place] = log_p
