"""Score candidates: sparse classifiers, label-name overlap, decision trees.

A point's features are laid out in a dense buffer, and each candidate's weights are looked up in
it. A label with very many weights is searched for the point's features instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

from elias.kernels.threads import thread_map_rows
from elias.rerank.solver import Rows, as_rows, sparse_dot

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


Array: TypeAlias = NDArray[Any]
Classifiers: TypeAlias = tuple[Array, Array, Array, Array]
"""Values, columns (ascending in a label) and label starts of the weights, and the biases."""

_PADDING = np.float32(-np.inf)


def as_classifiers(weights: csr_matrix, biases: NDArray[np.float32]) -> Classifiers:
    """Return weights (L, F + D) with sorted columns, and biases (L,), as plain arrays."""
    columns = np.ascontiguousarray(weights.indices).astype(np.uint32, copy=False)
    return weights.data, columns, weights.indptr.astype(np.int64, copy=False), biases


def candidate_margins(
    features: csr_matrix,
    dense: NDArray[np.float32],
    classifiers: Classifiers,
    candidates: NDArray[np.integer[Any]],
) -> NDArray[np.float32]:
    """Return w_ℓ·ψ_i + b_ℓ for the candidate labels of each point (N, k); -inf where padded.

    Args:
        features: (N, F) sparse features, float32, no column twice in a row.
        dense: (N, D) dense features; D may be 0.
        classifiers: Weights over the F + D features, and biases.
        candidates: (N, k) label ids; L and over are padding.
    """
    if not features.has_sorted_indices:  # searching takes them in order
        features = features.sorted_indices()
    rows = as_rows(features, dense)
    width = features.shape[1] + dense.shape[1]
    out = np.empty(candidates.shape, dtype=np.float32)

    def work(points: range, buffer: NDArray[np.float32]) -> None:
        _score_points(rows, (points.start, points.stop), classifiers, candidates, buffer, out)

    def memory() -> NDArray[np.float32]:
        return np.zeros(width, dtype=np.float32)

    thread_map_rows(work, len(candidates), memory, "Ranking candidates")
    return out


@njit(cache=True, nogil=True)
def _score_points(
    rows: Rows,
    span: tuple[int, int],
    classifiers: Classifiers,
    candidates: Array,
    buffer: Array,
    out: Array,
) -> None:
    data, columns, starts, dense = rows
    n_labels = classifiers[3].shape[0]
    for row in range(span[0], span[1]):
        point = (data[starts[row] : starts[row + 1]], columns[starts[row] : starts[row + 1]])
        for j in range(point[0].shape[0]):
            buffer[point[1][j]] = point[0][j]
        buffer[buffer.shape[0] - dense.shape[1] :] = dense[row]
        for k in range(candidates.shape[1]):
            label = candidates[row, k]
            known = label < n_labels
            out[row, k] = (
                _margin(point, dense.shape[1], classifiers, label, buffer) if known else _PADDING
            )
        for j in range(point[0].shape[0]):
            buffer[point[1][j]] = 0.0


@njit(cache=True, nogil=True)
def _margin(
    point: tuple[Array, Array], n_dense: int, classifiers: Classifiers, label: int, buffer: Array
) -> np.float32:
    data, own_columns = point
    values, columns, starts, biases = classifiers
    low, high = starts[label], starts[label + 1]
    total = np.float64(biases[label])
    if _searching_is_faster(data.shape[0], high - low):
        first_dense = _find(columns, low, high, buffer.shape[0] - n_dense)
        at = low
        for j in range(data.shape[0]):
            at = _find(columns, at, first_dense, own_columns[j])
            if at < first_dense and columns[at] == own_columns[j]:
                total += data[j] * values[at]
        low = first_dense
    return np.float32(total + sparse_dot(values, columns, low, high, buffer))


@njit(cache=True, nogil=True)
def _searching_is_faster(n_features: int, n_weights: int) -> bool:
    """Say whether to look features up among the weights rather than the other way round."""
    return n_weights > 64 and n_weights > 2 * n_features * np.log2(n_weights)


@njit(cache=True, nogil=True)
def _find(columns: Array, low: int, high: int, wanted: int) -> int:
    """Return the first place in an ascending stretch whose column is not below the wanted one."""
    while low < high:
        middle = (low + high) // 2
        if columns[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


class Nearness(NamedTuple):
    """What is shared by texts and the names of their candidates, both (N, k) in [0, 1]."""

    likeness: NDArray[np.float32]
    """The cosine between text and name, each feature of a name weighed by its idf."""
    coverage: NDArray[np.float32]
    """How much of the name stands in the text: the share of Σ idf² over the name's features."""


