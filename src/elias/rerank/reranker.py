"""Rerank candidates: sparse ranker, then calibration, then label names (§3.5, appendix C.2)."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, vstack

from elias.config import RerankConfig, ResolvedRerank
from elias.kernels.cpu.search import top_labels
from elias.predictions import PADDING_SCORE, Candidates, Predictions
from elias.rerank.calibration import (
    FOREST_LEAF,
    MIN_POINTS,
    MIXTURES,
    N_PROPOSED,
    Calibration,
    LabelNames,
    Mixture,
)
from elias.rerank.sparse_ranker import (
    MIN_WEIGHT,
    Inputs,
    RankerFeatures,
    Rows,
    SparseRanker,
    Transform,
    as_rows,
    relevance,
)

logger = logging.getLogger(__name__)

RERANK, CALIBRATE, NAMES = "rerank", "calibrate", "names"
"""Names of the components. The first ranks by p·q, the second by p·q and T, and the third by p·q
and a T that also uses label names.

p is the score of the search, q that of the ranker, and T the calibration.
"""
POWERS = (1.0, 0.5, 0.25, 0.125)
"""Exponents γ of q to choose from. Values above 1 were never clearly better."""
POWER_K = 5
"""The exponent γ is chosen by nDCG@k with this k."""
FOLDS = 3
"""Number of folds for cross-fitting the calibration."""
# settings of a ranker that scores every label, for corpora with few labels
FEW_POWERS = (16.0, 4.0, *POWERS)
"""Exponents γ to choose from. With a bag encoder, q was a better classifier than p."""
FEW_MIN_WEIGHT = 0.01
COST_FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of `RerankConfig.cost` to choose from, ascending."""
_DISCOUNTS = 1 / np.log2(np.arange(2, POWER_K + 2))
_POINTS_PER_CHUNK = 8192  # points whose features are in memory at once
# factors of p in the final score: p breaks ties, and labels that are not reranked come last
_TIE_BREAK = np.float32(1e-20)
_TAIL = np.float32(1e-25)


def product_of(
    scores: NDArray[np.floating[Any]], relevances: NDArray[np.floating[Any]], power: float
) -> NDArray[np.floating[Any]]:
    """Return p·q^γ, or its root p^(1/γ)·q for γ > 1, which has the same order.

    The root does not underflow.
    """
    scale = min(1, 1 / power)
    return scores**scale * relevances ** (power * scale)


