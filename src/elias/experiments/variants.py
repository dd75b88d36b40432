"""Train, load and measure the models of an experiment: the full model and its variants.

`ablation` plans Tables 3 and 8: the gain of each component, and of learning the index.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from elias.config import (
    ONE_VS_ALL,
    EliasConfig,
    IndexConfig,
    LossConfig,
    ResolvedConfig,
    StageConfig,
    first_difference,
    model_settings,
    read_tree,
)
from elias.data.corpus import resolve_config
from elias.data.splits import validation_split
from elias.errors import ConfigError, RunError, did_you_mean
from elias.experiments.runner import (
    MEGABYTES,
    MS_PER_POINT,
    TRAIN_SECONDS,
    Plan,
    Row,
    Setting,
    Table,
    Task,
    dot_plot,
)
from elias.inference.predict import ENSEMBLE, split_inputs
from elias.inference.predictor import Elias
from elias.metrics import EVALUATED, REPORTED, measure
from elias.persistence.manifest import MODEL_FOLDER, RANKER_FOLDER
from elias.predictions import Predictions
from elias.report.report import COMPONENTS
from elias.rerank.calibration import is_word
from elias.rerank.reranker import CALIBRATE, NAMES, RERANK, is_calibrated
from elias.training.run import CONFIG_FILE, RunRecords, read_records
from elias.training.train import train

logger = logging.getLogger(__name__)

RUNS = "runs"
MAIN_MODEL = "elias"
"""Name of the full model in row names and run folders."""
DEFAULT_MEMBERS = 3
TIMED_POINTS = 2_000
"""Maximum number of test points used to measure the prediction time."""
WARM_UP_POINTS = 64
METRICS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@5", "R@10", "R@20", "R@100")
"""Metrics of the tables of sweeps and pruning."""


def run_name(name: str, seed: int, member: int = 0) -> str:
    """Return the folder name of a run.

    >>> run_name("elias", 0), run_name("elias", 1, 2)
    ('elias-seed0', 'elias-seed1-member2')
    """
    return f"{name}-seed{seed}" + (f"-member{member}" if member else "")


class TrainedModel(NamedTuple):
    """A trained model with the folder and the logged events of its run."""

    model: Elias
    folder: Path
    records: RunRecords

    @property
    def run(self) -> str:
        """Return the folder of the run, relative to the folder of the experiment."""
        return f"{RUNS}/{self.folder.name}"

    def train_seconds(self, component: str | None = None) -> float:
        """Return the training time in seconds, without the time for saving.

        If ``component`` is given, count only the time until it was trained.
        """
        total = 0.0
        for event in self.records.events:
            if event["event"] == "time" and event["step"] != "save":
                total += event["seconds"]
            if event["event"] == "stage" and event["stage"] == component:
                break
        return total

    def megabytes(self, component: str) -> float:
        """Return the size of the model files in MB. For a stage, leave out the ranker."""
        folder, is_stage = self.folder / MODEL_FOLDER, component == self.model.components[0]
        files = {path for path in folder.rglob("*") if path.is_file()}
        files -= set((folder / RANKER_FOLDER).rglob("*")) if is_stage else set()
        return sum(path.stat().st_size for path in files) / 1e6


class Models:
    """The models of an experiment, which are trained or loaded, and measured on the test points."""

    def __init__(self, setting: Setting, *, timed: bool = False) -> None:
        """Set up the models of an experiment.

        If ``timed``, also measure their prediction time and size on disk.
        """
        self.setting, self.timed = setting, timed
        self._last: TrainedModel | None = None

    def check(self, name: str, config: ResolvedConfig) -> None:
        """Raise `RunError` if the run has another configuration, unless it may be overwritten."""
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
        if self._last is not None and self._last.folder == folder:
            return self._last
        self.check(name, config)
        self._last = model = None  # free its memory before another model is trained
        is_finished = (folder / MODEL_FOLDER).is_dir()
        if is_finished and self._stored_config(name) == model_settings(config.to_dict()):
            model = Elias.from_pretrained(folder, device=setting.device)
            if model.metadata.get("corpus") == setting.data["fingerprint"]:
                logger.info("%s: is already trained; loading it", folder)
            elif setting.overwrite:
                model = None
            else:
                raise RunError(
                    f"{folder}: was trained on other data; use --overwrite or another --out"
                )
        if model is None:
            options: dict[str, Any] = {"device": setting.device, "overwrite": setting.overwrite}
            model = train(setting.corpus, config, out=folder, **options)
        self._last = TrainedModel(model, folder, read_records(folder))
        return self._last

    def _folder(self, name: str) -> Path:
        return self.setting.folder / RUNS / name

    def _stored_config(self, name: str) -> dict[str, Any] | None:
        try:
            return model_settings(read_tree(self._folder(name) / CONFIG_FILE))
        except ConfigError:
            return None

    def evaluate(self, predictions: Predictions) -> dict[str, float]:
        """Return the metrics of predictions for the test points, in percent.

        Predicted labels that the filters of the test split exclude are dropped first.
        """
        config, corpus = self.setting.config, self.setting.corpus
        test = corpus.split("test")
        predictions = test.drop_filtered(predictions, EVALUATED)
        return measure(config.eval, predictions, test, corpus, REPORTED)

    def ms_per_point(self, members: Sequence[Elias], component: str) -> float:
        """Measure the prediction time per test point in milliseconds, after a warm-up.

        The predictions of several members are averaged.
        """
        test = self.setting.corpus.split("test")
        points = split_inputs(test, members[0].model.encoder)
        for n_points in (WARM_UP_POINTS, min(TIMED_POINTS, len(test))):
            start = time.perf_counter()  # the first prediction compiles and loads code
            parts = [
                model.predict(points[:n_points], top_k=EVALUATED, component=component)
                for model in members
            ]
            if len(parts) > 1:
                Predictions.merge(parts, k=EVALUATED)
        return round(1000 * (time.perf_counter() - start) / max(n_points, 1), 4)

    def measure(self, row: Row, model: Elias, component: str) -> Row:
        """Return a copy of the row with the test metrics and the prediction time."""
        predictions = model.predict_split(self.setting.corpus.split("test"), component=component)
        costs = {**row.costs, MS_PER_POINT: self.ms_per_point([model], component)}
        return replace(row, metrics=self.evaluate(predictions), costs=costs)

    def _costs(
        self, trained: Sequence[TrainedModel], component: str, until: str | None = None
    ) -> dict[str, float]:
        """Return training time and, if `timed`, prediction time and size, summed over models.

        If ``until`` is given, count only the training time up to this component.
        """
        costs = {TRAIN_SECONDS: round(sum(one.train_seconds(until) for one in trained), 3)}
        if self.timed:
            costs[MS_PER_POINT] = self.ms_per_point([one.model for one in trained], component)
            costs[MEGABYTES] = round(sum(one.megabytes(component) for one in trained), 3)
        return costs

    def component_rows(
        self, trained: TrainedModel, components: Iterable[str], name: str, titles: Mapping[str, str]
    ) -> list[Row]:
        """Return a row for each component with the test metrics recorded during training."""
        return [
            Row(
                name=f"{name}/{component}",
                title=titles[component],
                seed=trained.model.config.seed,
                metrics=trained.model.metadata["metrics"][component]["test"],
                costs=self._costs([trained], component, until=component),
                settings={"component": component},
                run=trained.run,
            )
            for component in components
        ]

    def component(self, name: str | None) -> str:
        """Return the component to measure, which defaults to the last stage.

        Raises:
            ConfigError: If the model will not have the component.
        """
        config, corpus = self.setting.config, self.setting.corpus
        rerank, (_, held_out) = config.rerank, validation_split(corpus, config)
        calibrates = is_calibrated(
            rerank, len(held_out or ()), every_label=config.ranks_every_label
        )
        has_names = corpus.train.features is None and any(map(is_word, corpus.label_names))
        known = [config.stages[-1].name]
        if rerank.enabled:
            known += [RERANK, *([CALIBRATE] if calibrates else [])]
            known += [NAMES] if calibrates and rerank.names and has_names else []
        if name is not None and name not in known:
            raise ConfigError(
                f"--component {name!r}: the model will not have this component"
                f"{did_you_mean(name, known)} (use one of: {', '.join(known)})"
            )
        return name or known[0]

    def variant_task(
        self, seed: int, name: str, title: str, make: Callable[[EliasConfig], EliasConfig]
    ) -> Task:
        """Return the task that trains and measures a variant of the model.

        ``make`` derives the configuration of the variant from the configuration of the experiment.
        """
        corpus, run = self.setting.corpus, run_name(name, seed)
        config = resolve_config(make(self.setting.seeded(seed)), corpus)
        titles = {key: f"{title} {suffix}" for key, suffix in COMPONENTS.items()}
        titles[config.stages[-1].name] = title
        self.check(run, config)

        def measure() -> list[Row]:
            trained = self.get(run, config)
            return self.component_rows(trained, trained.model.components, name, titles)

        return Task(run, f"{title}, seed {seed}", measure)

    def full_model_tasks(self, seed: int, members: int, titles: Mapping[str, str]) -> list[Task]:
        """Return a task for each member of the full model, then a task for the ensemble.

        Each member has a row for each component of its saved model and, unless `timed`, for each
        earlier stage.

        Args:
            seed: Seed of the first member.
            members: Number of members of the ensemble; 1 for a single model.
            titles: Title of the row of each component.
        """
        if members < 1:
            raise ConfigError(f"--members must be >= 1, not {members}")
        first = replace(self.setting.config, seed=seed)
        configs = {run_name(MAIN_MODEL, seed, i): first.member(i) for i in range(members)}

        def measure_member(run: str, member: int) -> list[Row]:
            trained = self.get(run, configs[run])
            model = trained.model
            components = model.components if self.timed else model.metadata["metrics"]
            rows = self.component_rows(trained, components, MAIN_MODEL, titles)
            return [replace(row, settings={**row.settings, "member": member}) for row in rows]

        tasks = []
        for member, (run, config) in enumerate(configs.items()):
            self.check(run, config)
            which = f"member {member + 1} of {members}" if member else "the model"
            measure = partial(measure_member, run, member)
            tasks.append(Task(run, f"{which}, seed {seed}", measure))
        if members > 1:
            name = run_name(f"{ENSEMBLE}-of-{members}", seed)
            measure = partial(self._ensemble_rows, configs, seed, titles[ENSEMBLE])
            tasks.append(Task(name, f"the ensemble of {members}, seed {seed}", measure))
        return tasks

    def _ensemble_rows(
        self, configs: Mapping[str, ResolvedConfig], seed: int, title: str
    ) -> list[Row]:
        """Return the metrics of the members' averaged predictions, with and without label names."""
        trained = [self.get(run, config) for run, config in configs.items()]
        test, components = self.setting.corpus.split("test"), trained[0].model.components
        measured = [CALIBRATE, NAMES] if NAMES in components else components[-1:]
        parts = [one.model.predict_components(test, measured) for one in trained]
        rows = []
        for component in measured:
            row = Row(
                name=f"{MAIN_MODEL}/{ENSEMBLE}",
                title=title,
                seed=seed,
                metrics=self.evaluate(Predictions.merge([part[component] for part in parts])),
                costs=self._costs(trained, component),
                settings={"component": ENSEMBLE, "members": len(trained)},
                run=trained[0].run,
            )
            if component != components[-1]:
                row = replace(
                    row,
                    name=f"{row.name}-unnamed",
                    title=f"{title.replace(' with label names', '')}, without label names",
                    settings={**row.settings, "names": False},
                )
            rows.append(row)
        return rows


