"""How much the ranker weighs beside the model: the power γ of q in p·q^γ, from held-out points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

POWERS = (1.0, 0.5, 0.25, 0.125)
"""What the power is chosen from. More than 1 was never clearly better."""
JUDGED = 5
"""k of the nDCG@k it is chosen by."""
_DISCOUNTS = 1 / np.log2(np.arange(2, JUDGED + 2))


def best_power(
    scores: NDArray[np.floating[Any]],
    relevances: NDArray[np.floating[Any]],
    relevant: NDArray[np.bool_],
    n_relevant: NDArray[np.integer[Any]],
) -> float:
    """Return the power of q with which p·q^γ has the best nDCG@5 on points.

    It is 1, the paper's, unless another gains more over it than the standard error of that gain.

    Args:
        scores: (N, k) p of each point's candidates, 0 where padded.
        relevances: (N, k) q of each.
        relevant: (N, k) whether the candidate is relevant.
        n_relevant: (N,) how many labels are relevant to each point, candidates or not.

    >>> p, q = np.array([[0.9, 0.8]] * 9), np.array([[0.5, 0.6]] * 9)
    >>> best_power(p, q, np.array([[True, False]] * 9), np.ones(9, dtype=int))
    0.5
    """
    ideal = np.cumsum(_DISCOUNTS)[np.clip(n_relevant, 1, JUDGED) - 1]

    def quality(power: float) -> NDArray[np.float64]:
        order = np.argsort(-scores * relevances**power, axis=1, kind="stable")[:, :JUDGED]
        gains = np.take_along_axis(relevant, order, axis=1) * _DISCOUNTS[: order.shape[1]]
        found: NDArray[np.float64] = gains.sum(axis=1) / ideal
        return found

    papers = quality(POWERS[0])
    best, most = POWERS[0], 0.0
    for power in POWERS[1:]:
        gain = quality(power) - papers
        error = gain.std() / np.sqrt(max(1, len(gain)))
        if gain.mean() > max(most, error):
            best, most = power, float(gain.mean())
    return best
