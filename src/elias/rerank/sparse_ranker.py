"""The sparse ranker: features ψ(x) and one masked linear classifier per label (§3.5, C.2).

The weights are stored by feature, with one row per feature. To score a point, the rows of its
features are searched for its candidates, and the weights of each candidate are added up. In a very
long row, it is faster to look up each candidate by binary search.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, hstack, issparse

from elias.errors import DataError
from elias.kernels.threads import split_range, thread_map_progress
from elias.text.vectorizer import Featurizer, unit_rows

if TYPE_CHECKING:
    from elias.config import ResolvedRerank
    from elias.rerank.solver import Solution


Array: TypeAlias = NDArray[Any]
Inputs: TypeAlias = Sequence[str] | csr_matrix
"""Texts, or the (N, F) feature matrix of a corpus that has features instead of texts."""
Transform: TypeAlias = Literal["l3-hinge", "sigmoid"]
MAX_FEATURES = 1_000_000
MIN_WEIGHT = 0.1  # smaller weights are set to zero
Rows: TypeAlias = tuple[Array, Array, Array, Array]
"""ψ: the sparse part in CSR layout (data, uint32 indices, indptr), and the dense part (N, D)."""
SparseArrays: TypeAlias = tuple[Array, Array, Array]
"""A matrix in CSR layout (data, uint32 sorted indices, indptr)."""

UNSEEN_MARGIN = -1.0
"""Margin s of a label without training pairs. It is typical of irrelevant labels."""
_PADDING = np.float32(-np.inf)
_POINTS_PER_CHUNK = 256  # points that a thread scores at a time
_BLOCK = 1024  # weights that are searched for candidates at a time
_0, _1, _2, _3, _4 = map(np.uint64, range(5))
_buffers = threading.local()  # per thread; allocation takes longer than scoring a point


@dataclass(frozen=True)
class RankerFeatures:
    """Converter of texts or feature vectors to the sparse part of ψ(x) (Eq. 16).

    Each row is scaled to length 1.

    >>> from elias.config import RerankConfig
    >>> config = RerankConfig(word_ngrams=2, char_ngrams=(0, 0))
    >>> features = RankerFeatures.fit(["red cod", "red tape"], config)
    >>> features.featurizer.words
    ('red', 'cod', 'tape', 'red cod', 'red tape')
    >>> features.transform(["red red herring"]).toarray().tolist()
    [[1.0, 0.0, 0.0, 0.0, 0.0]]
    """

    n_features: int
    """F, the number of features."""
    featurizer: Featurizer | None
    """The vocabulary, or None if features are given or the ranker uses only the embedding."""

    @classmethod
    def fit(cls, inputs: Inputs, config: ResolvedRerank) -> RankerFeatures:
        """Learn the vocabulary of training texts. For feature vectors, store only their width.

        Raises:
            DataError: If the texts have no word or n-gram.
        """
        if issparse(inputs):
            return cls(csr_matrix(inputs).shape[1], None)
        if config.word_ngrams == 0 and config.char_ngrams[1] == 0:
            return cls(0, None)
        featurizer = Featurizer.fit(
            inputs,
            char_ngrams=config.char_ngrams,
            word_ngrams=config.word_ngrams,
            min_count=1,
            max_features=MAX_FEATURES,
        )
        if not featurizer.n_features:
            raise DataError(
                f"the {len(inputs)} training texts contain no word or n-gram; check the texts"
            )
        return cls(featurizer.n_features, featurizer)

    def transform(self, inputs: Inputs) -> csr_matrix:
        """Return the (N, F) float32 features of texts, or feature vectors scaled to length 1.

        `elias.inference.predict.tokenize` has checked that the model reads such inputs.
        """
        if self.featurizer is not None:
            return self.featurizer.transform(inputs, unit=True)
        if isinstance(inputs, Sequence):  # the ranker uses only the embedding
            return csr_matrix((len(inputs), 0), dtype=np.float32)
        matrix = unit_rows(inputs)
        matrix.sum_duplicates()
        return matrix

    def as_new(self, psi: csr_matrix, train_psi: csr_matrix) -> csr_matrix:
        """Return features of texts without those that no training text has.

        If the vocabulary was also fitted on held-out texts, their features differ from those of new
        texts, whose unknown words and n-grams are left out before rows are scaled to length 1. The
        result has the features and the scale that a vocabulary of the training texts would give.

        >>> from elias.config import ResolvedRerank
        >>> config = ResolvedRerank(enabled=True, word_ngrams=1, char_ngrams=(0, 0))
        >>> features = RankerFeatures.fit(["red cod", "red tape"], config)
        >>> train_psi, psi = map(features.transform, (["red cod"], ["red tape"]))
        >>> features.as_new(psi, train_psi).toarray().tolist()
        [[1.0, 0.0, 0.0]]
        """
        if self.featurizer is None:
            return psi
        seen = np.bincount(train_psi.indices, minlength=self.n_features) > 0
        kept = csr_matrix(psi, copy=True)
        kept.data[~seen[kept.indices]] = 0
        kept.eliminate_zeros()
        n_words = len(self.featurizer.words)
        blocks = [unit_rows(kept[:, :n_words]), unit_rows(kept[:, n_words:])]
        return unit_rows(hstack(blocks, format="csr"))

    def rows(self, inputs: Inputs) -> Rows:
        """Return the result of `transform` as CSR arrays.

        For one text this is faster than building a csr_matrix.
        """
        if self.featurizer is None or not isinstance(inputs, Sequence):
            return as_rows(self.transform(inputs))
        starts, ids, weights = self.featurizer.weigh(inputs, unit=True)
        return weights, ids.view(np.uint32), starts, np.zeros((len(inputs), 0), dtype=np.float32)


def unit_embedding(embedding: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale each row to length 1. Scaled embeddings are the dense part of ψ(x) (Eq. 16)."""
    length = np.linalg.norm(embedding, axis=1, keepdims=True)
    return np.asarray(embedding / np.maximum(length, 1e-12), dtype=np.float32)


