"""Fit one linear classifier per label by dual coordinate descent.

The sub-problem of a label is a list of rows of one matrix ψ, which all labels share without copies.
The loops release the GIL, and idle threads take the next labels. Each thread has its own weight
buffers, and each label has its own random order, so the result does not depend on the number of
threads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from elias.kernels.threads import thread_map_progress
from elias.rerank.sparse_ranker import Array, Rows, as_rows, sparse_dot

if TYPE_CHECKING:
    from collections.abc import Iterator


Groups: TypeAlias = tuple[Array, Array, Array]
"""Sub-problems: the first pair of each label, and the row and y (+1 or -1) of each pair."""


def group_pairs(candidates: NDArray[np.integer[Any]], labels: csr_matrix) -> Groups:
    """Return each label's sub-problem: the points for which it is a candidate or relevant.

    The rows are in ascending order, with +1 where the label is relevant and -1 elsewhere.

    Args:
        candidates: (N, k) label ids; ids of L and above are padding.
        labels: (N, L) relevance; a stored entry is a relevant label.
    """
    relevant = (labels.indptr, labels.indices)
    counts = np.zeros(labels.shape[1], dtype=np.int64)
    _visit_pairs(candidates, relevant, counts, (np.empty(0, np.int32), np.empty(0, np.int8)))
    starts = np.concatenate([[0], np.cumsum(counts)])
    pairs = (np.empty(starts[-1], dtype=np.int32), np.empty(starts[-1], dtype=np.int8))
    _visit_pairs(candidates, relevant, starts[:-1].copy(), pairs)
    return starts, *pairs


@njit(cache=True)
def _visit_pairs(
    candidates: Array, relevant: tuple[Array, Array], slots: Array, pairs: tuple[Array, Array]
) -> None:
    """Write each pair to the next slot of its label; if ``pairs`` is empty, only count pairs."""
    label_starts, label_ids = relevant
    n_labels = slots.shape[0]
    last_row = np.full(n_labels, -1, dtype=np.int64)
    for row in range(candidates.shape[0]):
        for j in range(label_starts[row], label_starts[row + 1]):
            _note_pair(label_ids[j], row, 1, last_row, slots, pairs)
        for j in range(candidates.shape[1]):
            if candidates[row, j] < n_labels:
                _note_pair(candidates[row, j], row, -1, last_row, slots, pairs)


@njit(cache=True)
def _note_pair(
    label: int, row: int, sign: int, last_row: Array, slots: Array, pairs: tuple[Array, Array]
) -> None:
    rows, signs = pairs
    if last_row[label] == row:
        return
    last_row[label] = row
    if rows.shape[0]:
        rows[slots[label]] = row
        signs[slots[label]] = sign
    slots[label] += 1


Buffers: TypeAlias = tuple[Array, Array]
"""A thread's float64 weights of the sparse and the dense part; reset to 0 after each label."""

# Allow reordered sums, for vectorisation; NaN and infinity keep their meaning.
_SUMS = {"reassoc", "contract", "nsz"}


def squares_of(rows: Rows) -> NDArray[np.float64]:
    """Return ‖ψ‖² + 1 of each row; the 1 is the constant feature of the bias."""
    data, _, starts, dense = rows
    total = np.concatenate([[0.0], np.cumsum(data.astype(np.float64) ** 2)])
    dense_squares = np.einsum("nd,nd->n", dense, dense, dtype=np.float64)
    squares: NDArray[np.float64] = 1 + np.diff(total[starts]) + dense_squares
    return squares


@njit(cache=True, nogil=True, fastmath=_SUMS)
def _dense_dot(dense: Array, row: int, weight: Array) -> float:
    total = 0.0
    for d in range(dense.shape[1]):
        total += dense[row, d] * weight[d]
    return total


@njit(cache=True, nogil=True)
def dot(rows: Rows, row: int, buffers: Buffers) -> float:
    """Return w·ψ of one row."""
    data, columns, starts, dense = rows
    total = sparse_dot(data, columns, starts[row], starts[row + 1], buffers[0])
    return total + _dense_dot(dense, row, buffers[1])


