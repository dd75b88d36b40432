"""Search for better settings with Optuna: train trials and compare them on held-out points.

The study is stored in an SQLite file, so that it can be continued. Trials never use test points.
They train without the ranker, unless the search space contains a ``rerank`` setting, or the labels
are so few that the ranker scores all of them.
"""

from __future__ import annotations

import json
import logging
import math
import time
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

from elias.config import (
    EliasConfig,
    ResolvedConfig,
    StageConfig,
    fill_sizes,
    first_difference,
    read_tree,
)
from elias.data.corpus import Corpus, resolve_config
from elias.data.splits import validation_split
from elias.distributed import SingleProcess
from elias.errors import ConfigError, DataError, EliasError, RunError, did_you_mean, quoted
from elias.kernels.device import pick_device
from elias.persistence.hub import markdown_table
from elias.progress import progress, progress_disabled
from elias.progress import seconds as format_seconds
from elias.report.plots import Axis, Plot
from elias.report.report import render
from elias.training.run import Interruption, locked, write_text
from elias.training.stage import EpochReport
from elias.training.train import train_resolved

try:
    import optuna
    from optuna.trial import FrozenTrial, Trial, TrialState
except ImportError:
    raise ConfigError(
        "tuning needs Optuna; install it with pip install 'elias-xmc[tune]'"
    ) from None


logger = logging.getLogger(__name__)

DEFAULT_TRIALS = 20
"""Number of trials if neither a number nor a time is given."""
BEST_FILE, SPACE_FILE, STUDY_FILE = "best.toml", "space.toml", "study.db"
MARKDOWN_FILE, HTML_FILE = "summary.md", "summary.html"
_STEPS = 10  # number of times per stage at which trials are compared
_MIN_FOR_IMPORTANCE = 5  # minimum number of trials to compute the importance of parameters
_KINDS = ("factor", "range", "values")


@dataclass(frozen=True, slots=True)
class TunedParameter:
    """A search parameter, which sets one configuration key or the same key in every stage."""

    name: str
    """The configuration key. ``stages.*.epochs`` sets the key in all stages."""
    kind: str
    """``factor`` (multiples of the default), ``range`` (between two limits) or ``values`` (a list
    to choose from)."""
    options: Sequence[Any]
    """All values if `is_choice`, otherwise the minimum and the maximum."""
    defaults: Mapping[str, Any]
    """Default value of each configuration key that the parameter sets."""

    @property
    def is_choice(self) -> bool:
        """Return whether values are chosen from a list instead of an interval."""
        return self.kind == "values" or len(self.options) > 2

    def start(self) -> dict[str, Any]:
        """Return ``{name: default}``, or ``{}`` if the default is outside the search space."""
        value = 1.0 if self.kind == "factor" else next(iter(self.defaults.values()))
        is_inside = not self.is_choice and value and self.options[0] <= value <= self.options[1]
        return {self.name: _choice(value)} if is_inside or value in self.options else {}

    def suggest(self, trial: Trial) -> Any:
        """Return the value that the study samples for a trial."""
        if self.is_choice:
            options = {_choice(value): value for value in self.options}
            return options[trial.suggest_categorical(self.name, list(options))]
        values = [*self.options, *self.defaults.values()]
        if self.kind == "range" and not any(isinstance(value, float) for value in values):
            return trial.suggest_int(self.name, *self.options)
        return trial.suggest_float(self.name, *self.options, log=self.kind == "factor")

    def changes(self, value: Any) -> dict[str, Any]:
        """Return the configuration keys to override when the parameter has this value.

        A factor of 1 overrides nothing.
        """
        if self.kind == "factor":
            scaled = {key: value * base for key, base in self.defaults.items() if value != 1}
        else:
            scaled = dict.fromkeys(self.defaults, value)
        for key, new in scaled.items():
            if self.kind == "factor" and isinstance(self.defaults[key], int):
                scaled[key] = max(1, round(new))
            elif isinstance(new, float):
                scaled[key] = float(f"{new:.3g}")
        return scaled

    def format(self, *values: Any) -> str:
        """Format one value, or all options, for the summary."""
        numbers = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in values]
        joined = (", " if self.is_choice else " to ").join(numbers)
        return f"× {joined}" if self.kind == "factor" else joined


