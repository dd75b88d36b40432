"""The models of an experiment: each trained once, kept in a run of its own, and read again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elias.config import decisive, first_difference, read_tree
from elias.errors import ConfigError, RunError
from elias.pipeline import Elias, train
from elias.pipeline.answering import ENSEMBLE
from elias.pipeline.folder import MEMBERS_FOLDER, RANKER_FOLDER
from elias.training.records import RunRecords, read_records
from elias.training.tracking import CONFIG_FILE, MODEL_FOLDER

if TYPE_CHECKING:
    from elias.config import EliasConfig
    from elias.experiments.plan import Setting

RUNS = "runs"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kept:
    """A trained model with its run."""

    model: Elias
    run: str
    """Where it is, below the experiment's folder."""
    folder: Path
    records: RunRecords

    def metrics(self, component: str) -> dict[str, float]:
        """Return what training measured on the test points after a stage or another component."""
        found: dict[str, float] = self.model.facts["metrics"][component]["test"]
        return found

    def train_seconds(self, component: str | None = None) -> float:
        """Return how long training took until a component was there; None: all of it."""
        return sum(_seconds_until(self.records, component))

    def megabytes(self, component: str | None = None) -> float:
        """Return the size of what a component reads of the saved model; None: all of it."""
        stages = {stage.name for stage in self.model.config.stages}
        without = {MEMBERS_FOLDER} if component != ENSEMBLE else set()
        without |= {RANKER_FOLDER} if component in stages else set()
        model = self.folder / MODEL_FOLDER
        files = (path for path in model.rglob("*") if path.is_file())
        kept = (path for path in files if path.relative_to(model).parts[0] not in without)
        return sum(path.stat().st_size for path in kept) / 1e6


def _seconds_until(records: RunRecords, component: str | None) -> Iterator[float]:
    """Yield the seconds of each step of the (first) model before a component was measured."""
    for event in records.events:
        if "member" in event or event.get("step") == "save":
            continue
        if event["event"] == "time":
            yield event["seconds"]
        if event["event"] == "stage" and event["stage"] == component:
            return


class Models:
    """Trains the models of an experiment, or reads those that are finished."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def check(self, wanted: Mapping[str, EliasConfig]) -> None:
        """Refuse runs in the way of the models to be trained, before anything is."""
        if self.setting.overwrite:
            return
        for name, config in wanted.items():
            held = self._held(name)
            if held is None:
                continue
            changed = first_difference(decisive(config.to_dict()), held)
            if changed:
                raise RunError(
                    f"{self._folder(name)}: was trained with another configuration ({changed}); "
                    "use --overwrite or another --out"
                )

    def get(self, name: str, config: EliasConfig) -> Kept:
        """Return the model of a configuration: read from its run if that is finished, or trained.

        Raises:
            RunError: If another configuration or corpus is in the way.
        """
        folder = self._folder(name)
        if self._is_finished(name, config):
            model = Elias.from_pretrained(folder, device=self.setting.device)
            if self._is_of_this_corpus(model.facts):
                logger.info("%s: finished before, and used again", folder)
                return Kept(model, f"{RUNS}/{name}", folder, read_records(folder))
            if not self.setting.overwrite:
                raise RunError(
                    f"{folder}: was trained on other data; use --overwrite or another --out"
                )
        self.check({name: config})
        model = train(
            config,
            self.setting.corpus,
            out=folder,
            device=self.setting.device,
            overwrite=self.setting.overwrite,
        )
        return Kept(model, f"{RUNS}/{name}", folder, read_records(folder))

    def _folder(self, name: str) -> Path:
        return self.setting.folder / RUNS / name

    def _held(self, name: str) -> dict[str, Any] | None:
        """Return the configuration of the run that has this name; None where there is none."""
        try:
            return decisive(read_tree(self._folder(name) / CONFIG_FILE))
        except ConfigError:
            return None

    def _is_finished(self, name: str, config: EliasConfig) -> bool:
        there = (self._folder(name) / MODEL_FOLDER).is_dir()
        return there and self._held(name) == decisive(config.to_dict())

    def _is_of_this_corpus(self, facts: Mapping[str, Any]) -> bool:
        same: bool = facts.get("corpus") == self.setting.data["fingerprint"]
        return same
