"""Table 7: vary one parameter and keep all others.

λ, κ, α and β are parameters of training, so each value trains a model. Beam and shortlist are
parameters of the search, so all values use one model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from elias.config import model_settings
from elias.data.corpus import resolve_config
from elias.errors import ConfigError, did_you_mean
from elias.experiments.models import MAIN_MODEL, METRICS, Models, run_name
from elias.experiments.runner import MS_PER_POINT, TRAIN_SECONDS, Plan, Row, Table, Task
from elias.report.plots import Axis, Plot
from elias.rerank.reranker import CALIBRATE, NAMES, RERANK

if TYPE_CHECKING:
    from markupsafe import Markup

    from elias.config import ResolvedConfig
    from elias.experiments.runner import Line, Setting


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a resolved configuration that can be varied."""

    symbol: str
    key: str
    """Field of the index configuration, or of the stage configurations for λ."""
    factors: Sequence[float]
    """Default values to try, as multiples of the configured value."""
    limits: Callable[[ResolvedConfig, int], tuple[float, float]]
    """Function from a configuration and a number of labels to the (lowest, highest) value."""
    whole: bool = False
    """Only whole numbers are allowed."""
    trained: bool = True
    """True for a training parameter, False for a search parameter."""

    def read(self, config: ResolvedConfig) -> float:
        """Return the value of the parameter in a configuration."""
        holder = config.stages[-1] if self.key == _LAMBDA else config.index
        return float(getattr(holder, self.key))

    def change(self, config: ResolvedConfig, value: float) -> ResolvedConfig:
        """Return the configuration with another value of the parameter."""
        if self.key == _LAMBDA:
            stages = tuple(replace(stage, shortlist_loss_weight=value) for stage in config.stages)
            return replace(config, stages=stages)
        changes: dict[str, Any] = {self.key: int(value) if self.whole else value}
        index = replace(config.index, **changes)
        if self.key == _KAPPA:  # with fewer edges, the beam may not reach enough labels
            reached = index.beam_size * index.edges_per_cluster
            index = replace(
                index,
                shortlist_size=min(index.shortlist_size, reached),
                train_shortlist=min(index.train_shortlist, reached),
            )
        return replace(config, index=index)

    def defaults(self, config: ResolvedConfig, n_labels: int) -> list[float]:
        """Return default values around the configured value, within the limits."""
        low, high = self.limits(config, n_labels)
        base = self.read(config) or 1.0
        scaled = (min(max(factor * base, low), high) for factor in self.factors)
        return sorted({float(round(v)) if self.whole else float(f"{v:.6g}") for v in scaled})

    def check(self, values: Sequence[float], config: ResolvedConfig, n_labels: int) -> list[float]:
        """Return the values sorted and without repetitions.

        Raises:
            ConfigError: If a value is out of range or not a whole number.
        """
        low, high = self.limits(config, n_labels)
        for value in values:
            if not low <= value <= high:
                top = "" if high == math.inf else f" and at most {high:g}"
                raise ConfigError(
                    f"--values: {self.symbol} must be at least {low:g}{top} here, not {value:g}"
                )
            if self.whole and value != int(value):
                raise ConfigError(f"--values: {self.symbol} must be a whole number, not {value:g}")
        return sorted(set(values))


def parameter_called(name: str) -> Parameter:
    """Return the parameter with a name.

    Raises:
        ConfigError: If the name is unknown. The message lists all names.
    """
    if name not in PARAMETERS:
        known = ", ".join(PARAMETERS)
        raise ConfigError(
            f"cannot sweep {name!r}{did_you_mean(name, PARAMETERS)} (parameters: {known})"
        )
    return PARAMETERS[name]


_LAMBDA, _KAPPA = "shortlist_loss_weight", "edges_per_cluster"
_AROUND = (0.1, 0.3, 1.0, 3.0, 10.0)
PARAMETERS = {
    "lambda": Parameter("λ", _LAMBDA, (0.0, 0.2, 0.5, 1.0, 2.0, 5.0), lambda *_: (0.0, math.inf)),
    "kappa": Parameter(
        "κ",
        _KAPPA,
        (0.1, 0.2, 0.5, 1.0, 2.0),
        # fewer than L/C would leave labels without an edge
        lambda config, n_labels: (math.ceil(n_labels / config.index.n_clusters), n_labels),
        whole=True,
    ),
    "alpha": Parameter("α", "alpha", _AROUND, lambda *_: (1.0, math.inf)),
    "beta": Parameter("β", "beta", _AROUND, lambda *_: (1.0, math.inf)),
    "beam": Parameter(
        "b",
        "beam_size",
        (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0),
        lambda config, _: (1.0, config.index.n_clusters),
        whole=True,
        trained=False,
    ),
    "shortlist": Parameter(
        "K",
        "shortlist_size",
        (0.1, 0.25, 0.5, 1.0, 2.0, 4.0),
        lambda _, n_labels: (1.0, n_labels),
        whole=True,
        trained=False,
    ),
}
"""Parameters by name. Table 7 varies λ and κ only."""

