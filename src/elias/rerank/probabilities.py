"""Turn scores into probabilities and choose decision thresholds.

The map never falls, so it changes no ranking. Beside it stands how precise and how complete
decisions at each threshold were on the held-out points, from which a threshold is chosen.
scikit-learn fits the map. It is kept as arrays, so that a saved model holds no pickle.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from elias.errors import ConfigError, broken, quoted
from elias.rerank.calibration import FEWEST_POINTS
from elias.rerank.reranker import relevant_candidates

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.data.corpus import Split
    from elias.inference.predictor import Elias
    from elias.predictions import Predictions


logger = logging.getLogger(__name__)

_STEPS = 200
"""Thresholds at which decisions were judged: 0, 1/200 … 1."""
_N_BINS = 15
_TARGET = re.compile(r"(precision|recall)\s*=\s*([0-9.]+)")
_ARRAYS = ("scores", "values", "precision", "recall")


@dataclass(frozen=True, slots=True, eq=False)
class Probabilities:
    """How probable it is that a label with such a score is relevant.

    >>> import numpy as np
    >>> from scipy.sparse import csr_matrix
    >>> from elias.predictions import Predictions
    >>> found = Predictions.from_scores([[0, 1]] * 8, [[3.0, 1.0]] * 8, n_labels=2)
    >>> truth = csr_matrix([[1, 0]] * 7 + [[0, 1]])
    >>> probabilities = Probabilities.fit(found, truth)
    >>> print(probabilities.of(np.float32([1.0, 2.0, 9.0])).round(2))
    [0.12 0.45 0.78]
    >>> probabilities.threshold("precision=0.8")
    0.13
    """

    scores: NDArray[np.float64]
    """Knots of the map, ascending."""
    values: NDArray[np.float64]
    """The probability at each knot, never falling; straight lines in between."""
    precision: NDArray[np.float64]
    """Of the labels decided for at each threshold, the share that was relevant."""
    recall: NDArray[np.float64]
    """Of the relevant labels, the share that was decided for at each threshold."""

    @classmethod
    def fit(cls, found: Predictions, labels: csr_matrix) -> Probabilities | None:
        """Fit the map to predictions for held-out points and their relevant labels (N, L).

        None where they tell nothing: no label found is relevant, or every one is.
        """
        from sklearn.isotonic import IsotonicRegression  # here: only training needs it

        known = found.ids < found.n_labels
        scores = found.scores[known].astype(np.float64)
        relevant = relevant_candidates(found.ids, labels)[known]
        if not relevant.any() or relevant.all():
            return None
        isotonic = IsotonicRegression(y_min=0, y_max=1)
        # one wrong label at the top: whatever scores highest is not yet a certainty
        isotonic.fit(np.append(scores, scores.max()), np.append(relevant, False))
        knots = np.asarray(isotonic.X_thresholds_, dtype=np.float64)
        values = np.asarray(isotonic.y_thresholds_, dtype=np.float64)
        probability = np.interp(scores, knots, values)
        precision, recall = _judged(probability, relevant, int(labels.nnz))
        return cls(knots, values, precision, recall)

    def of(self, scores: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """Return the probability of each score; 0 for padding."""
        found = np.interp(np.asarray(scores, dtype=np.float64), self.scores, self.values)
        return np.where(np.isneginf(scores), 0, found).astype(np.float32)

    def threshold(self, target: float | str) -> float:
        """Return the lowest probability that a label is decided for at.

        Args:
            target: A probability; or ``"f1"``, for the best F1 on the held-out points; or
                ``"precision=0.8"``, for the most labels at that precision; or ``"recall=0.6"``,
                for the fewest wrong ones at that recall. All are over all pairs of point and label.

        Raises:
            ConfigError: If it is none of these, or was not reached at any threshold.
        """
        if not isinstance(target, str):
            return float(target)
        name, least = _parsed(target)
        if name == "f1":
            return float(np.argmax(self.f1)) / _STEPS
        if name is None:
            return least
        reached = (getattr(self, name) >= least) & (self.recall > 0)
        if not reached.any():
            best = float(getattr(self, name)[self.recall > 0].max(initial=0))
            raise ConfigError(
                f"threshold {target!r}: no threshold reached that on the held-out points; the "
                f"highest {name} was {best:.3f}"
            )
        # lower thresholds only add labels: the last with the recall, the first with the precision
        places = np.flatnonzero(reached)
        return float(places[-1] if name == "recall" else places[0]) / _STEPS

    @property
    def f1(self) -> NDArray[np.float64]:
        """Return F1 at each threshold: the harmonic mean of precision and recall."""
        total = self.precision + self.recall
        product = 2 * self.precision * self.recall
        return np.divide(product, total, out=np.zeros_like(total), where=total > 0)

    @property
    def thresholds(self) -> NDArray[np.float64]:
        """Return the thresholds that precision and recall belong to."""
        return np.arange(_STEPS + 1) / _STEPS

    def to_dict(self) -> dict[str, list[float]]:
        """Return the numbers of the map and of precision and recall as JSON can hold them."""
        return {name: getattr(self, name).tolist() for name in _ARRAYS}

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any], path: Path) -> Probabilities:
        """Return what `to_dict` returned; ``path`` is the file it was read from.

        Raises:
            ModelError: If a number is missing or makes no sense.
        """
        try:
            arrays = {name: np.array(tree[name], dtype=np.float64) for name in _ARRAYS}
        except (ValueError, KeyError, TypeError) as error:
            raise broken(path, f"damaged ({quoted(error)})") from error
        probabilities = cls(**arrays)
        if not probabilities._is_sound():
            raise broken(path, "the map from scores to probabilities is not monotonic in [0, 1]")
        return probabilities

    def _is_sound(self) -> bool:
        arrays = [getattr(self, name) for name in _ARRAYS]
        if any(array.ndim != 1 or not np.isfinite(array).all() for array in arrays):
            return False
        shares = np.concatenate([self.values, self.precision, self.recall])
        return bool(
            len(self.scores) == len(self.values) > 0
            and len(self.precision) == len(self.recall) == _STEPS + 1
            and (np.diff(self.scores) >= 0).all()
            and (np.diff(self.values) >= 0).all()
            and ((shares >= 0) & (shares <= 1)).all()
        )


def check_target(target: float | str) -> None:
    """Refuse a threshold that is none, before a model is read.

    >>> check_target("f1"), check_target("0.3"), check_target("precision=0.8")
    (None, None, None)
    """
    if isinstance(target, str):
        _parsed(target)


@dataclass(frozen=True, slots=True)
class Reliability:
    """What was said of labels, and what was true of them, in bins of like probability."""

    said: NDArray[np.float64]
    """The mean probability of each bin; not a number where the bin is empty."""
    true: NDArray[np.float64]
    """The share of its labels that are relevant."""
    counts: NDArray[np.int64]

    @property
    def error(self) -> float:
        """Return the expected calibration error in percent."""
        off = np.nansum(self.counts * np.abs(self.said - self.true))
        return float(100 * off / max(self.counts.sum(), 1))


def reliability(
    found: Predictions, labels: csr_matrix, k: int, *, calibrated: bool = True
) -> Reliability:
    """Return how far probabilities can be relied on, over the best ``k`` labels of each point.

    Without ``calibrated``, scores cut off at 1 are taken for probabilities.
    """
    best = found.top(k)
    known = best.ids < best.n_labels
    relevant = relevant_candidates(best.ids, labels)[known]
    if calibrated and best.probabilities is not None:
        probability = best.probabilities[known].astype(np.float64)
    else:
        probability = np.clip(best.scores[known].astype(np.float64), 0, 1)
    bins = np.minimum((probability * _N_BINS).astype(int), _N_BINS - 1)
    counts = np.bincount(bins, minlength=_N_BINS)
    sums = [np.bincount(bins, weights=of, minlength=_N_BINS) for of in (probability, relevant)]
    said, true = (np.where(counts > 0, one / np.maximum(counts, 1), np.nan) for one in sums)
    return Reliability(said, true, counts)


def calibration_error(
    found: Predictions, labels: csr_matrix, k: int, *, calibrated: bool = True
) -> float:
    """Return ECE@k in percent: how far probabilities are from how often labels are relevant.

    The best ``k`` labels of each point fall into fifteen bins of like probability; the error of a
    bin is the difference between its mean probability and its share of relevant labels, weighted by
    how many it holds. Without ``calibrated``, scores cut off at 1 are taken for probabilities.
    """
    return reliability(found, labels, k, calibrated=calibrated).error


def _parsed(target: str) -> tuple[str | None, float]:
    """Return what is aimed at, and at how much of it; None and a number for a plain threshold."""
    text = target.strip().lower()
    if text == "f1":
        return "f1", 0.0
    try:
        match = _TARGET.fullmatch(text)
        name, least = (match[1], float(match[2])) if match else (None, float(text))
    except ValueError:
        name, least = None, float("nan")
    if not 0 <= least <= 1 and (name is not None or np.isnan(least)):
        raise ConfigError(
            f"threshold {target!r}: give a number, f1, precision=0.8 or recall=0.6 (with what is "
            "wanted between 0 and 1)"
        )
    return name, least


def _judged(
    probability: NDArray[np.float64], relevant: NDArray[np.bool_], n_relevant: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return precision and recall of the decisions at each threshold."""
    # a probability p is decided for at the thresholds 0, 1/200 … that are at most p
    place = np.floor(probability.astype(np.float32).astype(np.float64) * _STEPS + 1e-9).astype(int)
    decided = np.bincount(place, minlength=_STEPS + 1)[::-1].cumsum()[::-1]
    right = np.bincount(place, weights=relevant, minlength=_STEPS + 1)[::-1].cumsum()[::-1]
    precision = np.divide(right, decided, out=np.ones_like(right), where=decided > 0)
    return precision, right / max(n_relevant, 1)


