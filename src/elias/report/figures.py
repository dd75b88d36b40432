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
    """Return a plot under its title; below it caption, description and a table of numbers."""
    numbers = details("Numbers", table(header, rows)) if header else None
    below = element("figcaption", f"{caption} {plot.description}".strip(), numbers)
    return element("figure", element("h3", plot.title), plot.svg(), below, "\n", id=key)


def _curve_figure(
    key: str,
    plot: Plot,
    caption: str,
    header: str,
    xs: Sequence[float] | Array,
    curves: Mapping[str, Array],
    shown: Iterable[int] | None = None,
) -> Markup:
    """Return a plot with curves over the same ``xs``; the table has the rows ``shown``."""
    for name, ys in curves.items():
        plot.line(name, xs, ys)
    rows = [
        [f"{xs[i]:g}", *(_value(ys[i]) for ys in curves.values())]
        for i in (range(len(xs)) if shown is None else shown)
    ]
    return _figure(key, plot, caption, [header, *curves], rows)


def _decile_figure(
    key: str, plot: Plot, caption: str, groups: Mapping[str, Array], **counts: Ints
) -> Markup:
    """Return a plot with bars by label decile; the table has a column of ``counts`` too."""
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
    validation = [epoch.get("validation") or {} for epoch in epochs]
    # None, for what was not measured, becomes NaN
    loss = {"loss": np.array([epoch.get("loss") for epoch in epochs], dtype=np.float64)}
    metrics = {
        name: np.array([values.get(name) for values in validation], dtype=np.float64)
        for name in dict.fromkeys(name for values in validation for name in values)
    }
    last = [f"{name} {v[np.isfinite(v)][-1]:.2f}" for name, v in metrics.items()]

    def draw(key: str, title: str, label: str, text: str, caption: str, curves: Any) -> Markup:
        plot = Plot(title, text, Axis("epoch", 1.0, max(len(epochs), 2.0)), Axis(label))
        for at, stage in starts.items():
            plot.rule(at, stage)
        return _curve_figure(key, plot, caption, "epoch", range(1, len(epochs) + 1), curves)

    figures = [
        draw(
            "learning-loss",
            "Training loss by epoch",
            "training loss",
            f"Stages: {', '.join(f'{stage} from epoch {at}' for at, stage in starts.items())}.",
            "L = L_c + λ·L_s on the training points. It can jump where a stage begins, because "
            "each stage searches another graph.",
            loss,
        )
    ]
    if metrics:
        figures.append(
            draw(
                "learning-validation",
                "Validation metrics by epoch",
                "validation, %",
                f"Last values: {', '.join(last)}.",
                "On the held-out points. Each stage keeps its best epoch (eval.select_by).",
                metrics,
            )
        )
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
    ks = next(iter(recalls.values())).ks
    last = ", ".join(f"{name} {recall.curve[-1]:.2f}%" for name, recall in recalls.items())
    curve = Plot(
        "Recall by number of predictions (Fig. 5, left)",
        f"R@{ks[-1]}: {last}.",
        Axis("labels predicted, k", low=1.0, log=True),
        Axis("R@k, %", low=0.0),
    )
    caption = f"Share of the true labels of a {split} point among its k best labels."
    for name, known in recorded.items():
        curve.line(name, list(known), list(known.values()))
        caption += f" Of {name}, only the values in the log of the run are known."
    added = {name: recall.by_decile for name, recall in recalls.items()}
    *_, final = added.values()
    by_decile = Plot(
        f"Contribution of each label decile to R@{RECALL_AT} (Fig. 5, right)",
        f"First decile: {final[0]:.2f}, last: {final[-1]:.2f} percentage points.",
        DECILE_AXIS,
        Axis("percentage points", low=0.0),
    )
    found = {name: 100 * score.recall for name, score in scores.items()}
    *_, final = found.values()
    within = Plot(
        "Recall within each label decile",
        f"First decile: {final[0]:.1f}%, last: {final[-1]:.1f}%.",
        DECILE_AXIS,
        Axis(f"% among the {RECALL_AT} best", low=0.0, high=100.0),
    )
    pairs = next(iter(scores.values())).pairs
    curves = {name: recall.curve for name, recall in recalls.items()}
    sum_caption = f"The ten bars of a component add up to its R@{RECALL_AT}."
    share_caption = "Share of the true labels of each decile that are predicted."
    return [
        _curve_figure("fig-5-curve", curve, caption, "k", ks, curves),
        _decile_figure("fig-5-deciles", by_decile, sum_caption, added),
        _decile_figure("fig-5-found", within, share_caption, found, **{"true labels": pairs}),
        _score_figure({name: score.quantiles for name, score in scores.items()}),
    ]


