"""Draw the figures of the report, each with a caption and a table of its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from elias.report.html import Markup, details, element, note, number, percent, table
from elias.report.plots import Axis, Plot, colour, scatter_plot
from elias.report.statistics import (
    ASSIGNED,
    MAX_CLUSTERS,
    MIN_POINTS,
    N_DECILES,
    QUANTILES,
    RECALL_AT,
    SPREAD_FREQUENCIES,
    THRESHOLDS,
)
from elias.rerank.probabilities import ECE_AT, reliability

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.predictions import Predictions
    from elias.report.statistics import EdgeScores, LabelMap, LabelMaps, Recalls, TrueScores
    from elias.rerank.probabilities import Probabilities

    Array = NDArray[np.float64]
    Ints = NDArray[np.int64]

DECILES = [str(i) for i in range(1, N_DECILES + 1)]
DECILE_AXIS = Axis("label decile, most frequent first", categories=DECILES)
_SHOWN_THRESHOLDS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)  # of Table 9, and 0
_HISTOGRAM_BARS = 24


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
    rows = [
        [
            decile,
            *(_value(values[i]) for values in groups.values()),
            *(f"{values[i]:,}" for values in counts.values()),
        ]
        for i, decile in enumerate(DECILES)
    ]
    return _figure(key, plot, caption, ["decile", *groups, *counts], rows)


def _value(value: float) -> str:
    return f"{value:,.4g}" if np.isfinite(value) else "–"


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
    title = "Recall by number of predictions (Fig. 5, left)"
    axis = Axis("labels predicted, k", low=1.0, log=True)
    plot = Plot(title, axis, Axis("R@k, %", low=0.0))
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
            Axis(f"% among the {RECALL_AT} best", low=0.0, high=100.0),
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
    title = "Scores of true labels by decile (Fig. 4)"
    plot = Plot(title, DECILE_AXIS, Axis("score", low=0.0, high=high))
    plot.boxes(quantiles)
    medians = "; ".join(
        f"{name}: median {number(q[0, 2])} in the first decile, {number(q[-1, 2])} in the last"
        for name, q in quantiles.items()
    )
    caption = (
        f"True labels among the {RECALL_AT} best. A box holds the middle half of the scores, its "
        f"bar is the median, and the line goes from 10% to 90%. {medians}."
    )
    header = ["decile", *(f"{name} {q:.0%}" for name in quantiles for q in QUANTILES)]
    rows = [
        [decile, *(_value(v) for values in quantiles.values() for v in values[i])]
        for i, decile in enumerate(DECILES)
    ]
    return _figure("fig-4", plot, caption, header, rows)


def threshold_figure(probabilities: Probabilities) -> Markup:
    """Return precision, recall and F1 by threshold on the held-out points."""
    thresholds, best = probabilities.thresholds, probabilities.threshold("f1")
    curves = {
        "precision": 100 * probabilities.precision,
        "recall": 100 * probabilities.recall,
        "F1": 100 * probabilities.f1,
    }
    at = int(np.searchsorted(thresholds, best - 1e-9))
    values = ", ".join(f"{name} {curve[at]:.1f}%" for name, curve in curves.items())
    caption = f"Over all pairs of a point and a label. F1 is highest at {best:g}: {values}."
    plot = Plot(
        "Precision and recall by threshold",
        Axis("threshold on the probability", low=0.0, high=1.0),
        Axis("on held-out points, %", low=0.0, high=100.0),
    )
    plot.rule(best, "best F1")
    shown = range(0, len(thresholds), 10)
    return _curve_figure("thresholds", plot, caption, "threshold", thresholds, curves, shown)


def reliability_figure(predictions: Predictions, truth: csr_matrix, split: str) -> Markup:
    """Return the share of relevant labels by predicted probability, raw and calibrated."""
    plot = Plot(
        "Reliability diagram",
        Axis("predicted probability", low=0.0, high=1.0),
        Axis("share that is relevant", low=0.0, high=1.0),
    )
    plot.line("perfect calibration", [0.0, 1.0], [0.0, 1.0])
    rows, errors = [], []
    for name, calibrated in (("raw scores", False), ("probabilities", True)):
        bins = reliability(predictions, truth, ECE_AT, calibrated=calibrated)
        plot.line(name, bins.predicted, bins.true)
        errors.append(f"{bins.error:.2f}% for {name}")
        columns = zip(bins.predicted, bins.true, bins.counts.tolist(), strict=True)
        rows += [[name, f"{p:.3f}", f"{true:.3f}", f"{n:,}"] for p, true, n in columns if n]
    caption = f"The {ECE_AT} best labels of each point in fifteen bins. Expected calibration error "
    caption += f"on the {split} points: {', '.join(errors)}."
    return _figure("reliability", plot, caption, ["", "predicted", "relevant", "labels"], rows)


def edge_figures(scores: EdgeScores) -> list[Markup]:
    """Return edge scores by rank within their cluster (Fig. 3) and their histogram."""
    n_edges = len(scores.mean)
    by_rank = Plot(
        "Edge scores by rank within the cluster (Fig. 3)",
        Axis("rank of the edge", low=1.0, high=max(n_edges, 2.0)),
        Axis("edge score ŝ", low=0.0, high=1.0),
    )
    by_rank.line("mean", range(1, n_edges + 1), scores.mean, band=(scores.low, scores.high))
    caption = (
        "ŝ = min(1, β·softmax a), Eq. 5: mean over clusters; the band holds 80% of them. The mean "
        f"is at least 0.5 for the first {(scores.mean >= 0.5).sum()} of {n_edges} edges."
    )
    ranks = sorted({1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, n_edges})
    rows = [[f"{rank}", _value(scores.mean[rank - 1])] for rank in ranks if rank <= n_edges]
    histogram = Plot("Histogram of edge scores", Axis("edge score ŝ"), Axis("% of edges", low=0.0))
    above = np.append(scores.above[::5], 0.0)
    histogram.histogram(-100 * np.diff(above), np.append(THRESHOLDS[::5], 1.0))
    low_scores = f"{percent(1 - _at(scores.above, ASSIGNED))} of the edges score {ASSIGNED} or "
    low_scores += "less. In Table 9 of the paper, removing them costs next to nothing."
    return [
        _figure("fig-3", by_rank, caption, ["rank", "mean ŝ"], rows),
        _figure("fig-3-histogram", histogram, low_scores),
    ]


def stage1_figure(scores: EdgeScores, stage1: Array) -> Markup:
    """Return the share of stage 1 edges above each threshold (Fig. 7a)."""
    plot = Plot(
        "Stage 1 edges in the learned graph (Fig. 7a)",
        Axis("threshold on the edge score ŝ", low=0.0, high=1.0),
        Axis("% above the threshold", low=0.0, high=100.0),
    )
    caption = (
        f"Stage 1 connects each label to one cluster. {percent(stage1[0])} of these edges are "
        f"stored, {percent(_at(stage1, ASSIGNED))} score more than {ASSIGNED}."
    )
    curves = {"stage 1 edges": 100 * stage1, "all edges": 100 * scores.above}
    shown = np.searchsorted(THRESHOLDS, _SHOWN_THRESHOLDS).tolist()
    return _curve_figure("fig-7a", plot, caption, "threshold", THRESHOLDS, curves, shown)


def _at(shares: Array, threshold: float) -> float:
    return float(shares[np.searchsorted(THRESHOLDS, threshold)])


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


def size_figure(key: str, title: str, label: str, sizes: Ints) -> Markup:
    """Return a histogram of the sizes of the clusters."""
    largest = int(sizes.max())
    plot = Plot(title, Axis(label), Axis("clusters", low=0.0))
    step = max(1, -(-(largest + 1) // _HISTOGRAM_BARS))
    plot.histogram(*np.histogram(sizes, bins=np.arange(0, largest + step + 1, step)))
    caption = f"Median {number(float(np.median(sizes)))}, from {sizes.min():,} to {largest:,}, "
    caption += f"over {len(sizes):,} clusters."
    rows = [[f"{q}%", float(np.percentile(sizes, q))] for q in (0, 10, 25, 50, 75, 90, 100)]
    return _figure(key, plot, caption, ["percentile", label], rows)


_LABEL_COLOUR = 4  # red, as in the paper
_CLUSTER_COLOURS = (0, 2, 3, 1, 5)


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
    low, high = SPREAD_FREQUENCIES
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