PROBABILITIES = "probabilities"
"""The key of a model's metadata that says how good its probabilities are."""
ECE_AT = 5


def add_probabilities(
    model: Elias,
    held_out: Split | None,
    others: Mapping[str, Split] | None = None,
    *,
    name: str = "validation",
) -> dict[str, Any]:
    """Give a model probabilities for its last scores, and return what is to be said of them.

    Args:
        model: A trained model; what it knew of probabilities is forgotten.
        held_out: Points that it was not trained on, to learn from.
        others: More points to measure on, by their name, which nothing was learned from.
        name: What the points to learn from are called.

    Returns:
        ECE@5 in percent, before and after, of those points and the others, and the threshold
        for the best F1; empty where there was nothing to learn from.
    """
    model.probabilities = None
    model.metadata.pop(PROBABILITIES, None)
    if held_out is None or len(held_out) < FEWEST_POINTS:
        count = 0 if held_out is None else len(held_out)
        logger.info("%d points are held out: too few to learn probabilities from", count)
        return {}
    raw = model.predict_split(held_out)
    model.probabilities = Probabilities.fit(raw, held_out.labels)
    if model.probabilities is None:
        logger.info("no label of the held-out points was found: there are no probabilities")
        return {}
    measured = {name: held_out, **(others or {})}
    told = {
        "errors": {key: _errors(model, split) for key, split in measured.items()},
        "f1": _at(model.probabilities, model.probabilities.threshold("f1")),
    }
    model.metadata[PROBABILITIES] = told
    return told


def _errors(model: Elias, split: Split) -> dict[str, float]:
    found = model.predict_split(split, top_k=ECE_AT)
    before = calibration_error(found, split.labels, ECE_AT, calibrated=False)
    after = calibration_error(found, split.labels, ECE_AT)
    return {"before": round(before, 4), "after": round(after, 4)}


def _at(probabilities: Probabilities, threshold: float) -> dict[str, float]:
    """Return how good decisions at a threshold were on the held-out points, in percent."""
    place = int(np.searchsorted(probabilities.thresholds, threshold - 1e-9))
    shown = {
        "precision": probabilities.precision[place],
        "recall": probabilities.recall[place],
        "F1": probabilities.f1[place],
    }
    return {"threshold": threshold, **{k: round(100 * float(v), 2) for k, v in shown.items()}}