@njit(cache=True, nogil=True)
def add(rows: Rows, row: int, scale: float, buffers: Buffers) -> None:
    """Add ``scale`` times one row to w."""
    data, columns, starts, dense = rows
    weight, dense_weight = buffers
    for j in range(starts[row], starts[row + 1]):
        weight[columns[j]] += scale * data[j]
    for d in range(dense.shape[1]):
        dense_weight[d] += scale * dense[row, d]


@njit(cache=True, nogil=True)
def seed_state(seed: int, label: int) -> np.uint64:
    """Return the initial random state of a label, never 0; neighbouring ids get distant states."""
    mixed = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(label) + np.uint64(1)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


@njit(cache=True, nogil=True)
def shuffle(order: Array, size: int, state: np.uint64) -> np.uint64:
    """Shuffle the first ``size`` entries in place; return the next random state."""
    for i in range(size - 1, 0, -1):
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        j = np.int64(((state >> np.uint64(32)) * np.uint64(i + 1)) >> np.uint64(32))
        order[i], order[j] = order[j], order[i]
    return state


_STILL = 1e-12  # projected gradients below this count as zero


@njit(cache=True, nogil=True)
def _sweep(
    rows: Rows,
    squares: Array,
    pairs: tuple[Array, Array],
    duals: tuple[Array, Array],
    order: Array,
    active: int,
    bounds: tuple[float, float, float],
    buffers: Buffers,
) -> tuple[int, float, float, float]:
    """Minimise the dual over each active α_i once, in the given order.

    Return the number of active α_i, the bias, and the highest and lowest projected gradient. An
    α_i of 0 becomes inactive if its gradient exceeds the highest projected gradient of the previous
    sweep.
    """
    members, signs = pairs
    dual, moved = duals
    bias, diagonal, highest_before = bounds
    highest, lowest = -np.inf, np.inf
    at = 0
    while at < active:
        i = order[at]
        row, sign, old = members[i], np.float64(signs[i]), dual[i]
        slope = sign * (dot(rows, row, buffers) + bias) - 1.0 + diagonal * old
        if old == 0.0 and slope > highest_before:
            active -= 1
            order[at], order[active] = order[active], order[at]
            continue
        at += 1
        projected = min(slope, 0.0) if old == 0.0 else slope
        highest, lowest = max(highest, projected), min(lowest, projected)
        if abs(projected) > _STILL:
            dual[i] = max(old - slope / (squares[row] + diagonal), 0.0)
            step = (dual[i] - old) * sign
            moved[i] = True
            bias += step
            add(rows, row, step, buffers)
    return active, bias, highest, lowest


@njit(cache=True, nogil=True)
def solve_hinge(
    rows: Rows,
    squares: Array,
    pairs: tuple[Array, Array],
    buffers: Buffers,
    limits: tuple[float, float, int],
    state: np.uint64,
) -> tuple[float, Array]:
    """Fit one classifier into ``buffers``; return its bias and the rows that contribute to it.

    The dual is min ½αᵀ(Q + 1/(2C))α − Σα over α ≥ 0, with Q_ij = y_i·y_j·(ψ_i·ψ_j + 1) and
    w = Σ α_i·y_i·ψ_i. Each sweep has a new random order. The solver stops when the difference
    between the highest and lowest projected gradient of all points is at most the tolerance.
    """
    cost, tolerance, most = limits
    size = pairs[0].shape[0]
    duals = (np.zeros(size), np.zeros(size, dtype=np.bool_))
    order = np.arange(size).astype(np.int32)
    active, bias, highest_before = size, 0.0, np.inf
    for _ in range(most):
        state = shuffle(order, active, state)
        bounds = (bias, 0.5 / cost, highest_before)
        active, bias, highest, lowest = _sweep(
            rows, squares, pairs, duals, order, active, bounds, buffers
        )
        highest_before = highest if highest > 0.0 else np.inf
        if highest - lowest <= tolerance:
            if active == size:
                break
            active, highest_before = size, np.inf  # check all of them again
    return bias, duals[1]


