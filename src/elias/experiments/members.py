"""The model itself and the ensemble of its members, which several experiments measure."""

from __future__ import annotations

import logging
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elias.config import EnsembleConfig, decisive
from elias.errors import ConfigError
from elias.experiments.measuring import component_rows, judged, model_ms
from elias.experiments.models import Models
from elias.experiments.plan import Task
from elias.experiments.rows import MEGABYTES, MS_PER_POINT, TRAIN_SECONDS, Row
from elias.pipeline.answering import ENSEMBLE
from elias.pipeline.reranking import CALIBRATE, NAMES
from elias.rerank.calibration import MIXTURES

if TYPE_CHECKING:
    from collections.abc import Callable

    from elias.config import EliasConfig
    from elias.experiments.models import Kept
    from elias.experiments.plan import Setting
    from elias.pipeline import Elias

OURS = "elias"
"""What the model is called in rows and runs."""
USUAL_MEMBERS = 3

logger = logging.getLogger(__name__)


def run_name(name: str, seed: int, member: int = 0) -> str:
    """Return what the run of a model is called.

    >>> run_name("elias", 0), run_name("elias", 1, 2)
    ('elias-seed0', 'elias-seed1-member2')
    """
    return f"{name}-seed{seed}" + (f"-member{member}" if member else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModel:
    """The model of a setting, with members for an ensemble."""

    setting: Setting
    models: Models
    members: int
    title: Callable[[str], str]
    """What the row of a component is called."""
    stages: bool = True
    """Whether every stage has a row, or the last alone."""
    timed: bool = False
    """Whether predictions are timed."""

    def __post_init__(self) -> None:
        """Check the number of members."""
        if self.members < 1:
            raise ConfigError(f"--members must be >= 1, not {self.members}")

    def runs(self, seed: int) -> dict[str, EliasConfig]:
        """Return the runs it takes with their configurations."""
        first = replace(self.setting.config, seed=seed)
        return {run_name(OURS, seed, i): first.member(i) for i in range(self.members)}

    def tasks(self, seed: int) -> list[Task]:
        """Return the tasks of one seed: each member by itself, then the ensemble."""
        runs = self.runs(seed)
        alone = [
            self._alone(seed, member, name, config)
            for member, (name, config) in enumerate(runs.items())
        ]
        if self.members == 1:
            return alone
        together = Task(
            name=run_name(ENSEMBLE, seed),
            title=f"the ensemble of {self.members}, seed {seed}",
            decided_by={
                "members": [decisive(c.to_dict()) for c in runs.values()],
                "timed": self.timed,
            },
            measure=lambda: self._ensemble(seed),
        )
        return [*alone, together]

    def _alone(self, seed: int, member: int, name: str, config: EliasConfig) -> Task:
        which = f"member {member + 1} of {self.members}" if member else "the model"
        return Task(
            name=name,
            title=f"{which}, seed {seed}",
            decided_by={
                "config": decisive(config.to_dict()),
                "timed": self.timed,
                "stages": self.stages,
            },
            measure=lambda: self._single(name, config, member),
        )

    def _single(self, name: str, config: EliasConfig, member: int) -> list[Row]:
        kept = self.models.get(name, config)
        components = kept.model.facts["metrics"] if self.stages else kept.model.components
        timed = self.setting if self.timed else None
        rows = component_rows(kept, components, OURS, self.title, timed)
        calibrated = [row for row in rows if row.settings["component"] == CALIBRATE]
        if self.stages and calibrated:
            after = rows.index(calibrated[0]) + 1
            rows.insert(after, self._other_mixture(kept, calibrated[0]))
        return [replace(row, settings={**row.settings, "member": member}) for row in rows]

    def _other_mixture(self, kept: Kept, calibrated: Row) -> Row:
        """Return the row of the calibrated model as the mixture would rank that it does not use."""
        reranker = kept.model.reranker
        assert reranker is not None
        other = next(name for name in MIXTURES if name != reranker.mixture)
        model = kept.model.joined_by((), kept.model.config)
        model.reranker = replace(reranker, mixture=other)
        found = model.predict_split(self.setting.corpus.split("test"), component=CALIBRATE)
        return replace(
            calibrated,
            name=f"{OURS}/{CALIBRATE}-{other}",
            title=f"{calibrated.title}, mixed as {MIXTURES[other]}",
            metrics=judged(found, self.setting),
            settings={**calibrated.settings, "mixture": other},
        )

    def _ensemble(self, seed: int) -> list[Row]:
        kept = []
        for number, (name, config) in enumerate(self.runs(seed).items(), start=1):
            logger.info("member %d of %d", number, self.members)
            kept.append(self.models.get(name, config))
        first_member = self.setting.config.ensemble.first_member
        together = EnsembleConfig(members=self.members, first_member=first_member)
        first, *others = (one.model for one in kept)
        model = copy(first)
        model.config = replace(self.setting.config, seed=seed, ensemble=together)
        model.others = tuple(others)
        costs = {TRAIN_SECONDS: round(sum(one.train_seconds() for one in kept), 3)}
        if self.timed:
            costs[MS_PER_POINT] = model_ms(model, self.setting, ENSEMBLE)
            costs[MEGABYTES] = round(sum(one.megabytes() for one in kept), 3)
        row = Row(
            name=f"{OURS}/{ENSEMBLE}",
            title=self.title(ENSEMBLE),
            seed=seed,
            metrics=self._judged(model),
            costs=costs,
            settings={"component": ENSEMBLE, "members": self.members},
            run=kept[0].run,
        )
        if NAMES not in first.components:
            return [row]
        unnamed, *others = map(_without_names, model.members)
        unnamed.config, unnamed.others = model.config, tuple(others)
        title = row.title.replace(" with label names", "")
        if self.timed:
            costs = {**costs, MS_PER_POINT: model_ms(unnamed, self.setting, ENSEMBLE)}
        return [
            replace(
                row,
                name=f"{OURS}/{ENSEMBLE}-unnamed",
                title=f"{title}, without label names",
                metrics=self._judged(unnamed),
                costs=costs,
                settings={**row.settings, "names": False},
            ),
            row,
        ]

    def _judged(self, model: Elias) -> dict[str, float]:
        return judged(model.predict_split(self.setting.corpus.split("test")), self.setting)


def _without_names(model: Elias) -> Elias:
    """Return the same model, ending where the paper's does."""
    other = copy(model)
    assert model.reranker is not None
    other.reranker = replace(model.reranker, names=None, by_name=None)
    return other