def choose_sharpness(
    scores: NDArray[np.floating[Any]],
    relevances: NDArray[np.floating[Any]],
    relevant: NDArray[np.bool_],
    n_relevant: NDArray[np.integer[Any]],
    powers: Sequence[float] = POWERS,
    *,
    by_decisions: bool = False,
) -> float:
    """Return the power γ for which p·q^γ has the best nDCG@5.

    Another power replaces the first one only if its gain in nDCG@5 exceeds the standard error of
    the gain.

    Args:
        scores: (N, k) p of each point's candidates, 0 where padded.
        relevances: (N, k) q of each candidate.
        relevant: (N, k) mask of the relevant candidates.
        n_relevant: (N,) number of relevant labels of each point, including labels that are not
            candidates.
        powers: Values of γ to choose from. The paper uses γ = 1.
        by_decisions: Use `Decisions.quality` instead of nDCG@5, which does not depend on how the
            scores of different points compare.

    >>> p, q = np.array([[0.9, 0.8]] * 9), np.array([[0.5, 0.6]] * 9)
    >>> choose_sharpness(p, q, np.array([[True, False]] * 9), np.ones(9, dtype=int))
    0.5
    """
    ideal = np.cumsum(_DISCOUNTS)[np.clip(n_relevant, 1, POWER_K) - 1]

    def ndcg(product: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        order = np.argsort(-product, axis=1, kind="stable")[:, :POWER_K]
        gains = np.take_along_axis(relevant, order, axis=1) * _DISCOUNTS[: order.shape[1]]
        return np.asarray(gains.sum(axis=1) / ideal)

    products = (product_of(scores, relevances, power) for power in powers)
    qualities: Iterator[NDArray[np.float64]]
    if by_decisions:
        decisions = [Decisions.best(product, relevant, n_relevant) for product in products]
        qualities = (each.gains(decisions[0]) for each in decisions)
    else:
        qualities = map(ndcg, products)
    baseline = next(qualities)
    best, largest_gain = powers[0], 0.0
    for power, quality in zip(powers[1:], qualities, strict=True):
        gain = quality - baseline
        error = gain.std() / np.sqrt(max(1, len(gain)))
        if gain.mean() > max(largest_gain, error):
            best, largest_gain = power, float(gain.mean())
    return best


@dataclass(frozen=True)
class Decisions:
    """The labels that the best threshold assigns to points, as numbers of labels.

    >>> scores = np.array([[0.9, 0.8], [0.7, 0.2], [0.6, 0.5]])
    >>> relevant = np.array([[True, True], [True, False], [False, False]])
    >>> best = Decisions.best(scores, relevant, np.array([2, 1, 0]))
    >>> best.assigned.tolist(), best.hits.tolist(), best.f1
    ([2, 1, 0], [2, 1, 0], 1.0)
    """

    assigned: NDArray[np.int64]
    """(N,) number of assigned labels."""
    hits: NDArray[np.int64]
    """(N,) number of assigned labels that are relevant."""
    is_first_right: NDArray[np.bool_]
    """(N,) whether the label with the highest score is relevant."""
    n_relevant: NDArray[np.integer[Any]]
    """(N,) number of relevant labels."""

    @classmethod
    def best(
        cls,
        scores: NDArray[np.floating[Any]],
        relevant: NDArray[np.bool_],
        n_relevant: NDArray[np.integer[Any]],
    ) -> Decisions:
        """Assign the labels above the threshold with the highest micro-averaged F1.

        The best label of each point is assigned whatever its score, if that has a higher F1. If
        every point has exactly one relevant label, every point is assigned its best label only.
        The arguments are as in `choose_sharpness`.
        """
        rows = np.arange(len(scores))
        first = scores.argmax(axis=1)
        is_first = first[:, None] == np.arange(scores.shape[1])
        ones, is_first_right = np.ones(len(scores), dtype=np.int64), relevant[rows, first]
        chosen = cls(ones, is_first_right.astype(np.int64), is_first_right, n_relevant)
        if (n_relevant == 1).all():
            return chosen
        for reached in (np.where(is_first, np.inf, scores), scores):
            order = np.argsort(-reached, axis=None, kind="stable")
            n_assigned = np.arange(1, len(order) + 1)
            f1 = 2 * relevant.ravel()[order].cumsum() / (n_assigned + n_relevant.sum())
            descending = reached.ravel()[order]  # equal scores are assigned together
            is_end = np.append(descending[1:] != descending[:-1], [True])
            threshold = descending[np.where(is_end, f1, -1).argmax()]
            is_assigned = reached >= threshold
            assigned, hits = is_assigned.sum(axis=1), (is_assigned & relevant).sum(axis=1)
            other = cls(assigned, hits, is_first_right, n_relevant)
            chosen = max(chosen, other, key=lambda each: each.f1)
        return chosen

    @property
    def f1(self) -> float:
        """Return micro-averaged F1."""
        return float(2 * self.hits.sum() / max(1, (self.assigned + self.n_relevant).sum()))

    @property
    def quality(self) -> float:
        """Return the mean of F1 and P@1. P@1 is that of the points with relevant labels."""
        return float(self.f1 + self.is_first_right.sum() / max(1, (self.n_relevant > 0).sum())) / 2

    def gains(self, other: Decisions) -> NDArray[np.float64]:
        """Return (N,) numbers whose mean is about the difference in `quality` to ``other``.

        F1 is linearised, so that each point has a share of its difference.
        """
        size = max(1, (other.assigned + other.n_relevant).sum()) / len(self.hits)
        right = self.is_first_right.astype(np.float64) - other.is_first_right
        share = max(1, (self.n_relevant > 0).sum()) / len(self.hits)
        gain = 2 * (self.hits - other.hits) - other.f1 * (self.assigned - other.assigned)
        return np.asarray(gain / size + right / share) / 2


def is_calibrated(config: RerankConfig, n_held_out: int, *, every_label: bool) -> bool:
    """Return whether `Reranker.fit` fits calibrations if this number of points is held out.

    Calibrations do not help a ranker that scores every label, because it is trained on every pair.
    """
    return config.calibrate and not every_label and n_held_out >= MIN_POINTS


@dataclass(frozen=True)
class Reranker:
    """The parts that ELIAS++ adds to a trained model (§3.5, appendix C.2)."""

    features: RankerFeatures
    ranker: SparseRanker
    frequencies: NDArray[np.int64]
    """(L,) n_ℓ, the number of training points of each label."""
    calibration: Calibration | None
    transform: Transform
    mixture: Mixture
    sharpness: float = 1.0
    """Exponent γ of q in p·q^γ. If it is above 1, p^(1/γ)·q is used, which gives the same order."""
    names: LabelNames | None = None
    """The label names for ``by_name``, or None if ``by_name`` is None."""
    by_name: Calibration | None = None
    """A second calibration T that also uses the overlap of label name and text."""
    n_proposed: int = 0
    """Number of candidates that names add for ``by_name``; 0 in models of earlier versions."""
    cost: float = field(default=1.0, compare=False)
    """C of the ranker, which `fit` may have chosen. It is not saved."""
    cross_fitted: tuple[tuple[NDArray[np.bool_], Reranker], ...] = field(default=(), compare=False)
    """For each fold of the held-out points given to `fit`, its mask and a reranker whose
    calibrations were fitted on the other folds. They are not saved."""
    refitted: bool = field(default=False, compare=False)
    """True if `fit` also trained the ranker on the held-out points."""

    @classmethod
    def fit(
        cls,
        features: RankerFeatures,
        train: Candidates,
        psi: csr_matrix,
        labels: csr_matrix,
        config: ResolvedRerank,
        *,
        validation: tuple[Candidates, csr_matrix, csr_matrix] | None = None,
        filtered: csr_matrix | None = None,
        label_names: Sequence[str] | None = None,
        every_label: bool = False,
        refit_psi: csr_matrix | None = None,
        seed: int = 0,
        earlier: Reranker | None = None,
    ) -> Reranker:
        """Train the ranker, and fit the calibrations without and with names on held-out points.

        Args:
            features: The vocabulary of the ranker.
            train: Candidates of the training points, from the trained model.
            psi: (N, F) features ψ(x) of the training points.
            labels: (N, L) relevant labels of the training points.
            config: The resolved settings.
            validation: Candidates, features and relevant labels of points that neither model nor
                ranker was trained on. If None, scores are not calibrated.
            filtered: (N, L) labels that the filters exclude for each validation point.
            label_names: Names of the labels, for `RerankConfig.names`.
            every_label: Whether all labels are candidates. The ranker is then a complete linear
                classifier: it is regularised less, and q gets more weight.
            refit_psi: (N, F) features of the validation points for training. If given, the ranker
                is finally trained again with these points, if there were enough of them to compute
                `cross_fitted`.
            seed: Seed of the order in which the ranker visits points.
            earlier: A reranker with the same ``features`` to continue from. Its labels must come
                first in ``labels``. Its calibrations, if any, are kept, because the held-out points
                may be few, or it may have been trained on them. For this reason, C is not chosen
                again. The frequency of a label is the larger of the old and the new one.
        """
        fit_ranker = partial(
            SparseRanker.fit,
            min_weight=FEW_MIN_WEIGHT if every_label else MIN_WEIGHT,
            seed=seed,
            earlier=None if earlier is None else earlier.ranker,
        )
        frequencies = np.bincount(labels.indices, minlength=labels.shape[1]).astype(np.int64)
        if earlier is not None:
            known = frequencies[: len(earlier.frequencies)]
            np.maximum(known, earlier.frequencies, out=known)
        transform: Transform = "sigmoid" if config.loss == "logistic" else "l3-hinge"
        sharpness = (FEW_POWERS if every_label else POWERS)[0]
        costs, best = [config.cost], -np.inf
        n_held_out = 0 if validation is None else len(validation[0].ids)
        if config.choose_cost and earlier is None and n_held_out >= MIN_POINTS:
            costs = [factor * config.cost for factor in COST_FACTORS]
        duals = None  # each fit starts from the one with the cost before
        for cost in costs:
            settings = replace(config, cost=cost)
            fitted, duals = fit_ranker(
                psi, train.embedding, train.ids, labels, settings, solution=duals
            )
            candidate = cls(
                features, fitted, frequencies, None, transform, "sum", sharpness, cost=cost
            )
            quality = 0.0
            if len(costs) > 1 and validation is not None:
                quality = candidate._decisions(*validation).quality
                logger.debug("C = %g: mean of P@1 and F1 on held-out points %.4f", cost, quality)
            # of equally good costs, take the one nearest to the default
            if quality > best or (quality == best and cost <= config.cost):
                best, reranker, solution = quality, candidate, duals
        config, ranker = replace(config, cost=reranker.cost), reranker.ranker
        if earlier is not None and earlier.calibration is not None:
            names = LabelNames.read(features, label_names or ()) if earlier.by_name else None
            return replace(
                earlier, ranker=ranker, frequencies=frequencies, names=names, cross_fitted=()
            )
        if validation is not None:
            reranker = reranker._fit_held_out(
                *validation, config, label_names or (), filtered, every_label=every_label
            )
        if refit_psi is not None and validation is not None and reranker.cross_fitted:
            held_out, _, more_labels = validation
            dense = None
            if train.embedding is not None and held_out.embedding is not None:
                dense = np.concatenate([train.embedding, held_out.embedding])
            ranker, _ = fit_ranker(
                vstack([psi, refit_psi], format="csr"),
                dense,
                np.concatenate([train.ids, held_out.ids]),
                vstack([labels, more_labels], format="csr"),
                config,
                solution=solution,
            )
            reranker = replace(reranker, ranker=ranker, refitted=True)
        return reranker

    def _held_out_scores(
        self, candidates: Candidates, psi: csr_matrix
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return p and q of the candidates. p is 0 for labels without training points."""
        ids = np.ascontiguousarray(candidates.ids)  # numba would compile again for slices
        known = np.append(self._trained, False)[ids]
        q = relevance(self.ranker.score(psi, candidates.embedding, ids), self.transform)
        return np.where(known, candidates.scores, 0), q

    def _decisions(self, candidates: Candidates, psi: csr_matrix, labels: csr_matrix) -> Decisions:
        """Return what the best threshold assigns to held-out points."""
        product = product_of(*self._held_out_scores(candidates, psi), self.sharpness)
        relevant = relevant_candidates(candidates.ids, labels)
        return Decisions.best(product, relevant, np.diff(labels.indptr))

    def _fit_held_out(
        self,
        candidates: Candidates,
        psi: csr_matrix,
        labels: csr_matrix,
        config: ResolvedRerank,
        label_names: Sequence[str],
        filtered: csr_matrix | None,
        *,
        every_label: bool,
    ) -> Reranker:
        """Choose γ and fit the calibrations on held-out points."""
        ids = np.ascontiguousarray(candidates.ids)  # numba would compile again for slices
        trained = np.append(self._trained, False)  # others are right only for held-out points
        known = trained[ids]
        enough = len(ids) >= MIN_POINTS
        if not enough and not every_label:
            message = "scores are not calibrated: only %d points are held out, but %d are needed"
            logger.info(message, len(ids), MIN_POINTS)
            return self
        if not known.any():
            logger.warning("scores are not calibrated: no held-out point has a candidate")
            return self
        p, q = self._held_out_scores(candidates, psi)
        relevant, n_relevant = relevant_candidates(ids, labels), np.diff(labels.indptr)
        sharpness = self.sharpness
        if enough:
            powers = FEW_POWERS if every_label else POWERS
            sharpness = choose_sharpness(
                p, q, relevant, n_relevant, powers, by_decisions=every_label
            )
        if sharpness != self.sharpness:
            logger.debug("exponent of the ranker score, chosen on held-out points: %g", sharpness)
        reranker = replace(self, sharpness=sharpness)
        if every_label:
            return replace(reranker, cross_fitted=((np.ones(len(ids), dtype=bool), reranker),))
        if not is_calibrated(config, len(ids), every_label=every_label):
            return reranker
        names = LabelNames.read(self.features, label_names) if config.names else None
        n_searched, overlap = ids.shape[1], None
        if names is not None:
            reranker = replace(reranker, names=names, n_proposed=N_PROPOSED)
            candidates = reranker._with_proposed(candidates, psi)
            ids, known = candidates.ids, trained[candidates.ids]
            if filtered is not None:
                known &= ~relevant_candidates(ids, filtered)
            q = relevance(self.ranker.score(psi, candidates.embedding, ids), self.transform)
            relevant, overlap = relevant_candidates(ids, labels), names.overlap(psi, ids)
        frequencies = np.append(self.frequencies, 0)[ids]
        p, q = candidates.scores, q ** np.float32(sharpness)
        folds = np.random.default_rng(0).permutation(len(ids)) % FOLDS

        def fit(chosen: NDArray[np.bool_], extra: Sequence[NDArray[np.float32]]) -> Calibration:
            return Calibration.fit(
                p[chosen],
                q[chosen],
                frequencies[chosen],
                relevant[chosen],
                leaf=1 if config.trees == 1 else FOREST_LEAF,
                n_trees=config.trees,
                extra=[values[chosen] for values in extra],
                points=np.nonzero(chosen)[0],
            )

        def calibrated(points: NDArray[np.bool_]) -> Reranker:
            """Return the reranker with calibrations that are fitted on the given points."""
            chosen = known & points[:, None]
            by_name = None if overlap is None else fit(chosen, overlap)
            chosen[:, n_searched:] = False
            return replace(reranker, calibration=fit(chosen, ()), by_name=by_name)

        parts = [folds == part for part in range(FOLDS)]
        cross_fitted = tuple((rows, calibrated(~rows)) for rows in parts)
        return replace(calibrated(np.ones(len(ids), dtype=bool)), cross_fitted=cross_fitted)

    def _with_proposed(
        self,
        candidates: Candidates,
        psi: csr_matrix | Rows,
        blocked: NDArray[np.bool_] | None = None,
    ) -> Candidates:
        """Append the labels with the most similar names to the candidates, with p = 0.

        Labels without training points are not proposed: the ranker does not know them.
        """
        allowed = self._trained
        if self.names is None or not self.n_proposed or candidates.ids.shape[1] >= len(allowed):
            return candidates
        if blocked is not None:
            allowed = allowed & ~blocked[: len(allowed)]
        more = self.names.propose(psi, candidates.ids, allowed, self.n_proposed)
        ids = np.concatenate([candidates.ids, more], axis=1)
        p = np.where(more < len(allowed), 0, PADDING_SCORE).astype(np.float32)
        return replace(candidates, ids=ids, scores=np.concatenate([candidates.scores, p], axis=1))

    def rerank_cross_fitted(
        self, candidates: Candidates, psi: csr_matrix, *, count: int, width: int | None = None
    ) -> dict[str, Predictions]:
        """Return rankings of the held-out points that `fit` was given, by cross-fitting.

        Each point is ranked by calibrations that were fitted on other points, so the metrics of
        these rankings estimate the metrics on new texts.
        """
        names, parts = self.components, []
        for rows, fold in self.cross_fitted:
            part = candidates.take(rows)
            parts.append(fold.rerank(part, (), names, count=count, width=width, psi=psi[rows]))
        order = np.argsort(np.concatenate([np.flatnonzero(rows) for rows, _ in self.cross_fitted]))
        return {
            name: Predictions.stack([part[name] for part in parts]).take(order) for name in names
        }

    def up_to(self, component: str) -> Reranker:
        """Return a copy without the components that follow ``component``."""
        if component == RERANK:
            return replace(self, calibration=None, names=None, by_name=None)
        return self if component == NAMES else replace(self, names=None, by_name=None)

    @cached_property
    def components(self) -> tuple[str, ...]:
        """Return the names of the components that this reranker has, in order."""
        parts = {RERANK: self.ranker, CALIBRATE: self.calibration, NAMES: self.by_name}
        return tuple(name for name, part in parts.items() if part is not None)

    @cached_property
    def _trained(self) -> NDArray[np.bool_]:
        """Return a mask (L,) of the labels with training points."""
        return self.frequencies > 0

    def rerank(
        self,
        candidates: Candidates,
        inputs: Inputs,
        components: Sequence[str],
        *,
        count: int,
        width: int | None = None,
        label_names: Sequence[str] | None = None,
        psi: csr_matrix | None = None,
        blocked: NDArray[np.bool_] | None = None,
    ) -> dict[str, Predictions]:
        """Return the candidates ranked by each component. Features are computed only once.

        Labels that `NAMES` adds by their names can take the place of the last candidates.

        Args:
            candidates: Candidates of N points, best first.
            inputs: N texts, or a feature matrix for a model trained on features.
            components: Components of this reranker.
            count: Number of candidates to score. The others follow in the same order.
            width: Number of labels to return for each point. None returns all candidates.
            label_names: Names for the predictions.
            psi: (N, F) features of the points. None computes them from ``inputs``.
            blocked: (L,) mask of the labels that must not be added.
        """
        n_labels = len(self.frequencies)
        parts: dict[str, list[tuple[NDArray[np.int64], NDArray[np.float32]]]] = defaultdict(list)
        for start in range(0, max(len(candidates.ids), 1), _POINTS_PER_CHUNK):
            rows = slice(start, start + _POINTS_PER_CHUNK)
            features = self.features.rows(inputs[rows]) if psi is None else as_rows(psi[rows])
            head = best = candidates.take(rows, count)
            tail, tail_scores = candidates.ids[rows, count:], candidates.scores[rows, count:]
            if NAMES in components:
                best = self._with_proposed(head, features, blocked)
                proposed = best.ids[:, head.ids.shape[1] :]
            for name, scores in self.scores(best, features, components)[0].items():
                n_ranked = (best if name == NAMES else head).ids.shape[1]
                if name == NAMES and tail.size:  # proposed labels are already ranked; do not repeat
                    row = np.arange(len(tail))[:, None] * (n_labels + 1)
                    tail = np.where(np.isin(row + tail, row + proposed), n_labels, tail)
                ids = np.concatenate([best.ids[:, :n_ranked], tail], axis=1)
                # p breaks ties, and labels that are not reranked come last
                ranked = (scores + _TIE_BREAK * (1 + best.scores))[:, :n_ranked]
                joined = np.concatenate([ranked, _TAIL * tail_scores], axis=1)
                joined[ids >= n_labels] = PADDING_SCORE
                parts[name].append(
                    top_labels(ids, joined, width or candidates.ids.shape[1], n_labels)
                )
        predictions = {}
        for name, chunks in parts.items():
            best_ids, best_scores = map(np.concatenate, zip(*chunks, strict=True))
            predictions[name] = Predictions(best_ids, best_scores, n_labels, label_names)
        return predictions

    def scores(
        self, candidates: Candidates, psi: csr_matrix | Rows, components: Collection[str]
    ) -> tuple[dict[str, NDArray[np.float32]], dict[str, NDArray[np.float32]]]:
        """Return the scores (N, k) of the candidates for each component, and their `factors`.

        The score of padding is -inf.
        """
        ids = np.ascontiguousarray(candidates.ids)  # numba would compile again for slices
        known = ids < len(self.frequencies)
        q = relevance(self.ranker.score(psi, candidates.embedding, ids), self.transform)
        p = np.where(known, candidates.scores, 0).astype(np.float32)
        product = p
        if self.sharpness != 1:
            # for γ > 1 use the root of p·q^γ, which gives the same ranking and does not underflow
            product = p ** np.float32(min(1, 1 / self.sharpness))
            q **= np.float32(min(self.sharpness, 1))
        product = product * q
        scores, factors = {}, {"ranker_score": q}
        for name in components:
            final = product
            if name != RERANK:
                trees, overlap = self.calibration, None
                if name == NAMES and self.names is not None:
                    trees, overlap = self.by_name, self.names.overlap(psi, ids)
                    factors["name_likeness"], factors["name_coverage"] = overlap
                assert trees is not None, f"this reranker has no component {name}"
                frequencies = np.take(self.frequencies, ids, mode="clip")
                probability = trees.probability(p, q, frequencies, overlap or ())
                factors["calibrated_score"] = np.where(known, probability, 0).astype(np.float32)
                of_trees, of_product = MIXTURES[self.mixture]
                final = of_trees * probability + of_product * product
            scores[name] = np.where(known, final, -np.inf).astype(np.float32)
        return scores, factors

    def factors(self, candidates: Candidates, inputs: Inputs) -> dict[str, NDArray[np.float32]]:
        """Return the factors of the final score, each (N, k) and 0 where padded.

        ``ranker_score`` is q^γ. ``calibrated_score`` is T, if the reranker has a calibration.
        ``name_likeness`` and ``name_coverage`` are the `NameOverlap`, if T uses names.
        """
        return self.scores(candidates, self.features.rows(inputs), self.components[-1:])[1]


def relevant_candidates(ids: NDArray[np.integer[Any]], labels: csr_matrix) -> NDArray[np.bool_]:
    """Return a mask (N, k) of the relevant candidates; ids of L and above are padding.

    >>> from scipy.sparse import csr_matrix
    >>> relevant_candidates(np.array([[1, 2], [0, 2]]), csr_matrix([[0, 1], [0, 1]])).tolist()
    [[True, False], [False, False]]
    """
    n_labels = labels.shape[1]
    rows = np.repeat(np.arange(len(ids)), np.diff(labels.indptr))
    relevant = np.unique(rows * n_labels + labels.indices.astype(np.int64))
    keys = np.arange(len(ids))[:, None] * n_labels + np.minimum(ids, n_labels - 1)
    return np.asarray(np.isin(keys, relevant) & (ids < n_labels))