_STEPS = 50  # maximum of Newton steps for one coordinate; three or four are usual
_FIRST = -4.0  # initial logit of α/C: each point contributes a little to w


@njit(cache=True, nogil=True)
def _share(logit: float) -> float:
    """Return σ(u) without overflow."""
    faint = math.exp(-abs(logit))
    return (1.0 if logit >= 0 else faint) / (1.0 + faint)


@njit(cache=True, nogil=True)
def _best_logit(logit: float, curvature: float, slope: float, precision: float) -> float:
    """Return the root u of u + A·σ(u) + B; the slope is at least 1, so the root is unique.

    Newton steps are limited to the interval [−B − A, −B], which contains the root.
    """
    low, high = -slope - curvature, -slope
    for _ in range(_STEPS):
        share = _share(logit)
        value = logit + curvature * share + slope
        if abs(value) <= precision:
            break
        if value > 0:
            high = min(high, logit)
        else:
            low = max(low, logit)
        step = logit - value / (1.0 + curvature * share * (1.0 - share))
        logit = step if low < step < high else 0.5 * (low + high)
    return logit


@njit(cache=True, nogil=True)
def solve_logistic(
    rows: Rows,
    squares: Array,
    pairs: tuple[Array, Array],
    buffers: Buffers,
    limits: tuple[float, float, int],
    state: np.uint64,
) -> tuple[float, Array]:
    """Fit one classifier into ``buffers``; return its bias and the rows that contribute to it.

    The dual of ½‖w‖² + C·Σ log(1 + exp(−y_i·w·ψ_i)) is min ½αᵀQα + Σ α_i·log α_i +
    (C − α_i)·log(C − α_i) over 0 < α < C, with Q_ij = y_i·y_j·(ψ_i·ψ_j + 1) and w = Σ α_i·y_i·ψ_i.
    Its derivative in α_i is y_i·w·ψ_i + u_i, where u_i is the logit of α_i/C. The solver updates
    u_i instead of α_i: the optimum is the root of a function with a slope of at least 1, and α_i
    never reaches its bounds. Each sweep has a new random order. The solver stops when no derivative
    exceeds the tolerance in absolute value.
    """
    cost, tolerance, most = limits
    members, signs = pairs
    size = members.shape[0]
    logits = np.full(size, _FIRST)
    order = np.arange(size).astype(np.int32)
    bias = 0.0
    for i in range(size):
        part = cost * _share(_FIRST) * signs[i]
        bias += part
        add(rows, members[i], part, buffers)
    for _ in range(most):
        state = shuffle(order, size, state)
        steepest = 0.0
        for at in range(size):
            i = order[at]
            row, sign, old = members[i], np.float64(signs[i]), cost * _share(logits[i])
            margin = sign * (dot(rows, row, buffers) + bias)
            slope = margin + logits[i]
            steepest = max(steepest, abs(slope))
            if abs(slope) <= 0.01 * tolerance:
                continue
            square = squares[row]
            logits[i] = _best_logit(
                logits[i], square * cost, margin - square * old, 0.001 * tolerance
            )
            step = (cost * _share(logits[i]) - old) * sign
            bias += step
            add(rows, row, step, buffers)
        if steepest <= tolerance:
            break
    return bias, np.ones(size, dtype=np.bool_)


Loss: TypeAlias = Literal["squared-hinge", "logistic"]
WeightBuffers: TypeAlias = tuple[Array, Array]
"""Buffers for the columns and values of one label's weights."""
Fitted: TypeAlias = tuple[Array, Array, Array, Array]
"""Result for a chunk of labels: number of weights and bias of each, all columns and values."""

_SCAN_IS_FASTER = 4  # scan all columns if picking would touch at least one in four
_PAIRS_PER_CHUNK = 20_000  # about 10 ms of work for a thread


