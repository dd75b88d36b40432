"""Score calibration T: small decision trees over the scores and the label name (appendix C.2).

scikit-learn grows the trees. They are stored as arrays and evaluated by a compiled loop, so that a
saved model holds no pickle and prediction does not need scikit-learn.

The classifier of a label with a single training point is poor, but the name of a rare label is as
informative as that of a frequent one. T can therefore also read the share of a label's name that
occurs in the text. Names are vectorised with the ranker's vocabulary, without further training.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

from elias.errors import ModelError
from elias.kernels.threads import thread_map_progress
from elias.rerank.sparse_ranker import as_rows, run_on_points

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from scipy.sparse import csr_matrix

    from elias.rerank.sparse_ranker import RankerFeatures, Rows


Mixture: TypeAlias = Literal["sum", "blend"]
MIXTURES: dict[Mixture, str] = {"sum": "T + p·q", "blend": "0.3·T + 0.7·p·q"}
"""Formulas of the final score: ``sum`` is the paper's, ``blend`` that of the authors' program.

The sum can exceed 1: it is a ranking score, not a probability.
"""

MIN_POINTS = 20
"""Minimum number of held-out points for calibration."""
N_TREE_FEATURES = 4
"""Features of the paper's T: p, q, p·q and the label's frequency."""
FOREST_FEATURE_SHARE = 0.5
"""Share of the features that a node of a random forest chooses from."""
LEAF = -1
"""Feature index that marks a leaf."""
TREE_DTYPES: dict[str, type] = {
    "feature": np.int32,
    "threshold": np.float64,
    "left": np.int32,
    "right": np.int32,
    "value": np.float64,
}
"""Names and types of the arrays that make up the trees."""


@dataclass(frozen=True)
class Calibration:
    """T(p, q, p·q, n_ℓ): a mean over decision trees of the probability of being relevant.

    A node compares one feature with a threshold and goes left if the feature is not larger. All
    trees are concatenated in the same arrays; a node without a parent is the root of a tree.

    >>> p = np.linspace(0, 1, 100, dtype=np.float32)
    >>> ones = np.ones(100)
    >>> tree = Calibration.fit(p, p, ones, p > 0.5, depth=1, leaf=1)
    >>> tree.probability(np.float32([0.2, 0.9]), np.float32([0.2, 0.9]), ones[:2]).tolist()
    [0.0, 1.0]
    """

    feature: NDArray[np.int32]
    """The feature that each node compares, counted from 0; `LEAF` for a leaf."""
    threshold: NDArray[np.float64]
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    value: NDArray[np.float64]
    """Share of relevant pairs among the training pairs that reached each node."""
    n_features: int = N_TREE_FEATURES
    """Number of features: the four of the paper and the ``extra`` features."""

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
        extra: Sequence[NDArray[np.floating[Any]]] = (),
        points: NDArray[np.integer[Any]] | None = None,
    ) -> Calibration:
        """Grow the trees on pairs of held-out points and their candidates, without padding.

        Args:
            scores: p of each pair, any shape.
            relevances: q of each pair.
            frequencies: n_ℓ of each pair's label, its number of training points.
            relevant: Whether the label is relevant to the point.
            depth: Maximum depth of a tree.
            leaf: Minimum number of pairs in a leaf.
            n_trees: 1 grows one tree on all pairs, as in the paper. A larger number grows a random
                forest: each tree is trained on a bootstrap sample of the points, and each node
                chooses from half of the features.
            extra: Additional features of each pair.
            points: The point of each pair, ascending; None: each pair is a point of its own.
        """
        from sklearn.tree import DecisionTreeClassifier  # here: only training needs it

        features = _features(scores, relevances, frequencies, extra)
        targets = np.ravel(relevant).astype(bool)
        point = np.arange(len(targets)) if points is None else np.ravel(points)
        starts = np.append(np.flatnonzero(np.diff(point, prepend=-1)), len(point))

        def grow(seeds: Sequence[int], _: None) -> dict[str, NDArray[Any]]:
            forest = n_trees > 1
            pairs = _bootstrap(starts, seeds[0]) if forest else slice(None)
            classifier = DecisionTreeClassifier(
                max_depth=depth,
                min_samples_leaf=leaf,
                max_features=FOREST_FEATURE_SHARE if forest else 1.0,
                random_state=seeds[0],
            )
            tree = classifier.fit(features[pairs], targets[pairs]).tree_
            leaves, classes = tree.children_left < 0, classifier.classes_.tolist()
            return {
                "feature": np.where(leaves, LEAF, tree.feature),
                "threshold": np.where(leaves, 0.0, tree.threshold),
                "left": tree.children_left,
                "right": tree.children_right,
                "value": tree.value[:, 0, classes.index(True)] if True in classes else 0.0 * leaves,
            }

        seeds = [[seed] for seed in range(n_trees)]
        trees = list(thread_map_progress(grow, seeds, lambda: None, "Growing trees", n_trees))
        offsets = np.cumsum([0] + [len(tree["feature"]) for tree in trees])
        for tree, offset in zip(trees, offsets[:-1], strict=True):
            for side in ("left", "right"):
                tree[side] = np.where(tree["feature"] != LEAF, tree[side] + offset, 0)
        return cls(
            **{
                name: np.concatenate([tree[name] for tree in trees]).astype(dtype)
                for name, dtype in TREE_DTYPES.items()
            },
            n_features=features.shape[1],
        )

    @cached_property
    def roots(self) -> NDArray[np.int64]:
        """The index of each tree's root node."""
        inner = self.feature != LEAF
        children = np.concatenate([self.left[inner], self.right[inner]])
        return np.setdiff1d(np.arange(len(self.feature)), children)

    def probability(
        self,
        scores: NDArray[np.floating[Any]],
        relevances: NDArray[np.floating[Any]],
        frequencies: NDArray[Any],
        extra: Sequence[NDArray[np.floating[Any]]] = (),
    ) -> NDArray[np.float64]:
        """Return T of each pair, in the shape of ``scores``; arguments as in `fit`."""
        features = _features(scores, relevances, frequencies, extra)
        if features.shape[1] != self.n_features:
            raise ValueError(f"T reads {self.n_features} features, not {features.shape[1]}")
        nodes = (self.feature, self.threshold, self.left, self.right, self.value)
        probability: NDArray[np.float64] = _mean_value(features, self.roots, *nodes)
        return probability.reshape(np.shape(scores))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the trees as named arrays, for saving."""
        return {name: getattr(self, name) for name in TREE_DTYPES}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], n_features: int = N_TREE_FEATURES
    ) -> Calibration:
        """Return the trees from the arrays of `to_arrays`.

        Raises:
            ModelError: If the arrays do not describe trees.
        """
        trees = cls(**arrays, n_features=n_features)
        if len({array.shape for array in arrays.values()}) > 1:
            raise ModelError("the arrays of calibration differ in length")
        n_nodes = len(trees.feature)
        inner = np.flatnonzero(trees.feature != LEAF)
        children = np.concatenate([trees.left[inner], trees.right[inner]])
        parents = np.concatenate([inner, inner])
        valid = (
            n_nodes > 0
            and trees.feature.min() >= LEAF
            and trees.feature.max() < n_features
            # children come after their parent, so every walk ends
            and bool(((children > parents) & (children < n_nodes)).all())
            and bool(((trees.value >= 0) & (trees.value <= 1)).all())
        )
        if not valid:
            raise ModelError("calibration is not made of trees")
        return trees


def _bootstrap(starts: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return all pairs of n points drawn with replacement from n.

    Args:
        starts: (n + 1,) index of the first pair of each point, then the number of pairs.
        seed: Seed of the draw.
    """
    n_points = len(starts) - 1
    drawn = np.random.default_rng(seed).integers(0, n_points, n_points)
    sizes = np.diff(starts)[drawn]
    # for each pair: where its point begins, plus its offset within the point
    offset = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    pairs: NDArray[np.int64] = np.repeat(starts[drawn], sizes) + offset
    return pairs


