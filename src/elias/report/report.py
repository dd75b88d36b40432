"""Write the report of a run: one HTML page with the figures of the paper and examples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import elias
from elias.data import load_corpus
from elias.data.load import reading_options
from elias.data.splits import repeat_hold_out, validation_split
from elias.errors import DataError, RunError
from elias.inference.predictor import Elias
from elias.persistence.manifest import METRICS_FILE, MODEL_FOLDER
from elias.report import sections
from elias.report.html import Markup, cards, element, note, page, seconds, section
from elias.report.statistics import PointSample, graph_edges, sample_points
from elias.training.run import REPORT_FILE, RunRecords, read_partition, read_records, write_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.data.corpus import Corpus, Split
    from elias.predictions import Predictions


SECTIONS = {
    "metrics": ("Metrics", sections.metrics_section),
    "learning": ("Learning curves", sections.learning_section),
    "recall": ("Recall and scores", sections.recall_section),
    "probabilities": ("Probabilities", sections.probabilities_section),
    "index": ("Index", sections.index_section),
    "embeddings": ("Embeddings", sections.embeddings_section),
    "examples": ("Examples", sections.examples_section),
    "data": ("Data", sections.data_section),
    "times": ("Times", sections.times_section),
    "configuration": ("Configuration", sections.configuration_section),
}
_HEADLINES = ("P@1", "P@5", "PSP@5", "R@100")
_REMEDY = "give the corpus that the run was trained on"


def write_report(
    run: str | Path,
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    reading: Mapping[str, str] | None = None,
    device: str = "auto",
) -> Path:
    """Write the report of a finished run as one HTML file and return its path.

    Args:
        run: Folder of the run, or of a saved model.
        data: The training corpus; by default the path that the run recorded.
        out: The file to write; by default ``report.html`` in the folder of the run.
        reading: Options for reading the corpus, such as ``{"text": "title"}``; by default the
            options of the run.
        device: Device to compute on.

    Raises:
        EliasError: If the run is not finished, the corpus is not the one of the run, or the file
            cannot be written.
    """
    run = Path(run)
    target = _target(run, None if out is None else Path(out))
    finished = load_run(run, None if data is None else Path(data), reading=reading, device=device)
    content = [section(key, title, write(finished)) for key, (title, write) in SECTIONS.items()]
    write_text(target, page(f"{finished.name}: ELIAS report", _header(finished), content))
    return target


def _target(run: Path, out: Path | None) -> Path:
    """Return the file to write; raise before any work if it cannot be written."""
    if out is None:
        folder = _run_folder(run)
        if folder is None and run.is_dir():
            raise RunError(f"{run}: is not the folder of a run; name the file to write with --out")
        return (folder or run) / REPORT_FILE
    if out.is_dir():
        raise RunError(f"{out}: is a folder; name a file with --out")
    if not out.parent.is_dir():
        raise RunError(f"{out.parent}: no such folder; create it, or give another --out")
    return out


def _run_folder(folder: Path) -> Path | None:
    """Return the run folder, given that folder or its model folder; None if there is no run."""
    run = folder.parent if folder.name == MODEL_FOLDER else folder
    return next((path for path in (folder, run) if (path / METRICS_FILE).exists()), None)


def _header(run: FinishedRun) -> list[Markup]:
    """Return the title, the key figures and the links to the sections."""
    model, corpus = run.model, run.corpus
    *_, last = model.metadata.get("metrics", {}).values() or [{}]
    best = last.get("test") or last.get("validation") or {}
    figures = {name: f"{best[name]:.2f}" for name in _HEADLINES if name in best}
    figures |= {"labels": f"{model.n_labels:,}", "training points": f"{len(corpus.train):,}"}
    times = run.records.times()
    if times:
        figures["training time"] = seconds(sum(times.values()))
    source = "" if corpus.source is None else f" on {corpus.source.name}"
    text = f"Written by ELIAS {elias.__version__}. Metrics are in percent."
    if model.others:
        text += f" An ensemble of {len(model.members)}: learning curves, index, embeddings and "
        text += "examples are those of its first member."
    links = [element("li", element("a", t, href=f"#{key}")) for key, (t, _) in SECTIONS.items()]
    nav = element("nav", element("ul", links), aria_label="Contents")
    return [element("h1", f"{run.name}{source}"), note(text), cards(figures), nav]


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A trained model with its corpus and the log of its run; computed results are cached."""

    name: str
    model: Elias
    corpus: Corpus
    """The corpus, with the labels of the model in the same order."""
    records: RunRecords
    partition: NDArray[np.int64] | None
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
        """Return the predictions of each component for the evaluated split, from one search."""
        return {} if self.evaluated is None else self.model.predict_components(self.evaluated[1])

    @cached_property
    def edges(self) -> csr_matrix | None:
        """Return the edges of the graph (C, L); None for one-vs-all."""
        return (
            None if self.model.config.index.kind == "all" else graph_edges(self.model.model.graph)
        )

    @cached_property
    def sample(self) -> PointSample:
        """Return a random sample of training points with their clusters."""
        return sample_points(self.model.model, self.corpus.train, self.model.config.seed)


def load_run(
    run: Path, data: Path | None, *, reading: Mapping[str, str] | None, device: str
) -> FinishedRun:
    """Load a finished run and its corpus; the arguments are those of `write_report`.

    Raises:
        DataError: If the corpus is unknown, missing, or not the one of the run.
    """
    model = Elias.from_pretrained(run, device=device)
    folder = _run_folder(run) or run
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
    explicit = {**dict.fromkeys(("text", "labels", "separator", "group")), **(reading or {})}
    options = reading_options(path, model.data_settings or records.reading(), explicit)
    graph = model.model.graph
    return FinishedRun(
        name=folder.resolve().name,
        model=model,
        corpus=_load_corpus(path, options, model),
        records=records,
        partition=read_partition(folder, graph.n_labels, graph.n_clusters),
    )


def _load_corpus(path: Path, options: Mapping[str, Any], model: Elias) -> Corpus:
    """Load the corpus with the splits of the run and the labels of the model."""
    recorded: dict[str, Any] = model.metadata.get("data", {}).get("splits", {})
    corpus = load_corpus(path, **options, test_size=0 if recorded else None)
    n_test = recorded.get("test", {}).get("points", 0)
    if corpus.test is None and 0 < n_test < len(corpus.train):
        corpus = repeat_hold_out(corpus, model.metadata)
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