def learns_graph(config: EliasConfig) -> bool:
    """Return whether any stage learns the graph of the index."""
    return any(stage.learn_graph for stage in config.stages)


def fixed_index(config: EliasConfig) -> EliasConfig:
    """Return the configuration with a fixed graph in all stages, and without the ranker."""
    stages = tuple(replace(stage, learn_graph=False, score_all=False) for stage in config.stages)
    return replace(config, stages=stages, rerank=replace(config.rerank, enabled=False))


def one_vs_all(config: EliasConfig) -> EliasConfig:
    """Return the configuration of a one-vs-all model, trained in a single stage.

    Encoder, seed, ranker and evaluation are unchanged. Batch size, encoder learning rate and
    classifier initialisation are taken from the first stage of ``config``. The number of epochs is
    the total over all stages, if every stage sets it. The loss is summed over labels, because the
    gradients of a mean over all labels would be smaller than the ε of AdamW.

    >>> from elias import EliasConfig
    >>> variant = one_vs_all(EliasConfig.preset("lf-amazontitles-131k"))
    >>> variant.index.kind, [(stage.name, stage.epochs) for stage in variant.stages]
    ('all', [('one-vs-all', 75)])
    """
    first = config.stages[0]
    epochs = [stage.epochs for stage in config.stages if stage.epochs is not None]
    stage = StageConfig(
        name=ONE_VS_ALL,
        epochs=sum(epochs) if len(epochs) == len(config.stages) else None,
        batch_size=first.batch_size,
        encoder_lr=first.encoder_lr,
        first_classifiers=first.first_classifiers,
    )
    return replace(
        config, index=IndexConfig(kind="all"), loss=LossConfig(reduction="sum"), stages=(stage,)
    )


def ablation(
    setting: Setting, *, members: int | None = None, with_one_vs_all: bool = False
) -> Plan:
    """Plan the ablation of stages, ranker, calibration, label names, ensemble and learned index.

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
    tasks = []
    for seed in setting.seeds:
        tasks += models.full_model_tasks(seed, members, titles)
        if learns_graph(config):
            tasks.append(models.variant_task(seed, "fixed", "fixed index throughout", fixed_index))
        if with_one_vs_all:
            tasks.append(models.variant_task(seed, "one-vs-all", "one-vs-all", one_vs_all))
    return Plan(
        name="ablation",
        title="Gain of each component (Tables 3 and 8)",
        setting=setting,
        tasks=tasks,
        table=Table(
            "component",
            columns=[*(name for name in REPORTED if name != "nDCG@1"), TRAIN_SECONDS],  # = P@1
            shown=("P@1", "P@5", "R@10", "R@100", TRAIN_SECONDS),
        ),
        plot=lambda lines: dot_plot(lines, "Gain of each component", ("P@1", "P@5", "R@100")),
        options={"members": members, "one_vs_all": with_one_vs_all},
    )
