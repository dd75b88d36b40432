"""What an encoder and the clustering read of a corpus's split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scipy.sparse import csr_matrix, issparse

from elias.data.disk import is_mapped
from elias.data.features import Featurizer, unit_rows
from elias.data.sampling import sample_points
from elias.data.tokenising import write_tokens
from elias.data.tokens import Tokens, cached, unit_tokens
from elias.errors import DataError
from elias.model.encoder import BagEncoder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from elias.config import EliasConfig
    from elias.data.corpus import Split
    from elias.data.disk import DiskTexts
    from elias.model.encoder import TextEncoder


SETUP_POINTS = 1_000_000
"""How many points that is where the corpus is on disk and the configuration does not say."""


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
    return unit_tokens(features) if is_mapped(features) else Tokens.from_csr(unit_rows(features))


def cached_tokens(split: Split, encoder: TextEncoder) -> Tokens:
    """Return a split's tokens, from the cache where they are there."""
    given = input_of(split, encoder)
    if issparse(given):
        return feature_tokens(given, encoder)
    featurizer = encoder.featurizer if isinstance(encoder, BagEncoder) else None

    def write(texts: DiskTexts, folder: Path) -> None:
        write_tokens(texts, folder, encoder.tokenise, featurizer)

    return cached(encoder.fingerprint, given, encoder.tokenise, write)


def setup_rows(split: Split, config: EliasConfig) -> NDArray[np.int64] | None:
    """Return the points that what comes before training is computed from; None: all of them."""
    size = config.data.setup_points or (SETUP_POINTS if split.on_disk else len(split))
    if size >= len(split):
        return None
    return sample_points(split.labels, size, config.seed)


def bag_of_words(split: Split) -> csr_matrix:
    """Return bow(x)/‖·‖ of each point for ψ (Eq. 14): given features, else tf-idf of words."""
    if split.features is not None:
        return unit_rows(split.features)
    assert split.texts is not None
    words = Featurizer.fit(split.texts, char_ngrams=(0, 0), min_count=1)
    return words.transform(split.texts)
