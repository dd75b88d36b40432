"""Write the report of a run: one HTML page with the figures of the paper and examples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from elias.data import load_corpus
from elias.data.load import READING_OPTIONS, reading_options
from elias.data.splits import repeat_hold_out
from elias.errors import DataError, RunError
from elias.inference.predictor import Elias
from elias.persistence.manifest import METRICS_FILE, MODEL_FOLDER
from elias.report.html import render
from elias.report.sections import report_values
from elias.training.run import REPORT_FILE, read_partition, read_records, write_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elias.data.corpus import Corpus


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
    model = Elias.from_pretrained(run, device=device)
    folder = _run_folder(run) or run
    records = read_records(folder)
    path = records.source() if data is None else Path(data)
    if path is None:
        raise DataError(
            f"{folder}: the path of its corpus is not recorded; give it: elias report RUN DATA"
        )
    if data is None and not path.exists():
        raise DataError(
            f"{path}: the corpus of {folder} is missing; give its new path: elias report RUN DATA"
        )
    explicit = {**dict.fromkeys(READING_OPTIONS), **(reading or {})}
    options = reading_options(path, model.data_settings or records.reading(), explicit)
    corpus = _load_corpus(path, options, model)
    partition = read_partition(folder, model.n_labels, model.model.graph.n_clusters)
    values = report_values(model, corpus, records, partition)
    write_text(target, render({"name": folder.resolve().name, **values}))
    return target


def _target(run: Path, out: Path | None) -> Path:
    """Return the file to write. Raise an error before any work if it cannot be written."""
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
    """Return the run folder of a run or of its model folder, or None if there is no run."""
    run = folder.parent if folder.name == MODEL_FOLDER else folder
    return next((path for path in (folder, run) if (path / METRICS_FILE).exists()), None)


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
