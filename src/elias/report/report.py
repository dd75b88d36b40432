"""Write the report of a run: one HTML page with the figures of the paper and examples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import elias
from elias.errors import RunError
from elias.report import sections
from elias.report.html import cards, element, note, page, seconds, section
from elias.report.run_data import load_run, run_folder
from elias.training.run import REPORT_FILE, write_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elias.report.html import Markup
    from elias.report.run_data import FinishedRun


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
    corpus = None if data is None else Path(data)
    write_text(target, build_report(load_run(run, corpus, reading=reading, device=device)))
    return target


def _target(run: Path, out: Path | None) -> Path:
    """Return the file to write; raise before any work if it cannot be written."""
    if out is None:
        folder = run_folder(run)
        if folder is None and run.is_dir():
            raise RunError(f"{run}: is not the folder of a run; name the file to write with --out")
        return (folder or run) / REPORT_FILE
    if out.is_dir():
        raise RunError(f"{out}: is a folder; name a file with --out")
    if not out.parent.is_dir():
        raise RunError(f"{out.parent}: no such folder; create it, or give another --out")
    return out


def build_report(run: FinishedRun) -> str:
    """Return the report of a run as HTML."""
    content = [section(key, title, write(run)) for key, (title, write) in SECTIONS.items()]
    return page(f"{run.name}: ELIAS report", _header(run), content)


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
    links = [
        element("li", element("a", title, href=f"#{key}")) for key, (title, _) in SECTIONS.items()
    ]
    return [
        element("h1", f"{run.name}{source}"),
        note(text),
        cards(figures),
        element("nav", element("ul", links), aria_label="Contents"),
    ]
