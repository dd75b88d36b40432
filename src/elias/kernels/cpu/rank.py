"""Rank the labels that a text's beam reaches, in one compiled pass on the CPU.

p = σ(w·φ + bias)·ŷ never exceeds ŷ. Paths are therefore walked in order of descending ŷ, and the
labels they reach are scored, until no remaining label can enter the k best. This proceeds in
rounds; each round doubles the number of paths walked.
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

from elias.kernels.cpu.rows import FASTMATH
from elias.kernels.cpu.search import (
    EMPTY,
    BestPaths,
    OrderedEdges,
    keep_best,
    new_best_paths,
    sample_size,
    score_threshold,
    walk,
)
from elias.kernels.threads import thread_map

Array: TypeAlias = NDArray[Any]

_FIRST_PATHS = 64  # paths walked in the first round, or as many as labels are wanted
_FEW_TEXTS = 64  # so few are ranked sooner than threads start


class Index(NamedTuple):
    """Arrays of the label index that `rank_beams` reads."""

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


class _ThreadScratch(threading.local):
    """Cached scratch memory of the calling thread; allocating it would dominate a single text."""

    scratch: _Scratch | None = None


_thread = _ThreadScratch()


def rank_beams(
    embedding: Float[Tensor, "B D"],
    beam: Int[Tensor, "B b"],
    beam_log: Float[Tensor, "B b"],
    index: Index,
    shortlist_size: int,
    top_k: int,
) -> tuple[Int[Tensor, "B k"], Float[Tensor, "B k"]]:
    """Return the k labels with the highest p among the K that `expand_beam` keeps, and their p.

    Ties are ordered by label id. Empty slots hold label L and p = 0.
    """
    n_rows, n_labels = len(embedding), len(index.weight)
    width = min(top_k, shortlist_size, n_labels)
    labels = np.full((n_rows, width), n_labels, dtype=np.int64)
    log_p = np.full((n_rows, width), EMPTY, dtype=np.float32)
    arrays = (embedding.numpy(), beam.numpy(), beam_log.numpy(), index)
    sizes, out = (shortlist_size, _FIRST_PATHS), (labels, log_p)
    if n_rows <= _FEW_TEXTS or numba.get_num_threads() == 1:
        if _thread.scratch is None or len(_thread.scratch.scores) != n_labels:
            _thread.scratch = _new_scratch(n_labels)
        _rank_rows(*arrays, sizes, (0, n_rows), _thread.scratch, out)
    else:

        def rank_some(rows: range, scratch: _Scratch) -> None:
            _rank_rows(*arrays, sizes, (rows.start, rows.stop), scratch, out)

        step = max(1, -(-n_rows // (4 * numba.get_num_threads())))
        spans = [range(i, min(i + step, n_rows)) for i in range(0, n_rows, step)]
        for _ in thread_map(rank_some, spans, lambda: _new_scratch(n_labels)):
            pass
    return torch.from_numpy(labels), torch.from_numpy(log_p).exp()


def log_probabilities(logits: Tensor, log_scores: Tensor) -> Tensor:
    """Return log p = log σ(logit) + log ŷ, bit-identical to `rank_beams`."""
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
    index: Index,
    sizes: tuple[int, int],
    span: tuple[int, int],
    scratch: _Scratch,
    outs: tuple[Array, Array],
) -> None:
    n_beam = beam.shape[1]
    sample = np.empty(sample_size(n_beam, index.edges.logs.shape[1]), dtype=np.float32)
    walked = np.empty(n_beam, dtype=np.int64)
    for row in range(span[0], span[1]):
        walked[:] = 0
        top = (outs[0][row], outs[1][row])
        row_beam = (beam[row], beam_log[row])
        n_reached = _choose(embedding[row], row_beam, index, scratch, sizes, (sample, walked), top)
        for i in range(n_reached):
            scratch.best.scores[scratch.best.reached[i], 0] = EMPTY


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
    """Score labels in rounds, best paths first, until no other label can enter the top k.

    Returns the number of labels reached. Path scores in a round are below those of earlier rounds.
    """
    shortlist_size, n_first = sizes
    sample, walked = spare
    best = scratch.best
    top, top_log = out
    n_top = top.shape[0]
    done, n_reached = 0, 0
    n_paths = max(n_first, n_top)
    threshold = np.float32(np.inf)
    while done < shortlist_size and threshold != EMPTY:
        threshold = score_threshold(beam[0], beam[1], index.edges, n_paths, sample)
        n_reached = walk(
            beam[0], beam[1], index.edges, threshold, walked, best, n_reached, index.blocked
        )
        take = min(n_reached, shortlist_size) - done
        if take < n_reached - done:
            _keep_some(scratch, done, n_reached, take)
        for i in range(done, done + take):
            label = best.reached[i]
            logit = _dot(index.weight[label], point) + index.bias[label]
            _insert(top, top_log, label, _log_sigmoid(logit) + best.scores[label, 0])
        done += take
        if top_log[n_top - 1] >= threshold:
            break
        n_paths *= 2
    return n_reached


@njit(cache=True, nogil=True)
def _keep_some(scratch: _Scratch, begin: int, end: int, keep: int) -> None:
    """Move the ``keep`` best of the reached labels ``begin:end`` to the front of this range."""
    for i in range(begin, end):
        label = scratch.best.reached[i]
        scratch.scores[i - begin] = scratch.best.scores[label, 0]
        scratch.unsaturated[i - begin] = scratch.best.scores[label, 1]
    labels = scratch.best.reached[begin:end]
    keep_best(scratch.scores, scratch.unsaturated, labels, end - begin, keep)


@njit(cache=True, nogil=True, fastmath=FASTMATH)
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
    """Insert a label into the top k if it ranks there; ties are ordered by label id."""
    rank = top.shape[0]
    while rank > 0 and (
        log_p > top_log[rank - 1]
        or (log_p == top_log[rank - 1] and log_p > EMPTY and label < top[rank - 1])
    ):
        rank -= 1
    if rank == top.shape[0]:
        return
    for i in range(top.shape[0] - 1, rank, -1):
        top[i] = top[i - 1]
        top_log[i] = top_log[i - 1]
    top[rank] = label
    top_log[rank] = log_p
