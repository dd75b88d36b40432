"""Score calibration: small decision trees over what model and ranker say (appendix C.2).

scikit-learn grows the trees. They are kept as arrays and walked by a compiled loop, so that a saved
model holds no pickle and needs no scikit-learn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from elias.errors import ModelError
from elias.kernels.threads import thread_map_progress
from elias.rerank.scoring import LEAF, mean_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray


Mixture: TypeAlias = Literal["sum", "blend"]
MIXTURES: dict[Mixture, str] = {"sum": "T + p·q", "blend": "0.3·T + 0.7·p·q"}
"""How T and p·q make the final score: as in the paper, and as in its program."""

FEWEST_POINTS = 20
"""Held-out points with fewer of which nothing is learned about scores: chance would be."""
N_QUESTIONS = 4
"""What the paper's T is asked about: p, q, p·q and the label's frequency."""
SHARE_ASKED = 0.5
"""Of several trees, each node chooses among this share of the questions, drawn anew."""
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
    """T(p, q, p·q, n_ℓ), the probability that a candidate label is relevant: the mean of trees.

    A node asks whether one of the four, or of what else it was told when it was fitted
    (``more``), is at most a threshold, and goes left if so. The trees stand
    one after the other in the same arrays; a node that is nobody's child is the root of one.

    >>> p = np.linspace(0, 1, 100, dtype=np.float32)
    >>> ones = np.ones(100)
    >>> tree = Calibration.fit(p, p, ones, p > 0.5, depth=1, leaf=1)
    >>> tree.probability(np.float32([0.2, 0.9]), np.float32([0.2, 0.9]), ones[:2]).tolist()
    [0.0, 1.0]
    """

    feature: NDArray[np.int32]
    """What each node asks about, counted from 0; `LEAF` where it asks nothing."""
    threshold: NDArray[np.float64]
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    value: NDArray[np.float64]
    """The share of relevant pairs among those of the training pairs that came to a node."""
    n_questions: int = N_QUESTIONS
    """How much can be asked about."""

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
        n_trees: int = 1,
        more: Sequence[NDArray[np.floating[Any]]] = (),
        points: NDArray[np.integer[Any]] | None = None,
    ) -> Calibration:
        """Grow the trees on pairs of held-out points and their candidates, padding left out.

        Args:
            scores: p of each pair, any shape.
            relevances: q of each pair.
            frequencies: n_ℓ of each pair's label, its number of training points.
            relevant: Whether the label is relevant to the point.
            depth: How many questions may be asked.
            leaf: How many pairs each answer must rest on.
            n_trees: One tree is grown on all pairs, as in the paper; each of several on all pairs
                of as many points drawn with replacement, and each of its nodes may ask about
                half of what there is (a random forest).
            more: What else is known of each pair.
            points: Which point each pair is of, ascending; without them each is a point.
        """
        questions = _questions(scores, relevances, frequencies, more)
        answers = np.ravel(relevant).astype(bool)
        of = np.arange(len(answers)) if points is None else np.ravel(points)
        starts = np.append(np.flatnonzero(np.diff(of, prepend=-1)), len(of))

        def grow(which: range, _: None) -> dict[str, NDArray[Any]]:
            if n_trees == 1:
                return _grown(questions, answers, depth, leaf)
            pairs, seed = _drawn(starts, which.start), which.start
            return _grown(questions[pairs], answers[pairs], depth, leaf, SHARE_ASKED, seed)

        each = [range(tree, tree + 1) for tree in range(n_trees)]
        trees = list(thread_map_progress(grow, each, lambda: None, "Growing trees", n_trees))
        firsts = np.cumsum([0] + [len(tree["feature"]) for tree in trees])
        for tree, start in zip(trees, firsts[:-1], strict=True):
            inner = tree["feature"] != LEAF
            for side in ("left", "right"):
                tree[side] = np.where(inner, tree[side] + start, 0)
        return cls(
            **{
                name: np.concatenate([tree[name] for tree in trees]).astype(kind)
                for name, kind in _KINDS.items()
            },
            n_questions=questions.shape[1],
        )

    @cached_property
    def roots(self) -> NDArray[np.int64]:
        """The first node of each tree."""
        inner = self.feature != LEAF
        is_child = np.zeros(len(self.feature), dtype=bool)
        is_child[self.left[inner]] = True
        is_child[self.right[inner]] = True
        return np.flatnonzero(~is_child)

    def probability(
        self,
        scores: NDArray[np.floating[Any]],
        relevances: NDArray[np.floating[Any]],
        frequencies: NDArray[Any],
        more: Sequence[NDArray[np.floating[Any]]] = (),
    ) -> NDArray[np.float64]:
        """Return T of each pair, in the shape of ``scores``; ``more`` is as `fit` had it."""
        questions = _questions(scores, relevances, frequencies, more)
        if questions.shape[1] != self.n_questions:
            raise ValueError(f"T asks about {self.n_questions} values, not {questions.shape[1]}")
        nodes = (self.feature, self.threshold, self.left, self.right, self.value)
        found: NDArray[np.float64] = mean_value(questions, self.roots, *nodes)
        return found.reshape(np.shape(scores))

    @staticmethod
    def kinds() -> dict[str, type]:
        """Return the names and the types of the arrays that make the trees."""
        return dict(_KINDS)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the trees as named arrays, to be saved."""
        return {name: getattr(self, name) for name in _KINDS}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], n_questions: int = N_QUESTIONS
    ) -> Calibration:
        """Return the trees that `to_arrays` gave.

        Raises:
            ModelError: If the arrays are not those of trees.
        """
        for name, kind in _KINDS.items():
            if name not in arrays:
                raise ModelError(f"calibration.{name} is missing")
            if arrays[name].dtype != kind or arrays[name].shape != arrays["feature"].shape:
                raise ModelError(f"calibration.{name} is not as it was saved")
        tree = cls(**{name: arrays[name] for name in _KINDS}, n_questions=n_questions)
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
            and self.feature.max() < self.n_questions
            # children come after their parent, so that every walk ends
            and bool(((children > after) & (children < n_nodes)).all())
            and np.isfinite(self.threshold).all()
            and bool(((self.value >= 0) & (self.value <= 1)).all())
        )
        if not sound:
            raise ModelError("calibration is not made of trees")


