"""Score calibration: a small decision tree over what model and ranker say (appendix C.2).

scikit-learn grows the tree. It is kept as arrays and walked by numpy, so that a saved model holds
no pickle and needs no scikit-learn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from elias.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

Mixture: TypeAlias = Literal["sum", "blend"]

LEAF = -1
_N_QUESTIONS = 4  # p, q, p·q and the label's frequency
_KINDS: dict[str, type] = {
    "feature": np.int32,
    "threshold": np.float64,
    "left": np.int32,
    "right": np.int32,
    "value": np.float64,
}


def mixed(
    probability: NDArray[np.float64], product: NDArray[np.float32], mixture: Mixture
) -> NDArray[np.float32]:
    """Return the final score of T and p·q: their sum, or 0.3·T + 0.7·p·q.

    The sum can exceed 1: it ranks, it is not a probability.
    """
    if mixture == "sum":
        return (probability + product).astype(np.float32)
    return (0.3 * probability + 0.7 * product).astype(np.float32)


@dataclass(frozen=True)
class Calibration:
    """T(p, q, p·q, n_ℓ), the probability that a candidate label is relevant.

    A node asks whether one of the four is at most a threshold, and goes left if so.

    >>> p = np.linspace(0, 1, 100, dtype=np.float32)
    >>> ones = np.ones(100)
    >>> tree = Calibration.fit(p, p, ones, p > 0.5, depth=1, leaf=1)
    >>> tree.probability(np.float32([0.2, 0.9]), np.float32([0.2, 0.9]), ones[:2]).tolist()
    [0.0, 1.0]
    """

    feature: NDArray[np.int32]
    """What each node asks about, 0 to 3; `LEAF` where it asks nothing."""
    threshold: NDArray[np.float64]
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    value: NDArray[np.float64]
    """The share of relevant pairs among those of the training pairs that came to a node."""

    @classmethod
    def fit(
        cls,
        scores: NDArray[np.floating[Any]],
        relevances: NDArray[np.floating[Any]],
        frequencies: NDArray[Any],
        relevant: NDArray[np.bool_],
        *,
        depth: int,
        leaf: int,
    ) -> Calibration:
        """Grow the tree on pairs of held-out points and their candidates, padding left out.

        Args:
            scores: p of each pair, any shape.
            relevances: q of each pair.
            frequencies: n_ℓ of each pair's label, its number of training points.
            relevant: Whether the label is relevant to the point.
            depth: How many questions may be asked.
            leaf: How many pairs each answer must rest on.
        """
        from sklearn.tree import DecisionTreeClassifier  # here: only training needs it

        questions = _questions(scores, relevances, frequencies)
        grown = DecisionTreeClassifier(max_depth=depth, min_samples_leaf=leaf, random_state=0)
        grown.fit(questions, np.ravel(relevant).astype(bool))
        tree = grown.tree_
        classes = grown.classes_.tolist()
        shares = tree.value[:, 0, classes.index(True)] if True in classes else 0 * tree.threshold
        leaf = tree.children_left < 0
        return cls(
            feature=np.where(leaf, LEAF, tree.feature).astype(np.int32),
            threshold=np.where(leaf, 0.0, tree.threshold),
            left=np.where(leaf, 0, tree.children_left).astype(np.int32),
            right=np.where(leaf, 0, tree.children_right).astype(np.int32),
            value=np.array(shares, dtype=np.float64),
        )

    def probability(
        self,
        scores: NDArray[np.floating[Any]],
        relevances: NDArray[np.floating[Any]],
        frequencies: NDArray[Any],
    ) -> NDArray[np.float64]:
        """Return T of each pair, in the shape of ``scores``."""
        questions = _questions(scores, relevances, frequencies)
        node = np.zeros(len(questions), dtype=np.int32)
        pairs = np.arange(len(questions))
        while len(pairs := pairs[self.feature[node[pairs]] != LEAF]):
            at = node[pairs]
            goes_left = questions[pairs, self.feature[at]] <= self.threshold[at]
            node[pairs] = np.where(goes_left, self.left[at], self.right[at])
        return self.value[node].reshape(np.shape(scores))

    @staticmethod
    def kinds() -> dict[str, type]:
        """Return the names and the types of the arrays that make a tree."""
        return dict(_KINDS)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the tree as named arrays, to be saved."""
        return {name: getattr(self, name) for name in _KINDS}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Calibration:
        """Return the tree that `to_arrays` gave.

        Raises:
            ModelError: If the arrays are not those of a tree.
        """
        for name, kind in _KINDS.items():
            if name not in arrays:
                raise ModelError(f"calibration.{name} is missing")
            if arrays[name].dtype != kind or arrays[name].shape != arrays["feature"].shape:
                raise ModelError(f"calibration.{name} is not as it was saved")
        tree = cls(**{name: arrays[name] for name in _KINDS})
        tree._check()
        return tree

    def _check(self) -> None:
        n_nodes = len(self.feature)
        inner = np.flatnonzero(self.feature != LEAF)
        children = np.concatenate([self.left[inner], self.right[inner]])
        after = np.concatenate([inner, inner])
        sound = (
            self.feature.ndim == 1
            and n_nodes > 0
            and self.feature.min() >= LEAF
            and self.feature.max() < _N_QUESTIONS
            # children come after their parent, so that every walk ends
            and bool(((children > after) & (children < n_nodes)).all())
            and np.isfinite(self.threshold).all()
            and bool(((self.value >= 0) & (self.value <= 1)).all())
        )
        if not sound:
            raise ModelError("calibration is not a tree")


def _questions(
    scores: NDArray[np.floating[Any]],
    relevances: NDArray[np.floating[Any]],
    frequencies: NDArray[Any],
) -> NDArray[np.float32]:
    """Return (p, q, p·q, n_ℓ) of each pair, float32 as scikit-learn's trees see them."""
    p = np.ravel(scores).astype(np.float32)
    q = np.ravel(relevances).astype(np.float32)
    return np.stack([p, q, p * q, np.ravel(frequencies).astype(np.float32)], axis=1)
