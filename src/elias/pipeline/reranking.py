"""The ranker and the calibration over what a search finds: training them, and using them (§3.5)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from elias.errors import ConfigError
from elias.predictions import PADDING_SCORE, Predictions
from elias.rerank.reranker import Candidates, Reranker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.config import EliasConfig

RERANK, CALIBRATE, NAMES = "rerank", "calibrate", "names"
"""Components of a ranker: p·q, its mixture with T, and with a T that is told about names."""

_FAINT = np.float32(1e-20)  # far below any score that says something, far above the next
_FAINTER = np.float32(1e-25)


_AT_A_TIME = 8192  # points whose features are held at once


class Found(NamedTuple):
    """What a search found for points, and what a ranker reads of them."""

    ranked: Predictions
    given: Sequence[str] | csr_matrix
    """Texts, or the features they came as."""
    embedding: NDArray[np.float32] | None = None
    """φ(x) of each, for a ranker that reads it."""

    def parts(self, size: int) -> Iterator[Found]:
        """Yield the points so many at a time."""
        for start in range(0, len(self.ranked), size):
            rows = slice(start, start + size)
            embedding = None if self.embedding is None else self.embedding[rows]
            ranked = replace(
                self.ranked, ids=self.ranked.ids[rows], scores=self.ranked.scores[rows]
            )
            yield Found(ranked, self.given[rows], embedding)

    def candidates(self, count: int) -> Candidates:
        """Return the best labels of each point, so many, for the ranker."""
        best = self.ranked.top(count)
        return Candidates(self.given, best.ids, best.scores, self.embedding)


def check_rerank(config: EliasConfig) -> None:
    """Refuse a ranker that is to read what the encoder does not have."""
    if config.rerank.embedding == "first" and config.encoder.kind == "bag":
        raise ConfigError(
            "rerank.embedding='first' is φ before training, which a bag encoder starts at random; "
            "use 'none' or 'encoder', or a transformer"
        )


def rerank(reranker: Reranker, found: Found, count: int, component: str) -> Predictions:
    """Return the labels found in the order that a component of the ranker gives the best.

    Labels past the ``count`` best stay below them, in the order they had.
    """
    ranked = found.ranked
    best = ranked.scores[:, :count]
    parts = [_scores(reranker, part, count, component) for part in found.parts(_AT_A_TIME)]
    # Where nothing is left of the score, p decides; the rest follows, fainter still.
    scores = np.concatenate([best[:0], *parts]) + _FAINT * (1 + best)
    joined = np.concatenate([scores, _FAINTER * ranked.scores[:, count:]], axis=1)
    joined[ranked.ids >= ranked.n_labels] = PADDING_SCORE
    return Predictions.from_scores(ranked.ids, joined, ranked.n_labels, ranked.label_names)


def _scores(reranker: Reranker, found: Found, count: int, component: str) -> NDArray[np.float32]:
    said = reranker.score(found.candidates(count), named=component == NAMES)
    return said.product if component == RERANK else said.final