def relevance(margins: NDArray[np.float32], transform: Transform) -> NDArray[np.float32]:
    """Convert margins s to scores q in [0, 1]: exp(−max(1−s, 0)³) for ``l3-hinge``, else σ(s).

    >>> relevance(np.float32([2, 1, -np.inf]), "l3-hinge").tolist()
    [1.0, 1.0, 0.0]
    """
    if transform == "l3-hinge":
        q = np.exp(-(np.maximum(1 - margins, 0) ** 3))
    else:
        small = np.exp(-np.abs(margins))  # cannot overflow
        q = np.where(margins >= 0, 1, small) / (1 + small)
    return np.asarray(q, dtype=np.float32)


@dataclass(frozen=True)
class SparseRanker:
    """One linear classifier w̄_ℓ per label over the features ψ(x).

    Each classifier is trained only on points for which its label is relevant or a candidate.

    >>> from elias.config import ResolvedRerank
    >>> features = csr_matrix(np.eye(4, dtype=np.float32)[[0, 0, 1, 1]])
    >>> labels = csr_matrix(np.float32([[1, 0], [1, 0], [0, 1], [0, 1]]))
    >>> candidates, config = np.array([[0, 1]] * 4), ResolvedRerank(enabled=True)
    >>> ranker, _ = SparseRanker.fit(features, None, candidates, labels, config)
    >>> (ranker.score(features, None, candidates) > 0).tolist()
    [[True, False], [True, False], [False, True], [False, True]]
    """

    weights: csr_matrix
    """(F, L) float32 weights of the sparse features after pruning, with sorted indices."""
    dense_weights: csr_matrix
    """(L, D) float32 weights of the embedding after pruning, with sorted indices."""
    biases: NDArray[np.float32]
    """(L,) bias of each label."""

    @classmethod
    def from_label_rows(
        cls, weights: csr_matrix, biases: NDArray[np.float32], n_dense: int
    ) -> SparseRanker:
        """Build a ranker from (L, F + D) weights. The last D columns belong to the embedding."""
        n_features = weights.shape[1] - n_dense
        sparse, dense = weights[:, :n_features], weights[:, n_features:]
        return cls(csr_matrix(sparse.T), csr_matrix(dense), biases)

    def label_rows(self) -> csr_matrix:
        """Return the (L, F + D) weights of all features."""
        return hstack([self.weights.T, self.dense_weights], format="csr")

    @property
    def n_labels(self) -> int:
        """Return L, the number of labels."""
        return len(self.biases)

    @property
    def n_dense(self) -> int:
        """Return D, the width of the embedding, or 0 if the ranker does not use it."""
        return int(self.dense_weights.shape[1])

    @classmethod
    def fit(
        cls,
        features: csr_matrix,
        embedding: NDArray[np.float32] | None,
        candidates: NDArray[np.integer[Any]],
        labels: csr_matrix,
        config: ResolvedRerank,
        *,
        min_weight: float = MIN_WEIGHT,
        seed: int = 0,
        earlier: SparseRanker | None = None,
        solution: Solution | None = None,
    ) -> tuple[SparseRanker, Solution]:
        """Train on the candidates and the relevant labels of the training points.

        Minimise Eq. 17 for each label with the logistic loss, or with the squared hinge loss that
        the authors' program uses. Return the ranker and the dual variables.

        Args:
            features: (N, F) sparse part of ψ(x), with rows of length 1.
            embedding: (N, D) φ(x), which is scaled to length 1, or None.
            candidates: (N, k) label ids in any order. L is padding.
            labels: (N, L) relevant labels.
            config: Loss and cost.
            min_weight: Smaller weights are set to zero.
            seed: Seed of the order in which points are visited.
            earlier: A ranker of the first labels, towards which their classifiers are regularised.
                Classifiers of labels without training points do not change.
            solution: Dual variables of an earlier fit on the first points, for a warm start.
        """
        from elias.rerank.solver import fit_label_classifiers, group_pairs  # only for training

        if earlier is not None:
            n_labels = labels.shape[1]
            keeps = np.bincount(labels.indices, minlength=n_labels + 1) == 0
            keeps[earlier.n_labels :] = False
            candidates = np.where(keeps[np.minimum(candidates, n_labels)], n_labels, candidates)
        groups = group_pairs(candidates, labels)
        weights, biases, solution = fit_label_classifiers(
            features,
            None if embedding is None else unit_embedding(embedding),
            groups,
            loss=config.loss,
            cost=config.cost,
            prune=min_weight,
            seed=seed,
            start=None if earlier is None else (earlier.label_rows(), earlier.biases),
            solution=solution,
        )
        is_new = np.arange(len(biases)) >= (0 if earlier is None else earlier.n_labels)
        biases[is_new & (np.diff(groups[0]) == 0)] = UNSEEN_MARGIN
        n_dense = weights.shape[1] - features.shape[1]
        return cls.from_label_rows(weights, biases, n_dense), solution

    def score(
        self,
        features: csr_matrix | Rows,
        embedding: NDArray[np.float32] | None,
        candidates: NDArray[np.integer[Any]],
    ) -> NDArray[np.float32]:
        """Return the margins s = w̄_ℓ·ψ(x) + b_ℓ of each point's candidates (N, k).

        Args:
            features: (N, F) sparse features, as in `fit`.
            embedding: (N, D) φ(x), as in `fit`. Ignored if the ranker was trained without it.
            candidates: (N, k) label ids. L is padding, which has a margin of -inf.
        """
        n_labels, n_dense = self.dense_weights.shape
        dense = None if embedding is None or n_dense == 0 else unit_embedding(embedding)
        rows, n_features = as_rows(features, dense), self.weights.shape[0]
        n_columns = n_features if isinstance(features, tuple) else features.shape[1]
        widths = (n_columns, rows[3].shape[1])
        assert widths == (n_features, n_dense), f"features and embedding are {widths} wide"
        margins = np.empty(candidates.shape, dtype=np.float32)
        arrays = (*self._arrays, self.biases, candidates, margins)
        run_on_points(_score_points, (n_labels, np.int32), "Ranking candidates", rows, *arrays)
        return margins

    @cached_property
    def _arrays(self) -> tuple[SparseArrays, SparseArrays]:
        """Return both weight matrices as arrays for the compiled functions."""
        return _arrays(self.weights), _arrays(self.dense_weights)


