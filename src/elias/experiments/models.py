"""Train, store and measure the models of an experiment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elias.config import EnsembleConfig, decisive, first_difference, read_tree
from elias.data.splits import validation_split
from elias.errors import ConfigError, RunError, did_you_mean
from elias.experiments.runner import Task
from elias.experiments.tables import MEGABYTES, MS_PER_POINT, TRAIN_SECONDS, Row
from elias.inference.predict import CALIBRATE, ENSEMBLE, NAMES, RERANK, input_of
from elias.inference.predictor import EVALUATED, Elias
from elias.metrics import REPORTED, inverse_propensities, score
from elias.persistence.manifest import MEMBERS_FOLDER, MODEL_FOLDER, RANKER_FOLDER
from elias.rerank.calibration import FEWEST_POINTS, MIXTURES
from elias.rerank.label_names import is_word
from elias.training.run import CONFIG_FILE, RunRecords, read_records
from elias.training.trainer import train

if TYPE_CHECKING:
    from elias.config import ResolvedConfig
    from elias.experiments.runner import Setting
    from elias.predictions import Predictions


logger = logging.getLogger(__name__)

RUNS = "runs"


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
        found: dict[str, float] = self.model.metadata["metrics"][component]["test"]
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

    def check(self, wanted: Mapping[str, ResolvedConfig]) -> None:
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

    def get(self, name: str, config: ResolvedConfig) -> Kept:
        """Return the model of a configuration: read from its run if that is finished, or trained.

        Raises:
            RunError: If another configuration or corpus is in the way.
        """
        folder = self._folder(name)
        if self._is_finished(name, config):
            model = Elias.from_pretrained(folder, device=self.setting.device)
            if self._is_of_this_corpus(model.metadata):
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

    def _is_finished(self, name: str, config: ResolvedConfig) -> bool:
        there = (self._folder(name) / MODEL_FOLDER).is_dir()
        return there and self._held(name) == decisive(config.to_dict())

    def _is_of_this_corpus(self, metadata: Mapping[str, Any]) -> bool:
        same: bool = metadata.get("corpus") == self.setting.data["fingerprint"]
        return same


TIMED_POINTS = 2_000
"""Most test points that are predicted again to see how long one takes."""
WARMED_UP = 64


def judged(found: Predictions, setting: Setting) -> dict[str, float]:
    """Return the metrics of predictions for the test points, in percent."""
    corpus, settings = setting.corpus, setting.config.eval
    weights = inverse_propensities(
        corpus.label_frequencies(),
        len(corpus.train),
        settings.propensity_a,
        settings.propensity_b,
    )
    measured = score(found, corpus.split("test").labels, weights, REPORTED)
    return {name: round(value, 4) for name, value in measured.items()}


def ms_per_point(predict: Callable[[int], object], n_points: int) -> float:
    """Return the milliseconds a point takes; ``predict`` is told how many points to predict."""
    predict(min(WARMED_UP, n_points))  # what is compiled or loaded at first use
    count = min(TIMED_POINTS, n_points)
    begin = time.perf_counter()
    predict(count)
    return round(1000 * (time.perf_counter() - begin) / max(count, 1), 4)


def model_ms(model: Elias, setting: Setting, component: str) -> float:
    """Return the milliseconds from a text to its ranked labels."""
    split = setting.corpus.split("test")
    given = input_of(split, model.model.encoder)
    return ms_per_point(
        lambda count: model.predict(given[:count], top_k=EVALUATED, component=component),
        len(split),
    )


def component_rows(
    kept: Kept,
    components: Iterable[str],
    name: str,
    title: Callable[[str], str],
    timed: Setting | None = None,
) -> list[Row]:
    """Return a row for each component of a model, as its training measured it.

    ``timed``: whose test points to time predictions with, and that the size is wanted too.
    """
    rows = []
    for component in components:
        costs = {TRAIN_SECONDS: round(kept.train_seconds(component), 3)}
        if timed is not None:
            costs[MS_PER_POINT] = model_ms(kept.model, timed, component)
            costs[MEGABYTES] = round(kept.megabytes(component), 3)
        rows.append(
            Row(
                name=f"{name}/{component}",
                title=title(component),
                seed=kept.model.config.seed,
                metrics=kept.metrics(component),
                costs=costs,
                settings={"component": component},
                run=kept.run,
            )
        )
    return rows


def single_component(setting: Setting, name: str | None) -> str:
    """Return the component of one model that is measured: the last stage where none is named."""
    config, corpus = setting.config, setting.corpus
    ranked = bool(config.rerank.enabled)
    _, held_out = validation_split(corpus, config)
    calibrated = ranked and config.rerank.calibrate and len(held_out or ()) >= FEWEST_POINTS
    has_names = corpus.train.features is None and any(map(is_word, corpus.label_names))
    there = {
        config.stages[-1].name: True,
        RERANK: ranked,
        CALIBRATE: calibrated,
        NAMES: calibrated and config.rerank.names and has_names,
    }
    known = [component for component, is_there in there.items() if is_there]
    if name is None:
        return known[0]
    if name not in known:
        raise ConfigError(
            f"--component {name!r}: the model will have no such part{did_you_mean(name, known)} "
            f"(it has: {', '.join(known)})"
        )
    return name


OURS = "elias"
"""What the model is called in rows and runs."""
USUAL_MEMBERS = 3


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

    def runs(self, seed: int) -> dict[str, ResolvedConfig]:
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

    def _alone(self, seed: int, member: int, name: str, config: ResolvedConfig) -> Task:
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

    def _single(self, name: str, config: ResolvedConfig, member: int) -> list[Row]:
        kept = self.models.get(name, config)
        components = kept.model.metadata["metrics"] if self.stages else kept.model.components
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
