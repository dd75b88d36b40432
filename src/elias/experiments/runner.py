"""Run the tasks of an experiment, and resume an interrupted experiment."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import elias
from elias.config import EliasConfig, ResolvedConfig, first_difference, model_settings
from elias.data.stats import corpus_stats
from elias.errors import ConfigError, DataError, RunError
from elias.experiments.tables import Line, Row, summarise
from elias.kernels.device import pick_device
from elias.report.plots import standalone
from elias.training.run import write_json, write_text

if TYPE_CHECKING:
    from elias.data.corpus import Corpus
    from elias.experiments.tables import Table
    from elias.report.html import Markup


logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_PACKAGES = ("torch", "numpy", "scipy", "numba", "scikit-learn", "transformers")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Configuration, corpus, seeds and folder of an experiment; make one with `Setting.of`."""

    config: ResolvedConfig
    """The resolved configuration."""
    corpus: Corpus
    """The corpus; everything is measured on its test points."""
    folder: Path
    """Folder of the results; models go to its subfolder ``runs``."""
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
        """Resolve the configuration for a corpus; ``seeds`` defaults to the configured seed.

        Raises:
            DataError: If the corpus has no test points.
            ConfigError: If a seed is repeated.
        """
        if corpus.test is None:
            raise DataError(
                f"{corpus.source or 'corpus'}: has no test points to measure on; "
                "set some aside with --test-size"
            )
        chosen = (config.seed,) if seeds is None else tuple(seeds)
        if len(set(chosen)) < len(chosen) or not chosen:
            raise ConfigError(f"seeds must be different, and at least one, not {list(chosen)}")
        return cls(
            config=config.resolve(len(corpus.train), corpus.n_labels),
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
class Task:
    """A unit of work of an experiment. Its rows are stored together when it is finished."""

    name: str
    title: str
    decided_by: Mapping[str, Any]
    """JSON values that determine the results, together with the corpus."""
    measure: Callable[[], list[Row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The tasks of an experiment, and the table and plot of its results."""

    name: str
    """Stem of the names of the result files."""
    title: str
    setting: Setting
    tasks: Sequence[Task]
    table: Table
    plot: Callable[[Sequence[Line]], Markup]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the experiment that are not part of the configuration."""
    remarks: Sequence[str] = ()
    """Notes below the table."""


@dataclass(frozen=True, slots=True)
class Result:
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
    results = _Results(plan)
    for number, task in enumerate(plan.tasks, start=1):
        title = f"{plan.name} {number}/{len(plan.tasks)}: {task.title}"
        if results.is_finished(task):
            logger.info("%s (finished before)", title)
            continue
        logger.info("%s", title)
        start = time.monotonic()
        rows = task.measure()
        results.add(task, rows, time.monotonic() - start)
        results.write()
    return results.write()


class _Results:
    """The rows of finished tasks, and the files that store them."""

    def __init__(self, plan: Plan) -> None:
        """Load the stored results of an earlier run of this experiment, if any."""
        self.plan = plan
        self.tasks: dict[str, dict[str, Any]] = {}
        self.started = _now()
        folder = plan.setting.folder
        self.path = folder / f"{plan.name}.json"
        if folder.exists() and not folder.is_dir():
            raise RunError(f"{folder}: is a file; give another --out")
        if self.path.exists():
            earlier = _read(self.path)
            difference = self._difference(earlier)
            if difference and not plan.setting.overwrite:
                raise RunError(f"{self.path}: {difference}; use --overwrite or another --out")
            if not difference:
                self.started = earlier["started"]
                self.tasks = {t["name"]: t for t in (*earlier["tasks"], *earlier["set_aside"])}
        folder.mkdir(parents=True, exist_ok=True)

    def _difference(self, earlier: Mapping[str, Any]) -> str:
        """Describe the difference between earlier results and this experiment; empty if none."""
        config, before = (
            {**model_settings(tree), "seed": None}  # seeds have tasks of their own
            for tree in (self.plan.setting.config.to_dict(), earlier["config"])
        )
        changed = first_difference(config, before)
        if changed:
            return f"was made with another configuration ({changed})"
        is_same = earlier["data"].get("fingerprint") == self.plan.setting.data["fingerprint"]
        return "" if is_same else "was made with other data"

    def is_finished(self, task: Task) -> bool:
        """Return whether a task is up to date and all of its rows have numbers."""
        return self._is_current(task) and all(
            row["metrics"] for row in self.tasks[task.name]["rows"]
        )

    def _is_current(self, task: Task) -> bool:
        return self.tasks.get(task.name, {}).get("digest") == self._digest(task)

    def _digest(self, task: Task) -> str:
        """Return a hash of everything that determines the results of a task."""
        inputs = json.dumps([task.decided_by, self.plan.setting.data], sort_keys=True)
        return hashlib.sha256(inputs.encode()).hexdigest()[:16]

    def add(self, task: Task, rows: list[Row], seconds: float) -> None:
        """Store the rows of a task."""
        self.tasks[task.name] = {
            "name": task.name,
            "digest": self._digest(task),
            "seconds": round(seconds, 3),
            "rows": [asdict(row) for row in rows],
        }

    def write(self) -> Result:
        """Write all files, each atomically, and return the results so far."""
        plan, setting = self.plan, self.plan.setting
        current = [self.tasks[task.name] for task in plan.tasks if self._is_current(task)]
        lines = summarise(Row(**row) for entry in current for row in entry["rows"])
        names = {task.name for task in plan.tasks}
        finished = len(current) == len(plan.tasks)
        document = {
            "experiment": plan.name,
            "title": plan.title,
            "format_version": FORMAT_VERSION,
            "finished": finished,
            "started": self.started,
            "updated": _now(),
            "seconds": round(sum(entry["seconds"] for entry in current), 3),
            "versions": _versions(),
            "device": _device_name(setting.device),
            "threads": torch.get_num_threads(),
            "seeds": list(setting.seeds),
            "options": dict(plan.options),
            "source": None if setting.corpus.source is None else str(setting.corpus.source),
            "data": setting.data,
            "config": setting.config.to_dict(),
            "remarks": list(plan.remarks),
            "table": [asdict(line) for line in lines],
            "tasks": current,
            "set_aside": [entry for entry in self.tasks.values() if entry["name"] not in names],
        }
        table, plot = self.path.with_suffix(".md"), self.path.with_suffix(".svg")
        write_json(self.path, document)
        write_text(table, self._markdown(lines, finished))
        if any(line.mean for line in lines):
            write_text(plot, standalone(plan.plot(lines)))
        return Result(lines, document, (self.path, table, plot))

    def _markdown(self, lines: list[Line], finished: bool) -> str:
        plan, setting = self.plan, self.plan.setting
        seeds = ", ".join(map(str, setting.seeds))
        models = [f"the seeds {seeds}"] if setting.seeds[1:] else []
        models += ["the members of the ensemble"] if plan.options.get("members", 1) > 1 else []
        notes = [f"On the {len(setting.corpus.split('test')):,} test points, in percent."]
        notes += [f"Mean ± standard deviation over {' and '.join(models)}."] if models else []
        notes += plan.remarks
        notes += [] if finished else ["Not finished: run the same command again to resume."]
        return f"# {plan.title}\n\n{plan.table.markdown(lines)}\n{' '.join(notes)}\n"


def _read(path: Path) -> dict[str, Any]:
    """Read the result file of an earlier run."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError):
        document = None
    needed = {"config", "data", "tasks", "set_aside", "started"}
    is_known = isinstance(document, dict) and document.get("format_version") == FORMAT_VERSION
    if not is_known or not needed <= document.keys():
        raise RunError(
            f"{path}: is not a result file of this version; remove it, or give another --out"
        )
    results: dict[str, Any] = document
    return results


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    versions = {"elias-xmc": elias.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _device_name(device: str) -> str:
    chosen = pick_device(device)
    return torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else str(chosen)
