"""Vary one parameter and keep all else equal (Table 7).

λ, κ, α and β decide training, so every value trains a model. The beam and the shortlist are
varied when predicting, with one model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from elias.config import decisive
from elias.errors import ConfigError, did_you_mean
from elias.experiments.models import OURS, Models, judged, model_ms, run_name, single_component
from elias.experiments.plots import curves
from elias.experiments.runner import Plan, Task
from elias.experiments.tables import MS_PER_POINT, TRAIN_SECONDS, Row, Table
from elias.inference.predict import CALIBRATE, NAMES, RERANK

if TYPE_CHECKING:
    from elias.config import ResolvedConfig
    from elias.experiments.models import Kept
    from elias.experiments.runner import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Something to vary in a resolved configuration."""

    symbol: str
    factors: Sequence[float]
    """Default values, as multiples of the configuration's."""
    read: Callable[[ResolvedConfig], float]
    change: Callable[[ResolvedConfig, float], ResolvedConfig]
    limits: Callable[[ResolvedConfig, int], tuple[float, float]]
    """The lowest and the highest value, given the number of labels."""
    whole: bool = False
    """Whether it counts something."""
    trained: bool = True
    """Whether a value takes another model, or another search."""

    def defaults(self, config: ResolvedConfig, n_labels: int) -> list[float]:
        """Return values around that of the configuration, within the limits."""
        low, high = self.limits(config, n_labels)
        base = self.read(config) or 1.0
        scaled = (min(max(factor * base, low), high) for factor in self.factors)
        return sorted({float(round(v)) if self.whole else float(f"{v:.6g}") for v in scaled})

    def check(self, values: Sequence[float], config: ResolvedConfig, n_labels: int) -> list[float]:
        """Return the values in order, each once; refuse what cannot be."""
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
    """Return the parameter of this name."""
    if name not in PARAMETERS:
        known = ", ".join(PARAMETERS)
        raise ConfigError(
            f"cannot sweep {name!r}{did_you_mean(name, PARAMETERS)} (parameters: {known})"
        )
    return PARAMETERS[name]


def _lambda(config: ResolvedConfig, value: float) -> ResolvedConfig:
    stages = tuple(replace(stage, shortlist_loss_weight=value) for stage in config.stages)
    return replace(config, stages=stages)


def _index(config: ResolvedConfig, **changes: Any) -> ResolvedConfig:
    return replace(config, index=replace(config.index, **changes))


def _kappa(config: ResolvedConfig, value: float) -> ResolvedConfig:
    """Change κ; a beam with fewer edges than the shortlist has places takes a shorter one."""
    index = config.index
    reached = index.beam_size * int(value)
    shortlist = min(index.shortlist_size, reached)
    training = min(index.train_shortlist, reached)
    return _index(
        config, edges_per_cluster=int(value), shortlist_size=shortlist, train_shortlist=training
    )


def _budget(config: ResolvedConfig, n_labels: int) -> tuple[float, float]:
    """Return the limits of α and β."""
    del config, n_labels
    return 1.0, math.inf


PARAMETERS = {
    "lambda": Parameter(
        symbol="λ",
        factors=(0.0, 0.2, 0.5, 1.0, 2.0, 5.0),
        read=lambda config: config.stages[-1].shortlist_loss_weight,
        change=_lambda,
        limits=lambda _config, _n_labels: (0.0, math.inf),
    ),
    "kappa": Parameter(
        symbol="κ",
        factors=(0.1, 0.2, 0.5, 1.0, 2.0),
        read=lambda config: config.index.edges_per_cluster,
        change=_kappa,
        # fewer than L/C would leave labels without an edge
        limits=lambda config, n: (math.ceil(n / config.index.n_clusters), n),
        whole=True,
    ),
    "alpha": Parameter(
        symbol="α",
        factors=(0.1, 0.3, 1.0, 3.0, 10.0),
        read=lambda config: config.index.alpha,
        change=lambda config, value: _index(config, alpha=value),
        limits=_budget,
    ),
    "beta": Parameter(
        symbol="β",
        factors=(0.1, 0.3, 1.0, 3.0, 10.0),
        read=lambda config: config.index.beta,
        change=lambda config, value: _index(config, beta=value),
        limits=_budget,
    ),
    "beam": Parameter(
        symbol="b",
        factors=(0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0),
        read=lambda config: config.index.beam_size,
        change=lambda config, value: _index(config, beam_size=int(value)),
        limits=lambda config, _n_labels: (1.0, config.index.n_clusters),
        whole=True,
        trained=False,
    ),
    "shortlist": Parameter(
        symbol="K",
        factors=(0.1, 0.25, 0.5, 1.0, 2.0, 4.0),
        read=lambda config: config.index.shortlist_size,
        change=lambda config, value: _index(config, shortlist_size=int(value)),
        limits=lambda _config, n: (1.0, n),
        whole=True,
        trained=False,
    ),
}
"""Table 7 has λ and κ; the others are what else the index is made of."""

