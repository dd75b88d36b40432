"""Linear classifiers, one for each label, over masked rows.

A label's sub-problem is a list of row numbers of one matrix ψ that all labels share, so nothing is
copied. The loops let go of the interpreter's lock, and threads take the next few labels as they
get free. Each thread has its own weights in memory, and a label's random order is its own, so no
result depends on which thread a label fell to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
from numba import njit
from scipy.sparse import csr_matrix

from elias.kernels.hinge import solve_hinge
from elias.kernels.logistic import solve_logistic
from elias.kernels.masked_rows import Array, Buffers, Rows, as_rows, first_state, squares_of
from elias.kernels.pairs import Groups
from elias.kernels.threads import over_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

Loss: TypeAlias = Literal["squared-hinge", "logistic"]
Kept: TypeAlias = tuple[Array, Array]
"""Room for the columns and the values of one label's weights."""
Fitted: TypeAlias = tuple[Array, Array, Array, Array]
"""Of some labels: how many weights each has, their biases, all columns and values."""

_SCAN_IS_FASTER = 4  # than picking, where that would touch one in so many columns
_PAIRS_AT_A_TIME = 20_000  # given to a thread: some 10 ms of work


class FitSettings(NamedTuple):
    """What decides a fit, given the points."""

    cost: float = 1.0
    """C: what an error costs beside ½‖w‖²."""
    tolerance: float = 0.1
    """A classifier is done when its gradients span no more."""
    max_iterations: int = 100
    """Passes over the points of a label, at most."""
    prune: float = 0.0
    """Weights that are smaller are dropped."""
    seed: int = 0
    """Of the order in which points are visited."""
    loss: Loss = "squared-hinge"
    """What an error is."""


def fit_masked(
    features: csr_matrix, dense: NDArray[np.float32], groups: Groups, settings: FitSettings
) -> tuple[csr_matrix, NDArray[np.float32]]:
    """Fit one classifier for each label on its own rows; return weights (L, F + D) and biases (L,).

    Minimises ½(‖w‖² + b²) + C·Σ_i loss(y_i·(w·ψ_i + b)) over the label's rows, ψ being the sparse
    and the dense features side by side: the masked loss of Eq. 17, log(1 + exp(−s)), or a squared
    hinge max(0, 1 − s)² in its place.

    Args:
        features: (N, F) sparse features, float32.
        dense: (N, D) dense features; D may be 0.
        groups: The rows of each label and their signs; see `group_pairs`.
        settings: The cost, when to stop, what to drop.
    """
    rows = as_rows(features, dense)
    widths = features.shape[1], dense.shape[1]
    squares = squares_of(rows)
    chunks = list(_chunks(groups[0]))
    limits = (settings.cost, settings.tolerance, settings.max_iterations)

    def work(labels: NDArray[np.int64], memory: tuple[Buffers, Kept]) -> Fitted:
        rest = (limits, settings.prune, settings.seed, settings.loss == "logistic")
        fitted: Fitted = _fit_labels(rows, squares, groups, labels, memory, rest)
        return fitted

    def memory() -> tuple[Buffers, Kept]:
        kept = np.empty(sum(widths), dtype=np.int32), np.empty(sum(widths), dtype=np.float32)
        return (np.zeros(widths[0]), np.zeros(widths[1])), kept

    n_labels = len(groups[0]) - 1
    fitted = list(over_threads(work, chunks, memory, "Fitting the ranker", n_labels))
    return _assemble(chunks, fitted, (n_labels, sum(widths)))


