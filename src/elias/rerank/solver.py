"""Fit one linear classifier per label by dual coordinate descent.

Each label is trained on some rows of the feature matrix ψ, which all labels share without copies.
The loops release the GIL, and idle threads take the next labels. Each thread has its own weight
buffer, and each label has its own random order, so that the result does not depend on the number
of threads.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from elias.kernels.cpu.rows import ZERO
from elias.kernels.threads import thread_map_progress
from elias.rerank.sparse_ranker import Array, Rows, as_rows, sparse_dot

Loss: TypeAlias = Literal["squared-hinge", "logistic"]
Groups: TypeAlias = tuple[Array, Array, Array]
"""Training pairs grouped by label: start of each group, row of each pair, y of each pair (±1)."""
Solution: TypeAlias = tuple[Array, Array]
"""The dual variables of a fit: start of each label's pairs, and α of each pair (logistic: u)."""
Entries: TypeAlias = tuple[Array, Array]
"""Column indices and values of sparse weights."""

_PAIRS_PER_CHUNK = 20_000  # about 10 ms of work for a thread
_SCAN_IS_FASTER = 4  # scan all columns if at least a quarter of them may have a weight
_MIN_GRADIENT = 1e-12  # smaller projected gradients count as zero
_NEWTON_STEPS = 50  # maximum for one coordinate; usually three or four suffice
_FIRST_LOGIT = -4.0  # initial logit of α/C, so that each point contributes a little to w
# Allow reordered sums for vectorisation, but keep correct results for NaN and infinity.
_SUMS = {"reassoc", "contract", "nsz"}


