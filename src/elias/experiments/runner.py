"""Run the tasks of an experiment, resume it after an interruption, and write its results."""

from __future__ import annotations

import json
import logging
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from markupsafe import Markup

import elias
from elias.config import EliasConfig, ResolvedConfig, first_difference, model_settings
from elias.data.corpus import Corpus, resolve_config
from elias.data.stats import corpus_stats
from elias.errors import ConfigError, DataError, RunError
from elias.kernels.device import pick_device
from elias.persistence.hub import markdown_table
from elias.progress import seconds
from elias.report.plots import Axis, Plot, standalone
from elias.training.run import write_json, write_text

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_PACKAGES = ("torch", "numpy", "scipy", "numba", "scikit-learn", "transformers")
COSTS = TRAIN_SECONDS, MS_PER_POINT, MEGABYTES = "train_seconds", "ms_per_point", "megabytes"
REMOVED = "edges_removed"
"""Keys of `Row.costs`; `REMOVED` is the percentage of pruned edges."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Configuration, corpus, seeds and folder of an experiment. Create it with `Setting.of`."""

    config: ResolvedConfig
    """The resolved configuration."""
    corpus: Corpus
    """The corpus. Everything is measured on its test points."""
    folder: Path
    """Folder of the results. Models are saved in its subfolder ``runs``."""
    seeds: tuple[int, ...]
    device: str = "auto"
    overwrite: bool = False
    """Replace existing results of another configuration or other data."""

    @classmethod
    def of(
        cls,
        config: EliasConfig,
        corpus: Corpus,
        folder: str | Path,
        *,
        seeds: Sequence[int] | None = None,
        device: str = "auto",
        overwrite: bool = False,
    ) -> Setting:
        """Return a setting with the configuration resolved for a corpus.

        ``seeds`` defaults to the configured seed.

        Unlike `train`, an experiment trains an index even for few labels (unless ``index.kind`` is
        ``all``), and keeps stages and components that do not help.

        Raises:
            DataError: If the corpus has no test points.
            ConfigError: If a seed is repeated.
        """
        if corpus.test is None:
            raise DataError(
                f"{corpus.source or 'corpus'}: has no test points to measure on; "
                "hold some out with --test-size"
            )
        chosen = (config.seed,) if seeds is None else tuple(seeds)
        if len(set(chosen)) < len(chosen) or not chosen:
            raise ConfigError(f"give one or more distinct seeds, not {list(chosen)}")
        kind = config.index.kind or "graph"
        changed = config.override({"eval.drop_unhelpful": False, "index.kind": kind})
        return cls(
            config=resolve_config(changed, corpus),
            corpus=corpus,
            folder=Path(folder),
            seeds=chosen,
            device=device,
            overwrite=overwrite,
        )

    @cached_property
    def data(self) -> dict[str, Any]:
        """Return the statistics and the fingerprint of the corpus as JSON values."""
        stats: dict[str, Any] = json.loads(json.dumps(corpus_stats(self.corpus).to_dict()))
        return {**stats, "fingerprint": self.corpus.fingerprint()}

    def seeded(self, seed: int) -> ResolvedConfig:
        """Return the configuration of a single model (no ensemble) with a given seed."""
        return replace(self.config, seed=seed).member(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The measurements of one line of a table for one seed."""

    name: str
    """Key of the table line, the same for every seed."""
    title: str
    """Title of the table line."""
    seed: int | None = None
    """Random seed; None for a deterministic method."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics by name, in percent; empty if nothing could be measured."""
    costs: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of this line, such as the value of λ."""
    run: str | None = None
    """Folder of the run, relative to the folder of the experiment."""
    note: str = ""
    """Reason for missing metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a table: the mean over all rows (seeds or ensemble members) of the same name."""

    name: str
    title: str
    n_seeds: int
    """Number of rows in the mean."""
    mean: Mapping[str, float]
    """Mean of each metric and cost."""
    std: Mapping[str, float]
    """Sample standard deviations; empty if there is only one row."""
    settings: Mapping[str, Any]
    note: str


def summarise(rows: Iterable[Row]) -> list[Line]:
    """Average the rows with the same name into one line. Lines are in the order of the rows.

    >>> rows = [Row(name="a", title="A", seed=s, metrics={"P@1": 70.0 + s}) for s in (0, 2)]
    >>> (line,) = summarise(rows)
    >>> line.mean["P@1"], round(line.std["P@1"], 3), line.n_seeds
    (71.0, 1.414, 2)
    """
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    lines = []
    for name, group in by_name.items():
        measured = [{**row.metrics, **row.costs} for row in group if row.metrics]
        keys = dict.fromkeys(key for values in measured for key in values)
        columns = {key: [values[key] for values in measured if key in values] for key in keys}
        line = Line(
            name=name,
            title=group[0].title,
            n_seeds=len(measured),
            mean={key: statistics.fmean(v) for key, v in columns.items()},
            std={key: statistics.stdev(v) for key, v in columns.items() if len(v) > 1},
            settings=group[0].settings,
            note="; ".join(dict.fromkeys(row.note for row in group if row.note)),
        )
        lines.append(line)
    return lines


_DECIMALS = {MS_PER_POINT: 3, MEGABYTES: 1, REMOVED: 1}
_TITLES = {
    TRAIN_SECONDS: "training time",
    MS_PER_POINT: "ms/point",
    MEGABYTES: "MB",
    REMOVED: "% pruned",
}


class Table(NamedTuple):
    """Layout of a table: the title of its first column, and its other columns."""

    heading: str
    """Title of the first column."""
    columns: Sequence[str]
    """Metrics and costs of the Markdown table."""
    shown: Sequence[str]
    """Columns to show on a terminal, where fewer fit."""

    def header(self, columns: Sequence[str]) -> list[str]:
        """Return the titles of columns."""
        return [self.heading, *(_TITLES.get(key, key) for key in columns)]

    def rows(
        self, lines: Sequence[Line], columns: Sequence[str], *, between: str = " ± "
    ) -> list[list[str]]:
        """Return the table cells of each line. The first cell includes the note of the line.

        ``between`` separates a mean from its standard deviation.
        """

        def cell(line: Line, key: str) -> str:
            if key not in line.mean:
                return ""
            if key == TRAIN_SECONDS:
                return seconds(line.mean[key])
            mean = f"{line.mean[key]:.{_DECIMALS.get(key, 2)}f}"
            has_std = key not in _DECIMALS and key in line.std
            return f"{mean}{between}{line.std[key]:.2f}" if has_std else mean

        return [
            [f"{line.title} ({line.note})" if line.note else line.title]
            + [cell(line, key) for key in columns]
            for line in lines
        ]

    def markdown(self, lines: Sequence[Line]) -> str:
        """Return a Markdown table of all columns that have a value."""
        columns = [key for key in self.columns if any(key in line.mean for line in lines)]
        return markdown_table(self.header(columns), self.rows(lines, columns))


def dot_plot(lines: Sequence[Line], title: str, metrics: Sequence[str]) -> Markup:
    """Return a plot with a row for each table line that has metrics, and a dot for each metric."""
    shown = [line for line in lines if line.mean]
    described = "; ".join(
        f"{line.title}: {', '.join(f'{key} {line.mean[key]:.2f}' for key in metrics)}"
        for line in shown
    )
    plot = Plot(title, Axis("%"), Axis("", categories=[line.title for line in shown]))
    for key in metrics:
        stds = [line.std.get(key, 0.0) for line in shown]
        plot.dots(key, [line.mean[key] for line in shown], stds)
    return plot.svg(f"{described}.")


class Task(NamedTuple):
    """A unit of work of an experiment. Its rows are stored together when it is finished."""

    name: str
    """Key of the task. Results are reused for the same name, configuration and corpus."""
    title: str
    measure: Callable[[], list[Row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The tasks of an experiment, and the table and plot of its results."""

    name: str
    """File name of the results, without extension."""
    title: str
    setting: Setting
    tasks: Sequence[Task]
    table: Table
    plot: Callable[[Sequence[Line]], Markup]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the experiment that are not part of the configuration."""
    remarks: Sequence[str] = ()
    """Notes below the table."""


class Result(NamedTuple):
    """The results of an experiment."""

    lines: list[Line]
    document: dict[str, Any]
    """Content of the JSON file."""
    files: tuple[Path, Path, Path]
    """The JSON file, the Markdown table and the plot."""


def run_experiment(plan: Plan) -> Result:
    """Run the tasks that are not finished, and write the results after each task.

    Raises:
        RunError: If the folder has results of another configuration or of other data.
    """
    started, stored = _read_earlier(plan)
    plan.setting.folder.mkdir(parents=True, exist_ok=True)
    for number, task in enumerate(plan.tasks, start=1):
        title = f"{plan.name} {number}/{len(plan.tasks)}: {task.title}"
        if task.name in stored and all(row["metrics"] for row in stored[task.name]["rows"]):
            logger.info("%s (already finished)", title)
            continue
        logger.info("%s", title)
        start = time.monotonic()
        rows = [asdict(row) for row in task.measure()]
        spent = round(time.monotonic() - start, 3)
        stored[task.name] = {"name": task.name, "seconds": spent, "rows": rows}
        _write(plan, started, stored)
    return _write(plan, started, stored)


def _read_earlier(plan: Plan) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the start time and the stored tasks of an earlier run.

    If there is none, return the current time and no tasks.
    """
    setting = plan.setting
    path = setting.folder / f"{plan.name}.json"
    new: tuple[str, dict[str, Any]] = (_now(), {})
    if setting.folder.exists() and not setting.folder.is_dir():
        raise RunError(f"{setting.folder}: is a file; give another --out")
    if not path.exists():
        return new
    try:
        earlier = json.loads(path.read_text(encoding="utf8"))
        if earlier["format_version"] != FORMAT_VERSION:
            raise ValueError
        config, fingerprint = earlier["config"], earlier["data"].get("fingerprint")
        tasks = {task["name"]: task for task in (*earlier["tasks"], *earlier["set_aside"])}
        started = earlier["started"]
    except (OSError, ValueError, LookupError, TypeError):
        raise RunError(
            f"{path}: is not a result file of this version; remove it, or give another --out"
        ) from None
    ours, before = (
        {**model_settings(tree), "seed": None}  # each seed has its own tasks
        for tree in (setting.config.to_dict(), config)
    )
    changed = first_difference(ours, before)
    difference = f"another configuration ({changed})" if changed else "other data"
    if not changed and fingerprint == setting.data["fingerprint"]:
        return started, tasks
    if setting.overwrite:
        return new
    raise RunError(f"{path}: was made with {difference}; use --overwrite or another --out")


def _write(plan: Plan, started: str, stored: Mapping[str, dict[str, Any]]) -> Result:
    """Write all files, each atomically, and return the results so far."""
    setting, names = plan.setting, {task.name for task in plan.tasks}
    current = [stored[task.name] for task in plan.tasks if task.name in stored]
    lines = summarise(Row(**row) for task in current for row in task["rows"])
    finished = len(current) == len(plan.tasks)
    device = pick_device(setting.device)
    document = {
        "experiment": plan.name,
        "title": plan.title,
        "format_version": FORMAT_VERSION,
        "finished": finished,
        "started": started,
        "updated": _now(),
        "seconds": round(sum(task["seconds"] for task in current), 3),
        "versions": {
            "elias-xmc": elias.__version__,
            "python": platform.python_version(),
            **{package: version(package) for package in _PACKAGES},
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "seeds": list(setting.seeds),
        "options": dict(plan.options),
        "source": None if setting.corpus.source is None else str(setting.corpus.source),
        "data": setting.data,
        "config": setting.config.to_dict(),
        "remarks": list(plan.remarks),
        "table": [asdict(line) for line in lines],
        "tasks": current,
        "set_aside": [task for name, task in stored.items() if name not in names],
    }
    seeds = ", ".join(map(str, setting.seeds))
    models = [f"the seeds {seeds}"] if setting.seeds[1:] else []
    models += ["the members of the ensemble"] if plan.options.get("members", 1) > 1 else []
    notes = [f"On the {len(setting.corpus.split('test')):,} test points, in percent."]
    notes += [f"Mean ± standard deviation over {' and '.join(models)}."] if models else []
    notes += plan.remarks
    notes += [] if finished else ["Not finished: run the same command again to resume."]
    path, table, plot = (setting.folder / f"{plan.name}.{end}" for end in ("json", "md", "svg"))
    write_json(path, document)
    write_text(table, f"# {plan.title}\n\n{plan.table.markdown(lines)}\n{' '.join(notes)}\n")
    if any(line.mean for line in lines):
        write_text(plot, standalone(plan.plot(lines)))
    return Result(lines, document, (path, table, plot))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