class FitSettings(NamedTuple):
    """Settings of a fit."""

    cost: float = 1.0
    """C: the weight of the loss relative to ½‖w‖²."""
    tolerance: float = 0.1
    """Stopping tolerance on the gradients of the dual; see the solvers."""
    max_iterations: int = 100
    """Maximum number of passes over the points of a label."""
    prune: float = 0.0
    """Drop weights whose absolute value is smaller than this."""
    seed: int = 0
    """Seed of the order in which points are visited."""
    loss: Loss = "squared-hinge"
    """The loss function."""


def fit_label_classifiers(
    features: csr_matrix, dense: NDArray[np.float32], groups: Groups, settings: FitSettings
) -> tuple[csr_matrix, NDArray[np.float32]]:
    """Fit one classifier for each label on its own rows; return weights (L, F + D) and biases (L,).

    Minimise ½(‖w‖² + b²) + C·Σ_i loss(y_i·(w·ψ_i + b)) over the label's rows i. ψ concatenates the
    sparse and the dense features. The loss is log(1 + exp(−s)), the masked loss of Eq. 17, or the
    squared hinge max(0, 1 − s)².

    Args:
        features: (N, F) sparse features, float32.
        dense: (N, D) dense features; D may be 0.
        groups: The rows of each label and their signs; see `group_pairs`.
        settings: Cost, stopping criterion and pruning threshold.
    """
    rows = as_rows(features, dense)
    widths = features.shape[1], dense.shape[1]
    squares = squares_of(rows)
    chunks = list(_chunks(groups[0]))
    limits = (settings.cost, settings.tolerance, settings.max_iterations)

    def work(labels: NDArray[np.int64], memory: tuple[Buffers, WeightBuffers]) -> Fitted:
        rest = (limits, settings.prune, settings.seed, settings.loss == "logistic")
        fitted: Fitted = _fit_labels(rows, squares, groups, labels, memory, rest)
        return fitted

    def memory() -> tuple[Buffers, WeightBuffers]:
        out = np.empty(sum(widths), dtype=np.int32), np.empty(sum(widths), dtype=np.float32)
        return (np.zeros(widths[0]), np.zeros(widths[1])), out

    n_labels = len(groups[0]) - 1
    fitted = list(thread_map_progress(work, chunks, memory, "Fitting the ranker", n_labels))
    return _assemble(chunks, fitted, (n_labels, sum(widths)))