def name_nearness(
    features: csr_matrix,
    names: tuple[NDArray[np.int64], NDArray[np.uint32]],
    idf: NDArray[np.float32],
    candidates: NDArray[np.integer[Any]],
) -> Nearness:
    """Return how near each point is to the names of its candidates; 0 where padded or nameless.

    Args:
        features: (N, F) rows of length 1, float32, no column twice in a row.
        names: Where each label's features start (L + 1,), and those features.
        idf: (F,) the weight of a feature.
        candidates: (N, k) label ids; L and over are padding.
    """
    rows = (
        np.ascontiguousarray(features.data, dtype=np.float32),
        np.ascontiguousarray(features.indices).astype(np.uint32, copy=False),
        features.indptr.astype(np.int64),
    )
    out = Nearness(*(np.empty(candidates.shape, dtype=np.float32) for _ in range(2)))

    def work(points: range, buffer: NDArray[np.float32]) -> None:
        _compare(rows, (points.start, points.stop), names, idf, candidates, buffer, out)

    def memory() -> NDArray[np.float32]:
        return np.zeros(len(idf), dtype=np.float32)

    thread_map_rows(work, len(candidates), memory, "Comparing names")
    return out


@njit(cache=True, nogil=True)
def _compare(
    rows: tuple[Array, Array, Array],
    span: tuple[int, int],
    names: tuple[Array, Array],
    idf: Array,
    candidates: Array,
    buffer: Array,
    out: tuple[Array, Array],
) -> None:
    data, columns, starts = rows
    name_starts, name_columns = names
    n_labels = name_starts.shape[0] - 1
    for row in range(span[0], span[1]):
        for j in range(starts[row], starts[row + 1]):
            buffer[columns[j]] = data[j]
        for k in range(candidates.shape[1]):
            label = candidates[row, k]
            shared, covered, whole = 0.0, 0.0, 0.0
            if label < n_labels:
                for j in range(name_starts[label], name_starts[label + 1]):
                    column = name_columns[j]
                    weight = np.float64(idf[column])
                    whole += weight * weight
                    if buffer[column] > 0:
                        shared += weight * buffer[column]
                        covered += weight * weight
            out[0][row, k] = shared / np.sqrt(whole) if whole > 0 else 0.0
            out[1][row, k] = covered / whole if whole > 0 else 0.0
        for j in range(starts[row], starts[row + 1]):
            buffer[columns[j]] = 0.0


LEAF = -1
"""What a node asks about that asks nothing."""


@njit(cache=True, nogil=True)
def mean_value(
    questions: NDArray[np.float32],
    roots: NDArray[Any],
    feature: NDArray[np.int32],
    threshold: NDArray[np.float64],
    left: NDArray[np.int32],
    right: NDArray[np.int32],
    value: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the mean over trees of the value of the leaf that each row (n, features) comes to.

    A node sends a row left if its feature is at most the threshold.
    """
    out = np.zeros(questions.shape[0])
    for row in range(questions.shape[0]):
        total = 0.0
        for tree in range(roots.shape[0]):
            node = roots[tree]
            while feature[node] != LEAF:
                goes_left = questions[row, feature[node]] <= threshold[node]
                node = left[node] if goes_left else right[node]
            total += value[node]
        out[row] = total / roots.shape[0]
    return out
