"""Tables 3 and 8: the gain of each component, and of learning the index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elias.experiments.models import (
    DEFAULT_MEMBERS,
    FullModel,
    Models,
    fixed_index,
    learns_graph,
    one_vs_all,
)
from elias.experiments.runner import Plan
from elias.experiments.tables import TRAIN_SECONDS, Table, dot_plot
from elias.inference.predict import ENSEMBLE
from elias.report.sections import COMPONENTS

if TYPE_CHECKING:
    from elias.experiments.runner import Setting


COLUMNS = (
    *("P@1", "P@3", "P@5", "nDCG@3", "nDCG@5", "PSP@1", "PSP@3", "PSP@5"),
    *("R@10", "R@20", "R@100", TRAIN_SECONDS),
)
SHOWN = ("P@1", "P@5", "R@10", "R@100", TRAIN_SECONDS)


def ablation(
    setting: Setting, *, members: int | None = None, with_one_vs_all: bool = False
) -> Plan:
    """Plan the ablation: stages, ranker, calibration, label names, ensemble, fixed index.

    Args:
        setting: Configuration, corpus, seeds and folder.
        members: Ensemble size; 1 for no ensemble. Defaults to the size in the configuration if it
            has an ensemble, else to 3.
        with_one_vs_all: Also train a one-vs-all classifier with the same encoder.
    """
    config, models = setting.config, Models(setting)
    if members is None:
        members = config.ensemble.members if config.ensemble.members > 1 else DEFAULT_MEMBERS
    first, *others = config.stages
    titles = {first.name: first.name}
    for stage in others:
        titles[stage.name] = f"+ {stage.name}{' (learned index)' if stage.learn_graph else ''}"
    titles |= {**COMPONENTS, ENSEMBLE: f"+ ensemble of {members}"}
    model = FullModel(models, members=members, titles=titles)
    tasks = []
    for seed in setting.seeds:
        tasks += model.tasks(seed)
        if learns_graph(config):
            tasks.append(models.variant_task(seed, "fixed", "fixed index throughout", fixed_index))
        if with_one_vs_all:
            tasks.append(models.variant_task(seed, "one-vs-all", "one-vs-all", one_vs_all))
    return Plan(
        name="ablation",
        title="Gain of each component (Tables 3 and 8)",
        setting=setting,
        tasks=tasks,
        table=Table(heading="component", columns=COLUMNS, shown=SHOWN),
        plot=lambda lines: dot_plot(lines, "Gain of each component", ("P@1", "P@5", "R@100")),
        options={"members": members, "one_vs_all": with_one_vs_all},
    )