def _chunks(starts: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the labels in chunks, the largest first, so that all threads finish together."""
    sizes = np.diff(starts)
    order = np.argsort(-sizes, kind="stable")
    before = np.cumsum(sizes[order] + 1) - (sizes[order] + 1)
    borders = np.flatnonzero(np.diff(before // _PAIRS_PER_CHUNK)) + 1
    yield from np.split(order, borders)


@njit(cache=True, nogil=True)
def _take(
    rows: Rows, members: Array, moved: Array, buffers: Buffers, out: WeightBuffers, prune: float
) -> int:
    """Move the unpruned weights to ``out``, columns ascending; reset all weights to 0.

    Return the number of moved weights. Only the columns of contributing rows can have a weight; if
    these rows have many entries, scanning all columns is faster.
    """
    _, columns, starts, _ = rows
    n_touched = 0
    for i in range(members.shape[0]):
        if moved[i]:
            n_touched += starts[members[i] + 1] - starts[members[i]]
    weight, dense_weight = buffers
    if n_touched >= weight.shape[0] // _SCAN_IS_FASTER:
        size = _scan(weight, 0, out, 0, prune)
    else:
        size = 0
        for i in range(members.shape[0]):
            if moved[i]:
                row = members[i]
                size = _pick(weight, columns[starts[row] : starts[row + 1]], out, size, prune)
        order = np.argsort(out[0][:size])
        out[0][:size] = out[0][:size][order]
        out[1][:size] = out[1][:size][order]
    return _scan(dense_weight, weight.shape[0], out, size, prune)


@njit(cache=True, nogil=True)
def _scan(weight: Array, offset: int, out: WeightBuffers, size: int, prune: float) -> int:
    """Move the unpruned weights of all columns to ``out``; return the new size of ``out``."""
    for column in range(weight.shape[0]):
        value = weight[column]
        if value != 0.0 and abs(value) >= prune:
            out[0][size] = offset + column
            out[1][size] = value
            size += 1
    weight[:] = 0.0
    return size


@njit(cache=True, nogil=True)
def _pick(weight: Array, columns: Array, out: WeightBuffers, size: int, prune: float) -> int:
    """Move the unpruned weights of some columns to ``out``; return the new size of ``out``."""
    for column in columns:
        value = weight[column]
        if value != 0.0:
            weight[column] = 0.0  # a column of several rows is taken once
            if abs(value) >= prune:
                out[0][size] = column
                out[1][size] = value
                size += 1
    return size


@njit(cache=True, nogil=True)
def _fit_labels(
    rows: Rows,
    squares: Array,
    groups: Groups,
    labels: Array,
    memory: tuple[Buffers, WeightBuffers],
    settings: tuple[tuple[float, float, int], float, int, bool],
) -> Fitted:
    """Fit a chunk of labels; see `Fitted`."""
    starts, members, signs = groups
    buffers, out = memory
    limits, prune, seed, logistic = settings
    counts = np.zeros(labels.shape[0], dtype=np.int64)
    biases = np.zeros(labels.shape[0], dtype=np.float32)
    columns = np.empty(0, dtype=np.int32)
    values = np.empty(0, dtype=np.float32)
    size = 0
    for i in range(labels.shape[0]):
        begin, end = starts[labels[i]], starts[labels[i] + 1]
        pairs = (members[begin:end], signs[begin:end])
        state = seed_state(seed, labels[i])
        if logistic:
            biases[i], moved = solve_logistic(rows, squares, pairs, buffers, limits, state)
        else:
            biases[i], moved = solve_hinge(rows, squares, pairs, buffers, limits, state)
        count = _take(rows, pairs[0], moved, buffers, out, prune)
        counts[i] = count
        missing = size + count - columns.shape[0]
        if missing > 0:
            more = max(columns.shape[0], missing)
            columns = np.concatenate((columns, np.empty(more, dtype=np.int32)))
            values = np.concatenate((values, np.empty(more, dtype=np.float32)))
        columns[size : size + count] = out[0][:count]
        values[size : size + count] = out[1][:count]
        size += count
    return counts, biases, columns[:size].copy(), values[:size].copy()


def _assemble(
    chunks: list[NDArray[np.int64]],
    fitted: list[Fitted],
    shape: tuple[int, int],
) -> tuple[csr_matrix, NDArray[np.float32]]:
    """Join the results of all chunks, in the order of the labels."""
    counts = np.zeros(shape[0], dtype=np.int64)
    biases = np.zeros(shape[0], dtype=np.float32)
    for labels, (count, bias, _, _) in zip(chunks, fitted, strict=True):
        counts[labels], biases[labels] = count, bias
    starts = np.concatenate([[0], np.cumsum(counts)])
    columns = np.empty(starts[-1], dtype=np.int32)
    values = np.empty(starts[-1], dtype=np.float32)
    while fitted:  # free the memory of each chunk as soon as it is copied
        count, _, chunk_columns, chunk_values = fitted.pop()
        _copy(chunks[len(fitted)], count, (chunk_columns, chunk_values), starts, (columns, values))
    weights = csr_matrix(shape, dtype=np.float32)
    weights.data, weights.indices, weights.indptr = values, columns, starts
    return weights, biases


@njit(cache=True, nogil=True)
def _copy(
    labels: Array,
    counts: Array,
    chunk: tuple[Array, Array],
    starts: Array,
    outs: tuple[Array, Array],
) -> None:
    at = 0
    for i in range(labels.shape[0]):
        begin = starts[labels[i]]
        outs[0][begin : begin + counts[i]] = chunk[0][at : at + counts[i]]
        outs[1][begin : begin + counts[i]] = chunk[1][at : at + counts[i]]
        at += counts[i]
