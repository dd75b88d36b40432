"""Models that stand beside ours: the same but for one thing, which they show the worth of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elias.analysis.facts import COMPONENTS
from elias.baselines import one_vs_all
from elias.config import decisive
from elias.experiments.measuring import component_rows
from elias.experiments.members import run_name
from elias.experiments.plan import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from elias.config import EliasConfig
    from elias.experiments.models import Models
    from elias.experiments.plan import Setting
    from elias.experiments.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """A model whose configuration is made from ours."""

    name: str
    title: str
    make: Callable[[EliasConfig], EliasConfig]
    setting: Setting
    models: Models
    timed: bool = False
    """Whether predictions are timed."""

    def runs(self, seed: int) -> dict[str, EliasConfig]:
        """Return the run it takes with its configuration."""
        corpus = self.setting.corpus
        twin = self.make(self.setting.seeded(seed)).resolve(len(corpus.train), corpus.n_labels)
        return {run_name(self.name, seed): twin}

    def tasks(self, seed: int) -> list[Task]:
        """Return the task of one seed."""
        ((name, config),) = self.runs(seed).items()
        return [
            Task(
                name=name,
                title=f"{self.title}, seed {seed}",
                decided_by={"config": decisive(config.to_dict()), "timed": self.timed},
                measure=lambda: self._measure(name, config),
            )
        ]

    def _measure(self, name: str, config: EliasConfig) -> list[Row]:
        kept = self.models.get(name, config)
        timed = self.setting if self.timed else None
        return component_rows(kept, kept.model.components, self.name, self._title, timed)

    def _title(self, component: str) -> str:
        return f"{self.title} {COMPONENTS.get(component, '')}".rstrip()


def learns_graph(config: EliasConfig) -> bool:
    """Say whether a stage learns the index."""
    return any(stage.learn_graph for stage in config.stages)


def fixed_index(config: EliasConfig) -> EliasConfig:
    """Return the control for the learned index: equal stages, rates and epochs, a fixed graph."""
    stages = tuple(replace(stage, learn_graph=False) for stage in config.stages)
    return replace(config, stages=stages, rerank=replace(config.rerank, enabled=False))


def fixed_twin(setting: Setting, models: Models) -> Twin:
    """Return the model whose index is never learned, without ranker."""
    return Twin(
        name="fixed",
        title="fixed index throughout",
        make=fixed_index,
        setting=setting,
        models=models,
    )


def one_vs_all_twin(setting: Setting, models: Models, *, timed: bool = False) -> Twin:
    """Return the model with the same encoder that scores every label."""
    return Twin(
        name="one-vs-all",
        title="one-vs-all",
        make=one_vs_all,
        setting=setting,
        models=models,
        timed=timed,
    )
