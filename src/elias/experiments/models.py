"""Train, load and measure the models of an experiment: the full model and its variants."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elias.config import (
    ONE_VS_ALL_STAGES,
    EnsembleConfig,
    IndexConfig,
    LossConfig,
    first_difference,
    model_settings,
    read_tree,
)
from elias.data.splits import validation_split
from elias.errors import ConfigError, RunError, did_you_mean
from elias.experiments.runner import Task
from elias.experiments.tables import MEGABYTES, MS_PER_POINT, TRAIN_SECONDS, Row
from elias.inference.predict import ENSEMBLE, split_inputs
from elias.inference.predictor import EVALUATED, Elias
from elias.metrics import REPORTED, measure
from elias.persistence.manifest import MEMBERS_FOLDER, MODEL_FOLDER, RANKER_FOLDER
from elias.report.sections import COMPONENTS
from elias.rerank.calibration import MIN_POINTS, MIXTURES, is_word
from elias.rerank.reranker import CALIBRATE, NAMES, RERANK
from elias.training.run import CONFIG_FILE, RunRecords, read_records
from elias.training.trainer import train

if TYPE_CHECKING:
    from elias.config import EliasConfig, ResolvedConfig
    from elias.experiments.runner import Setting
    from elias.predictions import Predictions


logger = logging.getLogger(__name__)

RUNS = "runs"
MAIN_MODEL = "elias"
"""Name of the full model in row names and run folders."""
DEFAULT_MEMBERS = 3
TIMED_POINTS = 2_000
"""Maximum number of test points used to measure the prediction time."""
WARM_UP_POINTS = 64


def run_name(name: str, seed: int, member: int = 0) -> str:
    """Return the folder name of a run.

    >>> run_name("elias", 0), run_name("elias", 1, 2)
    ('elias-seed0', 'elias-seed1-member2')
    """
    return f"{name}-seed{seed}" + (f"-member{member}" if member else "")


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A trained model with the folder and the logged events of its run."""

    model: Elias
    folder: Path
    records: RunRecords

    @property
    def run(self) -> str:
        """Return the folder of the run, relative to the folder of the experiment."""
        return f"{RUNS}/{self.folder.name}"

    def train_seconds(self, component: str | None = None) -> float:
        """Return the training time in seconds, without saving and ensemble members.

        If ``component`` is given, count only the time until it was trained.
        """
        total = 0.0
        for event in self.records.events:
            if "member" in event or event.get("step") == "save":
                continue
            if event["event"] == "time":
                total += event["seconds"]
            if event["event"] == "stage" and event["stage"] == component:
                break
        return total

    def megabytes(self, component: str | None = None) -> float:
        """Return the size of the model files that a component needs.

        Ensemble members count only for the ensemble. The ranker does not count for a stage.
        """
        skipped = set() if component == ENSEMBLE else {MEMBERS_FOLDER}
        if component in {stage.name for stage in self.model.config.stages}:
            skipped.add(RANKER_FOLDER)
        folder = self.folder / MODEL_FOLDER
        files = (path for path in folder.rglob("*") if path.is_file())
        needed = (path for path in files if path.relative_to(folder).parts[0] not in skipped)
        return sum(path.stat().st_size for path in needed) / 1e6


