"""Write the sections of the report: tables, the figures of the paper, and examples.

Each figure has a caption and a table of its numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from elias.data.stats import PERCENTILES, corpus_stats
from elias.inference.predict import split_inputs
from elias.report import statistics
from elias.report.html import Markup, details, element, grid, note, number, seconds, table
from elias.report.plots import Axis, Plot, colour, scatter_plot
from elias.report.statistics import ASSIGNED, MAX_CLUSTERS, MIN_POINTS, RECALL_AT, THRESHOLDS
from elias.rerank.probabilities import ECE_AT, PROBABILITIES, reliability

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from elias.inference.explain import ExplainedLabel, Explanation, LabelPath
    from elias.report.report import FinishedRun
    from elias.report.statistics import Array, Ints, LabelMap, LabelMaps, Recalls, TrueScores


COMPONENTS = {"rerank": "+ ranker", "calibrate": "+ calibration", "names": "+ label names"}
"""Titles of the components that are not stages."""
DECILES = [str(i) for i in range(1, statistics.N_DECILES + 1)]
DECILE_AXIS = Axis("label decile, most frequent first", categories=DECILES)
_AT_ASSIGNED = int(np.searchsorted(THRESHOLDS, ASSIGNED))
_NO_INDEX = note("The model has no index: it scores every label (one-vs-all).")
_NO_POINTS = note("The corpus has neither test nor validation points.")


def _figure(
    key: str,
    plot: Plot,
    caption: str,
    header: Sequence[str] = (),
    rows: Iterable[Sequence[object]] = (),
) -> Markup:
    """Return a plot under its title, with a caption and a table of numbers below it."""
    numbers = details("Numbers", table(header, rows)) if header else None
    below = element("figcaption", caption, numbers)
    return element("figure", element("h3", plot.title), plot.svg(caption), below, "\n", id=key)


def _curve_figure(
    key: str,
    plot: Plot,
    caption: str,
    header: str,
    xs: Sequence[float] | Array,
    curves: Mapping[str, Array],
    shown: Iterable[int] | None = None,
) -> Markup:
    """Return a figure with curves over the same ``xs``; its table has the rows ``shown``."""
    for name, ys in curves.items():
        plot.line(name, xs, ys)
    rows = [
        [f"{xs[i]:g}", *(_value(ys[i]) for ys in curves.values())]
        for i in (range(len(xs)) if shown is None else shown)
    ]
    return _figure(key, plot, caption, [header, *curves], rows)


def _decile_figure(
    key: str, title: str, axis: Axis, caption: str, groups: Mapping[str, Array], **counts: Ints
) -> Markup:
    """Return a figure with bars by label decile; its table also has the columns ``counts``."""
    plot = Plot(title, DECILE_AXIS, axis)
    plot.bars(groups)
    columns = [[_value(value) for value in values] for values in groups.values()]
    columns += [[f"{count:,}" for count in values] for values in counts.values()]
    rows = zip(DECILES, *columns, strict=True)
    return _figure(key, plot, caption, ["decile", *groups, *counts], rows)


def _value(value: float) -> str:
    return f"{value:,.4g}" if np.isfinite(value) else "–"


def metrics_section(run: FinishedRun) -> list[Markup]:
    """Return a table of the metrics of all components for each evaluated split."""
    metrics: dict[str, dict[str, dict[str, float]]] = run.model.metadata.get("metrics", {})
    splits = dict.fromkeys(split for values in metrics.values() for split in values)
    if not splits:
        return [note("The model was saved without metrics.")]
    text = "Each component is added to those above it. The best value of a column is bold."
    content = [note(text)]
    for split in sorted(splits, key=lambda name: name != "test"):
        values = {name: by_split[split] for name, by_split in metrics.items() if split in by_split}
        columns = list(next(iter(values.values())))  # the same for all components
        best = {column: max(v[column] for v in values.values()) for column in columns}
        rows = [
            [COMPONENTS.get(name, name)]
            + [
                element("td", f"{v[c]:.2f}", class_="best" if v[c] == best[c] else None)
                for c in best
            ]
            for name, v in values.items()
        ]
        content.append(table(["", *columns], rows, caption=f"On the {split} points, in percent"))
    return content


def learning_section(run: FinishedRun) -> list[Markup]:
    """Return the learning curves."""
    epochs = run.records.of("epoch")
    if not epochs:
        return [note("A model saved without its run has no learning curves.")]
    return [grid(learning_figures(epochs))]


def learning_figures(epochs: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """Return the training loss and, if there is a validation split, the metrics by epoch."""
    stages = [str(epoch.get("stage")) for epoch in epochs]
    starts = {i + 1: s for i, s in enumerate(stages) if i == 0 or stages[i - 1] != s}
    measured = [epoch.get("validation") or {} for epoch in epochs]
    names = dict.fromkeys(name for values in measured for name in values)
    # None, for what was not measured, becomes NaN
    loss = np.array([epoch.get("loss") for epoch in epochs], dtype=np.float64)
    metrics = {name: np.array([v.get(name) for v in measured], dtype=np.float64) for name in names}

    def draw(key: str, title: str, label: str, caption: str, curves: Any) -> Markup:
        plot = Plot(title, Axis("epoch", 1.0, max(len(epochs), 2.0)), Axis(label))
        for at, stage in starts.items():
            plot.rule(at, stage)
        return _curve_figure(key, plot, caption, "epoch", range(1, len(epochs) + 1), curves)

    caption = "L = L_c + λ·L_s on the training points. It can jump where a stage begins, because "
    caption += "each stage searches another graph. Stages: "
    caption += ", ".join(f"{stage} from epoch {at}" for at, stage in starts.items())
    title = "Training loss by epoch"
    figures = [draw("learning-loss", title, "training loss", f"{caption}.", {"loss": loss})]
    if metrics:
        title, key = "Validation metrics by epoch", "learning-validation"
        last = ", ".join(f"{name} {v[np.isfinite(v)][-1]:.2f}" for name, v in metrics.items())
        caption = "On the held-out points. Each stage keeps its best epoch (eval.select_by). "
        figures.append(draw(key, title, "validation, %", f"{caption}Last: {last}.", metrics))
    return figures


def recall_section(run: FinishedRun) -> list[Markup]:
    """Return recall and scores of true labels (Fig. 4 and 5)."""
    if run.evaluated is None:
        return [_NO_POINTS]
    name, split = run.evaluated
    predictions = {COMPONENTS.get(key, key): one for key, one in run.predictions.items()}
    known = (split.labels, run.corpus.label_frequencies())
    recorded = {}  # R@k by k; earlier stages are not saved
    for key, metrics in run.model.metadata.get("metrics", {}).items():
        values = metrics.get(name, {}).items()
        by_k = {int(metric[2:]): value for metric, value in values if metric.startswith("R@")}
        title = COMPONENTS.get(key, key)
        if by_k and title not in predictions:
            recorded[title] = dict(sorted(by_k.items()))
    figures = recall_figures(
        {key: statistics.recalls(one, *known) for key, one in predictions.items()},
        {key: statistics.true_scores(one, *known) for key, one in predictions.items()},
        recorded,
        name,
    )
    return [note(f"On the {len(split):,} {name} points."), grid(figures)]


def recall_figures(
    recalls: Mapping[str, Recalls],
    scores: Mapping[str, TrueScores],
    recorded: Mapping[str, Mapping[int, float]],
    split: str,
) -> list[Markup]:
    """Return recall by number of predictions and by label decile (Fig. 5), and scores (Fig. 4).

    Args:
        recalls: Recall of each component of the model.
        scores: Scores of the true labels by each component.
        recorded: R@k of earlier stages, from the log of the run.
        split: Name of the split.
    """
    axis = Axis("labels predicted, k", low=1.0, log=True)
    plot = Plot("Recall by number of predictions (Fig. 5, left)", axis, Axis("R@k, %", low=0.0))
    caption = f"Share of the true labels of a {split} point among its k best labels. "
    for name, known in recorded.items():
        plot.line(name, list(known), list(known.values()))
        caption += f"Of {name}, only the values in the log of the run are known. "
    # components may predict different numbers of labels
    ks = max((recall.ks for recall in recalls.values()), key=len)
    last = ", ".join(f"{name} {recall.curve[-1]:.2f}%" for name, recall in recalls.items())
    caption += f"Last value of each curve: {last}."
    curves = {
        name: np.pad(recall.curve, (0, len(ks) - len(recall.ks)), constant_values=np.nan)
        for name, recall in recalls.items()
    }
    added = {name: recall.by_decile for name, recall in recalls.items()}
    within = {name: 100 * score.recall for name, score in scores.items()}
    *_, last_added = added.values()
    *_, last_within = within.values()
    return [
        _curve_figure("fig-5-curve", plot, caption, "k", ks, curves),
        _decile_figure(
            "fig-5-deciles",
            f"Contribution of each label decile to R@{RECALL_AT} (Fig. 5, right)",
            Axis("percentage points", low=0.0),
            f"The ten bars of a component add up to its R@{RECALL_AT}. First decile: "
            f"{last_added[0]:.2f}, last: {last_added[-1]:.2f} percentage points.",
            added,
        ),
        _decile_figure(
            "fig-5-found",
            "Recall within each label decile",
            Axis(f"% among the {RECALL_AT} best", 0.0, 100.0),
            "Share of the true labels of each decile that are predicted. First decile: "
            f"{last_within[0]:.1f}%, last: {last_within[-1]:.1f}%.",
            within,
            **{"true labels": next(iter(scores.values())).pairs},
        ),
        _score_figure({name: score.quantiles for name, score in scores.items()}),
    ]


def _score_figure(quantiles: Mapping[str, Array]) -> Markup:
    """Return the scores of true labels by decile (Fig. 4)."""
    high = 1.0 if all(np.nanmax(q, initial=0.0) <= 1 for q in quantiles.values()) else None
    plot = Plot("Scores of true labels by decile (Fig. 4)", DECILE_AXIS, Axis("score", 0.0, high))
    plot.boxes(quantiles)
    medians = "; ".join(
        f"{name}: median {number(q[0, 2])} in the first decile, {number(q[-1, 2])} in the last"
        for name, q in quantiles.items()
    )
    caption = (
        f"True labels among the {RECALL_AT} best. A box holds the middle half of the scores, its "
        f"bar is the median, and the line goes from 10% to 90%. {medians}."
    )
    header = ["decile", *(f"{name} {q:.0%}" for name in quantiles for q in statistics.QUANTILES)]
    rows = [
        [decile, *map(_value, values)]
        for decile, values in zip(DECILES, np.hstack(list(quantiles.values())), strict=True)
    ]
    return _figure("fig-4", plot, caption, header, rows)


def probabilities_section(run: FinishedRun) -> list[Markup]:
    """Return the calibration error, the reliability diagram, and metrics by threshold."""
    probabilities = run.model.probabilities
    if probabilities is None:
        text = "The model has no probabilities: fewer than twenty points were held out, or an "
        return [note(text, "older version saved it. Add them with elias calibrate.")]
    figures = [] if run.evaluated is None else [_reliability_figure(run)]
    curves = {
        "precision": 100 * probabilities.precision,
        "recall": 100 * probabilities.recall,
        "F1": 100 * probabilities.f1,
    }
    thresholds, best = probabilities.thresholds, probabilities.threshold("f1")
    at = int(np.searchsorted(thresholds, best - 1e-9))
    values = ", ".join(f"{name} {curve[at]:.1f}%" for name, curve in curves.items())
    caption = f"Over all pairs of a point and a label. F1 is highest at {best:g}: {values}."
    axes = Axis("threshold on the probability", 0.0, 1.0), Axis("on held-out points, %", 0.0, 100.0)
    plot = Plot("Precision and recall by threshold", *axes)
    plot.rule(best, "best F1")
    shown = range(0, len(thresholds), 10)
    figures.append(
        _curve_figure("thresholds", plot, caption, "threshold", thresholds, curves, shown)
    )
    errors = run.model.metadata.get(PROBABILITIES, {}).get("errors", {})
    header = ["points", f"ECE@{ECE_AT} of raw scores, %", f"ECE@{ECE_AT} of probabilities, %"]
    rows = [[key, f"{e['before']:.2f}", f"{e['after']:.2f}"] for key, e in errors.items()]
    return [*([table(header, rows)] if rows else []), grid(figures)]


def _reliability_figure(run: FinishedRun) -> Markup:
    """Return the share of relevant labels by predicted probability, raw and calibrated."""
    assert run.evaluated is not None
    split, points = run.evaluated
    axes = Axis("predicted probability", 0.0, 1.0), Axis("share that is relevant", 0.0, 1.0)
    plot = Plot("Reliability diagram", *axes)
    plot.line("perfect calibration", [0.0, 1.0], [0.0, 1.0])
    predictions = run.predictions[run.model.components[-1]]
    rows, errors = [], []
    for name, calibrated in (("raw scores", False), ("probabilities", True)):
        bins = reliability(predictions, points.labels, ECE_AT, calibrated=calibrated)
        plot.line(name, bins.predicted, bins.true)
        errors.append(f"{bins.error:.2f}% for {name}")
        columns = zip(bins.predicted, bins.true, bins.counts.tolist(), strict=True)
        rows += [[name, f"{p:.3f}", f"{true:.3f}", f"{n:,}"] for p, true, n in columns if n]
    caption = f"The {ECE_AT} best labels of each point in fifteen bins. Expected calibration error "
    caption += f"on the {split} points: {', '.join(errors)}."
    return _figure("reliability", plot, caption, ["", "predicted", "relevant", "labels"], rows)


def index_section(run: FinishedRun) -> list[Markup]:
    """Return the edges of the graph (Fig. 3 and 7) and the sizes of the clusters."""
    edges = run.edges
    if edges is None:
        return [_NO_INDEX]
    figures, notes = [], []
    if run.model.model.graph.learned:
        above = statistics.shares_above(edges.data)
        figures += _edge_figures(statistics.ranked_edge_scores(edges), above)
        if run.partition is None:
            notes.append(note("Fig. 7a is missing because the run did not store its partition."))
        else:
            stage1 = statistics.stage1_edges_above(edges, run.partition)
            figures.append(_stage1_figure(stage1, above))
        frequencies, thresholds = run.corpus.label_frequencies(), (0.1, ASSIGNED, 0.5)
        means = statistics.clusters_per_label(edges, frequencies, thresholds)
        figures.append(clusters_figure(means))
    else:
        text = "The graph is fixed: each label has one cluster and each edge scores 1. Therefore "
        notes.append(note(text, "there are no Figures 3 and 7."))
    labels = (edges > ASSIGNED).getnnz(axis=1)
    points = np.bincount(run.sample.best, minlength=len(labels))
    axis = f"points with this best cluster, of {points.sum():,}"
    figures += [
        _size_figure("cluster-labels", "Labels per cluster", f"labels with ŝ > {ASSIGNED}", labels),
        _size_figure("cluster-points", "Training points per cluster", axis, points),
    ]
    return [*notes, grid(figures)]


def _edge_figures(ranked: Array, above: Array) -> list[Markup]:
    """Return edge scores by rank within their cluster (Fig. 3) and their histogram."""
    mean, n_edges = ranked.mean(axis=0), ranked.shape[1]
    axes = Axis("rank of the edge", 1.0, max(n_edges, 2.0)), Axis("edge score ŝ", 0.0, 1.0)
    by_rank = Plot("Edge scores by rank within the cluster (Fig. 3)", *axes)
    band = np.quantile(ranked, (0.1, 0.9), axis=0)
    by_rank.line("mean", range(1, n_edges + 1), mean, band=list(band))
    caption = (
        "ŝ = min(1, β·softmax a), Eq. 5: mean over clusters; the band holds 80% of them. The mean "
        f"is at least 0.5 for the first {(mean >= 0.5).sum()} of {n_edges} edges."
    )
    ranks = sorted({1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, n_edges})
    rows = [[f"{rank}", _value(mean[rank - 1])] for rank in ranks if rank <= n_edges]
    histogram = Plot("Histogram of edge scores", Axis("edge score ŝ"), Axis("% of edges", low=0.0))
    steps = np.append(above[::5], 0.0)
    histogram.histogram(-100 * np.diff(steps), np.append(THRESHOLDS[::5], 1.0))
    low_scores = f"{100 * (1 - above[_AT_ASSIGNED]):.3g}% of the edges score {ASSIGNED} or less. "
    low_scores += "In Table 9 of the paper, removing them costs next to nothing."
    return [
        _figure("fig-3", by_rank, caption, ["rank", "mean ŝ"], rows),
        _figure("fig-3-histogram", histogram, low_scores),
    ]


def _stage1_figure(stage1: Array, above: Array) -> Markup:
    """Return the share of stage 1 edges above each threshold (Fig. 7a)."""
    axes = (
        Axis("threshold on the edge score ŝ", 0.0, 1.0),
        Axis("% above the threshold", 0.0, 100.0),
    )
    plot = Plot("Stage 1 edges in the learned graph (Fig. 7a)", *axes)
    caption = (
        f"Stage 1 connects each label to one cluster. {100 * stage1[0]:.3g}% of these edges are "
        f"stored, {100 * stage1[_AT_ASSIGNED]:.3g}% score more than {ASSIGNED}."
    )
    curves = {"stage 1 edges": 100 * stage1, "all edges": 100 * above}
    thresholds = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)  # of Table 9, and 0
    shown = np.searchsorted(THRESHOLDS, thresholds).tolist()
    return _curve_figure("fig-7a", plot, caption, "threshold", THRESHOLDS, curves, shown)


def clusters_figure(means: Mapping[float, Array]) -> Markup:
    """Return the mean number of clusters per label by decile (Fig. 7b)."""
    known = means[ASSIGNED][np.isfinite(means[ASSIGNED])]
    comparison = "do not have more clusters than rare ones, unlike"
    if known[0] > known[-1]:
        comparison = "have more clusters than rare ones, as"
    caption = (
        "A label is assigned to the clusters whose edge to it scores more than a threshold, "
        f"{ASSIGNED} in the paper. Above {ASSIGNED}: {number(known[0])} in the first decile, "
        f"{number(known[-1])} in the last. Frequent labels {comparison} in the paper."
    )
    groups = {f"ŝ > {threshold:g}": values for threshold, values in means.items()}
    title, axis = "Clusters per label by decile (Fig. 7b)", Axis("clusters, mean", low=0.0)
    return _decile_figure("fig-7b", title, axis, caption, groups)


def _size_figure(key: str, title: str, label: str, sizes: NDArray[np.integer[Any]]) -> Markup:
    """Return a histogram of the sizes of the clusters, with at most 24 bars."""
    largest = int(sizes.max())
    plot = Plot(title, Axis(label), Axis("clusters", low=0.0))
    step = largest // 24 + 1
    plot.histogram(*np.histogram(sizes, bins=np.arange(0, largest + step + 1, step)))
    caption = f"Median {number(float(np.median(sizes)))}, from {sizes.min():,} to {largest:,}, "
    caption += f"over {len(sizes):,} clusters."
    rows = [[f"{q}%", float(np.percentile(sizes, q))] for q in (0, 10, 25, 50, 75, 90, 100)]
    return _figure(key, plot, caption, ["percentile", label], rows)


_LABEL_COLOUR = 4  # red, as in the paper
_CLUSTER_COLOURS = (0, 2, 3, 1, 5)


def embeddings_section(run: FinishedRun) -> list[Markup]:
    """Return t-SNE maps of labels in several clusters and in one (Fig. 8 and 9)."""
    if run.edges is None:
        return [_NO_INDEX]
    text = (
        "φ of training points, projected to the plane by t-SNE. A label is assigned to the "
        f"clusters whose edge to it scores more than {ASSIGNED}."
    )
    maps = statistics.label_maps(run.sample, run.edges, run.model.config.seed)
    return [element("p", text), *map_figures(maps, run.model.label_names)]


def map_figures(maps: LabelMaps, label_names: Sequence[str]) -> list[Markup]:
    """Return Fig. 8 and 9, and compare the spread of labels in several clusters and in one."""
    dot = element("span", class_="dot", style=f"background: {colour(_LABEL_COLOUR)}")
    legend = (
        " training points of the label. Each other colour is a cluster that the label is assigned "
        f"to: its training points with ŝ_c above {ASSIGNED}."
    )
    parts = [element("p", dot, legend)]
    for key, title, panels in (
        ("fig-8", f"Labels in 2 to {MAX_CLUSTERS} clusters (Fig. 8)", maps.several),
        ("fig-9", "Labels in one cluster (Fig. 9)", maps.one),
    ):
        drawn = [_map_panel(panel, label_names[panel.label]) for panel in panels]
        content = element("div", drawn, class_="panels")
        if not drawn:
            content = note(f"No such label has {MIN_POINTS} training points or more.")
        parts.append(element("div", element("h3", title), content, id=key))
    low, high = statistics.SPREAD_FREQUENCIES
    if not maps.spreads_several or not maps.spreads_one:
        text = f"There are too few labels with {low} to {high} points to compare their spread."
        return [*parts, note(text)]
    several, one = (float(np.mean(s)) for s in (maps.spreads_several, maps.spreads_one))
    text = (
        f"Of all labels with {low} to {high} points in the sample, those in several clusters "
        f"({len(maps.spreads_several):,} labels) spread {'more' if several > one else 'no more'} "
        f"widely than those in one ({len(maps.spreads_one):,} labels): {number(several)} against "
        f"{number(one)}. The spread is 0 if all embeddings have the same direction and 1 if they "
        "cancel out."
    )
    return [*parts, element("p", text)]


def _map_panel(panel: LabelMap, name: str) -> Markup:
    plural = "s" if len(panel.clusters) > 1 else ""
    counts = f"{len(panel.points):,} points; {len(panel.clusters)} cluster{plural}"
    names = [f"cluster {cluster}" for cluster in panel.clusters]
    groups = [*zip(names, _CLUSTER_COLOURS, panel.cluster_points, strict=False)]
    groups.append((name, _LABEL_COLOUR, panel.points))
    plot = scatter_plot(f"t-SNE of the training points of {name}", counts, groups)
    caption = element("figcaption", element("strong", name), element("br"), counts)
    return element("figure", plot, caption)


_STATISTICS = {
    "pairs": "point-label pairs",
    "words_mean": "words per text",
    "words_percentiles": f"words per text: {'/'.join(map(str, PERCENTILES))} %",
    "points_per_label": "training points per label",
    "points_per_label_percentiles": f"training points: {'/'.join(map(str, PERCENTILES))}/100 %",
}
"""Titles of statistics whose key cannot be used as a title."""


def data_section(run: FinishedRun) -> list[Markup]:
    """Return statistics of the corpus (Table 5)."""
    stats = dict(run.model.metadata.get("data") or corpus_stats(run.corpus).to_dict())
    splits = stats.pop("splits")
    keys = dict.fromkeys(key for split in splits.values() for key in split)

    def rows(keys: Iterable[str], columns: Iterable[Mapping[str, Any]]) -> list[list[str]]:
        cells = {key: [_statistic(column.get(key)) for column in columns] for key in keys}
        titles = {key: _STATISTICS.get(key, key.replace("_", " ")) for key in keys}
        return [[titles[key], *values] for key, values in cells.items() if any(values)]

    source = {"format": run.corpus.format, **run.corpus.notes}
    tables = [
        table(["", *splits], rows(keys, list(splits.values()))),
        table(["labels", ""], rows(stats, [stats])),
        table(["source", ""], [row for row in source.items() if row[1]], wide=True),
    ]
    return [element("div", tables, class_="side-by-side")]


def _statistic(value: Any) -> str:
    if value is None or value == []:
        return ""
    if isinstance(value, list | tuple):
        return " / ".join(f"{item:,}" for item in value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def times_section(run: FinishedRun) -> list[Markup]:
    """Return the duration of each step of training."""
    times = run.records.times()
    if not times:
        return [note("A model saved without its run has no times.")]
    total = sum(times.values())
    rows = [[step, seconds(value), f"{value / total:.0%}"] for step, value in times.items()]
    return [table(["step", "time", "share"], [*rows, ["all", seconds(total), ""]])]


def configuration_section(run: FinishedRun) -> list[Markup]:
    """Return every key of the resolved configuration."""
    values = dict(_leaves(run.model.config.to_dict()))
    rows = [[element("code", key), element("code", value)] for key, value in values.items()]
    keys = details(f"All {len(rows)} keys", table(["key", "value"], rows, wide=True))
    return [note("Sizes that were not set are derived from the data."), keys]


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of each setting; keys contain the names of stages."""
    if isinstance(tree, list) and tree and isinstance(tree[0], dict):
        tree = {value.get("name", i): value for i, value in enumerate(tree)}
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, str(tree).lower() if tree is None or isinstance(tree, bool) else str(tree)


