"""Where a run's numbers go beside ``metrics.jsonl``: TensorBoard and Weights & Biases.

Both are fed from the same events, so neither knows more than the file does. Neither may stop a run:
what goes wrong is told once, and the run goes on without.
"""

from __future__ import annotations

import logging
import secrets
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from elias.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from elias.config import EliasConfig, TrackingConfig


logger = logging.getLogger(__name__)

TRACKER_FOLDERS = ("tensorboard", "wandb")
"""What trackers leave in the folder of a run."""
_RUN_ID_FILE = "elias-run-id"
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


@runtime_checkable
class Tracker(Protocol):
    """Takes numbers."""

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        """Note some numbers at a step: the epoch of a stage."""

    def close(self) -> None:
        """Write what is left."""


def check_trackers(config: TrackingConfig) -> None:
    """Refuse a tracker whose package is missing, before anything is done."""
    wanted = {"tensorboard": config.tensorboard, "wandb": config.wandb is not None}
    for name, on in wanted.items():
        if on and find_spec(_PACKAGES[name]) is None:
            raise ConfigError(
                f"tracking.{name}: {name} is not installed; pip install 'elias-xmc[{name}]'"
            )


def open_trackers(config: EliasConfig, folder: Path) -> Trackers:
    """Begin what the configuration asks for, in a run's folder."""
    check_trackers(config.tracking)
    wanted: list[tuple[str, Callable[[], Tracker]]] = []
    if config.tracking.tensorboard:
        wanted.append(("TensorBoard", lambda: _TensorBoard(folder / TRACKER_FOLDERS[0])))
    if config.tracking.wandb is not None:
        wanted.append(("Wandb", lambda: _Wandb(config, folder)))
    found = []
    for name, begin in wanted:
        try:
            found.append(begin())
        except Exception as error:  # no key, no network, no room: not the run's trouble
            logger.warning("%s is left out: %s", name, _in_a_line(error))
    return Trackers(found)


class Trackers:
    """All trackers of a run; one that fails is left out from then on."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers
        self._epochs = 0

    def go_on(self, n_epochs: int) -> None:
        """Count on from the epochs that were recorded before the run was stopped."""
        self._epochs = n_epochs

    def record(self, event: Mapping[str, Any]) -> None:
        """Hand the numbers of an event on."""
        if not self._trackers:
            return
        numbers = numbers_of(event)
        if event.get("event") == "epoch":
            self._epochs += 1
        if numbers:
            self._each(lambda tracker: tracker.add(numbers, self._epochs))

    def close(self) -> None:
        """Write what is left."""
        self._each(lambda tracker: tracker.close())

    def _each(self, work: Any) -> None:
        for tracker in list(self._trackers):
            try:
                work(tracker)
            except Exception as error:  # a tracker's trouble is not the run's
                name = type(tracker).__name__.lstrip("_")
                logger.warning("%s is left out from here on: %s", name, _in_a_line(error))
                self._trackers.remove(tracker)


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def numbers_of(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an event by a path of names.

    >>> numbers_of({"event": "epoch", "stage": "stage1", "epoch": 2, "loss": 0.5})
    {'stage1/loss': 0.5}
    >>> numbers_of({"event": "time", "step": "tokens", "seconds": 3.2})
    {'seconds/tokens': 3.2}
    """
    kind = event.get("event")
    member = f"member {event['member']}/" if "member" in event else ""
    if kind == "time":
        return {f"{member}seconds/{event['step']}": float(event["seconds"])}
    if kind not in ("epoch", "stage", "data"):
        return {}
    root = str(event.get("stage", kind))
    facts = {k: v for k, v in event.items() if k not in ("event", "stage", "epoch", "member")}
    return dict(_flat(f"{member}{root}", facts))


def _flat(path: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in _flat(f"{path}/{key}", item)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [(path, float(value))]
    return []


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make: Any = SummaryWriter
        self._writer = make(str(folder))

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        for name, number in numbers.items():
            # TensorBoard takes no @ in a name
            self._writer.add_scalar(name.replace("@", "_at_"), number, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _run_id(path: Path) -> str:
    """Return the id kept with a run, so that one that goes on goes on there too, or a new one.

    A path would not do: an overwritten run, or one in a folder of the same name elsewhere, is
    another run.
    """
    if path.exists():
        kept = path.read_text(encoding="utf8").strip()
        if kept:
            return kept
    made = secrets.token_hex(8)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(f"{made}\n", encoding="utf8")
    temporary.replace(path)
    return made


class _Wandb:
    def __init__(self, config: EliasConfig, folder: Path) -> None:
        import wandb

        library: Any = wandb
        place = str(folder.resolve())
        self._run = library.init(
            project=config.tracking.wandb,
            name=folder.name,
            id=_run_id(folder / TRACKER_FOLDERS[1] / _RUN_ID_FILE),
            resume="allow",
            dir=place,
            config=config.to_dict(),
        )

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log({**numbers, "epoch": step})

    def close(self) -> None:
        self._run.finish()
