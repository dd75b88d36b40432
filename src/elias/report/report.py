"""Write the report of a run: one HTML page with the figures of the paper and examples.

The values shown are computed here. The template ``report.html.j2`` has the markup and the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest, nsmallest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from scipy.sparse import csr_matrix

import elias
from elias.config.io import leaves
from elias.data import load_corpus
from elias.data.corpus import Corpus, Split
from elias.data.load import READING_OPTIONS, reading_options
from elias.data.splits import repeat_hold_out, validation_split
from elias.data.stats import PERCENTILES, corpus_stats
from elias.errors import DataError, RunError
from elias.inference.explain import Explanation
from elias.inference.predict import split_inputs
from elias.inference.predictor import Elias
from elias.metrics import MIN_GROUP, frequency_groups, large_groups, per_label
from elias.persistence.manifest import METRICS_FILE, MODEL_FOLDER
from elias.predictions import Predictions
from elias.progress import seconds
from elias.report import statistics
from elias.report.plots import Axis, Plot, colour, number, scatter_plot, text
from elias.report.statistics import Array, Ints
from elias.rerank.probabilities import ECE_AT, PROBABILITIES, Probabilities, reliability
from elias.training.run import REPORT_FILE, RunRecords, read_partition, read_records, write_text

COMPONENTS = {"rerank": "+ ranker", "calibrate": "+ calibration", "names": "+ label names"}
"""Titles of the components after the last stage."""
DECILES = [str(i) for i in range(1, statistics.N_DECILES + 1)]
DECILE_AXIS = Axis("label decile, most frequent first", categories=DECILES)
N_LABELS = 10
"""Number of labels in each table of labels with errors."""
MIN_TEST_POINTS = 5
"""Minimum number of test points of a label in the table of labels with the lowest F1."""
N_EXAMPLES = 20
TOP_K = 5
N_PATHS = 3
_LABEL_COLOUR = 4  # red, as in the paper
_CLUSTER_COLOURS = (0, 2, 3, 1, 5)
_AT_ASSIGNED = int(np.searchsorted(statistics.THRESHOLDS, statistics.ASSIGNED))
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
        EliasError: If the run is not finished, the corpus is not the training corpus, or the file
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
            f"{folder}: does not record the path of the corpus; give it: elias report RUN DATA"
        )
    if data is None and not path.exists():
        raise DataError(
            f"{path}: the corpus of {folder} is missing; give the new path: elias report RUN DATA"
        )
    explicit = {**dict.fromkeys(READING_OPTIONS), **(reading or {})}
    options = reading_options(path, model.data_settings or records.reading(), explicit)
    corpus = _load_corpus(path, options, model)
    partition = None
    if model.config.index.kind != "all":
        partition = read_partition(folder, model.n_labels, model.model.graph.n_clusters)
    values = report_values(model, corpus, records, partition)
    write_text(target, render({"name": folder.resolve().name, **values}))
    return target


def render(values: Mapping[str, Any], template: str = "report.html.j2") -> str:
    """Render a template as a self-contained page without scripts, fonts or images."""
    environment = Environment(
        loader=PackageLoader("elias", "report"),
        autoescape=True,
        finalize=text,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"fmt": format, "number": number, "seconds": seconds}
    return environment.get_template(template).render(values)


def _target(run: Path, out: Path | None) -> Path:
    """Return the file to write. Raise an error if it cannot be written."""
    if out is None:
        folder = _run_folder(run)
        if folder is None and run.is_dir():
            raise RunError(
                f"{run} is not in a run folder, so the report has no default path; choose one with "
                "--out"
            )
        return (folder or run) / REPORT_FILE
    if out.is_dir():
        raise RunError(f"{out}: is a folder; give the path of a file with --out")
    if not out.parent.is_dir():
        raise RunError(f"{out.parent}: no such folder; create it, or give another --out")
    return out


def _run_folder(folder: Path) -> Path | None:
    """Return the run folder if ``folder`` is a run folder or its model folder, otherwise None."""
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


class Figure(NamedTuple):
    """A plot and the table of its numbers."""

    plot: Plot
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str | float]] = ()


def report_values(
    model: Elias, corpus: Corpus, records: RunRecords, partition: Ints | None
) -> dict[str, Any]:
    """Return the values for the template. Sections without content are None or empty.

    Args:
        model: The trained model.
        corpus: The corpus of the run, with the labels of the model in the same order.
        records: The log of the run.
        partition: The cluster of each label in stage 1 (L,), if the run stored it.
    """
    metrics = metrics_by_split(model.metadata.get("metrics", {}))
    frequencies = corpus.label_frequencies()
    values = {
        "source": corpus.source and corpus.source.name,
        "version": elias.__version__,
        "n_members": len(model.members),
        "n_labels": model.n_labels,
        "n_points": len(corpus.train),
        "statistics": statistics,
        "ECE_AT": ECE_AT,
        "PERCENTILES": PERCENTILES,
        "metrics": metrics,
        "learning": learning_values(records.of("epoch")),
        "probabilities": model.probabilities and _probability_values(model.probabilities),
        "calibration_errors": model.metadata.get(PROBABILITIES, {}).get("errors", {}),
        "data": model.metadata.get("data") or corpus_stats(corpus).to_dict(),
        "data_source": {"format": corpus.format, **corpus.notes},
        "times": records.times(),
        "configuration": {
            ".".join(path): _setting(value) for path, value in leaves(model.config.to_dict())
        },
        **dict.fromkeys(
            ("recall", "groups", "decisions", "reliability", "index", "embeddings", "examples")
        ),
    }
    name, split = "test", corpus.test
    if split is None:
        name, split = "validation", validation_split(corpus, model.config)[1]
    if split is not None:
        components = model.predict_components(split)
        predictions = {COMPONENTS.get(key, key): one for key, one in components.items()}
        last = components[model.components[-1]]
        recorded = metrics.get(name, {})
        values |= {
            "split": name,
            "n_evaluated": len(split),
            "recall": recall_values(predictions, split.labels, frequencies, recorded),
            "groups": group_values(model, last, split, frequencies),
            "min_group": MIN_GROUP,
            "examples": _examples(model, split),
            "label_names": model.label_names,
        }
        if model.probabilities:
            values["reliability"] = _reliability_values(last, split.labels)
            values["decisions"] = decision_values(model.assign(last), split.labels, frequencies)
    if model.config.index.kind != "all":
        edges = statistics.graph_edges(model.model.graph)
        sample = statistics.embed_sample(model.model, corpus.train, model.config.seed)
        maps = statistics.label_maps(sample, edges, model.config.seed)
        values["embeddings"] = map_values(maps, model.label_names)
        values["index"] = size_values(edges, sample.best)
        if model.model.graph.learned:
            values["index"] |= edge_values(edges, partition, frequencies)
    return values


def _curve_figure(
    plot: Plot,
    header: str,
    xs: Sequence[float] | Array,
    curves: Mapping[str, Array],
    shown: Iterable[int] | None = None,
) -> Figure:
    """Return a figure with curves over the same ``xs``, and their values as a table.

    If ``shown`` is given, the table has only the rows with these indices.
    """
    for name, ys in curves.items():
        plot.line(name, xs, ys)
    rows = list(zip(xs, *curves.values(), strict=True))
    return Figure(plot, [header, *curves], rows if shown is None else [rows[i] for i in shown])


def _decile_figure(title: str, axis: Axis, groups: Mapping[str, Array], **counts: Ints) -> Figure:
    """Return a figure with bars by label decile. The table also shows ``counts``."""
    plot = Plot(title, DECILE_AXIS, axis)
    plot.bars(groups)
    rows = list(zip(DECILES, *groups.values(), *counts.values(), strict=True))
    return Figure(plot, ["decile", *groups, *counts], rows)


def metrics_by_split(
    metrics: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> dict[str, dict[str, Mapping[str, float]]]:
    """Return the metrics of each component by split, the test split first."""
    splits = {split for by_split in metrics.values() for split in by_split}
    return {
        split: {COMPONENTS.get(k, k): v[split] for k, v in metrics.items() if split in v}
        for split in sorted(splits, key=lambda name: (name != "test", name))
    }


def learning_values(epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the training loss and, if there is a validation split, the metrics by epoch."""
    if not epochs:
        return None
    stages = [str(epoch.get("stage")) for epoch in epochs]
    starts = {i + 1: s for i, s in enumerate(stages) if i == 0 or stages[i - 1] != s}
    measured = [epoch.get("validation") or {} for epoch in epochs]
    names = dict.fromkeys(name for values in measured for name in values)
    # values that were not measured are None, which becomes NaN
    loss = np.array([epoch.get("loss") for epoch in epochs], dtype=np.float64)
    metrics = {name: np.array([v.get(name) for v in measured], dtype=np.float64) for name in names}

    def draw(title: str, label: str, curves: Mapping[str, Array]) -> Figure:
        plot = Plot(title, Axis("epoch", 1.0, max(len(epochs), 2.0)), Axis(label))
        for at, stage in starts.items():
            plot.rule(at, stage)
        return _curve_figure(plot, "epoch", range(1, len(epochs) + 1), curves)

    return {
        "starts": starts,
        "loss": draw("Training loss by epoch", "training loss", {"loss": loss}),
        "validation": draw("Validation metrics by epoch", "validation, %", metrics),
        "last": {name: values[np.isfinite(values)][-1] for name, values in metrics.items()},
    }