METRICS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@5", "R@10", "R@20", "R@100")
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
        setting: What to train on what; of an ensemble, the first member.
        parameter: ``lambda``, ``kappa``, ``alpha``, ``beta``, ``beam`` or ``shortlist``.
        values: Those to try; by default some around that of the configuration.
        component: The part of the model that is measured; the last stage by default.
    """
    if setting.config.index.kind == "all":
        raise ConfigError("one-vs-all has no index to sweep; leave index.kind at 'graph'")
    swept, n_labels = parameter_called(parameter), setting.corpus.n_labels
    chosen = (
        swept.defaults(setting.config, n_labels)
        if values is None
        else swept.check(values, setting.config, n_labels)
    )
    base = swept.read(setting.config)
    costs = (TRAIN_SECONDS, MS_PER_POINT) if swept.trained else (MS_PER_POINT,)
    models = Models(setting)
    shared = lru_cache(maxsize=1)(
        lambda seed: models.get(run_name(OURS, seed), setting.seeded(seed))
    )
    whole = _Sweep(setting, models, parameter, swept, single_component(setting, component), shared)
    for seed in setting.seeds:
        models.check(dict(whole.run(value, seed) for value in chosen))
    return Plan(
        name=f"sweep-{parameter}",
        title=f"{swept.symbol} varied (Table 7)",
        setting=setting,
        tasks=[whole.task(value, seed) for seed in setting.seeds for value in chosen],
        table=Table(heading=swept.symbol, columns=(*METRICS, *costs), shown=(*SHOWN, *costs)),
        plot=lambda lines: curves(lines, parameter, swept.symbol, base, SHOWN),
        options={"values": chosen, "component": whole.component},
        remarks=[f"Measured: {whole.component}."],
    )


@dataclass(frozen=True, slots=True)
class _Sweep:
    setting: Setting
    models: Models
    name: str
    parameter: Parameter
    component: str
    shared: Callable[[int], Kept]
    """The model of the configuration as it is, one seed at a time."""

    def run(self, value: float, seed: int) -> tuple[str, ResolvedConfig]:
        """Return the run that a value takes, and its configuration."""
        base = self.setting.seeded(seed)
        if not self.parameter.trained:
            return run_name(OURS, seed), base
        config = self.parameter.change(base, value).resolve(
            len(self.setting.corpus.train), self.setting.corpus.n_labels
        )
        if config == base:
            return run_name(OURS, seed), base
        if self.component not in (
            RERANK,
            CALIBRATE,
            NAMES,
        ):  # what is not measured need not be trained
            config = replace(config, rerank=replace(config.rerank, enabled=False))
        return run_name(f"{self.name}-{value:.12g}", seed), config

    def task(self, value: float, seed: int) -> Task:
        """Return the task of one value and one seed."""
        name, config = self.run(value, seed)
        return Task(
            name=f"{self.name}={value:.12g}-seed{seed}",
            title=f"{self.parameter.symbol} = {value:g}, seed {seed}",
            decided_by={
                "config": decisive(config.to_dict()),
                "component": self.component,
                self.name: value,
            },
            measure=lambda: [self._row(value, seed, name, config)],
        )

    def _row(self, value: float, seed: int, name: str, config: ResolvedConfig) -> Row:
        kept = self.models.get(name, config) if self.parameter.trained else self.shared(seed)
        model = kept.model
        if not self.parameter.trained:
            model = copy(model)
            model.config = self.parameter.change(model.config, value)
        component = model.check_component(self.component)
        found = model.predict_split(self.setting.corpus.split("test"), component=component)
        return Row(
            name=f"{self.name}={value:.12g}",
            title=f"{value:g}",
            seed=seed,
            metrics=judged(found, self.setting),
            costs={
                TRAIN_SECONDS: round(kept.train_seconds(component), 3),
                MS_PER_POINT: model_ms(model, self.setting, component),
            },
            settings={self.name: value},
            run=kept.run,
        )