def _score_figure(quantiles: Mapping[str, Array]) -> Markup:
    """Return the scores of true labels by decile (Fig. 4)."""
    medians = "; ".join(
        f"{name}: median {number(q[0, 2])} in the first decile, {number(q[-1, 2])} in the last"
        for name, q in quantiles.items()
    )
    high = 1.0 if all(np.nanmax(q, initial=0.0) <= 1 for q in quantiles.values()) else None
    title = "Scores of true labels by decile (Fig. 4)"
    plot = Plot(title, f"{medians}.", DECILE_AXIS, Axis("score", low=0.0, high=high))
    plot.boxes(quantiles)
    caption = (
        f"True labels among the {RECALL_AT} best. A box holds the middle half of the scores, its "
        "bar is the median, and the line goes from 10% to 90%."
    )
    header = ["decile", *(f"{name} {q:.0%}" for name in quantiles for q in QUANTILES)]
    rows = [
        [decile, *(_value(v) for values in quantiles.values() for v in values[i])]
        for i, decile in enumerate(DECILES)
    ]
    return _figure("fig-4", plot, caption, header, rows)


def threshold_figure(probabilities: Probabilities) -> Markup:
    """Return precision, recall and F1 by threshold on the held-out points."""
    best = probabilities.threshold("f1")
    at = int(np.searchsorted(probabilities.thresholds, best - 1e-9))
    parts = {"precision": probabilities.precision, "recall": probabilities.recall}
    curves = {name: 100 * values for name, values in (parts | {"F1": probabilities.f1}).items()}
    values = ", ".join(f"{name} {curve[at]:.1f}%" for name, curve in curves.items())
    plot = Plot(
        "Precision and recall by threshold",
        f"F1 is highest at {best:g}: {values}.",
        Axis("threshold on the probability", low=0.0, high=1.0),
        Axis("on held-out points, %", low=0.0, high=100.0),
    )
    plot.rule(best, "best F1")
    shown = range(0, len(probabilities.thresholds), 10)
    caption = "Over all pairs of a point and a label."
    xs = probabilities.thresholds
    return _curve_figure("thresholds", plot, caption, "threshold", xs, curves, shown)


def reliability_figure(predictions: Predictions, truth: csr_matrix, split: str) -> Markup:
    """Return the share of relevant labels by predicted probability, raw and calibrated."""
    measured = {
        "raw scores": reliability(predictions, truth, ECE_AT, calibrated=False),
        "probabilities": reliability(predictions, truth, ECE_AT),
    }
    errors = ", ".join(f"{bins.error:.2f}% for {name}" for name, bins in measured.items())
    plot = Plot(
        "Reliability diagram",
        f"Expected calibration error on the {split} points: {errors}.",
        Axis("predicted probability", low=0.0, high=1.0),
        Axis("share that is relevant", low=0.0, high=1.0),
    )
    plot.line("perfect calibration", [0.0, 1.0], [0.0, 1.0])
    rows = []
    for name, bins in measured.items():
        plot.line(name, bins.said, bins.true)
        columns = zip(bins.said, bins.true, bins.counts.tolist(), strict=True)
        rows += [[name, f"{p:.3f}", f"{true:.3f}", f"{n:,}"] for p, true, n in columns if n]
    caption = f"The {ECE_AT} best labels of each point in fifteen bins."
    header = ["", "predicted", "relevant", "labels"]
    return _figure("reliability", plot, caption, header, rows)