def default_space(config: ResolvedConfig) -> dict[str, Any]:
    """Return the default search space for the encoder and the index of a configuration.

    >>> default_space(EliasConfig().resolve(n_points=1000, n_labels=500))["encoder.dropout"]
    {'range': [0.1, 0.7]}
    """
    folder, settings = resources.files("elias.experiments") / "spaces", _settings(config)
    space = tomllib.loads((folder / f"{config.encoder.kind}.toml").read_text("utf8"))
    if config.ranks_every_label and config.rerank.enabled:
        space |= tomllib.loads((folder / "ranker.toml").read_text("utf8"))
    if not config.rerank.word_ngrams:  # without n-grams of characters there would be no features
        space.pop("rerank.char_ngrams", None)
    for name in list(space):
        needs_graph = name.startswith("index.") or name.endswith(".cluster_lr")
        is_zero = not all(v for key, v in settings.items() if fnmatchcase(key, name))
        if (needs_graph and config.index.kind == "all") or (is_zero and "factor" in space[name]):
            del space[name]
    return space


def read_space(
    path: str | Path | None, config: EliasConfig, resolved: ResolvedConfig
) -> list[TunedParameter]:
    """Read and check the search space in a TOML file, or the default space if there is no file.

    Raises:
        ConfigError: If a key is unknown, or a value is not valid for its key.
    """
    tree = default_space(resolved) if path is None else read_tree(path)
    settings, parameters = _settings(resolved), []
    for name, rule in _flatten(tree):
        defaults = {key: value for key, value in settings.items() if fnmatchcase(key, name)}
        try:
            if not defaults:
                raise ConfigError(f"unknown key{did_you_mean(name, settings)}")
            parameter = TunedParameter(name, *_parse_rule(rule, list(defaults.values())), defaults)
            for value in parameter.options:
                config.override(parameter.changes(value))
        except ConfigError as error:
            raise ConfigError(f"{path or 'search space'}: {name}: {error}") from None
        parameters.append(parameter)
    if not parameters:
        raise ConfigError(
            f"{path}: is empty; write, for example, encoder.dropout = {{ range = [0.1, 0.5] }}"
        )
    return parameters


def _settings(config: ResolvedConfig) -> dict[str, Any]:
    """Return all settings by dotted key."""
    return dict(_flatten(config.to_dict()))


def _choice(value: Any) -> Any:
    """Return a value in the form that Optuna can store. A list becomes a JSON string."""
    return _toml(value) if isinstance(value, list) else value