N_EXAMPLES = 20
TOP_K = 5
N_PATHS = 3
N_CLUSTER_LABELS = 3
"""Number of labels that describe a cluster."""
MAX_LETTERS = 400
"""Maximum number of characters of a text that are shown."""
_MAX_TRUE = 30


def examples_section(run: FinishedRun) -> list[Markup]:
    """Return random points with their predictions and the paths to them."""
    if run.evaluated is None:
        return [_NO_POINTS]
    name, split = run.evaluated
    model = run.model
    rows = np.sort(np.random.default_rng(model.config.seed).permutation(len(split))[:N_EXAMPLES])
    points = split.take(rows)
    explained = model.explain(split_inputs(points, model.model.encoder), top_k=TOP_K, paths=N_PATHS)
    articles = []
    for i, explanation in enumerate(explained):
        title = f"Point {rows[i]}" if points.texts is None else shorten(points.texts[i])
        true = points.labels.indices[slice(*points.labels.indptr[i : i + 2])].tolist()
        articles.append(_article(title, explanation, {j: model.label_names[j] for j in true}))
    text = (
        f"{len(articles)} random {name} points; ✓ marks a true label. p is classifier × cluster × "
        "edge along the best path (Eq. 1, 5, 6). With a ranker, the score is p·q. With "
        "calibration, it combines p·q with the calibrated score and can exceed 1. name is the "
        "similarity of text and label name, if the calibration uses it. A cluster is described by "
        "its strongest labels."
    )
    return [element("p", text), element("div", articles, class_="examples")]