def _arrays(matrix: csr_matrix) -> SparseArrays:
    indices = np.ascontiguousarray(matrix.indices)
    # a view of saved indices, which are memory-mapped; `astype` would copy them
    indices = indices.view(np.uint32) if indices.itemsize == 4 else indices.astype(np.uint32)
    return matrix.data, indices, matrix.indptr.astype(np.int64, copy=False)


def as_rows(features: csr_matrix | Rows, dense: NDArray[np.float32] | None = None) -> Rows:
    """Return the features ψ as arrays for the compiled functions.

    Columns are sorted, so that sums do not depend on the order. Their indices are unsigned, so that
    numba omits checks for negative indices.
    """
    if isinstance(features, tuple):
        return features if dense is None else (*features[:3], dense)
    if not features.has_sorted_indices:
        features = features.sorted_indices()
    if dense is None:
        dense = np.zeros((features.shape[0], 0), dtype=np.float32)
    return (
        np.ascontiguousarray(features.data, dtype=np.float32),
        np.ascontiguousarray(features.indices).astype(np.uint32, copy=False),
        features.indptr.astype(np.int64),
        np.ascontiguousarray(dense, dtype=np.float32),
    )


def run_on_points(
    kernel: Callable[..., None],
    buffer: tuple[int, type],
    description: str,
    rows: Rows,
    *arrays: Any,
) -> None:
    """Call ``kernel(begin, end, buffer, rows, *arrays)`` for chunks of points in several threads.

    Each thread has its own buffer of zeros, and ``kernel`` must set it to zero again. ``buffer`` is
    the size and the dtype of this buffer.
    """
    n_points, (size, dtype) = len(rows[2]) - 1, buffer
    if n_points <= _POINTS_PER_CHUNK:  # starting threads would only delay a few points
        buffers = _buffers.__dict__
        if dtype.__name__ not in buffers or len(buffers[dtype.__name__]) < size:
            buffers[dtype.__name__] = np.zeros(size, dtype)
        kernel(0, n_points, buffers[dtype.__name__][:size], rows, *arrays)
        return

    def work(points: range, memory: Array) -> None:
        kernel(points.start, points.stop, memory, rows, *arrays)

    new_buffer: Callable[[], Array] = partial(np.zeros, size, dtype)
    chunks = split_range(n_points, _POINTS_PER_CHUNK)
    list(thread_map_progress(work, chunks, new_buffer, description, n_points))


