"""Score calibration T: small decision trees over the scores and the label name (appendix C.2).

The trees are trained with scikit-learn. They are stored as arrays and evaluated by a compiled loop,
so that a saved model contains no pickle and prediction does not need scikit-learn.

A label with few training points has a poor classifier, but its name is as informative as that of a
frequent label. T can therefore also use the similarity of label name and text. Names are vectorised
with the ranker's vocabulary, without further training.
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
"""Formulas of the final score. ``sum`` is from the paper, ``blend`` from the authors' program.

The sum is a ranking score, not a probability, because it can exceed 1.
"""

MIN_POINTS = 20
"""Minimum number of held-out points for calibration."""
N_TREE_FEATURES = 4
"""Number of features of T in the paper: p, q, p·q and the frequency of the label."""
TREE_DEPTH = 5
FOREST_LEAF = 20
"""Minimum number of pairs in a leaf of a random forest."""
FOREST_FEATURE_SHARE = 0.5
"""Share of the features that are considered at each node of a random forest."""
LEAF = -1
"""Feature index that marks a leaf."""
TREE_DTYPES: dict[str, type] = {
    "feature": np.int32,
    "threshold": np.float64,
    "left": np.int32,
    "right": np.int32,
    "value": np.float64,
}
"""Names and dtypes of the arrays in which the trees are stored."""


@dataclass(frozen=True)
class Calibration:
    """T(p, q, p·q, n_ℓ): the probability of being relevant, averaged over decision trees.

    Each node compares a feature with a threshold. The left child follows if the feature is at most
    the threshold, else the right child. The nodes of all trees are stored in the same arrays. A
    node without a parent is the root of a tree.

    >>> p = np.linspace(0, 1, 100, dtype=np.float32)
    >>> ones = np.ones(100)
    >>> tree = Calibration.fit(p, p, ones, p > 0.5, depth=1, leaf=1)
    >>> tree.probability(np.float32([0.2, 0.9]), np.float32([0.2, 0.9]), ones[:2]).tolist()
    [0.0, 1.0]
    """

    feature: NDArray[np.int32]
    """Index of the feature that each node compares, or `LEAF`."""
    threshold: NDArray[np.float64]
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    value: NDArray[np.float64]
    """Share of relevant pairs among the training pairs that reached each node."""
    n_features: int = N_TREE_FEATURES
    """Number of features: the four of the paper plus the ``extra`` features."""

    @classmethod
    def fit(
        cls,
        scores: NDArray[np.floating[Any]],
        relevances: NDArray[np.floating[Any]],
        frequencies: NDArray[Any],
        relevant: NDArray[np.bool_],
        *,
        depth: int = TREE_DEPTH,
        leaf: int = 1,
        n_trees: int = 1,
        extra: Sequence[NDArray[np.floating[Any]]] = (),
        points: NDArray[np.integer[Any]] | None = None,
    ) -> Calibration:
        """Train the trees on (point, label) pairs of held-out points and their candidates.

        Padding must be removed before.

        Args:
            scores: p of each pair, an array of any shape.
            relevances: q of each pair.
            frequencies: n_ℓ, the number of training points of each pair's label.
            relevant: Whether the label is relevant to the point.
            depth: Maximum depth of a tree.
            leaf: Minimum number of pairs in a leaf.
            n_trees: Number of trees. A single tree is trained on all pairs, as in the paper.
                Several trees are trained as a random forest: each tree gets a bootstrap sample of
                the points, and each node considers half of the features.
            extra: Additional features of each pair.
            points: The point of each pair, ascending. None treats each pair as a separate point.
        """
        from sklearn.tree import DecisionTreeClassifier  # late import: only needed for training

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
        """Index of the root node of each tree."""
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
        """Return T of each pair in the shape of ``scores``. The arguments are as in `fit`."""
        features = _features(scores, relevances, frequencies, extra)
        if features.shape[1] != self.n_features:
            raise ValueError(f"expected {self.n_features} features, not {features.shape[1]}")
        nodes = (self.feature, self.threshold, self.left, self.right, self.value)
        probability: NDArray[np.float64] = _mean_value(features, self.roots, *nodes)
        return probability.reshape(np.shape(scores))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of the trees by name, for saving."""
        return {name: getattr(self, name) for name in TREE_DTYPES}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], n_features: int = N_TREE_FEATURES
    ) -> Calibration:
        """Build the trees from the arrays that `to_arrays` returned.

        Raises:
            ModelError: If the arrays do not describe valid trees.
        """
        trees = cls(**arrays, n_features=n_features)
        if len({array.shape for array in arrays.values()}) > 1:
            raise ModelError("the calibration arrays differ in length")
        n_nodes = len(trees.feature)
        inner = np.flatnonzero(trees.feature != LEAF)
        children = np.concatenate([trees.left[inner], trees.right[inner]])
        parents = np.concatenate([inner, inner])
        valid = (
            n_nodes > 0
            and trees.feature.min() >= LEAF
            and trees.feature.max() < n_features
            # children come after their parent, so there are no cycles
            and bool(((children > parents) & (children < n_nodes)).all())
            and bool(((trees.value >= 0) & (trees.value <= 1)).all())
        )
        if not valid:
            raise ModelError("the calibration arrays are not valid decision trees")
        return trees


