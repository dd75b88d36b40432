"""From the beam of a text to its best labels in one compiled pass, for a CPU.

p = σ(w·φ + bias)·ŷ is never above ŷ. So paths are walked and their labels scored from the best
down, the best few first, twice as many each time, until no label that is left can come before the k
found: mostly long before all paths have been walked.
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

from elias.kernels.cpu.rows import SUMS
from elias.kernels.cpu.search import Best, OrderedEdges, bar_of, keep_best, n_sampled, walk
from elias.kernels.threads import thread_map

Array: TypeAlias = NDArray[Any]

_EMPTY = np.float32(-np.inf)
_FIRST = 64  # paths walked at first, or as many as labels are wanted
_FEW = 64  # texts that are ranked sooner than threads are started


class Index(NamedTuple):
    """What a search reads, as arrays."""

    edges: OrderedEdges
    weight: Array
    bias: Array
    blocked: Array
    """(L,) which labels no path leads to; without entries: none."""


class _Scratch(NamedTuple):
    """Memory of one thread, an entry a label. Nothing is ``held`` between two texts."""

    best: Best
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

    if n_rows <= _FEW or numba.get_num_threads() == 1:
        rank_some(range(n_rows), _own_scratch(n_labels))
    else:
        step = max(1, -(-n_rows // (4 * numba.get_num_threads())))
        spans = [range(i, min(i + step, n_rows)) for i in range(0, n_rows, step)]
        for _ in thread_map(rank_some, spans, lambda: _new_scratch(n_labels)):
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
    if _kept.scratch is None or len(_kept.scratch.scores) != n_labels:
        _kept.scratch = _new_scratch(n_labels)
    return _kept.scratch


def _new_scratch(n_labels: int) -> _Scratch:
    held = np.full((n_labels, 2), _EMPTY, dtype=np.float32)
    path, reached = (np.empty(n_labels, dtype=np.int32) for _ in range(2))
    scores, frees = (np.empty(n_labels, dtype=np.float32) for _ in range(2))
    return _Scratch(Best(held, path, reached), scores, frees)


@njit(cache=True, nogil=True)
def _rank_rows(
    embedding: Array,
    beam: Array,
    beam_log: Array,
    index: Index,
    sizes: tuple[int, int],
    span: tuple[int, int],
    scratch: _Scratch,
    outs: tuple[Array, Array],
) -> None:
    n_beam = beam.shape[1]
    sample = np.empty(n_sampled(n_beam, index.edges.logs.shape[1]), dtype=np.float32)
    walked = np.empty(n_beam, dtype=np.int64)
    for row in range(span[0], span[1]):
        walked[:] = 0
        top = (outs[0][row], outs[1][row])
        place = (beam[row], beam_log[row])
        n_reached = _choose(embedding[row], place, index, scratch, sizes, (sample, walked), top)
        for i in range(n_reached):
            scratch.best.held[scratch.best.reached[i], 0] = _EMPTY


@njit(cache=True, nogil=True)
def _choose(
    point: Array,
    beam: tuple[Array, Array],
    index: Index,
    scratch: _Scratch,
    sizes: tuple[int, int],
    spare: tuple[Array, Array],
    out: tuple[Array, Array],
) -> int:
    """Score labels, those of the best paths first, while one of them may still be among the top.

    Returns how many were reached. Those that a round reaches score less than all before them.
    """
    shortlist_size, first = sizes
    sample, walked = spare
    best = scratch.best
    top, top_log = out
    n_top = top.shape[0]
    done, n_reached = 0, 0
    n_paths = max(first, n_top)
    bar = np.float32(np.inf)
    while done < shortlist_size and bar != _EMPTY:
        bar = bar_of(beam[0], beam[1], index.edges, n_paths, sample)
        n_reached = walk(beam[0], beam[1], index.edges, bar, walked, best, n_reached, index.blocked)
        take = min(n_reached, shortlist_size) - done
        if take < n_reached - done:
            _keep_some(scratch, done, n_reached, take)
        for i in range(done, done + take):
            label = best.reached[i]
            logit = _dot(index.weight[label], point) + index.bias[label]
            _insert(top, top_log, label, _log_sigmoid(logit) + best.held[label, 0])
        done += take
        if top_log[n_top - 1] >= bar:
            break
        n_paths *= 2
    return n_reached


@njit(cache=True, nogil=True)
def _keep_some(scratch: _Scratch, begin: int, end: int, keep: int) -> None:
    """Move the best of the labels reached from ``begin`` on to the front of them."""
    for i in range(begin, end):
        label = scratch.best.reached[i]
        scratch.scores[i - begin] = scratch.best.held[label, 0]
        scratch.frees[i - begin] = scratch.best.held[label, 1]
    labels = scratch.best.reached[begin:end]
    keep_best(scratch.scores, scratch.frees, labels, end - begin, keep)


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