def _drawn(starts: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return all pairs of as many points as there are, drawn with replacement.

    Args:
        starts: Where the pairs of each point begin, and where the last ones end.
        seed: Of the draw.
    """
    n_points = len(starts) - 1
    drawn = np.random.default_rng(seed).integers(0, n_points, n_points)
    sizes = np.diff(starts)[drawn]
    # of each pair: where its point begins, and how far into the point it is
    into = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    found: NDArray[np.int64] = np.repeat(starts[drawn], sizes) + into
    return found


def _grown(
    questions: NDArray[np.float32],
    answers: NDArray[np.bool_],
    depth: int,
    leaf: int,
    share: float = 1.0,
    seed: int = 0,
) -> dict[str, NDArray[Any]]:
    """Return the arrays of one tree."""
    from sklearn.tree import DecisionTreeClassifier  # here: only training needs it

    grown = DecisionTreeClassifier(
        max_depth=depth, min_samples_leaf=leaf, max_features=share, random_state=seed
    )
    tree = grown.fit(questions, answers).tree_
    classes = grown.classes_.tolist()
    shares = tree.value[:, 0, classes.index(True)] if True in classes else 0 * tree.threshold
    ends = tree.children_left < 0
    return {
        "feature": np.where(ends, LEAF, tree.feature),
        "threshold": np.where(ends, 0.0, tree.threshold),
        "left": tree.children_left,
        "right": tree.children_right,
        "value": shares,
    }


def _questions(
    scores: NDArray[np.floating[Any]],
    relevances: NDArray[np.floating[Any]],
    frequencies: NDArray[Any],
    more: Sequence[NDArray[np.floating[Any]]],
) -> NDArray[np.float32]:
    """Return (p, q, p·q, n_ℓ, …) of each pair, float32 as scikit-learn's trees see them."""
    p = np.ravel(scores).astype(np.float32)
    q = np.ravel(relevances).astype(np.float32)
    others = (np.ravel(each).astype(np.float32) for each in (frequencies, *more))
    return np.stack([p, q, p * q, *others], axis=1)
