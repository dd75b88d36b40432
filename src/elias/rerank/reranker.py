"""Rerank candidates: sparse ranker, calibration and label names combined."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from elias.rerank.calibration import FEWEST_POINTS, Calibration, Mixture, mixed
from elias.rerank.features import RankerFeatures
from elias.rerank.label_names import LabelNames
from elias.rerank.sparse_ranker import SparseRanker, Transform, relevance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from elias.config import RerankConfig
    from elias.rerank.scoring import Nearness


logger = logging.getLogger(__name__)

POWERS = (1.0, 0.5, 0.25, 0.125)
"""What the power is chosen from. More than 1 was never clearly better."""
JUDGED = 5
"""k of the nDCG@k it is chosen by."""
_DISCOUNTS = 1 / np.log2(np.arange(2, JUDGED + 2))


def best_power(
    scores: NDArray[np.floating[Any]],
    relevances: NDArray[np.floating[Any]],
    relevant: NDArray[np.bool_],
    n_relevant: NDArray[np.integer[Any]],
) -> float:
    """Return the power of q with which p·q^γ has the best nDCG@5 on points.

    It is 1, the paper's, unless another gains more over it than the standard error of that gain.

    Args:
        scores: (N, k) p of each point's candidates, 0 where padded.
        relevances: (N, k) q of each.
        relevant: (N, k) whether the candidate is relevant.
        n_relevant: (N,) how many labels are relevant to each point, candidates or not.

    >>> p, q = np.array([[0.9, 0.8]] * 9), np.array([[0.5, 0.6]] * 9)
    >>> best_power(p, q, np.array([[True, False]] * 9), np.ones(9, dtype=int))
    0.5
    """
    ideal = np.cumsum(_DISCOUNTS)[np.clip(n_relevant, 1, JUDGED) - 1]

    def quality(power: float) -> NDArray[np.float64]:
        order = np.argsort(-scores * relevances**power, axis=1, kind="stable")[:, :JUDGED]
        gains = np.take_along_axis(relevant, order, axis=1) * _DISCOUNTS[: order.shape[1]]
        found: NDArray[np.float64] = gains.sum(axis=1) / ideal
        return found

    papers = quality(POWERS[0])
    best, most = POWERS[0], 0.0
    for power in POWERS[1:]:
        gain = quality(power) - papers
        error = gain.std() / np.sqrt(max(1, len(gain)))
        if gain.mean() > max(most, error):
            best, most = power, float(gain.mean())
    return best


class Candidates(NamedTuple):
    """Points, and the labels that the model ranks best for each."""

    given: Sequence[str] | csr_matrix
    """N texts, or their given features."""
    ids: NDArray[np.integer[Any]]
    """(N, k) labels; L is padding."""
    scores: NDArray[np.float32]
    """(N, k) p of each; those of padding do not matter."""
    embedding: NDArray[np.float32] | None = None
    """(N, D) φ(x), where the ranker is to have it (`RerankConfig.embedding`)."""


class RankedScores(NamedTuple):
    """What each part says of the candidates; padding scores -inf in ``final``, 0 in the others."""

    margin: NDArray[np.float32]
    """s, the ranker's margin (N, k)."""
    relevance: NDArray[np.float32]
    """q."""
    product: NDArray[np.float32]
    """p·q."""
    probability: NDArray[np.float32] | None
    """T, where there is a calibration."""
    final: NDArray[np.float32]
    """p·q, or its mixture with T."""
    nearness: Nearness | None = None
    """What T was told about the names of labels, if it was."""


class _HeldOut(NamedTuple):
    """Points that nothing was trained on, and what is known of their candidates (N, k)."""

    points: Candidates
    known: NDArray[np.bool_]
    """Which candidates are no padding."""
    sparse: csr_matrix
    relevance: NDArray[np.float32]
    """q as the margins alone have it, γ being 1."""
    relevant: NDArray[np.bool_]
    n_relevant: NDArray[np.integer[Any]]

    def best_power(self) -> float:
        """Return the γ with which p·q^γ ranks the points best."""
        p = np.where(self.known, self.points.scores, 0)
        best = best_power(p, self.relevance, self.relevant, self.n_relevant)
        if best != 1:
            logger.info("q is taken to the power of %g, which ranks held-out points best", best)
        return best