def _article(title: str, explanation: Explanation, true: Mapping[int, str]) -> Markup:
    names = list(true.values())
    listed = " · ".join(names[:_MAX_TRUE]) or "none"
    if len(names) > _MAX_TRUE:
        listed += f" · and {len(names) - _MAX_TRUE} more"
    items = [_item(label, explanation.clusters, label.id in true) for label in explanation.labels]
    quote = element("blockquote", title or "(empty text)")
    return element("article", quote, note(f"True labels: {listed}"), element("ol", items), "\n")


def shorten(text: str) -> str:
    """Return the beginning of a long text, cut at the end of a word if possible."""
    if len(text) <= MAX_LETTERS:
        return text
    start = text[:MAX_LETTERS]
    return f"{start[: max(start.rfind(' '), MAX_LETTERS // 2)]} …"


def _item(label: ExplainedLabel, clusters: Mapping[int, Sequence[str]], is_true: bool) -> Markup:
    """Return a predicted label with its score and the paths that lead to it."""
    hidden = element("span", " (a true label)", class_="unseen") if is_true else None
    line = [
        element("span", "✓" if is_true else "", class_="right", aria_hidden="true"),
        element("strong" if is_true else "span", label.label, hidden),
        element("span", f"{label.score:.3f}", class_="score"),
    ]
    width = f"width: {100 * min(max(label.score, 0.0), 1.0):.1f}%"
    meter = element("div", element("span", style=width), class_="meter", aria_hidden="true")
    factors = {
        "p": label.p,
        "ranker q": label.ranker_score,
        "name": label.name_likeness,
        "calibrated": label.calibrated_score,
    }
    known = [f"{name} {value:.3f}" for name, value in factors.items() if value is not None]
    paths: list[object] = [element("div", ", ".join(known)) if len(known) > 1 else None]
    classifier = f"classifier {label.classifier_score:.3f} × "
    paths += [[classifier, _path(path, clusters)] for path in label.paths if path.won]
    others = [element("li", _path(path, clusters)) for path in label.paths if not path.won]
    if others:
        n_others = label.n_paths - 1
        summary = "1 other path" if n_others == 1 else f"best of {n_others} other paths"
        paths.append(details(summary, element("ul", others)))
    return element(
        "li", element("div", line, class_="label"), meter, element("div", paths, class_="paths")
    )


def _path(path: LabelPath, clusters: Mapping[int, Sequence[str]]) -> list[str]:
    names = " · ".join(clusters[path.cluster][:N_CLUSTER_LABELS])
    factors = f"cluster {path.cluster_score:.3f} × edge {path.edge_score:.3f}"
    return [f"{factors}, by cluster {path.cluster}: ", element("em", names)]
