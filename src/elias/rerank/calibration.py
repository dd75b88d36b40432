"""Score calibration T: decision trees over the scores and the label name (appendix C.2).

Trees are trained and evaluated by compiled loops, and stored as arrays. Splits are chosen from
histograms. This is about twenty times as fast as scikit-learn, which sorts at every node.

A label with few training points has a poor classifier, but its name is as informative as that of a
frequent label. T can therefore also use the similarity of label name and text. Names are vectorised
with the ranker's vocabulary, without further training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from elias.clustering import sort_halves
from elias.kernels.threads import split_range, thread_map, thread_map_progress
from elias.rerank.sparse_ranker import (
    Array,
    RankerFeatures,
    Rows,
    as_rows,
    read_first,
    run_on_points,
)

Mixture: TypeAlias = Literal["sum", "blend"]
"""Formula of the final score: T + p·q (the paper) or a blend of the two (the authors' program).

The sum is a ranking score, not a probability, because it can exceed 1.
"""
MIXTURES: dict[Mixture, tuple[float, float]] = {"sum": (1, 1), "blend": (0.3, 0.7)}
"""Weights of T and p·q in each formula."""

MIN_POINTS = 20
"""Minimum number of held-out points for calibration."""
N_TREE_FEATURES = 4
"""Number of features of T in the paper: p, q, p·q and the frequency of the label."""
TREE_DEPTH = 5
FOREST_LEAF = 20
"""Minimum number of pairs in a leaf of a random forest."""
FOREST_FEATURE_SHARE = 0.5
"""Share of the features that are considered at each node of a random forest."""
MAX_VALUES = 1024
"""Maximum number of distinct values of a feature. Features with more values are reduced to
quantiles."""
_PAIRS_PER_CHUNK = 1 << 15  # pairs that a thread evaluates at a time
_PAIRS_PER_BLOCK = 256  # pairs that descend a tree together
_1, _5, _31, _32, _LOW_BITS = map(np.uint64, (1, 5, 31, 32, 2**32 - 1))
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
    """Decision trees that estimate the probability T(p, q, p·q, n_ℓ) that a label is relevant.

    T is the mean over the trees. A node goes left if its feature is at most its threshold. The
    nodes of all trees are stored in the same arrays; a node without a parent is the root of a tree.

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

        The pairs must not include padding.

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
        features = _features(scores, relevances, frequencies, extra)
        targets = np.ravel(relevant).astype(np.uint8)
        point = np.arange(len(targets)) if points is None else np.ravel(points)
        starts = np.flatnonzero(np.diff(point, prepend=-1))
        pairs_of_point = np.diff(np.append(starts, len(point)))

        def divide(values: NDArray[np.float32], _: None) -> tuple[NDArray[Any], NDArray[Any]]:
            """Return the thresholds of a feature, and the bin of each of its values."""
            thresholds = _thresholds(values, targets)
            return thresholds, np.searchsorted(thresholds, values).astype(np.uint16)

        thresholds, binned = zip(*thread_map(divide, list(features), lambda: None), strict=True)
        bins, n_bins = np.stack(binned), 1 + max(map(len, thresholds))
        n_features, n_inner = len(features), 2**depth - 1
        forest = n_trees > 1
        n_considered = max(1, int(FOREST_FEATURE_SHARE * n_features)) if forest else n_features

        def grow(seeds: Sequence[int], _: None) -> dict[str, NDArray[Any]]:
            generator, n_points = np.random.default_rng(seeds[0]), len(starts)
            drawn = np.ones(n_points, dtype=np.int64)
            if forest:
                sample = generator.integers(0, n_points, n_points)
                drawn = np.bincount(sample, minlength=n_points)
            orders = np.tile(np.arange(n_features), (n_inner, 1))
            orders = generator.permuted(orders, axis=1) if forest else orders
            weights = np.repeat(drawn, pairs_of_point)
            feature, split, left, right, value = _grow(
                *(bins, n_bins, targets, weights, np.flatnonzero(weights)),
                *(orders, depth, leaf, n_considered),
            )
            chosen = zip(feature, split, strict=True)
            threshold = [0.0 if each == LEAF else thresholds[each][i] for each, i in chosen]
            arrays = (feature, np.array(threshold), left, right, value)
            return dict(zip(TREE_DTYPES, arrays, strict=True))

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
            n_features=n_features,
        )

    @cached_property
    def roots(self) -> NDArray[np.int64]:
        """Return the index of the root node of each tree."""
        inner = self.feature != LEAF
        children = np.concatenate([self.left[inner], self.right[inner]])
        return np.setdiff1d(np.arange(len(self.feature)), children)

    @cached_property
    def _nodes(self) -> tuple[Array, Array, Array, Array, Array, int]:
        """Return the ``nodes`` of `_mean_value`. Unsigned indices let numba omit sign checks."""
        leaf, nodes = self.feature == LEAF, np.arange(len(self.feature))
        left, right = np.where(leaf, nodes, self.left), np.where(leaf, nodes, self.right)
        # rounding down to float32 does not change comparisons with float32 features
        threshold = self.threshold.astype(np.float32)
        below = np.nextafter(threshold, np.float32(-np.inf))
        depth, level = 0, self.roots
        while not leaf[level].all():
            depth, level = depth + 1, np.unique([left[level], right[level]])
        return (
            self.roots.astype(np.uint32),
            np.where(leaf, 0, self.feature).astype(np.uint32),
            np.where(threshold > self.threshold, below, threshold),
            np.stack([left, right], axis=1).ravel().astype(np.uint32),
            self.value,
            depth,
        )

    def probability(
        self,
        scores: NDArray[np.floating[Any]],
        relevances: NDArray[np.floating[Any]],
        frequencies: NDArray[Any],
        extra: Sequence[NDArray[np.floating[Any]]] = (),
    ) -> NDArray[np.float64]:
        """Return the calibrated score T of each pair. The arguments are as in `fit`."""
        assert N_TREE_FEATURES + len(extra) == self.n_features, "pass the extra features of fit"
        p = np.ravel(scores).astype(np.float32, copy=False)
        q = np.ravel(relevances).astype(np.float32, copy=False)
        others = np.array([np.ravel(values) for values in (frequencies, *extra)], dtype=np.float32)
        probability = np.empty(p.size)
        arrays = (p, q, others, self._nodes, probability)
        if p.size <= _PAIRS_PER_CHUNK:
            _mean_value(0, p.size, *arrays)
        else:

            def work(pairs: range, _: None) -> None:
                _mean_value(pairs.start, pairs.stop, *arrays)

            list(thread_map(work, split_range(p.size, _PAIRS_PER_CHUNK), lambda: None))
        return probability.reshape(np.shape(scores))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of the trees by name, for saving."""
        return {name: getattr(self, name) for name in TREE_DTYPES}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], n_features: int = N_TREE_FEATURES
    ) -> Calibration | None:
        """Build the trees from the arrays of `to_arrays`. Return None if they are not valid."""
        trees = cls(**arrays, n_features=n_features)
        if len({array.shape for array in arrays.values()}) > 1:
            return None
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
        return trees if valid else None


def _features(
    scores: NDArray[np.floating[Any]],
    relevances: NDArray[np.floating[Any]],
    frequencies: NDArray[Any],
    extra: Sequence[NDArray[np.floating[Any]]],
) -> NDArray[np.float32]:
    """Return a float32 array with one row per feature and one column per (point, label) pair.

    The features are p, q, p·q, n_ℓ and the ``extra`` ones.
    """
    p, q = np.asarray(scores, np.float32), np.asarray(relevances, np.float32)
    rows = (p, q, p * q, frequencies, *extra)
    return np.stack(rows, dtype=np.float32).reshape(len(rows), -1)


def _thresholds(values: NDArray[np.float32], targets: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the thresholds at which a tree may split a feature, in ascending order.

    They lie halfway between neighbouring values. If there are more than `MAX_VALUES` values, use
    quantiles instead: one half over all pairs, the other half over the relevant pairs.
    """
    levels = np.unique(values)
    if len(levels) > MAX_VALUES:
        shares = np.linspace(0, 1, MAX_VALUES // 2)
        groups = [group for group in (values, values[targets > 0]) if len(group)]
        parts = [np.quantile(group, shares, method="nearest") for group in groups]
        levels = np.unique(np.concatenate(parts))
    middles: NDArray[np.float64] = levels[:-1].astype(np.float64) / 2 + levels[1:] / 2
    return middles


@njit(cache=True, nogil=True)
def _grow(
    bins: NDArray[np.uint16],
    n_bins: int,
    targets: NDArray[np.uint8],
    weights: NDArray[np.int64],
    pairs: NDArray[np.int64],
    orders: NDArray[np.int64],
    depth: int,
    leaf: int,
    n_considered: int,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Train one tree, level by level; return feature, bin, children and value of each node.

    Args:
        bins: (F, n) bin of each pair's value: the number of thresholds that are below the value.
        n_bins: Largest number of bins of a feature.
        targets: (n,) 1 for relevant pairs, else 0.
        weights: (n,) number of times that each pair is in the sample.
        pairs: The pairs in the sample, which are sorted by node.
        orders: (inner nodes, F) order of the features at each node, for `_best_split`.
        depth: Maximum depth.
        leaf: Minimum weight of a leaf.
        n_considered: Number of features to consider at each node.
    """
    size = 2 ** (depth + 1) - 1
    feature, last_left = np.full(size, LEAF), np.zeros(size, np.int64)
    left, right, value = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size)
    # `sort_halves` keeps the pairs of a node next to each other
    begins, ends = np.zeros(size, np.int64), np.zeros(size, np.int64)
    n_pairs, n_relevant, ends[0] = 0, 0, pairs.shape[0]
    for pair in pairs:
        n_pairs += weights[pair]
        n_relevant += weights[pair] * targets[pair]
    value[0] = n_relevant / n_pairs
    counts = np.empty((n_bins, 2), np.int64)
    first, end = 0, 1  # the nodes of this level
    for _ in range(depth):
        n_nodes = end
        for node in range(first, end):
            begin, stop = begins[node], ends[node]
            feature[node], last_left[node], value[n_nodes], value[n_nodes + 1] = _best_split(
                bins, targets, weights, pairs[begin:stop], counts, orders[node], leaf, n_considered
            )
            if feature[node] == LEAF:
                continue
            goes_left = np.empty(stop - begin, np.bool_)
            border = begin
            for i in range(begin, stop):
                goes_left[i - begin] = bins[feature[node], pairs[i]] <= last_left[node]
                border += goes_left[i - begin]
            sort_halves(pairs[begin:stop], goes_left)
            left[node], right[node] = n_nodes, n_nodes + 1
            begins[n_nodes], ends[n_nodes] = begin, border
            begins[n_nodes + 1], ends[n_nodes + 1] = border, stop
            n_nodes += 2
        first, end = end, n_nodes
    return feature[:end], last_left[:end], left[:end], right[:end], value[:end]


@njit(cache=True, nogil=True)
def _best_split(
    bins: NDArray[np.uint16],
    targets: NDArray[np.uint8],
    weights: NDArray[np.int64],
    pairs: NDArray[np.int64],
    counts: NDArray[np.int64],
    order: NDArray[np.int64],
    leaf: int,
    n_considered: int,
) -> tuple[int, int, float, float]:
    """Return the split of a node with the lowest Gini impurity.

    Try the first ``n_considered`` features of ``order``, then further ones until a split is found.
    ``pairs`` are the pairs of the node. ``counts`` (bins, 2) is memory for the number of irrelevant
    and relevant pairs in each bin of a feature.

    Returns:
        The feature, or `LEAF` if no split lowers the impurity; the last bin that goes left; and the
        share of relevant pairs on either side.
    """
    n_pairs, n_relevant = 0, 0
    for pair in pairs:
        n_pairs += weights[pair]
        n_relevant += weights[pair] * targets[pair]
    best = (n_relevant**2 + (n_pairs - n_relevant) ** 2) / max(1, n_pairs)
    split = (LEAF, 0, 0.0, 0.0)
    for i, f in enumerate(order):
        if i >= n_considered and split[0] != LEAF:
            break
        counts[:] = 0
        for pair in pairs:
            counts[bins[f, pair], targets[pair]] += weights[pair]
        below, relevant_below = 0, 0
        for b in range(counts.shape[0] - 1):
            below += counts[b, 0] + counts[b, 1]
            relevant_below += counts[b, 1]
            above, relevant_above = n_pairs - below, n_relevant - relevant_below
            if min(below, above) < max(1, leaf):
                continue
            purity = (relevant_below**2 + (below - relevant_below) ** 2) / below
            purity += (relevant_above**2 + (above - relevant_above) ** 2) / above
            if purity > best * (1 + 1e-12):
                best = purity
                split = (f, b, relevant_below / below, relevant_above / above)
    return split


@njit(cache=True, nogil=True)
def _mean_value(
    begin: int,
    end: int,
    p: NDArray[np.float32],
    q: NDArray[np.float32],
    others: NDArray[np.float32],
    nodes: tuple[Array, Array, Array, Array, Array, int],
    out: NDArray[np.float64],
) -> None:
    """Write the prediction of each pair: the mean over all trees of the value of its leaf.

    The features of a pair are p, q, p·q and the values in its column of ``others``. All pairs of a
    block go down one level before any pair goes down the next, so that the CPU can overlap them.
    The children of a node are ``children[2 * node]`` (left) and ``children[2 * node + 1]``; a leaf
    is its own child. The child is computed as an index, because a branch would often be
    mispredicted.
    """
    roots, feature, threshold, children, value, depth = nodes
    reached = np.empty(_PAIRS_PER_BLOCK, np.uint32)
    features = np.empty((3 + others.shape[0], _PAIRS_PER_BLOCK), np.float32)
    for first in range(begin, end, _PAIRS_PER_BLOCK):
        n_pairs = min(_PAIRS_PER_BLOCK, end - first)
        for i in range(n_pairs):
            features[0, i], features[1, i] = p[first + i], q[first + i]
            features[2, i] = p[first + i] * q[first + i]
            for j in range(others.shape[0]):
                features[3 + j, i] = others[j, first + i]
        out[first : first + n_pairs] = 0
        for root in roots:
            reached[:n_pairs] = root
            for _ in range(depth):
                for i in range(n_pairs):
                    node = reached[i]
                    goes_left = features[feature[node], i] <= threshold[node]
                    reached[i] = children[2 * node + (not goes_left)]
            for i in range(n_pairs):
                out[first + i] += value[reached[i]]
        for i in range(first, first + n_pairs):
            out[i] /= roots.shape[0]


class NameOverlap(NamedTuple):
    """The overlap of texts with the names of their candidates, as (N, k) arrays in [0, 1]."""

    similarity: NDArray[np.float32]
    """Cosine similarity of text and name. The features of the name are weighted by idf."""
    coverage: NDArray[np.float32]
    """Share of the name's features that occur in the text, weighted by idf²."""


N_NAME_FEATURES = len(NameOverlap._fields)
"""Number of extra features if T uses names."""
N_PROPOSED = 50
"""Number of labels that are added to the candidates of a text by the similarity of their names."""
_MAX_NAMES, _MAX_NAMES_SHARE = 20, 0.01  # `propose` skips features in more names than both limits


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
    """(L + 1,) position of each label's first feature in ``columns``, as in CSR ``indptr``."""
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

    @cached_property
    def _totals(self) -> NDArray[np.float64]:
        """Return the sum of idf² over the features of each label (L,)."""
        labels = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        weights = self.idf[self.columns].astype(np.float64) ** 2
        totals = np.bincount(labels, weights, minlength=len(self.starts) - 1)
        return totals.astype(np.float64, copy=False)

    @cached_property
    def _labels_of_features(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return the labels of each feature (weights, labels, starts), without common features.

        The similarity of a label and a text is the dot product of the label's weights and the
        text's features. Very common features would take most of the time and hardly change the best
        labels.
        """
        n_labels, n_features = len(self.starts) - 1, len(self.idf)
        labels = np.repeat(np.arange(n_labels), np.diff(self.starts))
        weights = self.idf[self.columns]
        norms = np.sqrt(self._totals)
        counts = np.bincount(self.columns, minlength=n_features)
        used = (counts <= max(_MAX_NAMES, _MAX_NAMES_SHARE * n_labels))[self.columns]
        labels, columns = labels[used], self.columns[used]
        order = np.argsort(columns, kind="stable")
        starts = np.searchsorted(columns[order], np.arange(n_features + 1))
        values = (weights[used] / norms[labels]).astype(np.float32)
        return values[order], labels[order].astype(np.int32), starts

    def propose(
        self,
        features: csr_matrix | Rows,
        candidates: NDArray[np.integer[Any]],
        allowed: NDArray[np.bool_],
        count: int = N_PROPOSED,
    ) -> NDArray[np.int64]:
        """Return the ``count`` labels whose names are most similar to each text, padded with L.

        Args:
            features: (N, F) matrix of the texts, as for `overlap`.
            candidates: (N, k) candidates of each text, which are not returned again.
            allowed: (L,) mask of the labels that may be proposed.
            count: Maximum number of labels for each text.

        >>> from elias.config import RerankConfig
        >>> from elias.rerank.sparse_ranker import RankerFeatures
        >>> config = RerankConfig(word_ngrams=1, char_ngrams=(0, 0))
        >>> features = RankerFeatures.fit(["red cod", "red tape"], config)
        >>> names = LabelNames.read(features, ["cod", "tape", "red"])
        >>> text, every_label = features.transform(["red cod"]), np.ones(3, dtype=np.bool_)
        >>> names.propose(text, np.array([[2]]), every_label, 2).tolist()
        [[0, 3]]
        """
        n_labels = len(self.starts) - 1
        out = np.full((len(candidates), min(count, n_labels)), n_labels)
        known = np.ascontiguousarray(candidates)  # numba would compile again for slices
        arrays = (as_rows(features), self._labels_of_features, known, allowed, out)
        run_on_points(_propose, (n_labels, np.float32), "Proposing labels", *arrays)
        return out

    def overlap(
        self, features: csr_matrix | Rows, candidates: NDArray[np.integer[Any]]
    ) -> NameOverlap:
        """Return the overlap of each text with the names of its candidates.

        The overlap is 0 for padding and for names without features.

        Args:
            features: (N, F) matrix of the texts, from `RankerFeatures.transform`. Rows must have
                length 1 and no duplicate columns.
            candidates: (N, k) label ids. Ids of L and above are padding.
        """
        out = NameOverlap(*np.empty((2, *candidates.shape), dtype=np.float32))
        names = (self.starts, self.columns, self._totals)
        arrays = (as_rows(features), names, self.idf, candidates, out)
        run_on_points(_compare, (len(self.idf) // 32 + 1, np.uint64), "Comparing names", *arrays)
        return out


@njit(cache=True, nogil=True)
def _compare(
    begin: int,
    end: int,
    words: NDArray[np.uint64],
    rows: Rows,
    names: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
    idf: NDArray[Any],
    candidates: NDArray[Any],
    out: tuple[NDArray[Any], NDArray[Any]],
) -> None:
    """Write the overlap of the points' features with the names of their candidates.

    Most features of names are not in the text. ``words`` is a bitmap that fits in the CPU caches.
    The lower half of each word has a bit for each of 32 features that is set if the text has the
    feature. The upper half is the position of the first of these features in ``rows``.
    """
    data, columns, starts, _ = rows
    name_starts, name_columns, totals = names
    n_labels, total = name_starts.shape[0] - 1, np.empty(1, np.int64)
    for row in range(begin, end):
        for j in range(starts[row + 1] - 1, starts[row] - 1, -1):
            column = np.uint64(columns[j])
            bits = words[column >> _5] & _LOW_BITS | _1 << (column & _31)
            words[column >> _5] = np.uint64(j) << _32 | bits
        read_first(candidates[row], name_starts, name_columns, total)
        for k in range(candidates.shape[1]):
            label = candidates[row, k]
            shared, covered, whole = 0.0, 0.0, 0.0
            if label < n_labels:
                whole = totals[label]
                for i in range(name_starts[label], name_starts[label + 1]):
                    column = np.uint64(name_columns[i])
                    word = words[column >> _5]
                    if word >> (column & _31) & _1:
                        j = word >> _32
                        while columns[j] != column:
                            j += _1
                        weight = np.float64(idf[column])
                        shared += weight * data[j]
                        covered += weight * weight
            out[0][row, k] = shared / np.sqrt(whole) if whole > 0 else 0.0
            out[1][row, k] = covered / whole if whole > 0 else 0.0
        for j in range(starts[row], starts[row + 1]):
            words[columns[j] >> _5] = 0


@njit(cache=True, nogil=True)
def _propose(
    begin: int,
    end: int,
    similarity: NDArray[np.float32],
    rows: Rows,
    labels_of_features: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
    candidates: NDArray[Any],
    allowed: NDArray[np.bool_],
    out: NDArray[np.int64],
) -> None:
    """Write the labels with the highest name similarity into ``out``, ties by label id."""
    data, columns, starts, _ = rows
    weights, labels, label_starts = labels_of_features
    n_labels, count = allowed.shape[0], out.shape[1]
    best, touched = np.empty(count, np.float32), np.empty(n_labels, np.int32)
    for row in range(begin, end):
        n_touched, n_best = 0, 0
        for j in range(starts[row], starts[row + 1]):
            value = data[j]
            for i in range(label_starts[columns[j]], label_starts[columns[j] + 1]):
                label = labels[i]
                before = similarity[label]
                if before == 0:
                    touched[n_touched] = label
                    n_touched += 1
                similarity[label] = before + value * weights[i]
        for k in range(candidates.shape[1]):
            if candidates[row, k] < n_labels:
                similarity[candidates[row, k]] = 0
        for label in touched[:n_touched]:
            value, similarity[label] = similarity[label], 0
            if value <= 0 or not allowed[label]:
                continue
            at = n_best  # insert it into the sorted list
            while at > 0 and (
                value > best[at - 1] or (value == best[at - 1] and label < out[row, at - 1])
            ):
                at -= 1
            if at == count:
                continue
            n_best = min(n_best + 1, count)
            for k in range(n_best - 1, at, -1):
                best[k], out[row, k] = best[k - 1], out[row, k - 1]
            best[at], out[row, at] = value, label