def edge_figures(scores: EdgeScores) -> list[Markup]:
    """Return edge scores by rank within their cluster (Fig. 3) and their histogram."""
    n_edges, high = len(scores.mean), int((scores.mean >= 0.5).sum())
    by_rank = Plot(
        "Edge scores by rank within the cluster (Fig. 3)",
        f"The mean is at least 0.5 for the first {high} of {n_edges} edges.",
        Axis("rank of the edge", low=1.0, high=max(n_edges, 2.0)),
        Axis("edge score ŝ", low=0.0, high=1.0),
    )
    by_rank.line("mean", range(1, n_edges + 1), scores.mean, band=(scores.low, scores.high))
    ranks = sorted({1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, n_edges})
    rows = [[f"{rank}", _value(scores.mean[rank - 1])] for rank in ranks if rank <= n_edges]
    caption = "ŝ = min(1, β·softmax a), Eq. 5: mean over clusters; the band holds 80% of them."
    histogram = Plot(
        "Histogram of edge scores",
        f"{percent(1 - _at(scores.above, ASSIGNED))} of the edges score {ASSIGNED} or less.",
        Axis("edge score ŝ"),
        Axis("% of edges", low=0.0),
    )
    above = np.append(scores.above[::5], 0.0)
    histogram.histogram(-100 * np.diff(above), np.append(THRESHOLDS[::5], 1.0))
    pruned = "In Table 9 of the paper, removing the low ones costs next to nothing."
    return [
        _figure("fig-3", by_rank, caption, ["rank", "mean ŝ"], rows),
        _figure("fig-3-histogram", histogram, pruned),
    ]


def stage1_figure(scores: EdgeScores, stage1: Array) -> Markup:
    """Return the share of stage 1 edges above each threshold (Fig. 7a)."""
    plot = Plot(
        "Stage 1 edges in the learned graph (Fig. 7a)",
        f"{percent(stage1[0])} of them are stored, {percent(_at(stage1, ASSIGNED))} score more "
        f"than {ASSIGNED}.",
        Axis("threshold on the edge score ŝ", low=0.0, high=1.0),
        Axis("% above the threshold", low=0.0, high=100.0),
    )
    curves = {"stage 1 edges": 100 * stage1, "all edges": 100 * scores.above}
    shown = np.searchsorted(THRESHOLDS, _SHOWN_THRESHOLDS).tolist()
    caption = "Stage 1 connects each label to one cluster."
    return _curve_figure("fig-7a", plot, caption, "threshold", THRESHOLDS, curves, shown)


def _at(shares: Array, threshold: float) -> float:
    return float(shares[np.searchsorted(THRESHOLDS, threshold)])


def clusters_figure(means: Mapping[float, Array]) -> Markup:
    """Return the mean number of clusters per label by decile (Fig. 7b)."""
    known = means[ASSIGNED][np.isfinite(means[ASSIGNED])]
    as_in_paper = known[0] > known[-1]
    comparison = (
        "have more clusters than rare ones, as"
        if as_in_paper
        else ("do not have more clusters than rare ones, unlike")
    )
    plot = Plot(
        "Clusters per label by decile (Fig. 7b)",
        f"Above {ASSIGNED}: {number(known[0])} in the first decile, {number(known[-1])} in the "
        f"last. Frequent labels {comparison} in the paper.",
        DECILE_AXIS,
        Axis("clusters, mean", low=0.0),
    )
    caption = (
        "A label is assigned to the clusters whose edge to it scores more than a threshold, "
        f"{ASSIGNED} in the paper."
    )
    groups = {f"ŝ > {threshold:g}": values for threshold, values in means.items()}
    return _decile_figure("fig-7b", plot, caption, groups)


def size_figure(key: str, title: str, label: str, sizes: Ints) -> Markup:
    """Return a histogram of the sizes of the clusters."""
    largest = int(sizes.max())
    plot = Plot(
        title,
        f"Median {number(float(np.median(sizes)))}, from {sizes.min():,} to {largest:,}, over "
        f"{len(sizes):,} clusters.",
        Axis(label),
        Axis("clusters", low=0.0),
    )
    step = max(1, -(-(largest + 1) // _HISTOGRAM_BARS))
    plot.histogram(*np.histogram(sizes, bins=np.arange(0, largest + step + 1, step)))
    rows = [[f"{q}%", float(np.percentile(sizes, q))] for q in (0, 10, 25, 50, 75, 90, 100)]
    return _figure(key, plot, "", ["percentile", label], rows)


_LABEL_COLOUR = 4  # red, as in the paper
_CLUSTER_COLOURS = (0, 2, 3, 1, 5)


def map_figures(maps: LabelMaps, label_names: Sequence[str]) -> list[Markup]:
    """Return Figures 8 and 9, and a comparison of the spread of all such labels."""
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
