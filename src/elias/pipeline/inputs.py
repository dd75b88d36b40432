"""What an encoder and the clustering read of a corpus's split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scipy.sparse import csr_matrix, issparse

from elias.data.features import Featurizer, unit_rows
from elias.data.tokens import Tokens, cached
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elias.data.corpus import Split
    from elias.model.encoder import TextEncoder


def input_of(split: Split, encoder: TextEncoder) -> Sequence[str] | csr_matrix:
    """Return what the encoder reads of a split: its texts, or its features."""
    given = split.features if encoder.reads_features else split.texts
    if given is None:
        wanted = "features" if encoder.reads_features else "texts"
        raise DataError(f"the model reads {wanted}, and the corpus has none")
    return given


def feature_tokens(features: csr_matrix, encoder: TextEncoder) -> Tokens:
    """Return given features as tokens, each point scaled to length 1."""
    if not encoder.reads_features:
        raise DataError("this model reads text; give it a list of texts")
    if features.shape[1] != encoder.n_features:
        raise DataError(
            f"the features have {features.shape[1]} columns, the model reads {encoder.n_features}"
        )
    return Tokens.from_csr(unit_rows(features))


def cached_tokens(split: Split, encoder: TextEncoder) -> Tokens:
    """Return a split's tokens, from the cache where they are there."""
    given = input_of(split, encoder)
    if issparse(given):
        return feature_tokens(given, encoder)
    return cached(encoder.fingerprint, given, encoder.tokenise)


def bag_of_words(split: Split) -> csr_matrix:
    """Return bow(x)/‖·‖ of each point for ψ (Eq. 14): given features, else tf-idf of words."""
    if split.features is not None:
        return unit_rows(split.features)
    assert split.texts is not None
    words = Featurizer.fit(split.texts, char_ngrams=(0, 0), min_count=1)
    return words.transform(split.texts)