class Models:
    """Train, load and measure the models of an experiment."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def check(self, name: str, config: ResolvedConfig) -> None:
        """Raise `RunError` if the run exists with another configuration and is not overwritten."""
        stored = self._stored_config(name)
        if stored is None or self.setting.overwrite:
            return
        changed = first_difference(model_settings(config.to_dict()), stored)
        if changed:
            raise RunError(
                f"{self._folder(name)}: was trained with another configuration ({changed}); "
                "use --overwrite or another --out"
            )

    def get(self, name: str, config: ResolvedConfig) -> TrainedModel:
        """Load the model of a finished run, or train it.

        Raises:
            RunError: If the run exists with another configuration or corpus.
        """
        folder, setting = self._folder(name), self.setting
        is_finished = (folder / MODEL_FOLDER).is_dir()
        if is_finished and self._stored_config(name) == model_settings(config.to_dict()):
            model = Elias.from_pretrained(folder, device=setting.device)
            if model.metadata.get("corpus") == setting.data["fingerprint"]:
                logger.info("%s: finished before, loaded", folder)
                return TrainedModel(model, folder, read_records(folder))
            if not setting.overwrite:
                raise RunError(
                    f"{folder}: was trained on other data; use --overwrite or another --out"
                )
        self.check(name, config)
        model = train(
            config,
            setting.corpus,
            out=folder,
            device=setting.device,
            overwrite=setting.overwrite,
        )
        return TrainedModel(model, folder, read_records(folder))

    def _folder(self, name: str) -> Path:
        return self.setting.folder / RUNS / name

    def _stored_config(self, name: str) -> dict[str, Any] | None:
        try:
            return model_settings(read_tree(self._folder(name) / CONFIG_FILE))
        except ConfigError:
            return None

    def evaluate(self, predictions: Predictions) -> dict[str, float]:
        """Return the metrics of predictions for the test points, in percent."""
        config, corpus = self.setting.config, self.setting.corpus
        return measure(config.eval, predictions, corpus.split("test"), corpus, REPORTED)

    def ms_per_point(self, model: Elias, component: str) -> float:
        """Measure the prediction time per test point in milliseconds, after a warm-up."""
        test = self.setting.corpus.split("test")
        points, n_points = split_inputs(test, model.model.encoder), min(TIMED_POINTS, len(test))
        # the first prediction compiles and loads code
        model.predict(points[:WARM_UP_POINTS], top_k=EVALUATED, component=component)
        start = time.perf_counter()
        model.predict(points[:n_points], top_k=EVALUATED, component=component)
        return round(1000 * (time.perf_counter() - start) / max(n_points, 1), 4)

    def measure(self, row: Row, model: Elias, component: str, *, timed: bool = True) -> Row:
        """Return a copy of the row with the test metrics and, if ``timed``, the prediction time."""
        predictions = model.predict_split(self.setting.corpus.split("test"), component=component)
        costs = dict(row.costs)
        if timed:
            costs[MS_PER_POINT] = self.ms_per_point(model, component)
        return replace(row, metrics=self.evaluate(predictions), costs=costs)

    def component_rows(
        self,
        trained: TrainedModel,
        components: Iterable[str],
        name: str,
        title: Callable[[str], str],
        *,
        timed: bool,
    ) -> list[Row]:
        """Return a row for each component with the test metrics recorded during training.

        If ``timed``, also measure the prediction time and the size on disk.
        """
        rows = []
        for component in components:
            costs = {TRAIN_SECONDS: round(trained.train_seconds(component), 3)}
            if timed:
                costs[MS_PER_POINT] = self.ms_per_point(trained.model, component)
                costs[MEGABYTES] = round(trained.megabytes(component), 3)
            row = Row(
                name=f"{name}/{component}",
                title=title(component),
                seed=trained.model.config.seed,
                metrics=trained.model.metadata["metrics"][component]["test"],
                costs=costs,
                settings={"component": component},
                run=trained.run,
            )
            rows.append(row)
        return rows

    def component(self, name: str | None) -> str:
        """Return the component to measure, which defaults to the last stage.

        Raises:
            ConfigError: If the model will not have the component.
        """
        config, corpus = self.setting.config, self.setting.corpus
        rerank, (_, held_out) = config.rerank, validation_split(corpus, config)
        known = [config.stages[-1].name]
        if rerank.enabled:
            known.append(RERANK)
            if rerank.calibrate and len(held_out or ()) >= MIN_POINTS:
                known.append(CALIBRATE)
                if rerank.names and corpus.train.features is None:
                    known += [NAMES] if any(map(is_word, corpus.label_names)) else []
        if name is not None and name not in known:
            raise ConfigError(
                f"--component {name!r}: the model will have no such component"
                f"{did_you_mean(name, known)} (it has: {', '.join(known)})"
            )
        return name or known[0]

    def variant_task(
        self,
        seed: int,
        name: str,
        title: str,
        make: Callable[[EliasConfig], EliasConfig],
        *,
        timed: bool = False,
    ) -> Task:
        """Return the task that trains and measures a variant of the model.

        ``make`` derives the configuration of the variant from that of the experiment.
        """
        corpus = self.setting.corpus
        config = make(self.setting.seeded(seed)).resolve(len(corpus.train), corpus.n_labels)
        run = run_name(name, seed)
        self.check(run, config)

        def component_title(component: str) -> str:
            return f"{title} {COMPONENTS.get(component, '')}".rstrip()

        def measure_components() -> list[Row]:
            trained = self.get(run, config)
            components = trained.model.components
            return self.component_rows(trained, components, name, component_title, timed=timed)

        return Task(
            name=run,
            title=f"{title}, seed {seed}",
            decided_by={"config": model_settings(config.to_dict()), "timed": timed},
            measure=measure_components,
        )


class FullModel:
    """The unmodified model of the configuration, and the ensemble of its members."""

    def __init__(
        self,
        models: Models,
        *,
        members: int,
        titles: Mapping[str, str],
        every_stage: bool = True,
        timed: bool = False,
    ) -> None:
        """Select the measurements.

        Args:
            models: The models of the experiment.
            members: Number of members of the ensemble; 1 for a single model.
            titles: Title of the row of each component.
            every_stage: Return a row for every stage instead of only the last one.
            timed: Measure the prediction time and the size on disk.
        """
        if members < 1:
            raise ConfigError(f"--members must be >= 1, not {members}")
        self.models, self.setting = models, models.setting
        self.members, self.titles, self.every_stage = members, titles, every_stage
        self.timed = timed

    def tasks(self, seed: int) -> list[Task]:
        """Return the tasks for one seed: one task per member, then one for the ensemble."""
        first = replace(self.setting.config, seed=seed)
        runs = {run_name(MAIN_MODEL, seed, i): first.member(i) for i in range(self.members)}
        tasks = []
        for member, (name, config) in enumerate(runs.items()):
            self.models.check(name, config)
            which = f"member {member + 1} of {self.members}" if member else "the model"
            task = Task(
                name=name,
                title=f"{which}, seed {seed}",
                decided_by={
                    "config": model_settings(config.to_dict()),
                    "timed": self.timed,
                    "stages": self.every_stage,
                },
                measure=partial(self._member_rows, name, config, member),
            )
            tasks.append(task)
        if self.members > 1:
            task = Task(
                name=run_name(ENSEMBLE, seed),
                title=f"the ensemble of {self.members}, seed {seed}",
                decided_by={
                    "members": [model_settings(config.to_dict()) for config in runs.values()],
                    "timed": self.timed,
                },
                measure=partial(self._ensemble_rows, runs, seed),
            )
            tasks.append(task)
        return tasks

    def _member_rows(self, name: str, config: ResolvedConfig, member: int) -> list[Row]:
        trained = self.models.get(name, config)
        model = trained.model
        components = model.metadata["metrics"] if self.every_stage else model.components
        title = self.titles.__getitem__
        rows = self.models.component_rows(trained, components, MAIN_MODEL, title, timed=self.timed)
        for i, row in enumerate(rows):
            if self.every_stage and row.settings["component"] == CALIBRATE:
                rows.insert(i + 1, self._other_mixture(model, row))
                break
        return [replace(row, settings={**row.settings, "member": member}) for row in rows]

    def _other_mixture(self, model: Elias, calibrated: Row) -> Row:
        """Measure the calibrated model with the alternative mixture of scores."""
        assert model.reranker is not None
        other = next(name for name in MIXTURES if name != model.reranker.mixture)
        changed = model.joined_by((), model.config)
        changed.reranker = replace(model.reranker, mixture=other)
        row = replace(
            calibrated,
            name=f"{MAIN_MODEL}/{CALIBRATE}-{other}",
            title=f"{calibrated.title}, mixed as {MIXTURES[other]}",
            settings={**calibrated.settings, "mixture": other},
        )
        return self.models.measure(row, changed, CALIBRATE, timed=False)

    def _ensemble_rows(self, runs: Mapping[str, ResolvedConfig], seed: int) -> list[Row]:
        """Return the rows of the ensemble, without and with label names."""
        trained = [self.models.get(name, config) for name, config in runs.items()]
        members = [one.model for one in trained]
        first_member = self.setting.config.ensemble.first_member
        ensemble = EnsembleConfig(members=self.members, first_member=first_member)
        config = replace(self.setting.config, seed=seed, ensemble=ensemble)
        costs = {TRAIN_SECONDS: round(sum(one.train_seconds() for one in trained), 3)}
        if self.timed:
            costs[MEGABYTES] = round(sum(one.megabytes() for one in trained), 3)
        row = Row(
            name=f"{MAIN_MODEL}/{ENSEMBLE}",
            title=self.titles[ENSEMBLE],
            seed=seed,
            costs=costs,
            settings={"component": ENSEMBLE, "members": self.members},
            run=trained[0].run,
        )
        variants = [(row, members)]
        if NAMES in members[0].components:
            unnamed = replace(
                row,
                name=f"{row.name}-unnamed",
                title=f"{row.title.replace(' with label names', '')}, without label names",
                settings={**row.settings, "names": False},
            )
            variants.insert(0, (unnamed, [_without_names(model) for model in members]))
        return [
            self.models.measure(empty, first.joined_by(others, config), ENSEMBLE, timed=self.timed)
            for empty, (first, *others) in variants
        ]


def _without_names(model: Elias) -> Elias:
    """Return the model without the component that uses label names."""
    changed = copy(model)
    assert model.reranker is not None
    changed.reranker = replace(model.reranker, names=None, by_name=None)
    return changed


def learns_graph(config: EliasConfig) -> bool:
    """Return whether any stage learns the graph of the index."""
    return any(stage.learn_graph for stage in config.stages)


def fixed_index(config: EliasConfig) -> EliasConfig:
    """Return the configuration with a fixed graph in all stages and without ranker."""
    stages = tuple(replace(stage, learn_graph=False) for stage in config.stages)
    return replace(config, stages=stages, rerank=replace(config.rerank, enabled=False))


def one_vs_all(config: EliasConfig) -> EliasConfig:
    """Return the configuration of a one-vs-all model, trained in a single stage.

    Encoder, seed, ranker and evaluation are unchanged. The stage is the default one-vs-all stage,
    with the batch size, encoder learning rate and classifier initialisation of the first stage of
    ``config`` and the total number of epochs of all its stages. The loss is summed over labels:
    the gradients of a mean over all labels would be smaller than the ε of AdamW.

    >>> from elias import EliasConfig
    >>> variant = one_vs_all(EliasConfig.preset("mesh-titles"))
    >>> variant.index.kind, [(stage.name, stage.epochs) for stage in variant.stages]
    ('all', [('one-vs-all', 13)])
    """
    first, (default,) = config.stages[0], ONE_VS_ALL_STAGES
    stage = replace(
        default,
        epochs=sum(stage.epochs for stage in config.stages),
        batch_size=first.batch_size,
        encoder_lr=first.encoder_lr,
        first_classifiers=first.first_classifiers,
    )
    return replace(
        config, index=IndexConfig(kind="all"), loss=LossConfig(reduction="sum"), stages=(stage,)
    )
