"""How near the names of candidate labels are to each text, in one pass over a name's features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

from elias.kernels.threads import over_rows

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Array: TypeAlias = NDArray[Any]


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

    over_rows(work, len(candidates), memory, "Comparing names")
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
