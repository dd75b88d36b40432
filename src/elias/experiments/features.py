"""The features that linear peers read of a corpus."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scipy.sparse import csr_matrix, issparse

from elias.data.features import Featurizer, unit_rows
from elias.rerank.features import RankerFeatures

if TYPE_CHECKING:
    from elias.data.corpus import Split
    from elias.experiments.plan import Setting

WORDS, RANKER = "words", "ranker"
TITLES = {WORDS: "", RANKER: ", our features"}
"""What is said of a peer that reads them."""


@dataclass(frozen=True, slots=True)
class PointFeatures:
    """Features of the training and the test points, and how long making them took."""

    train: csr_matrix
    test: csr_matrix
    train_seconds: float
    test_seconds: float


def point_features(setting: Setting, kind: str) -> PointFeatures:
    """Return tf-idf of words, or what our ranker reads but for φ; given features stay."""
    train, test = (_given(setting.corpus.split(name)) for name in ("train", "test"))
    begin = time.perf_counter()
    transform = _fitted(train, kind, setting)
    of_train = transform(train)
    middle = time.perf_counter()
    of_test = transform(test)
    return PointFeatures(of_train, of_test, middle - begin, time.perf_counter() - middle)


def _fitted(
    train: Sequence[str] | csr_matrix, kind: str, setting: Setting
) -> Callable[[Any], csr_matrix]:
    if issparse(train):
        return unit_rows
    if kind == WORDS:
        return Featurizer.fit(train, char_ngrams=(0, 0), min_count=1).transform
    return RankerFeatures.fit(train, setting.config.rerank).transform


def _given(split: Split) -> Sequence[str] | csr_matrix:
    if split.texts is not None:
        return split.texts
    assert split.features is not None, "a split has texts or features"
    return split.features
