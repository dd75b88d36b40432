"""Measuring on the test points: metrics as `elias evaluate` has them, and what prediction costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from elias.errors import ConfigError, nearest
from elias.experiments.rows import MEGABYTES, MS_PER_POINT, TRAIN_SECONDS, Row
from elias.metrics import inverse_propensities, score
from elias.pipeline.holding_out import validation_split
from elias.pipeline.inputs import input_of
from elias.pipeline.measuring import REPORTED
from elias.pipeline.predictor import EVALUATED
from elias.pipeline.reranking import CALIBRATE, NAMES, RERANK
from elias.rerank.calibration import FEWEST_POINTS
from elias.rerank.names import is_word

if TYPE_CHECKING:
    from elias.experiments.models import Kept
    from elias.experiments.plan import Setting
    from elias.pipeline import Elias
    from elias.predictions import Predictions

TIMED_POINTS = 2_000
"""Most test points that are predicted again to see how long one takes."""
WARMED_UP = 64


def judged(found: Predictions, setting: Setting) -> dict[str, float]:
    """Return the metrics of predictions for the test points, in percent."""
    corpus, settings = setting.corpus, setting.config.eval
    weights = inverse_propensities(
        corpus.label_frequencies(),
        len(corpus.train),
        settings.propensity_a,
        settings.propensity_b,
    )
    measured = score(found, corpus.split("test").labels, weights, REPORTED)
    return {name: round(value, 4) for name, value in measured.items()}


def ms_per_point(predict: Callable[[int], object], n_points: int) -> float:
    """Return the milliseconds a point takes; ``predict`` is told how many points to predict."""
    predict(min(WARMED_UP, n_points))  # what is compiled or loaded at first use
    count = min(TIMED_POINTS, n_points)
    begin = time.perf_counter()
    predict(count)
    return round(1000 * (time.perf_counter() - begin) / max(count, 1), 4)


def model_ms(model: Elias, setting: Setting, component: str) -> float:
    """Return the milliseconds from a text to its ranked labels."""
    split = setting.corpus.split("test")
    given = input_of(split, model.model.encoder)
    return ms_per_point(
        lambda count: model.predict(given[:count], top_k=EVALUATED, component=component),
        len(split),
    )


def component_rows(
    kept: Kept,
    components: Iterable[str],
    name: str,
    title: Callable[[str], str],
    timed: Setting | None = None,
) -> list[Row]:
    """Return a row for each component of a model, as its training measured it.

    ``timed``: whose test points to time predictions with, and that the size is wanted too.
    """
    rows = []
    for component in components:
        costs = {TRAIN_SECONDS: round(kept.train_seconds(component), 3)}
        if timed is not None:
            costs[MS_PER_POINT] = model_ms(kept.model, timed, component)
            costs[MEGABYTES] = round(kept.megabytes(component), 3)
        rows.append(
            Row(
                name=f"{name}/{component}",
                title=title(component),
                seed=kept.model.config.seed,
                metrics=kept.metrics(component),
                costs=costs,
                settings={"component": component},
                run=kept.run,
            )
        )
    return rows


def single_component(setting: Setting, name: str | None) -> str:
    """Return the component of one model that is measured: the last stage where none is named."""
    config, corpus = setting.config, setting.corpus
    ranked = bool(config.rerank.enabled)
    _, held_out = validation_split(corpus, config)
    calibrated = ranked and config.rerank.calibrate and len(held_out or ()) >= FEWEST_POINTS
    has_names = corpus.train.features is None and any(map(is_word, corpus.label_names))
    there = {
        config.stages[-1].name: True,
        RERANK: ranked,
        CALIBRATE: calibrated,
        NAMES: calibrated and config.rerank.names and has_names,
    }
    known = [component for component, is_there in there.items() if is_there]
    if name is None:
        return known[0]
    if name not in known:
        raise ConfigError(
            f"--component {name!r}: the model will have no such part{nearest(name, known)} "
            f"(it has: {', '.join(known)})"
        )
    return name
