"""Log the metrics of a run to TensorBoard and Weights & Biases.

Both receive the events that are written to ``metrics.jsonl``. If a logger fails, it is disabled
with a warning, and the run continues.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from elias.config import EliasConfig, TrackingConfig
from elias.config.io import numbers
from elias.data.atomic import staged_file
from elias.errors import ConfigError, quoted

logger = logging.getLogger(__name__)

LOGGER_FOLDERS = ("tensorboard", "wandb")
"""Folders that the loggers create in the folder of a run.

The Python package and the setting of a logger have the same name as its folder.
"""
_RUN_ID_FILE = "elias-run-id"


def check_loggers(config: TrackingConfig) -> None:
    """Raise a `ConfigError` if the package of a configured logger is not installed."""
    for name in LOGGER_FOLDERS:
        if getattr(config, name) and find_spec(name) is None:
            raise ConfigError(
                f"tracking.{name}: {name} is not installed; pip install 'elias-xmc[{name}]'"
            )


def open_loggers(config: EliasConfig, folder: Path) -> Loggers:
    """Open the configured loggers, which write into the folder of a run."""
    loggers: list[Logger] = []
    kinds: tuple[type[Logger], ...] = (_TensorBoard, _Wandb)
    for name, kind in zip(LOGGER_FOLDERS, kinds, strict=True):
        if getattr(config.tracking, name):
            try:
                loggers.append(kind(config, folder))
            except Exception as error:  # for example, no API key; must not stop the run
                logger.warning("%s is disabled: %s", kind.__name__[1:], quoted(error))
    return Loggers(loggers)


class Loggers:
    """All loggers of a run. A logger that fails is removed."""

    def __init__(self, loggers: list[Logger]) -> None:
        self._loggers = loggers
        self.n_epochs = 0
        """Number of epochs recorded so far. A resumed run sets it."""

    def record(self, event: Mapping[str, Any]) -> None:
        """Send the numbers of an event to all loggers."""
        numbers = event_numbers(event)
        self.n_epochs += event.get("event") == "epoch"
        if numbers:
            self._for_each(lambda each: each.add(numbers, self.n_epochs))

    def close(self) -> None:
        """Close all loggers."""
        self._for_each(lambda each: each.close())

    def _for_each(self, work: Callable[[Logger], None]) -> None:
        for each in list(self._loggers):
            try:
                work(each)
            except Exception as error:  # must not stop the run
                name = type(each).__name__[1:]
                logger.warning("%s is disabled from now on: %s", name, quoted(error))
                self._loggers.remove(each)


def event_numbers(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in an event by name. Names are paths such as stage1/loss.

    >>> event_numbers({"event": "epoch", "stage": "stage1", "epoch": 2, "loss": 0.5})
    {'stage1/loss': 0.5}
    >>> event_numbers({"event": "time", "step": "tokens", "seconds": 3.2})
    {'seconds/tokens': 3.2}
    """
    kind = event.get("event")
    member = f"member {event['member']}/" if "member" in event else ""
    if kind == "time":
        return {f"{member}seconds/{event['step']}": float(event["seconds"])}
    if kind not in ("epoch", "stage", "data"):
        return {}
    root = str(event.get("stage", kind))
    values = {k: v for k, v in event.items() if k not in ("event", "stage", "epoch", "member")}
    return {f"{member}{'/'.join((root, *path))}": float(x) for path, x in numbers(values)}


class _TensorBoard:
    """Logger that writes metrics to TensorBoard."""

    def __init__(self, config: EliasConfig, folder: Path) -> None:
        from torch.utils import tensorboard

        del config
        self._writer: Any = tensorboard.SummaryWriter(str(folder / "tensorboard"))

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        """Log named numbers. ``step`` is the number of finished epochs."""
        for name, number in numbers.items():
            # TensorBoard does not allow @ in a name
            self._writer.add_scalar(name.replace("@", "_at_"), number, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Logger that sends metrics to Weights & Biases."""

    def __init__(self, config: EliasConfig, folder: Path) -> None:
        import wandb

        library: Any = wandb
        self._run = library.init(
            project=config.tracking.wandb,
            name=folder.name,
            id=_run_id(folder / "wandb" / _RUN_ID_FILE),
            resume="allow",
            dir=str(folder.resolve()),
            config=config.to_dict(),
        )

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log({**numbers, "epoch": step})

    def close(self) -> None:
        self._run.finish()


Logger: TypeAlias = _TensorBoard | _Wandb


def _run_id(path: Path) -> str:
    """Return the run id stored in ``path``. If there is none, create and store one.

    A resumed run therefore keeps its id, and a run that overwrites another gets a new one.
    """
    if path.exists() and (stored := path.read_text(encoding="utf8").strip()):
        return stored
    run_id = secrets.token_hex(8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with staged_file(path) as temporary:
        temporary.write_text(f"{run_id}\n", encoding="utf8")
    return run_id
