"""Load the inputs of a report: a trained model, its corpus and the log of its run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elias.data import load_corpus
from elias.data.load import reading_options
from elias.data.splits import hold_out_test, validation_split
from elias.errors import DataError
from elias.inference.predictor import Elias
from elias.persistence.manifest import METRICS_FILE, MODEL_FOLDER
from elias.report.statistics import Edges, PointSample, sample_points
from elias.training.run import RunRecords, read_partition, read_records

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from elias.data.corpus import Corpus, Split
    from elias.predictions import Predictions


_REMEDY = "give the corpus that the run was trained on"


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A trained model with its corpus and the log of its run; computed results are cached."""

    name: str
    model: Elias
    corpus: Corpus
    """The corpus, with the labels of the model in the same order."""
    records: RunRecords = field(default_factory=RunRecords)
    partition: NDArray[np.int64] | None = None
    """The cluster of each label in stage 1 (L,), if the run stored it."""

    @cached_property
    def evaluated(self) -> tuple[str, Split] | None:
        """Return the name and points of the test split, else of the validation split, else None."""
        if self.corpus.test is not None:
            return "test", self.corpus.test
        held_out = validation_split(self.corpus, self.model.config)[1]
        return None if held_out is None else ("validation", held_out)

    @cached_property
    def predictions(self) -> dict[str, Predictions]:
        """Return the predictions of each component for the evaluated split."""
        if self.evaluated is None:
            return {}
        return self.model.predict_components(self.evaluated[1])

    @cached_property
    def edges(self) -> Edges | None:
        """Return the edges of the graph; None for one-vs-all."""
        return None if self.model.config.index.kind == "all" else Edges.of(self.model.model.graph)

    @cached_property
    def sample(self) -> PointSample:
        """Return a random sample of training points with their clusters."""
        return sample_points(self.model.model, self.corpus.train, self.model.config.seed)


def load_run(
    run: Path,
    data: Path | None = None,
    *,
    reading: Mapping[str, str] | None = None,
    device: str = "auto",
) -> FinishedRun:
    """Load a finished run and its corpus.

    Args:
        run: Folder of the run, or of a saved model.
        data: The corpus; by default the path that the run recorded.
        reading: Options for reading the corpus (see `load_corpus`); they override recorded ones.
        device: Device to compute on.

    Raises:
        DataError: If the corpus is unknown, missing, or not the one of the run.
    """
    model = Elias.from_pretrained(run, device=device)
    folder = run_folder(run) or run
    records = read_records(folder)
    path = data or records.source()
    if path is None:
        raise DataError(
            f"{folder}: the path of its corpus is not recorded; give it: elias report RUN DATA"
        )
    if data is None and not path.exists():
        raise DataError(
            f"{path}: the corpus of {folder} is missing; give its new path: elias report RUN DATA"
        )
    explicit = {"text": None, "labels": None, "separator": None, **(reading or {})}
    options = reading_options(path, model.data_settings or records.reading(), explicit)
    graph = model.model.graph
    return FinishedRun(
        name=folder.resolve().name,
        model=model,
        corpus=_load_corpus(path, options, model),
        records=records,
        partition=read_partition(folder, graph.n_labels, graph.n_clusters),
    )


def run_folder(folder: Path) -> Path | None:
    """Return the run folder, given that folder or its model folder; None if there is no run."""
    for run in (folder, folder.parent):
        if (run / METRICS_FILE).exists() and (run == folder or folder.name == MODEL_FOLDER):
            return run
    return None


def _load_corpus(path: Path, options: Mapping[str, Any], model: Elias) -> Corpus:
    """Load the corpus with the splits of the run and the labels of the model."""
    recorded: dict[str, Any] = model.metadata.get("data", {}).get("splits", {})
    corpus = load_corpus(path, **options, test_size=0 if recorded else None)
    n_test = recorded.get("test", {}).get("points", 0)
    if corpus.test is None and 0 < n_test < len(corpus.train):
        corpus = hold_out_test(corpus, n_test, seed=model.data_settings.get("seed", 0))
    for name, stats in recorded.items():
        split = corpus.splits.get(name)
        n_points, n_pairs = (0, 0) if split is None else (len(split), int(split.labels.nnz))
        if (n_points, n_pairs) != (stats["points"], stats["pairs"]):
            raise DataError(
                f"{path}: has {n_points:,} {name} points with {n_pairs:,} labels, but the run had "
                f"{stats['points']:,} with {stats['pairs']:,}; {_REMEDY}"
            )
    corpus = corpus.align_labels(model.label_names)
    if corpus.n_labels != model.n_labels:
        raise DataError(f"{path}: has labels that the model does not have; {_REMEDY}")
    return corpus