def recall_values(
    predictions: Mapping[str, Predictions],
    truth: csr_matrix,
    frequencies: Ints,
    metrics: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Return recall by k and by label decile (Fig. 5), and scores of true labels (Fig. 4).

    Args:
        predictions: Predictions of each component of the model, by title.
        truth: True labels of the points (n, L).
        frequencies: Number of training points of each label (L,).
        metrics: Recorded metrics of each component and earlier stage, by title.
    """
    recalls = {k: statistics.recalls(p, truth, frequencies) for k, p in predictions.items()}
    scores = {k: statistics.true_scores(p, truth, frequencies) for k, p in predictions.items()}
    axis = Axis("labels predicted, k", low=1.0, log=True)
    curve = Plot("Recall by number of predictions (Fig. 5, left)", axis, Axis("R@k, %", low=0.0))
    recorded = []  # earlier stages are not saved, so only their recorded R@k are known
    for name, values in metrics.items():
        by_k = sorted((int(k[2:]), value) for k, value in values.items() if k.startswith("R@"))
        if by_k and name not in predictions:
            recorded.append(name)
            curve.line(name, *zip(*by_k, strict=True))
    # components may predict different numbers of labels
    ks = max((recall.ks for recall in recalls.values()), key=len)
    curves = {
        name: np.pad(recall.curve, (0, len(ks) - len(recall.ks)), constant_values=np.nan)
        for name, recall in recalls.items()
    }
    added = {name: recall.by_decile for name, recall in recalls.items()}
    title = f"Contribution of each label decile to R@{statistics.RECALL_AT} (Fig. 5, right)"
    within = {name: 100 * score.recall for name, score in scores.items()}
    percent = Axis(f"% among the {statistics.RECALL_AT} best", 0.0, 100.0)
    true_labels = {"true labels": next(iter(scores.values())).pairs}
    quantiles = {name: score.quantiles for name, score in scores.items()}
    kinds, kind = "Scores", "score"
    first, last = next(iter(predictions)), list(predictions)[-1]
    if predictions[last].probabilities is not None:  # scores of a reranker are not comparable
        kinds, kind = "Probabilities", "probability"
        stage = {} if first == last else {f"{first}, score": quantiles[first]}
        quantiles = {**stage, f"{last}, probability": quantiles[last]}
    high = 1.0 if all(np.nanmax(q, initial=0.0) <= 1 for q in quantiles.values()) else None
    deciles = Axis("label decile, most frequent first", 1.0, len(DECILES))
    of_true = Plot(f"{kinds} of true labels by decile (Fig. 4)", deciles, Axis(kind, 0.0, high))
    for name, by_decile in quantiles.items():
        _, low, median, up, _ = by_decile.T
        of_true.line(name, range(1, len(DECILES) + 1), median, band=(low, up))
    header = ["decile", *(f"{name} {q:.0%}" for name in quantiles for q in statistics.QUANTILES)]
    rows = list(zip(DECILES, *np.hstack(list(quantiles.values())).T, strict=True))
    return {
        "recorded": recorded,
        "last": {name: recall.curve[-1] for name, recall in recalls.items()},
        "last_added": list(added.values())[-1],
        "last_within": list(within.values())[-1],
        "medians": {name: q[:, 2] for name, q in quantiles.items()},
        "curve": _curve_figure(curve, "k", ks, curves),
        "added": _decile_figure(title, Axis("percentage points", low=0.0), added),
        "within": _decile_figure("Recall within each label decile", percent, within, **true_labels),
        "scores": Figure(of_true, header, rows),
    }


def group_values(
    model: Elias, predictions: Predictions, split: Split, frequencies: Ints
) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Return a table (header and rows) of the weakest groups of labels for each kind of group."""
    kinds = {"training points": frequency_groups(frequencies)}
    if model.label_table.broader is not None:
        kinds["broader label"] = model.label_table.broader_groups()
    assigned = model.assign(predictions) if model.probabilities else None
    tables = {}
    for kind, groups in kinds.items():
        rows = elias.metrics_by_labels(predictions, split.labels, groups, assigned=assigned)
        rows = list(large_groups(rows))[:N_LABELS]
        if rows:
            names = [f"{k}, %" if isinstance(v, float) else k for k, v in rows[0].items()]
            cells = [[_cell(value) for value in row.values()] for row in rows]
            tables[kind] = ([kind, *names[1:]], cells)
    return tables


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _probability_values(probabilities: Probabilities) -> dict[str, Any]:
    """Return precision, recall and F1 by threshold."""
    curves = {
        "precision": 100 * probabilities.precision,
        "recall": 100 * probabilities.recall,
        "F1": 100 * probabilities.f1,
    }
    thresholds, best = probabilities.thresholds, probabilities.threshold("f1")
    at = int(np.searchsorted(thresholds, best - 1e-9))
    axes = Axis("threshold on the probability", 0.0, 1.0), Axis("on held-out points, %", 0.0, 100.0)
    plot = Plot("Precision and recall by threshold", *axes)
    plot.rule(best, "best F1")
    shown = range(0, len(thresholds), 10)
    return {
        "best": best,
        "at_best": {name: curve[at] for name, curve in curves.items()},
        "thresholds": _curve_figure(plot, "threshold", thresholds, curves, shown),
    }


def decision_values(assigned: Predictions, truth: csr_matrix, frequencies: Ints) -> dict[str, Any]:
    """Return metrics of the assigned labels, and tables of the labels with the most errors."""
    rows = [
        row
        for row in per_label(assigned, truth, frequencies, assigned=assigned)
        if row["test_count"]
    ]
    missed = nlargest(N_LABELS, rows, key=lambda row: row["test_count"] - row["hits"])
    common = [row for row in rows if row["test_count"] >= MIN_TEST_POINTS]
    worst = nsmallest(N_LABELS, common, key=lambda row: (row["f1"], -row["test_count"]))

    def cells(row: Mapping[str, Any]) -> list[str]:
        counts = [f"{row[name]:,}" for name in ("train_count", "test_count", "assigned", "hits")]
        ratios = (row[name] for name in ("precision", "recall", "f1"))
        return [row["label"], *counts, *("–" if r is None else f"{100 * r:.1f}" for r in ratios)]

    return {
        "metrics": elias.f1_metrics(assigned, truth),
        "missed": [cells(row) for row in missed if row["hits"] < row["test_count"]],
        "worst": [cells(row) for row in worst],
        "min_points": MIN_TEST_POINTS,
    }


def _reliability_values(predictions: Predictions, truth: csr_matrix) -> dict[str, Any]:
    """Return the share of relevant labels by raw score and by calibrated probability."""
    axes = Axis("predicted probability", 0.0, 1.0), Axis("share that is relevant", 0.0, 1.0)
    plot = Plot("Reliability diagram", *axes)
    plot.line("perfect calibration", [0.0, 1.0], [0.0, 1.0])
    rows, errors = [], {}
    for name, calibrated in (("raw scores", False), ("probabilities", True)):
        bins = reliability(predictions, truth, ECE_AT, calibrated=calibrated)
        plot.line(name, bins.predicted, bins.true)
        errors[name] = bins.error
        columns = zip(bins.predicted, bins.true, bins.counts, strict=True)
        rows += [(name, f"{p:.3f}", f"{true:.3f}", n) for p, true, n in columns if n]
    header = ["", "predicted", "relevant", "labels"]
    return {"errors": errors, "figure": Figure(plot, header, rows)}


def size_values(edges: csr_matrix, best: Ints) -> dict[str, Any]:
    """Return histograms of the labels and of the points per cluster, with at most 24 bars."""
    labels = (edges > statistics.ASSIGNED).getnnz(axis=1)
    points = np.bincount(best, minlength=len(labels))
    axis = f"points that prefer the cluster, of {len(best):,}"
    values = {}
    for key, title, label, sizes in (
        ("labels", "Labels per cluster", f"labels with ŝ > {statistics.ASSIGNED}", labels),
        ("points", "Training points per cluster", axis, points),
    ):
        plot = Plot(title, Axis(label), Axis("clusters", low=0.0))
        step = int(sizes.max()) // 24 + 1
        plot.histogram(*np.histogram(sizes, bins=np.arange(0, sizes.max() + step + 1, step)))
        rows = [(f"{q}%", number(np.percentile(sizes, q))) for q in (0, 10, 25, 50, 75, 90, 100)]
        values[key] = {"sizes": sizes, "figure": Figure(plot, ["percentile", label], rows)}
    return values


def edge_values(edges: csr_matrix, partition: Ints | None, frequencies: Ints) -> dict[str, Any]:
    """Return figures of the edge scores (Fig. 3 and 7a) and of the clusters per label (Fig. 7b)."""
    ranked = statistics.ranked_edge_scores(edges)
    mean, n_edges = ranked.mean(axis=0), ranked.shape[1]
    axes = Axis("rank of the edge", 1.0, max(n_edges, 2.0)), Axis("edge score ŝ", 0.0, 1.0)
    by_rank = Plot("Edge scores by rank within the cluster (Fig. 3)", *axes)
    band = np.quantile(ranked, (0.1, 0.9), axis=0)
    by_rank.line("mean", range(1, n_edges + 1), mean, band=list(band))
    ranks = sorted({1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, n_edges})
    rows = [(rank, mean[rank - 1]) for rank in ranks if rank <= n_edges]
    above = statistics.shares_above(edges.data)
    histogram = Plot("Histogram of edge scores", Axis("edge score ŝ"), Axis("% of edges", low=0.0))
    steps = np.append(above[::5], 0.0)
    histogram.histogram(-100 * np.diff(steps), np.append(statistics.THRESHOLDS[::5], 1.0))
    means = statistics.clusters_per_label(edges, frequencies, (0.1, statistics.ASSIGNED, 0.5))
    groups = {f"ŝ > {threshold:g}": mean for threshold, mean in means.items()}
    title, axis = "Clusters per label by decile (Fig. 7b)", Axis("clusters, mean", low=0.0)
    values = {
        "n_edges": n_edges,
        "n_strong": (mean >= 0.5).sum(),
        "low_scores": 100 * (1 - above[_AT_ASSIGNED]),
        "by_rank": Figure(by_rank, ["rank", "mean ŝ"], rows),
        "histogram": Figure(histogram),
        "clusters": _decile_figure(title, axis, groups),
        "n_clusters": means[statistics.ASSIGNED][np.isfinite(means[statistics.ASSIGNED])],
    }
    if partition is not None:
        stage1 = 100 * statistics.stage1_edges_above(edges, partition)
        axis = Axis("threshold on the edge score ŝ", 0.0, 1.0)
        percent = Axis("% above the threshold", 0.0, 100.0)
        plot = Plot("Stage 1 edges in the learned graph (Fig. 7a)", axis, percent)
        thresholds = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)  # thresholds of Table 9, and 0
        shown = np.searchsorted(statistics.THRESHOLDS, thresholds).tolist()
        curves = {"stage 1 edges": stage1, "all edges": 100 * above}
        values["stage1"] = _curve_figure(plot, "threshold", statistics.THRESHOLDS, curves, shown)
        values |= {"stage1_stored": stage1[0], "stage1_assigned": stage1[_AT_ASSIGNED]}
    return values


