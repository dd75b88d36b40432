"""Turn scores into probabilities and choose decision thresholds.

The map from scores to probabilities is monotone, so it does not change the ranking. It is fitted
with scikit-learn and stored as arrays, so that a saved model contains no pickle. Precision and
recall on the held-out points are stored for each threshold, and used to choose a threshold.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from elias.errors import ConfigError, damaged_file, quoted
from elias.metrics import f1_metrics, rounded
from elias.predictions import Predictions
from elias.rerank.calibration import MIN_POINTS
from elias.rerank.reranker import relevant_candidates

logger = logging.getLogger(__name__)

PROBABILITIES = "probabilities"
"""Metadata key under which a model stores the quality of its probabilities."""
ECE_AT = 5
_STEPS = 200
"""Number of equal steps between 0 and 1. Their bounds are the thresholds at which precision and
recall are measured."""
_N_BINS = 15
_FOLDS = 3  # more folds fitted on more points, but overestimated the error of few points
F1_TARGETS = ("f1", "macro-f1")
PER_LABEL = "per-label"
_RARE_POWERS = tuple(step / 10 for step in range(11))
"""Exponents τ to try for ``macro-f1``, see `_rare_weights`."""
MIN_LABEL_POINTS = 20
"""Minimum number of held-out points of a label for a ``per-label`` threshold."""
_TARGET = re.compile(r"(precision|recall)\s*=\s*([0-9.]+)")
_ARRAYS = ("scores", "values", "precision", "recall")


@dataclass(frozen=True, slots=True, eq=False)
class Probabilities:
    """A monotone map from scores to the probability that a label is relevant.

    >>> import numpy as np
    >>> from scipy.sparse import csr_matrix
    >>> from elias.predictions import Predictions
    >>> predictions = Predictions.from_scores([[0, 1]] * 8, [[3.0, 1.0]] * 8, n_labels=2)
    >>> truth = csr_matrix([[1, 0]] * 7 + [[0, 1]])
    >>> probabilities = Probabilities.fit(predictions, truth)
    >>> print(probabilities.of(np.float32([1.0, 2.0, 9.0])).round(2))
    [0.12 0.45 0.78]
    >>> probabilities.threshold("precision=0.8")
    0.13
    """

    scores: NDArray[np.float64]
    """Knots of the map, ascending."""
    values: NDArray[np.float64]
    """Probability at each knot, non-decreasing. Between knots it is interpolated linearly."""
    precision: NDArray[np.float64]
    """Precision at each threshold, the share of assigned labels that are relevant."""
    recall: NDArray[np.float64]
    """Recall at each threshold, the share of relevant labels that are assigned."""
    rules: Mapping[str, tuple[float, bool]] = field(default_factory=dict)
    """For ``f1`` and ``macro-f1``: the best threshold, and whether the best label of a point is
    assigned even if it is below the threshold. Models of older versions have no rules."""
    by_label: Mapping[int, float] = field(default_factory=dict)
    """Thresholds of single labels for ``per-label``. All other labels use the ``f1`` threshold."""
    weights: Mapping[int, float] = field(default_factory=dict)
    """Weights of labels for ``macro-f1``, if every held-out point has exactly one label.

    A point then gets the label for which score times weight is highest."""

    @classmethod
    def fit(cls, predictions: Predictions, labels: csr_matrix) -> Probabilities | None:
        """Fit the map to predictions for held-out points and their relevant labels (N, L).

        Return None if the map cannot be fitted, because none or all of the predicted labels are
        relevant.
        """
        from sklearn.isotonic import IsotonicRegression  # late import: only for training

        known = predictions.ids < predictions.n_labels
        scores = predictions.scores[known].astype(np.float64)
        relevant = relevant_candidates(predictions.ids, labels)[known]
        if not relevant.any() or relevant.all():
            return None
        isotonic = IsotonicRegression(y_min=0, y_max=1)
        # add a wrong label with the highest score, so that no probability becomes 1
        isotonic.fit(np.append(scores, scores.max()), np.append(relevant, False))
        knots = np.asarray(isotonic.X_thresholds_, dtype=np.float64)
        values = np.asarray(isotonic.y_thresholds_, dtype=np.float64)
        probability = np.interp(scores, knots, values)
        steps, ids = _steps(probability), predictions.ids[known]
        assigned, correct = _reached(steps), _reached(steps, relevant)
        precision = np.divide(correct, assigned, out=np.ones_like(correct), where=assigned > 0)
        is_best = np.nonzero(known)[1] == 0
        rules = _choose_rules(steps, ids, relevant, is_best, labels)
        weights: dict[int, float] = {}
        if (np.diff(labels.indptr) == 1).all():
            rules = dict.fromkeys(F1_TARGETS, (1.0, True))
            weights = _rare_weights(predictions, labels)
        lowest = round(_STEPS * rules["f1"][0])
        by_label = _label_thresholds(steps, ids, relevant, labels, lowest)
        recall = correct / max(labels.nnz, 1)
        return cls(knots, values, precision, recall, rules, by_label, weights)

    def of(self, scores: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """Return the probability of each score. Padding, whose score is -inf, gets 0."""
        probability = np.interp(np.asarray(scores, dtype=np.float64), self.scores, self.values)
        return np.where(np.isneginf(scores), 0, probability).astype(np.float32)

    def threshold(self, target: float | str) -> float:
        """Return the decision threshold for a target.

        Labels with a probability of at least the threshold are assigned.

        Args:
            target: A number, which must not exceed 1, is returned unchanged. ``"f1"`` chooses the
                threshold with the highest F1 on the held-out points, ``"precision=0.8"`` the lowest
                threshold with at least this precision, and ``"recall=0.6"`` the highest threshold
                with at least this recall. All three metrics are micro-averaged over (point, label)
                pairs.
                ``"macro-f1"`` chooses the threshold with the highest mean F1 of the labels;
                `weights` may change the best label. ``"per-label"`` is like ``"f1"``, but some
                labels have their own thresholds (`by_label`). See also `keeps_best`.

        Raises:
            ConfigError: If the target is invalid, or no threshold reaches it.
        """
        name, least = parse_target(target)
        name = "f1" if name == PER_LABEL else name
        if name in F1_TARGETS:
            return self.rules[name][0] if name in self.rules else self.f1.argmax() / _STEPS
        if name is None and least > 1:
            problem = f"threshold {target!r}: a probability is at most 1"
            raise ConfigError(f"{problem}; give a lower number, such as 0.5 for 50%")
        if name is None:
            return least
        reached = (getattr(self, name) >= least) & (self.recall > 0)
        if not reached.any():
            best = float(getattr(self, name)[self.recall > 0].max(initial=0))
            raise ConfigError(
                f"threshold {target!r}: no threshold reached this on the held-out points, where "
                f"the highest {name} was {best:.3f}; give a lower {name}"
            )
        # the highest threshold with this recall, or the lowest threshold with this precision
        steps = np.flatnonzero(reached)
        return float(steps[-1] if name == "recall" else steps[0]) / _STEPS

    def keeps_best(self, target: float | str) -> bool:
        """Return whether a point gets its best label even if it is below the threshold.

        This is True for ``"f1"`` and ``"macro-f1"`` if it improved the metric on held-out points.
        """
        name = str(parse_target(target)[0])
        return self.rules.get("f1" if name == PER_LABEL else name, (0.0, False))[1]

    def assign(self, predictions: Predictions, target: float | str) -> Predictions:
        """Keep only the labels that the rule for ``target`` assigns, see `threshold`."""
        if weights := self.label_weights(target):
            return predictions.best_by(weights)
        return predictions.threshold(
            self.threshold(target),
            keep_best=self.keeps_best(target),
            by_label=self.label_thresholds(target),
        )

    def label_thresholds(self, target: float | str) -> Mapping[int, float]:
        """Return the thresholds of single labels. Only the target ``"per-label"`` has any."""
        return self.by_label if parse_target(target)[0] == PER_LABEL else {}

    def label_weights(self, target: float | str) -> Mapping[int, float]:
        """Return the `weights` of labels. Only the target ``"macro-f1"`` has any."""
        return self.weights if parse_target(target)[0] == "macro-f1" else {}

    @property
    def f1(self) -> NDArray[np.float64]:
        """Return F1 at each threshold: the harmonic mean of precision and recall."""
        total = self.precision + self.recall
        product = 2 * self.precision * self.recall
        return np.divide(product, total, out=np.zeros_like(total), where=total > 0)

    @property
    def thresholds(self) -> NDArray[np.float64]:
        """Return the thresholds at which precision and recall were measured."""
        return np.arange(_STEPS + 1) / _STEPS

    def to_dict(self) -> dict[str, Any]:
        """Return the map, precision and recall as a JSON-compatible dictionary of lists."""
        arrays = {name: getattr(self, name).tolist() for name in _ARRAYS}
        rules = {name: list(rule) for name, rule in self.rules.items()}
        pairs = {"by_label": self.by_label, "weights": self.weights}
        of_labels = {name: list(map(list, by_label.items())) for name, by_label in pairs.items()}
        return arrays | {"rules": rules} | of_labels

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any], path: Path) -> Probabilities:
        """Build the map from the result of `to_dict`, which was read from the file ``path``.

        Raises:
            ModelError: If an array is missing or invalid.
        """
        try:
            arrays = {name: np.array(tree[name], dtype=np.float64) for name in _ARRAYS}
            rules = {
                str(name): (float(lowest), bool(keeps_best))
                for name, (lowest, keeps_best) in tree.get("rules", {}).items()
            }
            by_label, weights = (
                {int(label): float(value) for label, value in tree.get(name, [])}
                for name in ("by_label", "weights")
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged_file(path, f"damaged ({quoted(error)})") from error
        scores, *shares = arrays.values()
        values, precision, recall = shares
        monotonic = (
            all(array.ndim == 1 and np.isfinite(array).all() for array in arrays.values())
            and len(scores) == len(values) > 0
            and len(precision) == len(recall) == _STEPS + 1
            and all((np.diff(knots) >= 0).all() for knots in (scores, values))
            and all(((share >= 0) & (share <= 1)).all() for share in shares)
            and all(label >= 0 and 0 <= least <= 1 for label, least in by_label.items())
            and all(label >= 0 and weight > 0 for label, weight in weights.items())
        )
        if not monotonic:
            raise damaged_file(
                path, "the map from scores to probabilities is not monotonic in [0, 1]"
            )
        return cls(**arrays, rules=rules, by_label=by_label, weights=weights)


def parse_target(target: float | str) -> tuple[str | None, float]:
    """Return the metric of a threshold target and its minimum.

    If the target is a number, return None and this number.

    >>> parse_target("precision=0.8"), parse_target("0.3"), parse_target("f1")
    (('precision', 0.8), (None, 0.3), ('f1', 0.0))

    Raises:
        ConfigError: If the target is invalid.
    """
    if not isinstance(target, str):
        return None, float(target)
    text = target.strip().lower()
    if text in (*F1_TARGETS, PER_LABEL):
        return text, 0.0
    match = _TARGET.fullmatch(text)
    name, number = (match[1], match[2]) if match else (None, text)
    try:
        least = float(number)
    except ValueError:
        least = float("nan")
    if not 0 <= least <= 1 and (name is not None or np.isnan(least)):
        raise ConfigError(
            f"threshold {target!r}: give a number, f1, macro-f1, per-label, precision=0.8 or "
            "recall=0.6 (precision and recall between 0 and 1)"
        )
    return name, least


@dataclass(frozen=True, slots=True)
class Reliability:
    """Data of a reliability diagram with equal-width bins of probability."""

    predicted: NDArray[np.float64]
    """Mean probability of the labels in each bin, or NaN if the bin is empty."""
    true: NDArray[np.float64]
    """Share of relevant labels in each bin, or NaN if the bin is empty."""
    counts: NDArray[np.int64]

    @property
    def error(self) -> float:
        """Return the expected calibration error in percent."""
        off = np.nansum(self.counts * np.abs(self.predicted - self.true))
        return float(100 * off / max(self.counts.sum(), 1))


def reliability(
    predictions: Predictions, labels: csr_matrix, k: int, *, calibrated: bool = True
) -> Reliability:
    """Compare the probabilities of the best ``k`` labels of each point with their relevance.

    If ``calibrated`` is False, scores clipped to [0, 1] are used as probabilities.
    """
    best = predictions.top(k)
    known = best.ids < best.n_labels
    relevant = relevant_candidates(best.ids, labels)[known]
    if calibrated and best.probabilities is not None:
        probability = best.probabilities[known].astype(np.float64)
    else:
        probability = np.clip(best.scores[known].astype(np.float64), 0, 1)
    bins = np.minimum((probability * _N_BINS).astype(int), _N_BINS - 1)
    counts = np.bincount(bins, minlength=_N_BINS)
    sums = [np.bincount(bins, weights=of, minlength=_N_BINS) for of in (probability, relevant)]
    predicted, true = (np.where(counts > 0, one / np.maximum(counts, 1), np.nan) for one in sums)
    return Reliability(predicted, true, counts)


def calibration_error(
    predictions: Predictions, labels: csr_matrix, k: int, *, calibrated: bool = True
) -> float:
    """Return ECE@k in percent: the expected calibration error of the best ``k`` labels.

    Labels are grouped into fifteen bins by probability. The error of a bin is the absolute
    difference between its mean probability and its share of relevant labels. The errors are
    averaged, weighted by the number of labels in each bin. If ``calibrated`` is False, scores
    clipped to [0, 1] are used as probabilities.
    """
    return reliability(predictions, labels, k, calibrated=calibrated).error


def _steps(probability: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the step of the highest threshold that each probability reaches."""
    rounded = probability.astype(np.float32).astype(np.float64)
    return np.floor(rounded * _STEPS + 1e-9).astype(np.int64)