def _features(
    scores: NDArray[np.floating[Any]],
    relevances: NDArray[np.floating[Any]],
    frequencies: NDArray[Any],
    extra: Sequence[NDArray[np.floating[Any]]],
) -> NDArray[np.float32]:
    """Return (p, q, p·q, n_ℓ, …) of each pair as float32, which scikit-learn's trees use."""
    p, q = np.asarray(scores, np.float32), np.asarray(relevances, np.float32)
    columns = (p, q, p * q, frequencies, *extra)
    return np.stack(columns, axis=-1, dtype=np.float32).reshape(-1, len(columns))


@njit(cache=True, nogil=True)
def _mean_value(
    features: NDArray[np.float32],
    roots: NDArray[Any],
    feature: NDArray[np.int32],
    threshold: NDArray[np.float64],
    left: NDArray[np.int32],
    right: NDArray[np.int32],
    value: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return, for each row, the mean over all trees of the value of the leaf it reaches."""
    out = np.zeros(features.shape[0])
    for row in range(features.shape[0]):
        total = 0.0
        for tree in range(roots.shape[0]):
            node = roots[tree]
            while feature[node] != LEAF:
                goes_left = features[row, feature[node]] <= threshold[node]
                node = left[node] if goes_left else right[node]
            total += value[node]
        out[row] = total / roots.shape[0]
    return out


class NameOverlap(NamedTuple):
    """The overlap between texts and the names of their candidates, both (N, k) in [0, 1]."""

    likeness: NDArray[np.float32]
    """Cosine similarity of text and name, with idf weights for the features of the name."""
    coverage: NDArray[np.float32]
    """The share of Σ idf² over the name's features that occurs in the text."""


N_NAME_FEATURES = len(NameOverlap._fields)
"""Number of extra features of a T that reads names."""


def is_word(name: str) -> bool:
    """Return True if a label name has a letter; other names are only identifiers.

    >>> is_word("Room 101"), is_word("101")
    (True, False)
    """
    return any(map(str.isalpha, name))


@dataclass(frozen=True)
class LabelNames:
    """The words and n-grams of each label's name, as columns of the ranker's features.

    >>> from elias.config import RerankConfig
    >>> from elias.rerank.sparse_ranker import RankerFeatures
    >>> config = RerankConfig(word_ngrams=1, char_ngrams=(0, 0))
    >>> features = RankerFeatures.fit(["red cod", "red tape"], config)
    >>> names = LabelNames.read(features, ["cod", "Red Herring"])
    >>> overlap = names.overlap(features.transform(["red cod"]), np.array([[0, 1, 2]]))
    >>> overlap.coverage.tolist()  # 2 is padding; herring is not in the training texts
    [[1.0, 1.0, 0.0]]
    """

    starts: NDArray[np.int64]
    """(L + 1,) index in ``columns`` of the first feature of each label, then the length."""
    columns: NDArray[np.uint32]
    """The features, ascending per label."""
    idf: NDArray[np.float32]
    """(F,) the weight of each feature."""

    @classmethod
    def read(cls, features: RankerFeatures, names: Sequence[str]) -> LabelNames | None:
        """Return the features of names; None if no name has a feature, or the ranker reads no text.

        Names without a letter are ignored, because they are only identifiers.
        """
        featurizer = features.featurizer
        if featurizer is None:
            return None
        words = [name if is_word(name) else "" for name in names]
        matrix = featurizer.transform(words).sorted_indices()
        if not matrix.nnz:
            return None
        return cls(matrix.indptr.astype(np.int64), matrix.indices.astype(np.uint32), featurizer.idf)

    def overlap(self, features: csr_matrix, candidates: NDArray[np.integer[Any]]) -> NameOverlap:
        """Return the overlap of each point's text with the names of its candidates.

        The overlap is 0 if a candidate is padding or its name has no features.

        Args:
            features: (N, F) from `RankerFeatures.transform`: unit rows without duplicate columns.
            candidates: (N, k) label ids; ids of L and above are padding.
        """
        out = NameOverlap(*np.empty((2, *candidates.shape), dtype=np.float32))
        arrays = (as_rows(features), (self.starts, self.columns), self.idf, candidates, out)
        run_on_points(_compare, len(self.idf), "Comparing names", *arrays)
        return out


@njit(cache=True, nogil=True)
def _compare(
    begin: int,
    end: int,
    buffer: NDArray[Any],
    rows: Rows,
    names: tuple[NDArray[Any], NDArray[Any]],
    idf: NDArray[Any],
    candidates: NDArray[Any],
    out: tuple[NDArray[Any], NDArray[Any]],
) -> None:
    data, columns, starts, _ = rows
    name_starts, name_columns = names
    n_labels = name_starts.shape[0] - 1
    for row in range(begin, end):
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