SHOWN = ("P@1", "P@5", "R@10", "R@100")


def sweep(
    setting: Setting,
    parameter: str,
    *,
    values: Sequence[float] | None = None,
    component: str | None = None,
) -> Plan:
    """Plan the sweep of a parameter.

    Args:
        setting: Configuration, corpus, seeds and folder. Of an ensemble, only the first member is
            used.
        parameter: ``lambda``, ``kappa``, ``alpha``, ``beta``, ``beam`` or ``shortlist``.
        values: Values to try; by default several around the configured value.
        component: The component to measure; by default the last stage.
    """
    if setting.config.index.kind == "all":
        raise ConfigError("one-vs-all has no index to sweep; set index.kind to 'graph'")
    swept, n_labels = parameter_called(parameter), setting.corpus.n_labels
    if values is None:
        chosen = swept.defaults(setting.config, n_labels)
    else:
        chosen = swept.check(values, setting.config, n_labels)
    models = Models(setting)
    measured = models.component(component)

    def run_of(value: float, seed: int) -> tuple[str, ResolvedConfig]:
        """Return the name and the configuration of the run for a value of the parameter."""
        base = setting.seeded(seed)
        if swept.trained:
            config = resolve_config(swept.change(base, value), setting.corpus)
            if config != base:
                if measured not in (RERANK, CALIBRATE, NAMES):  # a ranker would not be measured
                    config = replace(config, rerank=replace(config.rerank, enabled=False))
                return run_name(f"{parameter}-{value:.12g}", seed), config
        return run_name(MAIN_MODEL, seed), base

    def measure(value: float, seed: int) -> list[Row]:
        trained = models.get(*run_of(value, seed))
        row = Row(
            name=f"{parameter}={value:.12g}",
            title=f"{value:g}",
            seed=seed,
            costs={TRAIN_SECONDS: round(trained.train_seconds(measured), 3)},
            settings={parameter: value},
            run=trained.run,
        )
        if swept.trained:  # training has recorded the metrics
            recorded = trained.model.metadata["metrics"][measured]["test"]
            costs = {**row.costs, MS_PER_POINT: models.ms_per_point([trained.model], measured)}
            return [replace(row, metrics=recorded, costs=costs)]
        model = copy(trained.model)
        model.config = swept.change(model.config, value)
        return [models.measure(row, model, measured)]

    tasks = []
    for seed in setting.seeds:
        for value in chosen:
            name, config = run_of(value, seed)
            models.check(name, config)
            task = Task(
                name=f"{parameter}={value:.12g}-seed{seed}",
                title=f"{swept.symbol} = {value:g}, seed {seed}",
                decided_by={
                    "config": model_settings(config.to_dict()),
                    "component": measured,
                    parameter: value,
                },
                measure=partial(measure, value, seed),
            )
            tasks.append(task)
    costs = (TRAIN_SECONDS, MS_PER_POINT) if swept.trained else (MS_PER_POINT,)
    base = swept.read(setting.config)
    return Plan(
        name=f"sweep-{parameter}",
        title=f"Metrics by {swept.symbol} (Table 7)",
        setting=setting,
        tasks=tasks,
        table=Table(swept.symbol, columns=(*METRICS, *costs), shown=(*SHOWN, *costs)),
        plot=lambda lines: _plot(lines, parameter, swept.symbol, base),
        options={"values": chosen, "component": measured},
        remarks=[f"Measured: {measured}."],
    )


def _plot(lines: Sequence[Line], parameter: str, symbol: str, base: float) -> Markup:
    """Plot metrics by value, as differences to the value nearest to the configured one."""
    shown = [line for line in lines if line.mean]
    values = np.array([float(line.settings[parameter]) for line in shown])
    at = int(np.argmin(np.abs(values - base)))
    means = {key: np.array([line.mean[key] for line in shown]) for key in SHOWN}
    best = ", ".join(f"{key} at {values[int(np.argmax(mean))]:g}" for key, mean in means.items())
    is_wide = bool(values.min() > 0 and values.max() > 20 * values.min())
    axes = Axis(symbol, log=is_wide), Axis(f"difference to {symbol} = {values[at]:g}, points")
    plot = Plot(f"Metrics by {symbol}", *axes)
    for key, mean in means.items():
        change = mean - mean[at]
        std = np.array([line.std.get(key, 0.0) for line in shown])
        plot.line(key, values, change, band=(change - std, change + std) if std.any() else ())
    return plot.svg(f"Highest: {best}.")
