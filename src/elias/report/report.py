"""The report of a run: one HTML file with the paper's figures, examples, settings and times."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import elias
from elias.errors import RunError
from elias.report import figures as charts
from elias.report.figures import cloud_figures, decisions_section
from elias.report.page import Markup, cards, element, grid, lines, page, paragraph, seconds, section
from elias.report.run_data import Subject, open_subject, run_of
from elias.report.sections import (
    component_name,
    config_section,
    data_section,
    example_articles,
    metrics_section,
    times_section,
)
from elias.report.statistics import (
    ASSIGNED,
    Edges,
    PointSample,
    clouds,
    clusters_per_label,
    edge_weights,
    learning_curve,
    recalls,
    sample_points,
    stage1_edges_kept,
    stored_edges,
    true_scores,
)
from elias.training.run import REPORT_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elias.data.corpus import Split
    from elias.predictions import Predictions


THRESHOLDS = (0.1, ASSIGNED, 0.5)
HEADLINES = ("P@1", "P@5", "PSP@5", "R@100")
CONTENTS = {
    "metrics": "Metrics",
    "learning": "Learning",
    "recall": "Recall and scores",
    "decisions": "Decisions",
    "index": "Index",
    "clouds": "Points",
    "examples": "Examples",
    "data": "Data",
    "times": "Times",
    "configuration": "Configuration",
}
"""Every section, in order: its key, and what a link to it says."""
_NO_INDEX = paragraph("There is none: every label is scored (one-vs-all).", soft=True)
_NO_POINTS = paragraph("There are neither test nor validation points to look at.", soft=True)


def write_report(
    run: str | Path,
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    reading: Mapping[str, str] | None = None,
    device: str = "auto",
) -> Path:
    """Write the report of a finished run as one HTML file, and return where it is.

    Args:
        run: The run's folder, or a saved model's.
        data: The corpus it was trained on; where the run read it, when None.
        out: The file to write; ``report.html`` in the run's folder, when None.
        reading: Options to read the corpus with, such as ``{"text": "title"}``; those of the run,
            when None.
        device: Where to compute.

    Raises:
        EliasError: If the run is not finished, the corpus is not the run's, or the file cannot
            be written.
    """
    run = Path(run)
    target = _target(run, None if out is None else Path(out))
    given = None if data is None else Path(data)
    content = build_report(open_subject(run, given, reading=reading, device=device))
    temporary = target.with_name(f".{target.name}.writing")
    try:
        temporary.write_text(content, encoding="utf8")
        temporary.replace(target)
    except OSError as error:  # names the temporary file
        raise RunError(f"{target}: cannot be written ({error.strerror or error})") from None
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _target(run: Path, out: Path | None) -> Path:
    """Return where the report goes, having refused what would fail after all the work."""
    if out is None:
        home = run_of(run)
        if home is None and run.is_dir():
            raise RunError(f"{run}: is not a run's folder; say where the report goes with --out")
        return (home or run) / REPORT_FILE
    if out.is_dir():
        raise RunError(f"{out}: is a folder; give the name of a file with --out")
    if not out.parent.is_dir():
        raise RunError(f"{out.parent}: no such folder; make it, or give another --out")
    return out


def build_report(subject: Subject) -> str:
    """Return the report of a model, its corpus and its run as HTML."""
    judged = subject.judged()
    ranked = {} if judged is None else subject.ranked(judged[1])
    edges = stored_edges(subject.model.model.graph)
    sample = sample_points(
        subject.model.model, subject.corpus.train, seed=subject.model.config.seed
    )
    sections = [
        metrics_section(subject),
        _learning_section(subject),
        _recall_section(subject, judged, ranked),
        decisions_section(subject, judged, ranked.get(subject.model.components[-1])),
        _index_section(subject, edges, sample),
        _clouds_section(subject, edges, sample),
        _examples_section(subject, judged),
        data_section(subject),
        times_section(subject),
        config_section(subject),
    ]
    return page(f"{subject.name}: ELIAS report", _header(subject), sections)


def _header(subject: Subject) -> Markup:
    model, corpus = subject.model, subject.corpus
    metrics = list(model.metadata.get("metrics", {}).values())
    last = metrics[-1] if metrics else {}
    best = last.get("test") or last.get("validation") or {}
    facts = {name: f"{best[name]:.2f}" for name in HEADLINES if name in best}
    facts |= {
        "labels": f"{model.n_labels:,}",
        "training points": f"{len(corpus.train):,}",
    }
    times = subject.records.times()
    if times:
        facts["time to train"] = seconds(sum(times.values()))
    links = [element("li", element("a", name, href=f"#{key}")) for key, name in CONTENTS.items()]
    where = "" if corpus.source is None else f" on {corpus.source.name}"
    told = f"A run of ELIAS {elias.__version__}. Metrics are in percent."
    if model.others:
        told += f" An ensemble of {len(model.members)}: learning curves, index, points and "
        told += "examples are of its first member."
    return lines(
        element("h1", f"{subject.name}{where}"),
        paragraph(told, soft=True),
        cards(facts),
        element("nav", element("ul", links), aria_label="Contents"),
    )


def _learning_section(subject: Subject) -> Markup:
    epochs = subject.records.of("epoch")
    if not epochs:
        told = paragraph("A saved model alone does not know how it was trained.", soft=True)
        return section("learning", "Learning curves", told)
    figures = charts.learning_figures(learning_curve(epochs))
    return section("learning", "Learning curves", grid(figures))


def _recall_section(
    subject: Subject, judged: tuple[str, Split] | None, by_key: Mapping[str, Predictions]
) -> Markup:
    if judged is None:
        return section("recall", "Recall and scores", _NO_POINTS)
    name, split = judged
    frequencies = subject.corpus.label_frequencies()
    ranked = {component_name(key): one for key, one in by_key.items()}
    found = {key: true_scores(one, split.labels, frequencies) for key, one in ranked.items()}
    curves = {key: recalls(one, split.labels, frequencies) for key, one in ranked.items()}
    recorded = {
        key: known for key, known in _recorded_recall(subject, name).items() if key not in ranked
    }
    figures = [*charts.recall_figures(curves, found, recorded, name), charts.score_figure(found)]
    told = paragraph(f"On the {len(split):,} {name} points.", soft=True)
    return section("recall", "Recall and scores", told, grid(figures))


def _recorded_recall(subject: Subject, split: str) -> dict[str, dict[int, float]]:
    """Return R@k of each component as the run noted it, since earlier stages are gone."""
    found: dict[str, dict[int, float]] = {}
    for key, metrics in subject.model.metadata.get("metrics", {}).items():
        known = {
            int(name.removeprefix("R@")): value
            for name, value in metrics.get(split, {}).items()
            if name.startswith("R@")
        }
        if known:
            found[component_name(key)] = dict(sorted(known.items()))
    return found


def _index_section(subject: Subject, edges: Edges, sample: PointSample) -> Markup:
    if subject.model.config.index.kind == "all":
        return section("index", "The index", _NO_INDEX)
    figures: list[Markup] = []
    told = None
    if subject.model.model.graph.learned:
        weights = edge_weights(edges)
        figures += charts.edge_figures(weights)
        if subject.partition is None:
            told = paragraph(
                "The run did not keep its partition, so Fig. 7a is missing.", soft=True
            )
        else:
            kept = stage1_edges_kept(edges, subject.partition)
            figures.append(charts.stage1_figure(weights, kept))
        means = clusters_per_label(edges, subject.corpus.label_frequencies(), THRESHOLDS)
        figures.append(charts.clusters_figure(means))
    else:
        told = paragraph(
            "The graph is fixed: each label has one cluster and each edge weighs 1, so Figures 3 "
            "and 7 have nothing to show.",
            soft=True,
        )
    points = np.bincount(sample.best, minlength=edges.n_clusters)
    figures += charts.size_figures(edges.above(ASSIGNED).per_cluster(), points)
    return section("index", "The index", told, grid(figures))


def _clouds_section(subject: Subject, edges: Edges, sample: PointSample) -> Markup:
    if subject.model.config.index.kind == "all":
        return section("clouds", "Labels of several clusters and of one", _NO_INDEX)
    told = paragraph(
        "φ of training points, brought into the plane by t-SNE. A label is assigned to the "
        f"clusters whose edge to it weighs more than {ASSIGNED}."
    )
    found = clouds(sample, edges, subject.model.config.seed)
    panels = cloud_figures(found, lambda label: subject.model.label_names[label])
    return section("clouds", "Labels of several clusters and of one", told, panels)


def _examples_section(subject: Subject, judged: tuple[str, Split] | None) -> Markup:
    if judged is None:
        return section("examples", "Examples", _NO_POINTS)
    name, split = judged
    articles = example_articles(subject.model, split, subject.model.config.seed)
    told = paragraph(
        "✓ marks a true label. p is classifier × cluster × edge along the best path (Eq. 1, 5, 6); "
        "with a ranker the score is p times what the ranker says, and after calibration that and T "
        "together, which can exceed 1; name is how alike text and name are, "
        "where T was told. A cluster is described by its strongest labels."
    )
    title = f"{len(articles)} {name} points and their predictions"
    return section("examples", title, told, element("div", articles, class_="examples"))
