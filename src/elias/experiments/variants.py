"""Ablation variants: the same configuration with one component changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elias.config import ONE_VS_ALL_STAGES, IndexConfig, LossConfig, decisive
from elias.experiments.models import component_rows, run_name
from elias.experiments.runner import Task
from elias.report.sections import COMPONENTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from elias.config import EliasConfig, ResolvedConfig
    from elias.experiments.models import Models
    from elias.experiments.runner import Setting
    from elias.experiments.tables import Row


def one_vs_all(config: EliasConfig) -> EliasConfig:
    """Return ``config`` with every label scored, in one stage.

    Encoder, seed, ranker and evaluation stay. The stage is one-vs-all's own, with the batches, the
    encoder's rate and the starts of the first stage, and the epochs of all of them. The loss is
    summed over labels: averaged over all of them, its gradients fall under AdamW's ε.

    >>> from elias import EliasConfig
    >>> twin = one_vs_all(EliasConfig.preset("mesh-titles"))
    >>> twin.index.kind, [(stage.name, stage.epochs) for stage in twin.stages]
    ('all', [('one-vs-all', 13)])
    """
    first, (usual,) = config.stages[0], ONE_VS_ALL_STAGES
    stage = replace(
        usual,
        epochs=sum(stage.epochs for stage in config.stages),
        batch_size=first.batch_size,
        encoder_lr=first.encoder_lr,
        first_classifiers=first.first_classifiers,
    )
    return replace(
        config, index=IndexConfig(kind="all"), loss=LossConfig(reduction="sum"), stages=(stage,)
    )


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

    def runs(self, seed: int) -> dict[str, ResolvedConfig]:
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

    def _measure(self, name: str, config: ResolvedConfig) -> list[Row]:
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