def _choose_rules(
    steps: NDArray[np.int64],
    ids: NDArray[np.integer[Any]],
    relevant: NDArray[np.bool_],
    is_best: NDArray[np.bool_],
    labels: csr_matrix,
) -> dict[str, tuple[float, bool]]:
    """Return the best decision rule for each of `F1_TARGETS` on held-out points.

    Args:
        steps: (M,) result of `_steps` for each predicted (point, label) pair.
        ids: (M,) label of each pair.
        relevant: (M,) whether the label of the pair is relevant.
        is_best: (M,) whether the label of the pair is the best of its point.
        labels: (N, L) relevant labels.
    """
    # labels that do not occur cannot change which rule is best
    names, of_label = np.unique(np.append(ids, labels.indices), return_inverse=True)
    n_labels = len(names)
    n_relevant = np.bincount(of_label[len(ids) :], minlength=n_labels)
    rules: dict[str, tuple[float, bool]] = {}
    best = dict.fromkeys(F1_TARGETS, -1.0)
    for keep_best in (False, True):
        reached = np.where(is_best & keep_best, _STEPS, steps)
        order = np.argsort(-reached, kind="stable")
        ends = np.searchsorted(-reached[order], -np.arange(_STEPS + 1), side="right")
        assigned, hits = np.zeros((2, n_labels))
        begin = 0
        for step in range(_STEPS, -1, -1):
            new = order[begin : ends[step]]
            begin = ends[step]
            assigned += np.bincount(of_label[new], minlength=n_labels)
            hits += np.bincount(of_label[new], weights=relevant[new], minlength=n_labels)
            totals = assigned + n_relevant
            values = (
                2 * hits.sum() / max(1, totals.sum()),
                float(np.mean(2 * hits / np.maximum(totals, 1))),
            )
            for name, value in zip(F1_TARGETS, values, strict=True):
                if value > best[name]:
                    best[name], rules[name] = value, (step / _STEPS, keep_best)
    return rules