def _parse_rule(rule: Any, defaults: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return the kind and the options of a rule such as ``{"range": [0.0, 0.5]}``."""
    kind, options = next(iter(rule.items())) if isinstance(rule, dict) else ("", None)
    if isinstance(options, list) and options and len(rule) == 1 and kind in _KINDS:
        are_numbers = all(type(value) in (int, float) for value in options)
        is_rising = are_numbers and len(options) > 1 and options == sorted(set(options))
        can_scale = all(type(value) in (int, float) and value for value in defaults)
        if (
            (kind == "values" and not any(isinstance(value, dict) for value in options))
            or (kind == "range" and is_rising and len(options) == 2)
            or (kind == "factor" and is_rising and options[0] > 0 and can_scale)
        ):
            return kind, options
    raise ConfigError(
        f"{rule!r} is not a search rule; write {{ range = [low, high] }}, {{ values = [a, b] }} "
        "or, if the default is a number other than 0, { factor = [low, high] } for multiples of "
        "the default"
    )


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a configuration or a search space, with their values."""
    for key, value in tree.items():
        if key == "stages" and isinstance(value, list):
            value = {stage["name"]: stage for stage in value}
        if isinstance(value, dict) and not any(kind in value for kind in _KINDS):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@dataclass
class Tuner:
    """A study and everything that the trials need. It is created by `tune`."""

    config: EliasConfig
    corpus: Corpus
    """The whole corpus. Settings that are not given are derived from it, as in `train`."""
    points: Corpus
    """The training and held-out points, which the trials see. There are no test points."""
    parameters: Sequence[TunedParameter]
    study: optuna.Study
    device: str
    deadline: float

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials in the given states."""
        return self.study.get_trials(deepcopy=False, states=states)

    def objective(self, trial: Trial) -> float:
        """Train a trial and return its held-out metric. Raise `TrialPruned` if it is stopped early.

        A trial that fails counts as pruned, so that the search avoids its settings. If no trial has
        succeeded yet, the error is raised.
        """
        try:
            return self._train(trial, self._sample(trial))
        except EliasError as error:
            if not self.trials(TrialState.COMPLETE):
                raise
            trial.set_user_attr("error", quoted(error))
            raise optuna.TrialPruned from error

    def _sample(self, trial: Trial) -> ResolvedConfig:
        """Sample the configuration of a trial. Index sizes that are too large are reduced."""
        changes: dict[str, Any] = {}
        for parameter in self.parameters:
            changes |= parameter.changes(parameter.suggest(trial))
        n_points, n_labels = len(self.corpus.train), self.corpus.n_labels
        resolved = fill_sizes(self.config.override(changes), n_points, n_labels)
        index = resolved.index
        n_paths = min(index.beam_size, index.n_clusters) * index.edges_per_cluster
        limits = {"beam_size": index.n_clusters, "shortlist_size": min(n_labels, n_paths)}
        changes |= {
            f"index.{name}": min(changes[f"index.{name}"], limit)
            for name, limit in limits.items()
            if f"index.{name}" in changes
        }
        trial.set_user_attr("changes", changes)
        fixed: dict[str, Any] = {"ensemble.members": 1}
        tunes_ranker = any(parameter.name.startswith("rerank.") for parameter in self.parameters)
        if not (tunes_ranker or resolved.ranks_every_label):
            fixed["rerank.enabled"] = False
        return resolve_config(self.config.override(changes | fixed), self.corpus)

    def _train(self, trial: Trial, config: ResolvedConfig) -> float:
        metric = config.eval.select_by
        epochs = {stage.name: stage.epochs for stage in config.stages}
        ranker_decides = config.ranks_every_label and config.rerank.enabled

        def on_epoch(report: EpochReport) -> None:
            value, n_epochs = report.validation.get(metric), epochs[report.stage]
            advance(note="" if value is None else f"{metric} {value:.2f}")
            if time.monotonic() > self.deadline and self.trials(TrialState.COMPLETE):
                raise optuna.TrialPruned
            if value is None or ranker_decides:
                return
            # the steps from the end of this epoch until the end of the next
            start, stop = (
                -(-_STEPS * epoch // n_epochs) for epoch in (report.epoch, report.epoch + 1)
            )
            for step in range(start, min(stop, _STEPS + 1)):
                trial.report(value, _STEPS * list(epochs).index(report.stage) + step)
                if step == start and trial.should_prune():
                    raise optuna.TrialPruned

        with (
            progress(f"trial {trial.number}", sum(epochs.values())) as advance,
            progress_disabled(),
        ):
            world = SingleProcess(pick_device(self.device))
            model = train_resolved(world, config, self.points, on_epoch=on_epoch)
        assert model is not None
        # the last component except calibration, which is fitted on the held-out points
        component = model.components[:2][-1]
        return float(model.metadata["metrics"][component]["validation"][metric])

    def best_config(self) -> EliasConfig:
        """Return the configuration of the best trial, with the ranker and ensemble of `config`."""
        return self.config.override(self.study.best_trial.user_attrs["changes"])


def tune(
    config: EliasConfig,
    corpus: Corpus,
    out: str | Path,
    *,
    space: str | Path | None = None,
    trials: int | None = None,
    seconds: float | None = None,
    device: str = "auto",
    overwrite: bool = False,
) -> EliasConfig:
    """Search for a better configuration and return it.

    The study, its summary and the best configuration are written to ``out``. The first trial trains
    ``config`` itself. Call this again with the same arguments to continue.

    Args:
        config: The configuration to improve.
        corpus: The points. Test points are not used. Without a validation split, the same points
            are held out as in `train`.
        out: Folder of the results.
        space: TOML file with a search space; by default `default_space`.
        trials: Total number of trials of the study, including those of earlier calls.
        seconds: Time limit for this call. When it is reached, the trial stops at the end of the
            current epoch. The first trial always finishes.
        device: ``auto`` uses a GPU if there is one.
        overwrite: Replace an earlier study in ``out``.

    Raises:
        RunError: If ``out`` has a study of another configuration, search space or corpus.
    """
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    folder, resolved = Path(out), resolve_config(config, corpus)
    if resolved.index.kind == "all":  # the kind of index decides which stages exist
        config = config.override({"index.kind": "all"})
    parameters = read_space(space, config, resolved)
    train, validation = validation_split(corpus, resolved)
    if validation is None:
        raise DataError("tuning needs held-out points; set eval.validation_size to 1 or more")
    points = corpus.with_splits(train=train, validation=validation, test=None)
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; give another --out")
    folder.mkdir(parents=True, exist_ok=True)
    rules = {p.name: {p.kind: list(p.options)} for p in parameters}
    inputs = {"config": config.to_dict(), "space": rules, "points": points.fingerprint()}
    with (
        locked(folder),
        _open_study(folder / STUDY_FILE, inputs, config.seed, overwrite=overwrite) as study,
        Interruption().listening(),
    ):
        tuner = Tuner(config, corpus, points, parameters, study, device, deadline)

        def after_trial(_: optuna.Study, trial: FrozenTrial) -> None:
            if trial.state is not TrialState.FAIL:  # not an interrupted trial
                best = f"best {config.eval.select_by} {study.best_value:.2f}"
                logger.info("trial %d: %s; %s", trial.number, _outcome(trial), best)
                write_results(tuner, folder)
                _set_log_level(logging.ERROR)  # other trials would repeat the warnings
            if time.monotonic() >= deadline:
                study.stop()

        lines = [f'"{p.name}" = {{ {p.kind} = {_toml(p.options)} }}\n' for p in parameters]
        write_text(folder / SPACE_FILE, "".join(lines))
        n_done = len(tuner.trials(TrialState.COMPLETE, TrialState.PRUNED))
        if not n_done:
            study.enqueue_trial({k: v for p in parameters for k, v in p.start().items()})
        if seconds is None and trials is None:
            trials = DEFAULT_TRIALS
        n_left = None if trials is None else max(0, trials - n_done)
        _set_log_level(logging.WARNING)  # a line for each trial, not for each epoch
        try:
            study.optimize(tuner.objective, n_left, callbacks=[after_trial])
        except KeyboardInterrupt as interrupt:
            remedy = "run the same command again to continue"
            interrupt.args = (f"the study is kept in {folder}; {remedy}",)
            raise
        finally:
            _set_log_level(logging.NOTSET)
        write_results(tuner, folder)
        return tuner.best_config()


def _set_log_level(level: int) -> None:
    """Set the minimum level of the log messages of training."""
    for package in ("inference", "metrics", "rerank", "text", "training"):
        logging.getLogger(f"elias.{package}").setLevel(level)


@contextmanager
def _open_study(
    path: Path, inputs: Mapping[str, Any], seed: int, *, overwrite: bool
) -> Iterator[optuna.Study]:
    """Create or load the study in a file. Raise a `RunError` if it was made with other inputs."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    remedy = "use --overwrite or another --out"
    if overwrite:
        path.unlink(missing_ok=True)
    try:
        storage = optuna.storages.RDBStorage(f"sqlite:///{path.resolve()}")
        study = optuna.create_study(
            study_name="elias", storage=storage, direction="maximize", load_if_exists=True
        )
    except Exception as error:  # an error of SQLite, SQLAlchemy or Optuna
        raise RunError(f"{path}: is not an Optuna study: {quoted(error)}; {remedy}") from error
    try:
        difference = first_difference(dict(inputs), study.user_attrs.get("inputs", inputs))
        if difference:
            raise RunError(f"{path}: was made with other inputs ({difference}); {remedy}")
        study.set_user_attr("inputs", inputs)
        # Trials that still run belong to a process that was killed.
        for trial in study.get_trials(states=(TrialState.RUNNING,)):
            study.tell(trial.number, state=TrialState.FAIL)
        # a study that continues must not sample the same values again
        study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))
        study.pruner = optuna.pruners.MedianPruner(n_warmup_steps=_STEPS // 2)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Target and region")  # trials with equal values
            yield study
    finally:
        storage.remove_session()
        storage.engine.dispose()


# --- results ---


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def config_toml(config: EliasConfig) -> str:
    """Format the settings that differ from the defaults as a TOML file for ``--config``."""
    tree, default = config.to_dict(), EliasConfig().to_dict()
    sections = [(f"[{k}]", v, default[k]) for k, v in tree.items() if isinstance(v, dict)]
    sections += [("[[stages]]", s, {**asdict(StageConfig()), "name": ""}) for s in tree["stages"]]
    text = f"seed = {config.seed}\n"
    for title, values, defaults in sections:
        changed = {k: v for k, v in values.items() if v is not None and v != defaults[k]}
        lines = [f"{key} = {_toml(value)}\n" for key, value in changed.items()]
        text += "".join([f"\n{title}\n", *lines]) if lines else ""
    return text


def _outcome(trial: FrozenTrial) -> str:
    duration = format_seconds(0.0 if trial.duration is None else trial.duration.total_seconds())
    is_complete = trial.state is TrialState.COMPLETE  # a pruned trial also has a value
    pruned = trial.user_attrs.get("error", "pruned")
    return f"{f'{trial.value:.2f}' if is_complete else pruned} ({duration})"


def write_results(tuner: Tuner, folder: Path) -> None:
    """Write the best configuration, and the summary as Markdown and HTML."""
    study, metric, best = tuner.study, tuner.config.eval.select_by, tuner.study.best_trial
    complete, pruned = tuner.trials(TrialState.COMPLETE), tuner.trials(TrialState.PRUNED)
    shares: dict[str, float] = {}
    if len(complete) >= _MIN_FOR_IMPORTANCE:
        shares = optuna.importance.get_param_importances(study)
    parameters = sorted(tuner.parameters, key=lambda p: -shares.get(p.name, 0.0))
    headline = (
        f"Complete trials: {len(complete)}; pruned: {len(pruned)}. Best: trial "
        f"{best.number}, {metric} {best.value:.2f} on {len(tuner.points.split('validation')):,} "
        f"held-out points; first trial: {complete[0].value:.2f}. The best of many trials is partly "
        "luck: compare both configurations on test points, once."
    )
    percent = {name: f"{share:.0%}" for name, share in shares.items()}
    settings = [
        [p.name, p.format(*p.options), p.format(best.params[p.name]), percent.get(p.name, "")]
        for p in parameters
    ]
    ranked = sorted(complete, key=lambda trial: -(trial.value or 0.0)) + pruned
    rows = [
        [str(t.number), _outcome(t), *(p.format(t.params[p.name]) for p in parameters)]
        for t in ranked
    ]
    tables = {
        "Parameters": (["parameter", "searched", "best", "importance"], settings),
        "Trials": (["trial", metric, *(p.name for p in parameters)], rows),
    }
    numbers, values = [t.number for t in complete], [t.value or 0.0 for t in complete]
    plot = Plot("Held-out metric by trial", Axis("trial"), Axis(metric))
    plot.line("trial", numbers, values)
    plot.line("best so far", numbers, [max(values[: i + 1]) for i in range(len(values))])
    command = f"elias train DATA --config {folder / BEST_FILE}"
    markdown = f"# Tuning\n\n{headline}\n\n    {command}\n"
    for title, (header, cells) in tables.items():
        markdown += f"\n## {title}\n\n{markdown_table(header, cells)}"
    page = {"headline": headline, "command": command, "plot": plot.svg(headline), "tables": tables}
    write_text(folder / BEST_FILE, f"# {headline}\n{config_toml(tuner.best_config())}")
    write_text(folder / MARKDOWN_FILE, markdown)
    write_text(folder / HTML_FILE, render(page, "tune.html.j2"))