def map_values(maps: statistics.LabelMaps, label_names: Sequence[str]) -> dict[str, Any]:
    """Return t-SNE maps of labels in several clusters (Fig. 8) and in one cluster (Fig. 9)."""

    def panel(shown: statistics.LabelMap) -> dict[str, Any]:
        name = label_names[shown.label]
        names = [f"cluster {cluster}" for cluster in shown.clusters]
        groups = [*zip(names, _CLUSTER_COLOURS, shown.cluster_points, strict=False)]
        groups.append((name, _LABEL_COLOUR, shown.points))
        return {"name": name, "map": shown, "groups": groups}

    return {
        "colour": colour(_LABEL_COLOUR),
        "scatter_plot": scatter_plot,
        "several": list(map(panel, maps.several)),
        "one": list(map(panel, maps.one)),
        "maps": maps,
    }


def _setting(value: Any) -> str:
    """Format the value of a setting as in TOML, with none for None."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _examples(model: Elias, split: Split) -> list[tuple[str, list[int], Explanation]]:
    """Return the texts of random points, their true labels and their explained predictions."""
    rows = np.sort(np.random.default_rng(model.config.seed).permutation(len(split))[:N_EXAMPLES])
    points = split.take(rows)
    titles = [f"Point {row}" for row in rows] if points.texts is None else points.texts
    true = [ids.tolist() for ids in np.split(points.labels.indices, points.labels.indptr[1:-1])]
    explained = model.explain(split_inputs(points, model.model.encoder), top_k=TOP_K, paths=N_PATHS)
    return list(zip(titles, true, explained, strict=True))
