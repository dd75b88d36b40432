"""Walking decision trees that are kept as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

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
