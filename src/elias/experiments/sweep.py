"""Table 7: one parameter varied, all else equal.

λ, κ, α and β decide training, so every value trains a model. The beam and the shortlist are
varied when predicting, with one model.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from elias.config import decisive
from elias.errors import ConfigError
from elias.experiments.drawing import curves
from elias.experiments.measuring import judged, model_ms, single_component
from elias.experiments.members import OURS, run_name
from elias.experiments.models import Models
from elias.experiments.parameters import parameter_called
from elias.experiments.plan import Plan, Task
from elias.experiments.rows import MS_PER_POINT, TRAIN_SECONDS, Row
from elias.experiments.tables import Table
from elias.pipeline.reranking import CALIBRATE, NAMES, RERANK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elias.config import EliasConfig
    from elias.experiments.models import Kept
    from elias.experiments.parameters import Parameter
    from elias.experiments.plan import Setting

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

    def run(self, value: float, seed: int) -> tuple[str, EliasConfig]:
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

    def _row(self, value: float, seed: int, name: str, config: EliasConfig) -> Row:
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