@dataclass(frozen=True)
class Reranker:
    """All that ELIAS++ adds to a trained model (§3.5, appendix C.2)."""

    features: RankerFeatures
    ranker: SparseRanker
    frequencies: NDArray[np.int64]
    """(L,) n_ℓ, the training points of each label."""
    calibration: Calibration | None
    transform: Transform
    mixture: Mixture
    sharpness: float = 1.0
    """γ, the power of q."""
    names: LabelNames | None = None
    """The names of labels, where a calibration is told about them."""
    by_name: Calibration | None = None
    """T that is also told how near a label's name is to the text; there is one of both or none."""

    @classmethod
    def fit(
        cls,
        train: Candidates,
        labels: csr_matrix,
        config: RerankConfig,
        *,
        validation: tuple[Candidates, csr_matrix] | None = None,
        label_names: Sequence[str] | None = None,
        seed: int = 0,
    ) -> Reranker:
        """Train the ranker and, on held-out points, the calibration, without and with names.

        Args:
            train: Training points with the candidates of the trained model.
            labels: (N, L) their relevant labels.
            config: The resolved settings.
            validation: Points that neither model nor ranker has seen, and their relevant labels;
                without them there is no calibration.
            label_names: The names of the labels, where they are to be told (`RerankConfig.names`).
            seed: Of the order in which the ranker visits points.
        """
        features = RankerFeatures.fit(train.given, config)
        sparse = features.transform(train.given)
        ranker = SparseRanker.fit(sparse, train.embedding, train.ids, labels, config, seed=seed)
        frequencies = np.bincount(labels.indices, minlength=labels.shape[1]).astype(np.int64)
        plain = cls(features, ranker, frequencies, None, config.transform, config.mixture)
        if config.sharpness is not None:
            plain = replace(plain, sharpness=config.sharpness)
        held_out = None if validation is None else plain._judged(*validation)
        if held_out is None:
            return plain
        if config.sharpness is None:
            plain = replace(plain, sharpness=held_out.best_power())
        if not config.calibrate:
            return plain
        named = LabelNames.read(features, label_names or ()) if config.names else None
        calibration = plain._calibrated(held_out, config)
        if named is None:
            return replace(plain, calibration=calibration)
        nearness = named.beside(held_out.sparse, held_out.points.ids)
        by_name = plain._calibrated(held_out, config, nearness)
        return replace(plain, calibration=calibration, names=named, by_name=by_name)

    def score(self, points: Candidates, *, named: bool = True) -> RankedScores:
        """Score the candidates of points anew; they stay in their order.

        Args:
            points: Points with their candidates.
            named: Whether T is told about names, where there is one that is.
        """
        known = points.ids < self.ranker.n_labels
        sparse = self.features.transform(points.given)
        margin = self.ranker.score(sparse, points.embedding, points.ids)
        q = relevance(margin, self.transform) ** np.float32(self.sharpness)
        p = np.where(known, points.scores, 0).astype(np.float32)
        product = p * q
        probability, final, nearness = None, product, None
        trees, told = self.calibration, self.names if named else None
        if told is not None:
            trees, nearness = self.by_name, told.beside(sparse, points.ids)
        if trees is not None:
            exact = trees.probability(p, q, self._frequencies(points.ids), nearness or ())
            final = mixed(exact, product, self.mixture)
            probability = np.where(known, exact, 0).astype(np.float32)
        return RankedScores(
            margin=np.where(known, margin, 0).astype(np.float32),
            relevance=q,
            product=product,
            probability=probability,
            final=np.where(known, final, -np.inf).astype(np.float32),
            nearness=nearness,
        )

    def _judged(self, points: Candidates, labels: csr_matrix) -> _HeldOut | None:
        """Return what ranker and truth say of held-out points; None where that is too little."""
        if len(points.ids) < FEWEST_POINTS:
            logger.info(
                "%d points are held out, fewer than %d: scores are not calibrated",
                len(points.ids),
                FEWEST_POINTS,
            )
            return None
        if not (points.ids < self.ranker.n_labels).any():
            logger.warning("no held-out point has a candidate: scores are not calibrated")
            return None
        sparse = self.features.transform(points.given)
        margin = self.ranker.score(sparse, points.embedding, points.ids)
        return _HeldOut(
            points=points,
            known=points.ids < self.ranker.n_labels,
            sparse=sparse,
            relevance=relevance(margin, self.transform),
            relevant=relevant_candidates(points.ids, labels),
            n_relevant=np.diff(labels.indptr),
        )

    def _calibrated(
        self,
        held_out: _HeldOut,
        config: RerankConfig,
        nearness: Sequence[NDArray[np.float32]] = (),
    ) -> Calibration:
        known, ids = held_out.known, held_out.points.ids
        return Calibration.fit(
            held_out.points.scores[known],
            held_out.relevance[known] ** np.float32(self.sharpness),
            self._frequencies(ids)[known],
            held_out.relevant[known],
            depth=config.tree_depth,
            leaf=config.tree_leaf,
            n_trees=config.trees,
            more=[each[known] for each in nearness],
            points=np.nonzero(known)[0],
        )

    def _frequencies(self, ids: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        found: NDArray[np.int64] = np.append(self.frequencies, 0)[ids]
        return found


def relevant_candidates(ids: NDArray[np.integer[Any]], labels: csr_matrix) -> NDArray[np.bool_]:
    """Return which candidates (N, k) are relevant; L and over are padding.

    >>> relevant_candidates(np.array([[1, 2], [0, 2]]), csr_matrix([[0, 1], [0, 1]])).tolist()
    [[True, False], [False, False]]
    """
    n_labels = labels.shape[1]
    rows = np.repeat(np.arange(len(ids)), np.diff(labels.indptr))
    own = np.unique(rows * n_labels + labels.indices.astype(np.int64))
    asked = np.arange(len(ids))[:, None] * n_labels + np.minimum(ids, n_labels - 1)
    found: NDArray[np.bool_] = np.isin(asked, own) & (ids < n_labels)
    return found
