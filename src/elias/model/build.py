"""Build a new encoder for a corpus."""

from __future__ import annotations

from collections.abc import Sequence

from elias.config import ResolvedEncoder
from elias.errors import ConfigError, DataError
from elias.model.encoder import BagEncoder, TextEncoder
from elias.text.vectorizer import Featurizer


def build_encoder(
    config: ResolvedEncoder, texts: Sequence[str] | None, n_features: int | None
) -> TextEncoder:
    """Return a fresh encoder for a corpus of texts, or of ``n_features`` ready features.

    Raises:
        ConfigError: If this kind of encoder cannot read what the corpus has.
        DataError: If the corpus has nothing to read.
        ModelError: If pretrained weights cannot be loaded.
    """
    if config.kind == "transformer":
        if texts is None:
            raise ConfigError(
                "encoder.kind: the corpus has features and no text; only 'bag' can read them"
            )
        # here, not above: transformers is slow to import, and a bag of words does without
        from elias.model.transformer import TransformerEncoder

        return TransformerEncoder.from_config(config)
    if texts is None:
        if not n_features:
            raise DataError("the corpus has neither texts nor features; nothing to learn from")
        return BagEncoder(config, None, n_features)
    featurizer = Featurizer.fit(
        texts,
        char_ngrams=config.char_ngrams,
        min_count=config.min_count,
        max_features=config.max_features,
    )
    if not featurizer.n_features:
        if config.min_count == 1:
            raise DataError(f"no word stands in any of the {len(texts)} training texts")
        raise DataError(
            f"no word stands in {config.min_count} of the {len(texts)} training texts; "
            "lower encoder.min_count or check the texts"
        )
    return BagEncoder(config, featurizer, featurizer.n_features)
