"""Run an experiment task by task and resume it."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import elias
from elias.config import EliasConfig, ResolvedConfig, decisive, first_difference
from elias.data.stats import corpus_stats
from elias.errors import ConfigError, DataError, RunError
from elias.experiments.tables import Line, Row, summarise
from elias.kernels.device import pick_device
from elias.report.plots import standalone
from elias.training.run import write_json

if TYPE_CHECKING:
    from elias.data.corpus import Corpus
    from elias.experiments.tables import Table
    from elias.report.page import Markup


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every experiment starts from."""

    config: ResolvedConfig
    """Resolved by `of`."""
    corpus: Corpus
    """With test points: every number is measured on those."""
    folder: Path
    """Where results go, and below ``runs`` every model."""
    seeds: tuple[int, ...]
    device: str = "auto"
    overwrite: bool = False
    """Replace what was made with another configuration, or of other data."""

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
        """Return a setting, sizes derived from the corpus; the configuration's seed by default.

        Raises:
            DataError: If the corpus has no test points.
            ConfigError: If a seed comes twice.
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
        """Return the corpus in numbers, as JSON gives them back, and its fingerprint."""
        stats: dict[str, Any] = json.loads(json.dumps(corpus_stats(self.corpus).to_dict()))
        return {**stats, "fingerprint": self.corpus.fingerprint()}

    def seeded(self, seed: int) -> ResolvedConfig:
        """Return the configuration of one model with a seed."""
        return replace(self.config, seed=seed).member(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece of an experiment: what is done at once, and done again if it was interrupted."""

    name: str
    title: str
    decided_by: Mapping[str, Any]
    """Everything that its numbers depend on beside the corpus, as JSON takes it."""
    measure: Callable[[], list[Row]]

    def digest(self, data: Mapping[str, Any]) -> str:
        """Return a name for all that decides its numbers."""
        whole = json.dumps([self.decided_by, data], sort_keys=True)
        return hashlib.sha256(whole.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An experiment before it is carried out."""

    name: str
    """What its files are called."""
    title: str
    setting: Setting
    tasks: Sequence[Task]
    table: Table
    plot: Callable[[Sequence[Line]], Markup]
    options: Mapping[str, Any] = field(default_factory=dict)
    """What was asked for beside the configuration."""
    remarks: Sequence[str] = ()
    """What a reader of the table has to know."""


FORMAT_VERSION = 1
_PACKAGES = ("torch", "numpy", "scipy", "numba", "scikit-learn", "transformers")


@dataclass(frozen=True, slots=True)
class Result:
    """An experiment that was carried out."""

    lines: list[Line]
    document: dict[str, Any]
    """What stands in its JSON file."""
    files: tuple[Path, Path, Path]
    """The JSON, the Markdown table and the plot."""


def carry_out(plan: Plan) -> Result:
    """Do every task that was not done before, and write the results after each.

    Raises:
        RunError: If the folder holds results of another configuration or of other data.
    """
    ledger = _Ledger(plan)
    for number, task in enumerate(plan.tasks, start=1):
        where = f"{plan.name} {number}/{len(plan.tasks)}: {task.title}"
        if ledger.has(task):
            logger.info("%s (finished before)", where)
            continue
        logger.info("%s", where)
        begin = time.monotonic()
        rows = task.measure()
        ledger.add(task, rows, time.monotonic() - begin)
        ledger.write()
    return ledger.write()


class _Ledger:
    """The tasks that are done, with their rows, and the files that hold them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.done: dict[str, dict[str, Any]] = {}
        self.started = _now()
        folder = plan.setting.folder
        self.path = folder / f"{plan.name}.json"
        if folder.exists() and not folder.is_dir():
            raise RunError(f"{folder}: is a file; give another --out")
        if self.path.exists():
            self._take_up(_read(self.path))
        folder.mkdir(parents=True, exist_ok=True)

    def _take_up(self, before: Mapping[str, Any]) -> None:
        """Go on with the results of an earlier command, where they are of this experiment."""
        differs = self._difference(before)
        if differs and not self.plan.setting.overwrite:
            raise RunError(f"{self.path}: {differs}; use --overwrite or another --out")
        if not differs:
            self.started = before["started"]
            entries = [*before["tasks"], *before["set_aside"]]
            self.done = {entry["name"]: entry for entry in entries}

    def _difference(self, before: Mapping[str, Any]) -> str:
        config = decisive(self.plan.setting.config.to_dict())
        changed = first_difference(
            {**config, "seed": None},
            {**decisive(before["config"]), "seed": None},  # seeds are told apart
        )
        if changed:
            return f"was made with another configuration ({changed})"
        same = before["data"].get("fingerprint") == self.plan.setting.data["fingerprint"]
        return "" if same else "was made of other data"

    def has(self, task: Task) -> bool:
        """Say whether a task is done as it is asked for, and every row of it has its numbers."""
        return self._is_current(task) and all(row["metrics"] for row in self._rows(task))

    def _is_current(self, task: Task) -> bool:
        entry = self.done.get(task.name, {})
        return entry.get("digest") == task.digest(self.plan.setting.data)

    def _rows(self, task: Task) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.done[task.name]["rows"]
        return rows

    def add(self, task: Task, rows: list[Row], seconds: float) -> None:
        """Note the rows of a task."""
        self.done[task.name] = {
            "name": task.name,
            "digest": task.digest(self.plan.setting.data),
            "seconds": round(seconds, 3),
            "rows": [row.to_dict() for row in rows],
        }

    def write(self) -> Result:
        """Write what is known, each file whole, and return it."""
        tasks = [task for task in self.plan.tasks if self._is_current(task)]
        lines = summarise(Row(**row) for task in tasks for row in self._rows(task))
        document = self._document(tasks, lines)
        table, plot = self.path.with_suffix(".md"), self.path.with_suffix(".svg")
        write_json(self.path, document)
        _write_text(table, self._markdown(lines, finished=document["finished"]))
        if any(line.mean for line in lines):
            _write_text(plot, standalone(self.plan.plot(lines)))
        return Result(lines, document, (self.path, table, plot))

    def _document(self, tasks: list[Task], lines: list[Line]) -> dict[str, Any]:
        plan, setting = self.plan, self.plan.setting
        current = [self.done[task.name] for task in tasks]
        names = {task.name for task in plan.tasks}
        return {
            "experiment": plan.name,
            "title": plan.title,
            "format_version": FORMAT_VERSION,
            "finished": len(tasks) == len(plan.tasks),
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
            "table": [line.to_dict() for line in lines],
            "tasks": current,
            "set_aside": [entry for entry in self.done.values() if entry["name"] not in names],
        }

    def _markdown(self, lines: list[Line], *, finished: bool) -> str:
        plan, setting = self.plan, self.plan.setting
        seeds = ", ".join(map(str, setting.seeds))
        models = [f"the seeds {seeds}"] if setting.seeds[1:] else []
        models += ["the members of the ensemble"] if plan.options.get("members", 1) > 1 else []
        over = f"Mean ± standard deviation over {' and '.join(models)}." if models else ""
        said = [
            f"On the {len(setting.corpus.split('test')):,} test points, in percent. {over}".strip(),
            *plan.remarks,
            *([] if finished else ["Not finished: the same command goes on from here."]),
        ]
        return f"# {plan.title}\n\n{plan.table.markdown(lines)}\n{' '.join(said)}\n"


def _read(path: Path) -> dict[str, Any]:
    """Read the results that an earlier command wrote."""
    try:
        found = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError):
        found = None
    known = isinstance(found, dict) and found.get("format_version") == FORMAT_VERSION
    needed = {"config", "data", "tasks", "set_aside", "started"}
    if not known or not needed <= found.keys():
        raise RunError(
            f"{path}: is not what this version's experiments write; remove it, or give another "
            "--out"
        )
    document: dict[str, Any] = found
    return document


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(text, encoding="utf8", newline="\n")
    temporary.replace(path)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    found = {"elias-xmc": elias.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _device_name(device: str) -> str:
    picked = pick_device(device)
    return torch.cuda.get_device_name(picked) if picked.type == "cuda" else str(picked)