def _chunks(starts: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the labels, those of most rows first, a few at a time.

    The largest first: else a thread may be left alone with one of them at the end.
    """
    sizes = np.diff(starts)
    order = np.argsort(-sizes, kind="stable")
    before = np.cumsum(sizes[order] + 1) - (sizes[order] + 1)
    borders = np.flatnonzero(np.diff(before // _PAIRS_AT_A_TIME)) + 1
    yield from np.split(order, borders)


@njit(cache=True, nogil=True)
def _take(
    rows: Rows, members: Array, moved: Array, buffers: Buffers, kept: Kept, prune: float
) -> int:
    """Move the weights worth keeping into ``kept``, columns ascending; set all weights to 0.

    Returns how many there are. Only columns of rows that had a part can have a weight; where those
    are many, walking through all columns is faster.
    """
    _, columns, starts, _ = rows
    n_touched = 0
    for i in range(members.shape[0]):
        if moved[i]:
            n_touched += starts[members[i] + 1] - starts[members[i]]
    weight, dense_weight = buffers
    if n_touched >= weight.shape[0] // _SCAN_IS_FASTER:
        size = _scan(weight, 0, kept, 0, prune)
    else:
        size = 0
        for i in range(members.shape[0]):
            if moved[i]:
                row = members[i]
                size = _pick(weight, columns[starts[row] : starts[row + 1]], kept, size, prune)
        order = np.argsort(kept[0][:size])
        kept[0][:size] = kept[0][:size][order]
        kept[1][:size] = kept[1][:size][order]
    return _scan(dense_weight, weight.shape[0], kept, size, prune)


@njit(cache=True, nogil=True)
def _scan(weight: Array, offset: int, kept: Kept, size: int, prune: float) -> int:
    """Keep what is worth it of all weights."""
    for column in range(weight.shape[0]):
        value = weight[column]
        if value != 0.0 and abs(value) >= prune:
            kept[0][size] = offset + column
            kept[1][size] = value
            size += 1
    weight[:] = 0.0
    return size


@njit(cache=True, nogil=True)
def _pick(weight: Array, columns: Array, kept: Kept, size: int, prune: float) -> int:
    """Keep what is worth it of the weights of some columns."""
    for column in columns:
        value = weight[column]
        if value != 0.0:
            weight[column] = 0.0  # in another row again, it is not taken twice
            if abs(value) >= prune:
                kept[0][size] = column
                kept[1][size] = value
                size += 1
    return size


@njit(cache=True, nogil=True)
def _fit_labels(
    rows: Rows,
    squares: Array,
    groups: Groups,
    labels: Array,
    memory: tuple[Buffers, Kept],
    settings: tuple[tuple[float, float, int], float, int, bool],
) -> Fitted:
    """Fit some labels; return the number of weights and the bias of each, columns and values."""
    starts, members, signs = groups
    buffers, kept = memory
    limits, prune, seed, logistic = settings
    counts = np.zeros(labels.shape[0], dtype=np.int64)
    biases = np.zeros(labels.shape[0], dtype=np.float32)
    columns = np.empty(0, dtype=np.int32)
    values = np.empty(0, dtype=np.float32)
    size = 0
    for i in range(labels.shape[0]):
        begin, end = starts[labels[i]], starts[labels[i] + 1]
        pairs = (members[begin:end], signs[begin:end])
        state = first_state(seed, labels[i])
        if logistic:
            biases[i], moved = solve_logistic(rows, squares, pairs, buffers, limits, state)
        else:
            biases[i], moved = solve_hinge(rows, squares, pairs, buffers, limits, state)
        count = _take(rows, pairs[0], moved, buffers, kept, prune)
        counts[i] = count
        missing = size + count - columns.shape[0]
        if missing > 0:
            more = max(columns.shape[0], missing)
            columns = np.concatenate((columns, np.empty(more, dtype=np.int32)))
            values = np.concatenate((values, np.empty(more, dtype=np.float32)))
        columns[size : size + count] = kept[0][:count]
        values[size : size + count] = kept[1][:count]
        size += count
    return counts, biases, columns[:size].copy(), values[:size].copy()


def _assemble(
    chunks: list[NDArray[np.int64]],
    fitted: list[Fitted],
    shape: tuple[int, int],
) -> tuple[csr_matrix, NDArray[np.float32]]:
    """Put what was fitted in the order of size back into that of the labels."""
    counts = np.zeros(shape[0], dtype=np.int64)
    biases = np.zeros(shape[0], dtype=np.float32)
    for labels, (count, bias, _, _) in zip(chunks, fitted, strict=True):
        counts[labels], biases[labels] = count, bias
    starts = np.concatenate([[0], np.cumsum(counts)])
    columns = np.empty(starts[-1], dtype=np.int32)
    values = np.empty(starts[-1], dtype=np.float32)
    while fitted:  # give the memory of each back as soon as it is placed
        count, _, own_columns, own_values = fitted.pop()
        _place(chunks[len(fitted)], count, (own_columns, own_values), starts, (columns, values))
    weights = csr_matrix(shape, dtype=np.float32)
    weights.data, weights.indices, weights.indptr = values, columns, starts
    return weights, biases


@njit(cache=True, nogil=True)
def _place(
    labels: Array,
    counts: Array,
    own: tuple[Array, Array],
    starts: Array,
    outs: tuple[Array, Array],
) -> None:
    at = 0
    for i in range(labels.shape[0]):
        begin = starts[labels[i]]
        outs[0][begin : begin + counts[i]] = own[0][at : at + counts[i]]
        outs[1][begin : begin + counts[i]] = own[1][at : at + counts[i]]
        at += counts[i]
