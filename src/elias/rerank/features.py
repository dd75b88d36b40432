"""ψ(x) of the ranker (Eq. 16), but for φ: words, runs of words and character n-grams, weighed.

A corpus that came as features keeps them: they only are scaled to length 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_matrix, issparse

from elias.errors import DataError
from elias.text.vectorizer import Featurizer, unit_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from elias.config import RerankConfig


@dataclass(frozen=True)
class RankerFeatures:
    """What turns texts, or given features, into the sparse part of ψ(x), rows of length 1.

    >>> from elias.config import RerankConfig
    >>> config = RerankConfig(word_ngrams=2, char_ngrams=(0, 0), min_count=1)
    >>> features = RankerFeatures.fit(["red cod", "red tape"], config)
    >>> features.featurizer.words
    ('red', 'cod', 'tape', 'red cod', 'red tape')
    >>> features.transform(["red red herring"]).toarray().tolist()
    [[1.0, 0.0, 0.0, 0.0, 0.0]]
    """

    n_features: int
    """F, the width of what comes out."""
    featurizer: Featurizer | None
    """The vocabulary, or None where features were given."""

    @classmethod
    def fit(cls, given: Sequence[str] | csr_matrix, config: RerankConfig) -> RankerFeatures:
        """Learn the vocabulary from training texts, or note how wide given features are.

        Raises:
            DataError: If no word or n-gram is frequent enough.
        """
        if issparse(given):
            return cls(csr_matrix(given).shape[1], None)
        if config.word_ngrams == 0 and config.char_ngrams[1] == 0:
            return cls(0, None)
        featurizer = Featurizer.fit(
            given,
            char_ngrams=config.char_ngrams,
            word_ngrams=config.word_ngrams,
            min_count=config.min_count,
            max_features=config.max_features,
        )
        if not featurizer.n_features:
            raise DataError(
                f"no word or n-gram stands in {config.min_count} of the {len(given)} training "
                "texts; lower rerank.min_count or check the texts"
            )
        return cls(featurizer.n_features, featurizer)

    def transform(self, given: Sequence[str] | csr_matrix) -> csr_matrix:
        """Return the features (N, F) of texts, or of given features, float32.

        Raises:
            DataError: If they are not what the ranker was trained on.
        """
        if issparse(given):
            return self._pass_through(given)
        if self.featurizer is None:
            if self.n_features == 0:
                return csr_matrix((len(given), 0), dtype=np.float32)
            raise DataError("this ranker was trained on features; give it their CSR matrix")
        return unit_rows(self.featurizer.transform(given))

    def _pass_through(self, given: csr_matrix) -> csr_matrix:
        if self.featurizer is not None:
            raise DataError("this ranker reads text; give it a list of texts")
        if given.shape[1] != self.n_features:
            raise DataError(
                f"the features have {given.shape[1]} columns, the ranker reads {self.n_features}"
            )
        matrix = unit_rows(given)
        matrix.sum_duplicates()
        return matrix


def unit_embedding(embedding: NDArray[np.float32] | None, n_points: int) -> NDArray[np.float32]:
    """Return φ/‖φ‖ of each point, the dense part of ψ(x) in Eq. 16; None is of no width."""
    if embedding is None:
        return np.zeros((n_points, 0), dtype=np.float32)
    length = np.linalg.norm(embedding, axis=1, keepdims=True)
    scaled: NDArray[np.float32] = (embedding / np.maximum(length, 1e-12)).astype(np.float32)
    return scaled
