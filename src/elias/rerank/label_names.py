"""The names of labels beside the texts: what a calibration may ask about besides p, q and n_ℓ.

A label of one training point has a classifier that hardly knows it, but its name is as long as
anyone's. Names are read with the ranker's own words and n-grams, so nothing new is learned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from elias.rerank.scoring import Nearness, name_nearness

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.rerank.features import RankerFeatures


N_NAME_QUESTIONS = len(Nearness._fields)
"""What a calibration that knows names asks about besides."""


def is_word(name: str) -> bool:
    """Say whether a label is called something, rather than numbered.

    >>> is_word("Room 101"), is_word("101")
    (True, False)
    """
    return any(map(str.isalpha, name))


@dataclass(frozen=True)
class LabelNames:
    """The words and n-grams of each label's name, as numbers of the ranker's features.

    >>> from elias.config import RerankConfig
    >>> from elias.rerank.features import RankerFeatures
    >>> config = RerankConfig(word_ngrams=1, char_ngrams=(0, 0))
    >>> features = RankerFeatures.fit(["red cod", "red tape"], config)
    >>> names = LabelNames.read(features, ["cod", "Red Herring"])
    >>> near = names.beside(features.transform(["red cod"]), np.array([[0, 1, 2]]))
    >>> near.coverage.tolist()  # 2 is padding; herring is no word of the training texts
    [[1.0, 1.0, 0.0]]
    """

    starts: NDArray[np.int64]
    """(L + 1,) where the features of each label begin."""
    columns: NDArray[np.uint32]
    """The features, ascending in a label."""
    idf: NDArray[np.float32]
    """(F,) the weight of each feature."""

    @classmethod
    def read(cls, features: RankerFeatures, names: Sequence[str]) -> LabelNames | None:
        """Return the features of names; None where the ranker reads no text, or knows no name.

        What has no letter in it is a number that stands for a label, and counts as no name.
        """
        featurizer = features.featurizer
        if featurizer is None:
            return None
        words = [name if is_word(name) else "" for name in names]
        found = featurizer.transform(words).sorted_indices()
        if not found.nnz:
            return None
        return cls(found.indptr.astype(np.int64), found.indices.astype(np.uint32), featurizer.idf)

    def beside(self, features: csr_matrix, candidates: NDArray[np.integer[Any]]) -> Nearness:
        """Return how near texts are to the names of their candidates.

        Args:
            features: (N, F) of the texts, as `RankerFeatures.transform` gives them.
            candidates: (N, k) label ids; L is padding.
        """
        return name_nearness(features, (self.starts, self.columns), self.idf, candidates)