def _rare_weights(predictions: Predictions, labels: csr_matrix) -> dict[int, float]:
    """Choose label weights n^-τ that maximise macro-F1 when each point gets one label.

    n is the label's number of points plus 1. An empty dictionary means τ = 0 is best.
    """
    counts = np.bincount(labels.indices, minlength=labels.shape[1]) + 1.0
    best, chosen = -1.0, {}
    for power in _RARE_POWERS:
        weights = dict(enumerate((counts**-power).tolist())) if power else {}
        value = f1_metrics(predictions.best_by(weights), labels)["macro-F1"]
        if value > best:
            best, chosen = value, weights
    return chosen


def _label_thresholds(
    steps: NDArray[np.int64],
    ids: NDArray[np.integer[Any]],
    relevant: NDArray[np.bool_],
    labels: csr_matrix,
    lowest: int,
) -> dict[int, float]:
    """Return thresholds for single labels, where they give a better F1 than the common one.

    Only labels with `MIN_LABEL_POINTS` held-out points are considered. To avoid overfitting, the
    pairs are halved, and the best threshold of each half is measured on the other half.

    Args:
        steps: (M,) result of `_steps` for each predicted (point, label) pair.
        ids: (M,) label of each pair.
        relevant: (M,) whether the label of the pair is relevant.
        labels: (N, L) relevant labels.
        lowest: The step of the common threshold.
    """
    n_true = np.bincount(labels.indices, minlength=labels.shape[1])
    order = np.argsort(ids, kind="stable")
    starts = np.searchsorted(ids[order], np.arange(labels.shape[1] + 1))
    chosen = {}
    for label in np.flatnonzero(n_true >= MIN_LABEL_POINTS).tolist():
        pairs = order[starts[label] : starts[label + 1]]
        half = np.arange(len(pairs)) % 2 == 0
        sides = [pairs[half], pairs[~half]]
        assigned = np.stack([_reached(steps[side]) for side in sides])
        correct = np.stack([_reached(steps[side], relevant[side]) for side in sides])
        # relevant pairs that are not predicted are always missed; each half gets half of them
        missed = (n_true[label] - correct[:, 0].sum()) / 2
        first, second = 2 * correct / np.maximum(assigned + correct[:, :1] + missed, 1)
        if first[second.argmax()] + second[first.argmax()] > first[lowest] + second[lowest]:
            f1 = 2 * correct.sum(axis=0) / (assigned.sum(axis=0) + n_true[label])
            chosen[label] = float(f1.argmax()) / _STEPS
    return chosen


