"""What is measured of predictions, for the reports of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elias.metrics import inverse_propensities, score

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elias.data.corpus import Corpus, Split
    from elias.pipeline.predictor import Elias
    from elias.predictions import Predictions

REPORTED = [
    *(f"{name}@{k}" for name in ("P", "nDCG", "PSP") for k in (1, 3, 5)),
    *(f"R@{k}" for k in (10, 20, 100)),
]


def measure(
    model: Elias, found: Predictions, split: Split, corpus: Corpus, names: list[str]
) -> dict[str, float]:
    """Return the metrics of predictions, in percent, with the model's propensity constants."""
    settings = model.config.eval
    propensity = inverse_propensities(
        corpus.label_frequencies(),
        len(corpus.train),
        settings.propensity_a,
        settings.propensity_b,
    )
    measured = score(found, split.labels, propensity, names)
    return {name: round(value, 4) for name, value in measured.items()}


def rounded(timings: Mapping[str, float]) -> dict[str, float]:
    """Return times as they are kept with a model."""
    return {name: round(value, 2) for name, value in timings.items()}
