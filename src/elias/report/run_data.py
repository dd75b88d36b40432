"""What a report is about: a model, the corpus it was trained on, and what its run recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elias.data import load_corpus
from elias.data.load import reading_options
from elias.data.splits import hold_out_test, validation_split
from elias.errors import DataError
from elias.inference.predictor import Elias
from elias.persistence.manifest import METRICS_FILE, MODEL_FOLDER
from elias.training.run import RunRecords, read_partition, read_records

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from elias.data.corpus import Corpus, Split
    from elias.predictions import Predictions


_REMEDY = "give the corpus that the run was trained on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A trained model with its corpus, whose labels are the model's, and its run."""

    name: str
    model: Elias
    corpus: Corpus
    records: RunRecords = field(default_factory=RunRecords)
    partition: NDArray[np.int64] | None = None
    """Each label's cluster in stage 1 (L,), where the run kept it."""

    def judged(self) -> tuple[str, Split] | None:
        """Return the points to judge by: test points, else those held out, else None."""
        if self.corpus.test is not None:
            return "test", self.corpus.test
        held_out = validation_split(self.corpus, self.model.config)[1]
        return None if held_out is None else ("validation", held_out)

    def ranked(self, split: Split) -> dict[str, Predictions]:
        """Return the 100 best labels of each point by every component that the model has."""
        return {
            name: self.model.predict_split(split, component=name) for name in self.model.components
        }


def open_subject(
    run: Path,
    data: Path | None = None,
    *,
    reading: Mapping[str, str] | None = None,
    device: str = "auto",
) -> Subject:
    """Read a finished run and its corpus.

    Args:
        run: The run's folder, or a saved model's.
        data: The corpus; where the run read it, when None.
        reading: Options to read it with (see `load_corpus`), in place of the run's own.
        device: Where to compute.

    Raises:
        DataError: If the corpus is not known, not there any more, or another one.
    """
    model = Elias.from_pretrained(run, device=device)
    home = run_of(run) or run
    records = read_records(home)
    place = _place(home, data, records)
    settings = model.data_settings or records.reading()
    asked = {"text": None, "labels": None, "separator": None, **(reading or {})}
    given = reading_options(place, settings, asked)
    graph = model.model.graph
    return Subject(
        name=home.resolve().name,
        model=model,
        corpus=_as_trained(place, given, model),
        records=records,
        partition=read_partition(home, graph.n_labels, graph.n_clusters),
    )


def run_of(folder: Path) -> Path | None:
    """Return the run that a folder is, or whose model it is; None for a model alone."""
    for home in (folder, folder.parent):
        if (home / METRICS_FILE).exists() and (home == folder or folder.name == MODEL_FOLDER):
            return home
    return None


def _place(run: Path, data: Path | None, records: RunRecords) -> Path:
    """Return where the corpus is."""
    if data is not None:
        return data
    known = records.source()
    if known is None:
        raise DataError(f"{run}: does not say where its corpus is; give it: elias report RUN DATA")
    if not known.exists():
        raise DataError(
            f"{known}: the corpus of {run} is no longer there; give its new place: "
            "elias report RUN DATA"
        )
    return known


def _as_trained(place: Path, reading: Mapping[str, Any], model: Elias) -> Corpus:
    """Read a corpus, cut as the run had it, over the labels of the model."""
    recorded = model.metadata.get("data", {}).get("splits", {})
    corpus = load_corpus(
        place,
        text=reading.get("text"),
        labels=reading.get("labels"),
        separator=reading.get("separator"),
        test_size=0 if recorded else None,
    )
    n_test = recorded.get("test", {}).get("points", 0)
    if corpus.test is None and 0 < n_test < len(corpus.train):
        corpus = hold_out_test(corpus, n_test, seed=model.data_settings.get("seed", 0))
    for name, split in recorded.items():
        found = corpus.splits.get(name)
        n_points = 0 if found is None else len(found)
        n_pairs = 0 if found is None else int(found.labels.nnz)
        if (n_points, n_pairs) != (split["points"], split["pairs"]):
            raise DataError(
                f"{place}: {n_points:,} {name} points with {n_pairs:,} labels, where the run had "
                f"{split['points']:,} with {split['pairs']:,}; {_REMEDY}"
            )
    corpus = corpus.align_labels(model.label_names)
    if corpus.n_labels != model.n_labels:
        raise DataError(f"{place}: has labels that the model does not know; {_REMEDY}")
    return corpus
