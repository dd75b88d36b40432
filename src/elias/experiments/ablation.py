"""Tables 3 and 8: what each component adds, and what learning the index is worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elias.experiments.models import USUAL_MEMBERS, Models, OwnModel
from elias.experiments.plots import beside
from elias.experiments.runner import Plan
from elias.experiments.tables import TRAIN_SECONDS, Table
from elias.experiments.variants import Twin, fixed_twin, learns_graph, one_vs_all_twin
from elias.inference.predict import ENSEMBLE
from elias.report.sections import COMPONENTS

if TYPE_CHECKING:
    from elias.config import ResolvedConfig
    from elias.experiments.runner import Setting


COLUMNS = (
    *("P@1", "P@3", "P@5", "nDCG@3", "nDCG@5", "PSP@1", "PSP@3", "PSP@5"),
    *("R@10", "R@20", "R@100", TRAIN_SECONDS),
)
SHOWN = ("P@1", "P@5", "R@10", "R@100", TRAIN_SECONDS)


def ablation(
    setting: Setting, *, members: int | None = None, with_one_vs_all: bool = False
) -> Plan:
    """Plan the ablation: stages, ranker, calibration, names, ensemble; beside them the fixed index.

    Args:
        setting: What to train on what.
        members: Of the ensemble; 1: none. By default as many as the configuration has, or 3.
        with_one_vs_all: Train the one-vs-all twin too.
    """
    config, models = setting.config, Models(setting)
    if members is None:
        members = config.ensemble.members if config.ensemble.members > 1 else USUAL_MEMBERS
    titles = _titles(config, members)
    parts: list[OwnModel | Twin] = [
        OwnModel(setting=setting, models=models, members=members, title=titles.__getitem__)
    ]
    if learns_graph(config):
        parts.append(fixed_twin(setting, models))
    if with_one_vs_all:
        parts.append(one_vs_all_twin(setting, models))
    for seed in setting.seeds:
        for part in parts:
            models.check(part.runs(seed))
    return Plan(
        name="ablation",
        title="What each component adds (Tables 3 and 8)",
        setting=setting,
        tasks=[task for seed in setting.seeds for part in parts for task in part.tasks(seed)],
        table=Table(heading="component", columns=COLUMNS, shown=SHOWN),
        plot=lambda lines: beside(lines, "What each component adds", ("P@1", "P@5", "R@100")),
        options={"members": members, "one_vs_all": with_one_vs_all},
    )


def _titles(config: ResolvedConfig, members: int) -> dict[str, str]:
    """Return what the rows are called, each adding to the one above."""
    first, *others = (stage.name for stage in config.stages)
    added = {name: f"+ {name}" for name in others}
    learned = [stage.name for stage in config.stages if stage.learn_graph]
    added |= {name: f"+ {name} (learned index)" for name in learned if name in added}
    return {
        first: first,
        **added,
        **COMPONENTS,
        ENSEMBLE: f"+ ensemble of {members}",
    }
