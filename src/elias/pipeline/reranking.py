"""The ranker and the calibration over what a search finds: training them, and using them (§3.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from elias.errors import ConfigError
from elias.predictions import PADDING_SCORE, Predictions
from elias.rerank.reranker import Candidates, Reranker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.config import EliasConfig

_FAINT = np.float32(1e-20)  # far below any score that says something, far above the next
_FAINTER = np.float32(1e-25)


class Found(NamedTuple):
    """What a search found for points, and what a ranker reads of them."""

    ranked: Predictions
    given: Sequence[str] | csr_matrix
    """Texts, or the features they came as."""
    embedding: NDArray[np.float32] | None = None
    """φ(x) of each, for a ranker that reads it."""

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


def rerank(reranker: Reranker, found: Found, count: int, *, calibrated: bool) -> Predictions:
    """Return the labels found in the order that p·q, or the calibrated score, gives the best.

    Labels past the ``count`` best stay below them, in the order they had.
    """
    ranked = found.ranked
    said = reranker.score(found.candidates(count))
    best = ranked.scores[:, :count]
    # Where nothing is left of the score, p decides; the rest follows, fainter still.
    scores = (said.final if calibrated else said.product) + _FAINT * (1 + best)
    joined = np.concatenate([scores, _FAINTER * ranked.scores[:, count:]], axis=1)
    joined[ranked.ids >= ranked.n_labels] = PADDING_SCORE
    return Predictions.from_scores(ranked.ids, joined, ranked.n_labels, ranked.label_names)
