"""Reading what a run left behind: its events, the corpus it read, the partition of its labels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elias.errors import RunError
from elias.training.tracking import METRICS_FILE, PARTITION_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The lines of ``metrics.jsonl``; a model without a run has none."""

    events: Sequence[Mapping[str, Any]] = ()

    def of(self, event: str) -> list[Mapping[str, Any]]:
        """Return the events of one kind, in order: data, epoch or stage.

        Of an ensemble, those of its first member: the others' lines name theirs.
        """
        return [r for r in self.events if r.get("event") == event and "member" not in r]

    def times(self) -> dict[str, float]:
        """Return the seconds of each step; a step that came twice is added up, as members' are."""
        seconds: dict[str, float] = {}
        for record in (r for r in self.events if r.get("event") == "time"):
            seconds[record["step"]] = seconds.get(record["step"], 0.0) + record["seconds"]
        return seconds

    def source(self) -> Path | None:
        """Return where the corpus was read from, if the run knows."""
        places = [record.get("source") for record in self.of("data")]
        return Path(places[-1]) if places and places[-1] else None

    def reading(self) -> dict[str, Any]:
        """Return the options that the corpus was read with."""
        given = [record.get("reading") for record in self.of("data")]
        return dict(given[-1]) if given and given[-1] else {}


def read_records(run: Path) -> RunRecords:
    """Read the events of a run; none where the folder is that of a model alone."""
    path = run / METRICS_FILE
    if not path.exists():
        return RunRecords()
    events = []
    for number, line in enumerate(path.read_text(encoding="utf8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise RunError(f"{path}:{number}: is not a JSON object; train the run again")
        events.append(record)
    return RunRecords(tuple(events))


def read_partition(run: Path, n_labels: int, n_clusters: int) -> NDArray[np.int64] | None:
    """Return each label's cluster in the fixed graph (L,), or None where a run kept none."""
    path = run / PARTITION_FILE
    if not path.exists():
        return None
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        found = np.empty(0)
    whole = found.shape == (n_labels,) and np.issubdtype(found.dtype, np.integer)
    if not whole or found.min() < 0 or found.max() >= n_clusters:
        raise RunError(
            f"{path}: is not a cluster below {n_clusters} for each of {n_labels} labels; "
            "remove the file, or train the run again"
        )
    clusters: NDArray[np.int64] = found.astype(np.int64)
    return clusters