def _reached(
    steps: NDArray[np.int64], weights: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """Return the number of pairs, or the sum of their weights, at or above each threshold."""
    counts = np.bincount(steps, weights=weights, minlength=_STEPS + 1)
    return counts[::-1].cumsum()[::-1].astype(np.float64)


def fit_probabilities(
    predictions: Predictions | None, labels: csr_matrix | None
) -> Probabilities | None:
    """Fit probabilities to the predictions of the last component for held-out points.

    Return None if there are too few points, or if all or no predictions are correct.
    """
    if predictions is None or labels is None or len(predictions) < MIN_POINTS:
        n_points = 0 if predictions is None else len(predictions)
        message = "probabilities are not fitted: only %d points are held out, but %d are needed"
        logger.info(message, n_points, MIN_POINTS)
        return None
    learned = Probabilities.fit(predictions, labels)
    if learned is None:
        problem = "the held-out predictions are all correct or all wrong"
        logger.info("probabilities are not fitted: %s", problem)
    return learned


def _judge(
    learned: Probabilities, predictions: Predictions, labels: csr_matrix, n_folds: int
) -> tuple[Predictions, Predictions, csr_matrix]:
    """Return predictions with probabilities, those that the F1 rule assigns, and their labels.

    With several folds, the map and the rule of each fold are fitted on the other folds, as if its
    points were new. The points are then in another order.
    """
    folds = np.random.default_rng(0).permutation(len(predictions)) % n_folds
    ranked, assigned, order = [], [], np.argsort(folds, kind="stable")
    for fold in range(n_folds):
        rows, others = np.flatnonzero(folds == fold), np.flatnonzero(folds != fold)
        fitted = learned
        if len(others):
            fitted = Probabilities.fit(predictions.take(others), labels[others]) or learned
        part = predictions.take(rows)
        ranked.append(replace(part, probabilities=fitted.of(part.scores)))
        assigned.append(fitted.assign(ranked[-1], "f1"))
    return Predictions.stack(ranked), Predictions.stack(assigned), labels[order]


def measure_probabilities(
    learned: Probabilities,
    predicted: Mapping[str, tuple[Predictions, csr_matrix]],
    *,
    name: str = "validation",
) -> dict[str, Any]:
    """Return the quality of a model's probabilities, for its metadata.

    Args:
        learned: The probabilities.
        predicted: For each split, by name, the model's predictions and the relevant labels.
        name: Name of the split on which the probabilities were fitted.

    Returns:
        ECE@5 of each split in percent, before and after calibration, the threshold with the best
        F1, and `f1_metrics` of each split at this threshold. The split ``name`` is cross-fitted.
    """
    errors, at_threshold = {}, {}
    for split, (predictions, labels) in predicted.items():
        n_folds = min(_FOLDS, len(predictions)) if split == name else 1
        ranked, assigned, labels = _judge(learned, predictions, labels, n_folds)
        at_threshold[split] = rounded(f1_metrics(assigned, labels))
        errors[split] = {
            when: round(calibration_error(ranked, labels, ECE_AT, calibrated=when == "after"), 4)
            for when in ("before", "after")
        }
    at_rule = at_threshold[name]
    at_best = {metric: at_rule[f"micro-{metric}"] for metric in ("precision", "recall", "F1")}
    threshold, keep_best = learned.threshold("f1"), learned.keeps_best("f1")
    return {
        "errors": errors,
        "f1": {"threshold": threshold, "keep_best": keep_best, **at_best},
        "at_threshold": at_threshold,
    }
