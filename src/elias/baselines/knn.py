"""Nearest-neighbour baseline that predicts the labels of the most similar training texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_matrix, issparse

from elias.data.corpus import Corpus, Split
from elias.errors import DataError, check_positive
from elias.predictions import Predictions, from_entries
from elias.progress import track
from elias.text.vectorizer import bag_of_words, unit_rows

NEIGHBOURS = 30
_MAX_SIMILARITIES = 2**24  # similarities computed at a time (at most 128 MB; most are 0)


class NearestNeighbours:
    """k-nearest-neighbour classifier with cosine similarity.

    The score of a label is the summed similarity of those of the k nearest training points that
    have the label. Points are compared by the tf-idf of their words, or by the features of a corpus
    without texts. Points without a common word are not neighbours, so a text can have fewer than k
    neighbours, or none.

    Example:
        >>> from elias import evaluate
        >>> from elias.baselines import NearestNeighbours
        >>> from elias.data.synthetic import synthetic_corpus
        >>> corpus = synthetic_corpus(n_points=300, n_labels=30)
        >>> neighbours = NearestNeighbours(corpus, k=30)
        >>> predictions = neighbours.predict(corpus.test.texts, top_k=10)
        >>> evaluate(predictions, corpus, recall_ks=[10])["P@1"] > 50
        True
    """

    def __init__(self, corpus: Corpus, *, k: int = NEIGHBOURS) -> None:
        check_positive(k=k)
        self.k = k
        self.label_names = corpus.label_names
        points = corpus.train
        # texts are compared if there are both
        compared = None if points.texts is not None else points.features
        features, self._featurizer = bag_of_words(points.texts, compared)
        self._points_by_word = features.T.tocsr()  # (words, N)
        labels = points.labels
        ones = np.ones(labels.nnz, dtype=np.float32)
        self._labels = csr_matrix((ones, labels.indices, labels.indptr), shape=labels.shape)

    @property
    def n_bytes(self) -> int:
        """Return the size of the training points and their labels in memory, in bytes."""
        parts = (self._points_by_word, self._labels)
        return sum(m.data.nbytes + m.indices.nbytes + m.indptr.nbytes for m in parts)

    def predict(self, texts: Sequence[str] | csr_matrix, *, top_k: int = 100) -> Predictions:
        """Return the ``top_k`` best labels of each text, sorted by score, then by label id.

        Args:
            texts: A list of texts or, for a corpus without texts, a CSR matrix of features.
            top_k: Number of labels per text. A text gets fewer if its neighbours have fewer.
        """
        features, parts = self._features(texts), []
        step = max(1, _MAX_SIMILARITIES // self._points_by_word.shape[1])
        for start in track(range(0, max(1, features.shape[0]), step), "Finding neighbours"):
            nearest = strongest(features[start : start + step] @ self._points_by_word, self.k)
            scores = (nearest @ self._labels).tocsr()
            parts.append(Predictions.from_csr(scores, top_k, self.label_names))
        return Predictions.stack(parts)

    def predict_split(self, split: Split, *, top_k: int = 100) -> Predictions:
        """Return predictions for a split, without the labels that its filters exclude."""
        inputs = split.features if self._featurizer is None else split.texts
        if inputs is None:
            kind = "features" if self._featurizer is None else "texts"
            raise DataError(
                f"this model was fitted on {kind}, but the split has none; give a split with {kind}"
            )
        predictions = self.predict(inputs, top_k=top_k + split.max_filtered)
        return split.drop_filtered(predictions, top_k)

    def _features(self, texts: Sequence[str] | csr_matrix) -> csr_matrix:
        if self._featurizer is not None:
            if issparse(texts) or isinstance(texts, str):
                raise DataError("this model was fitted on texts; pass a list of texts")
            return self._featurizer.transform(texts)
        n_features = self._points_by_word.shape[0]
        if not issparse(texts) or texts.shape[1] != n_features:  # type: ignore[union-attr]
            raise DataError(
                f"this model was fitted on features; pass a CSR matrix with {n_features} columns"
            )
        return unit_rows(texts)


def strongest(matrix: csr_matrix, k: int) -> csr_matrix:
    """Keep the ``k`` largest entries of each row. Of equal entries, prefer lower columns."""
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    values = np.split(matrix.data, matrix.indptr[1:-1])
    least = np.array([np.partition(row, -k)[-k] if len(row) > k else -np.inf for row in values])
    is_large = matrix.data >= least[rows]  # k or slightly more in each row; the rest is not sorted
    entries = (rows[is_large], matrix.indices[is_large], matrix.data[is_large])
    return from_entries(*entries, matrix.shape, k, None).to_csr()