def _bootstrap(starts: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Draw as many points as there are, with replacement, and return the indices of their pairs.

    Args:
        starts: (n + 1,) index of the first pair of each point, followed by the number of pairs.
        seed: Random seed.
    """
    n_points = len(starts) - 1
    drawn = np.random.default_rng(seed).integers(0, n_points, n_points)
    sizes = np.diff(starts)[drawn]
    # index of a pair = start of its point + offset within the point
    offset = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    pairs: NDArray[np.int64] = np.repeat(starts[drawn], sizes) + offset
    return pairs


def _features(
    scores: NDArray[np.floating[Any]],
    relevances: NDArray[np.floating[Any]],
    frequencies: NDArray[Any],
    extra: Sequence[NDArray[np.floating[Any]]],
) -> NDArray[np.float32]:
    """Return (p, q, p·q, n_ℓ, …) of each pair as float32, like the trees of scikit-learn."""
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
    """Return for each row the value of the leaf that it reaches, averaged over all trees."""
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
    """The overlap of texts with the names of their candidates, as (N, k) arrays in [0, 1]."""

    likeness: NDArray[np.float32]
    """Cosine similarity of text and name, where the features of the name have idf weights."""
    coverage: NDArray[np.float32]
    """Share of the name's features that occur in the text, weighted by idf²."""


N_NAME_FEATURES = len(NameOverlap._fields)
"""Number of extra features if T uses names."""


def is_word(name: str) -> bool:
    """Return whether a label name has a letter. Names without letters are only identifiers.

    >>> is_word("Room 101"), is_word("101")
    (True, False)
    """
    return any(map(str.isalpha, name))


@dataclass(frozen=True)
class LabelNames:
    """The words and n-grams of each label name, as columns of the ranker's feature matrix.

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
    """(L + 1,) position of each label's first feature in ``columns``, as indptr of a CSR matrix."""
    columns: NDArray[np.uint32]
    """Feature indices of all labels, ascending within each label."""
    idf: NDArray[np.float32]
    """(F,) inverse document frequency of each feature."""

    @classmethod
    def read(cls, features: RankerFeatures, names: Sequence[str]) -> LabelNames | None:
        """Vectorise label names with the ranker's vocabulary.

        Names without a letter are ignored, because they are only identifiers. Return None if no
        name has a feature, or if the ranker was trained on features instead of texts.
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
        """Return the overlap of each text with the names of its candidates.

        The overlap is 0 for padding and for names without features.

        Args:
            features: (N, F) matrix of the texts, from `RankerFeatures.transform`. Rows must have
                length 1 and no duplicate columns.
            candidates: (N, k) label ids. Ids of L and above are padding.
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