def group_pairs(candidates: NDArray[np.integer[Any]], labels: csr_matrix) -> Groups:
    """Return each label's training pairs: the points for which it is a candidate or relevant.

    The rows of a label are in ascending order. y is +1 if the label is relevant, else -1.

    Args:
        candidates: (N, k) label ids. Ids of L and above are padding.
        labels: (N, L) relevant labels. Every stored entry counts as relevant.
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
    """Write each pair to the next slot of its label. If ``pairs`` is empty, only count pairs."""
    label_starts, label_ids = relevant
    rows, signs = pairs
    n_labels = slots.shape[0]
    last_row = np.full(n_labels, -1, dtype=np.int64)
    for row in range(candidates.shape[0]):
        begin, end = label_starts[row], label_starts[row + 1]
        for j in range(begin, end + candidates.shape[1]):  # relevant labels, then candidates
            label = label_ids[j] if j < end else candidates[row, j - end]
            if label >= n_labels or last_row[label] == row:
                continue
            last_row[label] = row
            if rows.shape[0]:
                rows[slots[label]] = row
                signs[slots[label]] = 1 if j < end else -1
            slots[label] += 1


def fit_label_classifiers(
    features: csr_matrix,
    dense: NDArray[np.float32] | None,
    groups: Groups,
    *,
    loss: Loss = "squared-hinge",
    cost: float = 1.0,
    tolerance: float = 0.3,
    max_iterations: int = 100,
    prune: float = 0.0,
    seed: int = 0,
    start: tuple[csr_matrix, NDArray[np.float32]] | None = None,
    solution: Solution | None = None,
) -> tuple[csr_matrix, NDArray[np.float32], Solution]:
    """Fit a classifier for each label, and return weights (L, F + D), biases (L,) and solution.

    Minimise ½(‖w‖² + b²) + C·Σ_i loss(y_i·(w·ψ_i + b)) over the label's rows i. ψ concatenates the
    sparse and the dense features. The loss is the logistic loss log(1 + exp(−s)), as in the masked
    loss of Eq. 17, or the squared hinge loss max(0, 1 − s)².

    Args:
        features: (N, F) sparse features, float32.
        dense: (N, D) dense features, or None.
        groups: The training pairs of each label, from `group_pairs`.
        loss: The loss function.
        cost: C, the weight of the loss relative to ½‖w‖².
        tolerance: Stopping tolerance on the gradients of the dual. See `_solve`.
        max_iterations: Maximum number of passes over the points of a label.
        prune: Drop weights whose absolute value is smaller than this.
        seed: Seed of the order in which points are visited.
        start: Weights w₀ and biases b₀ to stay close to, for the first labels. These labels
            minimise ½(‖w − w₀‖² + (b − b₀)²) + C·Σ_i loss instead.
        solution: Dual variables of an earlier fit on the first pairs of each label. Starting from
            them takes fewer passes; the minimum is the same.
    """
    rows = as_rows(features, dense)
    squares = _squares(rows)
    n_labels, width = len(groups[0]) - 1, features.shape[1] + rows[3].shape[1]
    limits = (cost, tolerance, max_iterations)
    first, logistic = _first_weights(start, n_labels, width), loss == "logistic"
    duals = _first_duals(groups, logistic, solution)

    def work(labels: NDArray[np.int64], weight: NDArray[np.float32]) -> tuple[Array, ...]:
        fitted: tuple[Array, ...] = _fit_labels(
            rows, squares, groups, duals, labels, weight, first, logistic, limits, prune, seed
        )
        return fitted

    chunks = _chunks(groups[0])
    fitted = thread_map_progress(
        work, chunks, lambda: np.zeros(width, np.float32), "Fitting the ranker", n_labels
    )
    counts, biases, columns, values = map(np.concatenate, zip(*fitted, strict=True))
    starts = np.concatenate([[0], np.cumsum(counts)])
    order = np.argsort(np.concatenate(chunks))
    weights = csr_matrix((values, columns, starts), shape=(n_labels, width))[order]
    weights.sort_indices()
    return weights, biases[order], (groups[0], duals)


def _first_duals(groups: Groups, logistic: bool, solution: Solution | None) -> Array:
    """Return the initial dual variable of each pair."""
    starts, members, _ = groups
    duals = np.full(len(members), _FIRST_LOGIT if logistic else 0.0, dtype=np.float32)
    if solution is not None:
        before, values = solution
        moved = np.repeat(starts[:-1] - before[:-1], np.diff(before))
        duals[np.arange(len(values)) + moved] = values
    return duals


def _first_weights(
    start: tuple[csr_matrix, NDArray[np.float32]] | None, n_labels: int, width: int
) -> tuple[Array, Array, Array, Array]:
    """Return w₀ as CSR arrays (data, columns, starts), and b₀. Both are 0 for new labels."""
    if start is None:
        weights, biases = csr_matrix((0, width), dtype=np.float32), np.zeros(0, np.float32)
    else:
        weights, biases = start
    missing = n_labels - len(biases)
    starts = np.pad(weights.indptr.astype(np.int64), (0, missing), mode="edge")
    # copy, because numba compiles again for memory-mapped arrays
    columns = weights.indices.astype(np.int32)
    return weights.data.copy(), columns, starts, np.pad(biases, (0, missing))


def _chunks(starts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Split the labels into chunks with about the same number of training pairs.

    Labels with the most pairs come first, so that all threads finish at about the same time.
    """
    sizes = np.diff(starts)
    order = np.argsort(-sizes, kind="stable")
    before = np.cumsum(sizes[order] + 1) - (sizes[order] + 1)
    return np.split(order, np.flatnonzero(np.diff(before // _PAIRS_PER_CHUNK)) + 1)


def _squares(rows: Rows) -> NDArray[np.float64]:
    """Return the squared length of each row, plus 1 for the constant feature of the bias."""
    data, _, starts, dense = rows
    total = np.concatenate([[0.0], np.cumsum(data.astype(np.float64) ** 2)])
    dense_squares = np.einsum("nd,nd->n", dense, dense, dtype=np.float64)
    squares: NDArray[np.float64] = 1 + np.diff(total[starts]) + dense_squares
    return squares


@njit(cache=True, nogil=True)
def _fit_labels(
    rows: Rows,
    squares: Array,
    groups: Groups,
    duals: Array,
    labels: Array,
    weight: Array,
    first: tuple[Array, Array, Array, Array],
    logistic: bool,
    limits: tuple[float, float, int],
    prune: float,
    seed: int,
) -> tuple[Array, Array, Array, Array]:
    """Fit a chunk of labels, and update their ``duals``.

    ``weight`` is a buffer of zeros with one entry per feature, and ``first`` is the result of
    `_first_weights`. Return the number of weights of each label, the biases, and the columns and
    values of all weights.
    """
    starts, members, signs = groups
    first_values, first_columns, first_starts, first_biases = first
    _, _, row_starts, dense = rows
    capacity = 0
    for label in labels:
        group = members[starts[label] : starts[label + 1]]
        n_entries = _count_entries(row_starts, group) + dense.shape[1]
        n_entries += first_starts[label + 1] - first_starts[label]
        capacity += min(n_entries, weight.shape[0])
    counts = np.zeros(labels.shape[0], dtype=np.int64)
    biases = np.zeros(labels.shape[0], dtype=np.float32)
    columns = np.empty(capacity, dtype=np.int32)
    values = np.empty(capacity, dtype=np.float32)
    size = 0
    for i, label in enumerate(labels):
        begin, end = starts[label], starts[label + 1]
        pairs = (members[begin:end], signs[begin:end], duals[begin:end])
        state = _first_state(seed, label)
        known = first_columns[first_starts[label] : first_starts[label + 1]]
        for j in range(known.shape[0]):
            weight[known[j]] = first_values[first_starts[label] + j]
        bias = np.float64(first_biases[label])
        biases[i], used = _solve(rows, squares, pairs, weight, bias, logistic, limits, state)
        counts[i] = _take(rows, used, known, weight, (columns[size:], values[size:]), prune)
        size += counts[i]
    return counts, biases, columns[:size].copy(), values[:size].copy()


@njit(cache=True, nogil=True)
def _solve(
    rows: Rows,
    squares: Array,
    pairs: tuple[Array, Array, Array],
    weight: Array,
    bias: float,
    logistic: bool,
    limits: tuple[float, float, int],
    state: np.uint64,
) -> tuple[float, Array]:
    """Fit the classifier of one label, and return its bias and the rows that contribute to it.

    The weights are written to ``weight``, which must hold w₀. ``pairs`` are the label's rows, their
    y and their initial dual variables, replaced by the final values. The dual is minimised
    over one α_i at a time, with w = w₀ + Σ α_i·y_i·ψ_i and Q_ij = y_i·y_j·(ψ_i·ψ_j + 1). The
    formulas below are for w₀ = 0. Each sweep visits the points in a new random order.

    Squared hinge: min ½αᵀ(Q + 1/(2C))α − Σα over α ≥ 0. An α_i of 0 becomes inactive if its
    gradient exceeds the highest projected gradient of the previous sweep. The solver stops when the
    highest and lowest projected gradients of all points differ by at most the tolerance.

    Logistic: min ½αᵀQα + Σ α_i·log α_i + (C − α_i)·log(C − α_i) over 0 < α < C, the dual of
    ½‖w‖² + C·Σ log(1 + exp(−y_i·w·ψ_i)). Its derivative in α_i is y_i·w·ψ_i + u_i, where u_i is the
    logit of α_i/C. The solver stores u_i instead of α_i: the optimum is the root of a function with
    a slope of at least 1, and α_i never reaches its bounds. The solver stops when no derivative
    exceeds the tolerance in absolute value.
    """
    cost, tolerance, max_iterations = limits
    diagonal = 0.5 / cost
    members, signs, solution = pairs
    size = members.shape[0]
    order = np.empty(size, dtype=np.int32)
    duals = solution.astype(np.float64)  # u or α
    moved = np.empty(size, dtype=np.bool_)
    for i in range(size):
        step = (cost * _sigmoid(duals[i]) if logistic else duals[i]) * signs[i]
        order[i], moved[i] = i, step != 0.0
        if moved[i]:
            bias += step
            _add(rows, members[i], np.float32(step), weight)
    active, bound = size, np.inf
    for _ in range(max_iterations):
        state = _shuffle(order, active, state)
        highest, lowest = -np.inf, np.inf
        at = 0
        while at < active:
            i = order[at]
            row, sign, old = members[i], np.float64(signs[i]), duals[i]
            margin = sign * (_dot(rows, row, weight) + bias)
            change = 0.0
            if logistic:
                gradient = margin + old
                if abs(gradient) > 0.01 * tolerance:
                    duals[i] = _best_logit(old, margin, squares[row], cost, 0.001 * tolerance)
                    change = cost * _sigmoid(duals[i]) - cost * _sigmoid(old)
            else:
                gradient = margin - 1.0 + diagonal * old
                if old == 0.0 and gradient > bound:
                    active -= 1
                    order[at], order[active] = order[active], order[at]
                    continue
                gradient = min(gradient, 0.0) if old == 0.0 else gradient
                if abs(gradient) > _MIN_GRADIENT:
                    duals[i] = max(old - gradient / (squares[row] + diagonal), 0.0)
                    change = duals[i] - old
            at += 1
            highest, lowest = max(highest, gradient), min(lowest, gradient)
            if change != 0.0:
                moved[i] = True
                bias += change * sign
                _add(rows, row, np.float32(change * sign), weight)
        bound = highest if highest > 0.0 else np.inf
        if (max(highest, -lowest) if logistic else highest - lowest) <= tolerance:
            if active == size:
                break
            active, bound = size, np.inf  # check all points again
    for i in range(size):
        solution[i] = duals[i]
    return bias, members[moved]


@njit(cache=True, nogil=True)
def _best_logit(logit: float, margin: float, square: float, cost: float, precision: float) -> float:
    """Return the u_i that minimises the dual: the root of u + A·σ(u) + B, by Newton's method.

    A is ``square`` · ``cost``, and B does not depend on u. The root is unique, because the
    derivative is at least 1. Steps are limited to the interval [−B − A, −B], which contains the
    root.
    """
    curvature, slope = square * cost, margin - square * (cost * _sigmoid(logit))
    low, high = -slope - curvature, -slope
    for _ in range(_NEWTON_STEPS):
        sigmoid = _sigmoid(logit)
        value = logit + curvature * sigmoid + slope
        if abs(value) <= precision:
            break
        if value > 0:
            high = min(high, logit)
        else:
            low = max(low, logit)
        step = logit - value / (1.0 + curvature * sigmoid * (1.0 - sigmoid))
        logit = step if low < step < high else 0.5 * (low + high)
    return logit


@njit(cache=True, nogil=True)
def _sigmoid(logit: float) -> float:
    """Return the sigmoid of a logit without overflow."""
    small = math.exp(-abs(logit))
    return (1.0 if logit >= 0 else small) / (1.0 + small)


@njit(cache=True, nogil=True)
def _dot(rows: Rows, row: int, weight: Array) -> np.float32:
    """Return the dot product of the weights and one row."""
    data, columns, starts, dense = rows
    begin, end = starts[row], starts[row + 1]
    total = sparse_dot(data[begin:end], columns[begin:end], weight)
    return total + _dense_dot(dense[row], weight[weight.shape[0] - dense.shape[1] :])


@njit(cache=True, nogil=True, fastmath=_SUMS)
def _dense_dot(values: Array, weight: Array) -> np.float32:
    total = np.float32(0)
    for d in range(values.shape[0]):
        total += values[d] * weight[d]
    return total


@njit(cache=True, nogil=True)
def _add(rows: Rows, row: int, scale: np.float32, weight: Array) -> None:
    """Add ``scale`` times one row to the weights."""
    data, columns, starts, dense = rows
    begin, end = starts[row], starts[row + 1]
    _add_sparse(data[begin:end], columns[begin:end], scale, weight)
    dense_weight = weight[weight.shape[0] - dense.shape[1] :]
    for d in range(dense.shape[1]):
        dense_weight[d] += scale * dense[row, d]


@njit(cache=True, nogil=True)
def _add_sparse(data: Array, columns: Array, scale: np.float32, weight: Array) -> None:
    for j in range(np.uint64(data.shape[0])):  # unsigned, as in `sparse_dot`
        weight[columns[j]] += scale * data[j]


@njit(cache=True, nogil=True)
def _first_state(seed: int, label: int) -> np.uint64:
    """Return the initial random state of a label: a hash of seed and label, never 0."""
    mixed = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(label) + np.uint64(1)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


@njit(cache=True, nogil=True)
def _shuffle(order: Array, size: int, state: np.uint64) -> np.uint64:
    """Shuffle the first ``size`` entries in place, and return the next random state."""
    for i in range(size - 1, 0, -1):
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        j = np.int64(((state >> np.uint64(32)) * np.uint64(i + 1)) >> np.uint64(32))
        order[i], order[j] = order[j], order[i]
    return state


@njit(cache=True, nogil=True)
def _count_entries(starts: Array, rows: Array) -> int:
    total = 0
    for row in rows:
        total += starts[row + 1] - starts[row]
    return total


@njit(cache=True, nogil=True)
def _take(rows: Rows, used: Array, known: Array, weight: Array, out: Entries, prune: float) -> int:
    """Move the weights of a label to ``out``, in any order, and return how many there are.

    Weights below ``prune`` are dropped, and ``weight`` is reset to 0. Only ``known`` columns,
    columns of the ``used`` rows and dense columns can have a weight. If the ``used`` rows have many
    entries, it is faster to scan all columns.
    """
    _, columns, starts, dense = rows
    first_dense = weight.shape[0] - dense.shape[1]
    if _count_entries(starts, used) >= first_dense // _SCAN_IS_FASTER:
        return _move(weight, range(weight.shape[0]), out, ZERO, prune)
    size = _move(weight, known, out, ZERO, prune)
    for row in used:
        size = _move(weight, columns[starts[row] : starts[row + 1]], out, size, prune)
    return _move(weight, range(first_dense, weight.shape[0]), out, size, prune)


@njit(cache=True, nogil=True)
def _move(weight: Array, columns: Array | range, out: Entries, size: int, prune: float) -> int:
    """Move the weights of some columns to ``out``, and return the new size of ``out``."""
    for column in columns:
        value = weight[column]
        if value != 0.0:
            weight[column] = 0.0  # so that a column of several rows is moved only once
            if abs(value) >= prune:
                out[0][size] = column
                out[1][size] = value
                size += 1
    return size