@njit(cache=True, nogil=True)
def _score_points(
    begin: int,
    end: int,
    slots: Array,
    rows: Rows,
    weights: SparseArrays,
    dense_weights: SparseArrays,
    biases: Array,
    candidates: Array,
    out: Array,
) -> None:
    """Write the margins of the candidates. ``slots`` maps a candidate to its column + 1.

    The positions of the candidates' weights are first collected without a branch, because the CPU
    would often mispredict it.
    """
    data, columns, starts, dense = rows
    values, labels, label_starts = weights
    dense_values, dense_columns, dense_starts = dense_weights
    n_labels, n_candidates = biases.shape[0], candidates.shape[1]
    totals, positions = np.empty(n_candidates), np.empty(_BLOCK, np.int64)
    for row in range(begin, end):
        for k in range(n_candidates):
            label = candidates[row, k]
            if label < n_labels:
                slots[label] = k + 1
                totals[k] = biases[label]
        row_columns = columns[starts[row] : starts[row + 1]]
        read_first(row_columns, label_starts, labels, positions)
        read_first(row_columns, label_starts, values, positions)
        for j in range(starts[row], starts[row + 1]):
            low, high = label_starts[columns[j]], label_starts[columns[j] + 1]
            if high - low > 64 and high - low > 4 * n_candidates * np.log2(high - low):
                for k in range(n_candidates):
                    at = find(labels, low, high, candidates[row, k])
                    if at < high and labels[at] == candidates[row, k]:
                        totals[k] += data[j] * values[at]
                continue
            for first in range(low, high, _BLOCK):
                n_found = 0
                for i in range(first, min(first + _BLOCK, high)):
                    positions[n_found] = i
                    n_found += slots[labels[i]] > 0
                for i in positions[:n_found]:
                    totals[slots[labels[i]] - 1] += data[j] * values[i]
        for k in range(n_candidates):
            label, out[row, k] = candidates[row, k], _PADDING
            if label < n_labels:
                total = totals[slots[label] - 1]
                low, high = dense_starts[label], dense_starts[label + 1]
                total += sparse_dot(dense_values[low:high], dense_columns[low:high], dense[row])
                out[row, k] = total
        for k in range(n_candidates):
            if candidates[row, k] < n_labels:
                slots[candidates[row, k]] = 0


@njit(cache=True, nogil=True)
def read_first(rows: Array, starts: Array, values: Array, total: Array) -> None:
    """Read the first value of some rows, which are far apart in memory.

    The CPU then waits for all of them at once instead of one after the other. The sum is written to
    ``total`` only because the compiler would otherwise omit the loop.
    """
    total[0] = 0
    for row in rows:
        if row < starts.shape[0] - 1 and starts[row] < values.shape[0]:
            total[0] += np.int64(values[starts[row]])


@njit(cache=True, nogil=True)
def find(columns: Array, low: int, high: int, wanted: int) -> int:
    """Return the first position in low..high whose column is at least ``wanted``, or ``high``."""
    while low < high:
        middle = (low + high) // 2
        if columns[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def sparse_dot(data: Array, columns: Array, weight: Array) -> np.float32:
    """Return Σ data·weight[columns], in four partial sums that the CPU computes in parallel.

    The counter is unsigned, so that numba omits checks for negative indices.
    """
    zero = np.float32(0)
    first, second, third, fourth = zero, zero, zero, zero
    size, j = np.uint64(data.shape[0]), _0
    while j + _4 <= size:
        first += data[j] * weight[columns[j]]
        second += data[j + _1] * weight[columns[j + _1]]
        third += data[j + _2] * weight[columns[j + _2]]
        fourth += data[j + _3] * weight[columns[j + _3]]
        j += _4
    while j < size:
        first += data[j] * weight[columns[j]]
        j += _1
    return (first + second) + (third + fourth)
