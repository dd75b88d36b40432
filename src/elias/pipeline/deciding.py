"""From scores to decisions: probabilities of a whole model, learned from points it has not seen."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from elias.rerank.calibration import FEWEST_POINTS
from elias.rerank.probabilities import Probabilities, calibration_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elias.data.corpus import Split
    from elias.pipeline.predictor import Elias

logger = logging.getLogger(__name__)

PROBABILITIES = "probabilities"
"""The key of a model's facts that says how good its probabilities are."""
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
    model.facts.pop(PROBABILITIES, None)
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
    model.facts[PROBABILITIES] = told
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
