"""Making encoders: new ones from a corpus, and those of a saved model again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elias.config import EncoderConfig, ResolvedEncoder
from elias.errors import (
    CONFIG_FILE,
    ENCODER_FOLDER,
    VOCABULARY_FILE,
    WEIGHTS_FILE,
    ConfigError,
    DataError,
    broken,
)
from elias.model.encoder import BagEncoder, TextEncoder
from elias.persistence.labels_file import read_names, write_names
from elias.text.vectorizer import Featurizer

IDF = "vocabulary.idf"
"""The tensor that holds the bag encoder's inverse document frequencies."""


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


def save_encoder(encoder: TextEncoder, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write an encoder's files into a model folder.

    Returns:
        What `rebuild_encoder` must be told, and tensors beside the module's own to keep.
    """
    if not isinstance(encoder, BagEncoder):
        from elias.model.transformer import TransformerEncoder

        assert isinstance(encoder, TransformerEncoder), "no other kind is known"
        encoder.save(folder / ENCODER_FOLDER)
        return {"kind": "transformer"}, {}
    featurizer = encoder.featurizer
    if featurizer is None:
        return {"kind": "features", "n_features": len(encoder.vectors)}, {}
    write_names(folder / VOCABULARY_FILE, [*featurizer.words, *featurizer.ngrams])
    described = {
        "kind": "bag",
        "n_words": len(featurizer.words),
        "n_ngrams": len(featurizer.ngrams),
        "char_ngrams": list(featurizer.char_ngrams),
    }
    return described, {IDF: torch.from_numpy(featurizer.idf)}


def rebuild_encoder(
    described: Mapping[str, Any], config: EncoderConfig, folder: Path, extra: Mapping[str, Tensor]
) -> TextEncoder:
    """Return the encoder `save_encoder` wrote, its weights yet to be set.

    Raises:
        ModelError: If a file or a value is missing or does not fit.
    """
    kind = described.get("kind")
    if kind == "transformer":
        from elias.model.transformer import TransformerEncoder

        return TransformerEncoder.from_saved(config, folder / ENCODER_FOLDER)
    with torch.device("meta"):
        if kind == "features":
            return BagEncoder(config, None, _count(described, "n_features", folder))
        if kind == "bag":
            featurizer = _read_featurizer(described, folder, extra)
            return BagEncoder(config, featurizer, featurizer.n_features)
    raise broken(folder / CONFIG_FILE, f"encoder.kind is {kind!r}, which is not known")


def _read_featurizer(
    described: Mapping[str, Any], folder: Path, extra: Mapping[str, Tensor]
) -> Featurizer:
    n_words = _count(described, "n_words", folder)
    n_features = n_words + _count(described, "n_ngrams", folder)
    span = described.get("char_ngrams")
    if not isinstance(span, list) or [type(size) for size in span] != [int, int]:
        raise broken(
            folder / CONFIG_FILE, f"encoder.char_ngrams must be two whole numbers, not {span!r}"
        )
    names = read_names(folder / VOCABULARY_FILE, n_features)
    idf = extra.get(IDF)
    fits = idf is not None and idf.dtype == torch.float32 and tuple(idf.shape) == (n_features,)
    if idf is None or not fits or not idf.isfinite().all():
        raise broken(folder / WEIGHTS_FILE, f"{IDF} must be {n_features} finite float32 numbers")
    return Featurizer(
        words=names[:n_words],
        ngrams=names[n_words:],
        idf=np.array(idf.cpu().numpy()),
        char_ngrams=(span[0], span[1]),
    )


def _count(described: Mapping[str, Any], key: str, folder: Path) -> int:
    value = described.get(key)
    if type(value) is not int or value < 0:
        raise broken(folder / CONFIG_FILE, f"encoder.{key} must be a count, not {value!r}")
    return value
