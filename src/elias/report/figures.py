"""The figures of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from elias.report.page import (
    Markup,
    element,
    figure,
    grid,
    lines,
    number,
    paragraph,
    percent,
    section,
    table,
)
from elias.report.plots import (
    Axis,
    Dots,
    Line,
    Words,
    bar_plot,
    binned_plot,
    box_plot,
    colour,
    histogram,
    line_plot,
    scatter_plot,
)
from elias.report.statistics import (
    ASSIGNED,
    FEWEST_POINTS,
    LIKE_FREQUENCY,
    MOST_CLUSTERS,
    N_DECILES,
    QUANTILES,
    RECALL_AT,
)
from elias.rerank.probabilities import ECE_AT, PROBABILITIES, reliability

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from elias.data.corpus import Split
    from elias.predictions import Predictions
    from elias.report.run_data import Subject
    from elias.report.statistics import (
        Clouds,
        EdgeWeights,
        LearningCurve,
        Panel,
        Recalls,
        TrueScores,
    )
    from elias.rerank.probabilities import Probabilities, Reliability

    Array = NDArray[np.float64]

DECILES = [str(i) for i in range(1, N_DECILES + 1)]
DECILE_AXIS = Axis(label="tenth of the labels, most frequent first")
SHOWN_THRESHOLDS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
"""Those of the paper's Table 9, and 0."""
_HISTOGRAM_BARS = 24


def learning_figures(curve: LearningCurve) -> list[Markup]:
    """Return the loss and the validation metrics over all epochs."""
    epochs = np.arange(1, len(curve.loss) + 1)
    axis = Axis(label="epoch", low=1.0, high=float(max(len(epochs), 2)))
    rules = {float(at): name for at, name in curve.begins.items()}
    stages = ", ".join(f"{name} from epoch {at}" for at, name in curve.begins.items())
    words = Words(title="Training loss by epoch", description=f"Stages: {stages}.")
    plot = line_plot(
        [Line(name="loss", xs=epochs, ys=curve.loss)],
        axis,
        Axis(label="training loss"),
        words,
        rules=rules,
    )
    caption = "L = L_c + λ·L_s on the training points. A new stage searches another graph, so the "
    caption += "loss may jump where one begins."
    rows = [[str(e), f"{v:.4f}"] for e, v in zip(epochs, curve.loss, strict=True)]
    found = [figure("learning-loss", words.title, plot, caption, table(["epoch", "loss"], rows))]
    if curve.validation:
        found.append(_validation_figure(curve, epochs, axis, rules))
    return found


def _validation_figure(
    curve: LearningCurve, epochs: NDArray[np.int64], axis: Axis, rules: Mapping[float, str]
) -> Markup:
    lines = []
    for name, values in curve.validation.items():
        there = np.isfinite(values)
        lines.append(Line(name=name, xs=epochs[there], ys=values[there]))
    last = ", ".join(f"{line.name} {np.asarray(line.ys)[-1]:.2f}" for line in lines)
    words = Words(title="Validation metrics by epoch", description=f"After the last: {last}.")
    plot = line_plot(lines, axis, Axis(label="validation, %"), words, rules=rules)
    rows = [
        [str(e), *(_fixed(v[i], 2) for v in curve.validation.values())]
        for i, e in enumerate(epochs)
    ]
    numbers = table(["epoch", *curve.validation], rows)
    caption = "On points held out of training. Each stage keeps its best epoch (eval.select_by)."
    return figure("learning-validation", words.title, plot, caption, numbers)


def recall_figures(
    recalls: Mapping[str, Recalls],
    found: Mapping[str, TrueScores],
    recorded: Mapping[str, Mapping[int, float]],
    split: str,
) -> list[Markup]:
    """Return the recall curve, and the recall by decile (Fig. 5).

    ``recorded`` holds R@k of stages whose model is gone: their numbers were noted in the run.
    """
    return [
        _recall_curve(recalls, recorded, split),
        _decile_recall(recalls),
        _decile_found(found),
    ]


def _recall_curve(
    recalls: Mapping[str, Recalls], recorded: Mapping[str, Mapping[int, float]], split: str
) -> Markup:
    lines = [Line(name=n, xs=list(known), ys=list(known.values())) for n, known in recorded.items()]
    lines += [Line(name=name, xs=one.ks, ys=one.curve) for name, one in recalls.items()]
    last = {name: one.curve[-1] for name, one in recalls.items()}
    told = ", ".join(f"{name} {value:.2f}%" for name, value in last.items())
    words = Words(
        title="Recall by number of predictions (Fig. 5, left)",
        description=f"R@{next(iter(recalls.values())).ks[-1]}: {told}.",
    )
    axis = Axis(label="labels predicted, k", low=1.0, log=True)
    plot = line_plot(lines, axis, Axis(label="R@k, %", low=0.0), words)
    first = next(iter(recalls.values()))
    rows = [
        [str(k), *(f"{one.curve[i]:.2f}" for one in recalls.values())]
        for i, k in enumerate(first.ks)
    ]
    caption = f"The share of a {split} point's true labels among its k best. {words.description}"
    if recorded:
        caption += f" Of {', '.join(recorded)}, only what the run noted is known."
    return figure("fig-5-curve", words.title, plot, caption, table(["k", *recalls], rows))


def _decile_recall(recalls: Mapping[str, Recalls]) -> Markup:
    groups = {name: one.by_decile for name, one in recalls.items()}
    last = list(groups.values())[-1]
    words = Words(
        title=f"What each tenth of the labels adds to R@{RECALL_AT} (Fig. 5, right)",
        description=f"The first tenth adds {last[0]:.2f}, the last {last[-1]:.2f} points.",
    )
    plot = bar_plot(DECILES, groups, DECILE_AXIS, Axis(label="points of recall", low=0.0), words)
    caption = f"The ten bars sum to R@{RECALL_AT}. {words.description}"
    numbers = table(["tenth", *groups], _by_decile(groups))
    return figure("fig-5-deciles", words.title, plot, caption, numbers)


def _decile_found(found: Mapping[str, TrueScores]) -> Markup:
    groups = {name: 100 * one.found for name, one in found.items()}
    last = list(groups.values())[-1]
    words = Words(
        title="How many true labels of each tenth are found",
        description=f"{last[0]:.1f}% in the first tenth, {last[-1]:.1f}% in the last.",
    )
    axis = Axis(label=f"% among the {RECALL_AT} best", low=0.0, high=100.0)
    plot = bar_plot(DECILES, groups, DECILE_AXIS, axis, words)
    caption = f"Each tenth by itself, however many true labels it has: {words.description}"
    pairs = next(iter(found.values())).pairs
    rows = [[*row, f"{n:,}"] for row, n in zip(_by_decile(groups), pairs.tolist(), strict=True)]
    numbers = table(["tenth", *groups, "true labels"], rows)
    return figure("fig-5-found", words.title, plot, caption, numbers)


def _by_decile(groups: Mapping[str, Array]) -> list[list[str]]:
    return [[name, *(_fixed(v[i], 3) for v in groups.values())] for i, name in enumerate(DECILES)]


def _fixed(value: float, decimals: int) -> str:
    return f"{value:,.{decimals}f}" if np.isfinite(value) else "–"


def score_figure(found: Mapping[str, TrueScores]) -> Markup:
    """Return how each component scores true labels, decile by decile (Fig. 4)."""
    groups = {name: one.quantiles for name, one in found.items()}
    medians = {name: values[:, 2] for name, values in groups.items()}
    told = "; ".join(
        f"{name}: median {number(m[0])} in the first tenth, {number(m[-1])} in the last"
        for name, m in medians.items()
    )
    words = Words(title="Scores of true labels by tenth (Fig. 4)", description=f"{told}.")
    high = 1.0 if all(np.nanmax(v, initial=0.0) <= 1 for v in groups.values()) else None
    axis = Axis(label="score", low=0.0, high=high)
    plot = box_plot(DECILES, groups, DECILE_AXIS, axis, words)
    caption = (
        f"Of the true labels among the {RECALL_AT} best. A box holds the middle half, its bar "
    )
    caption += f"the median, the line 10% to 90%. {words.description}"
    header = ["tenth", *(f"{name} {q:.0%}" for name in groups for q in QUANTILES)]
    rows = [
        [tenth, *(_fixed(v, 4) for values in groups.values() for v in values[i])]
        for i, tenth in enumerate(DECILES)
    ]
    return figure("fig-4", words.title, plot, caption, table(header, rows))


def edge_figures(weights: EdgeWeights) -> list[Markup]:
    """Return the edge weights by rank, and how many edges a threshold leaves (Fig. 3)."""
    ranks = np.arange(1, len(weights.mean) + 1)
    full = int((weights.mean >= 0.5).sum())
    words = Words(
        title="Edge weights of a cluster, strongest first (Fig. 3)",
        description=f"The mean is above 0.5 for the first {full} of {len(ranks)} edges.",
    )
    line = Line(name="mean", xs=ranks, ys=weights.mean, band=(weights.low, weights.high))
    axis = Axis(label="rank of the edge within its cluster", low=1.0, high=float(len(ranks)))
    plot = line_plot([line], axis, Axis(label="edge score ŝ", low=0.0, high=1.0), words)
    caption = "ŝ = min(1, β·softmax a), Eq. 5, averaged over clusters; the band holds 80% of them. "
    caption += words.description
    shown = sorted({1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, len(ranks)})
    rows = [[str(r), f"{weights.mean[r - 1]:.4f}"] for r in shown if r <= len(ranks)]
    by_rank = figure("fig-3", words.title, plot, caption, table(["rank", "mean ŝ"], rows))
    return [by_rank, _edge_histogram(weights)]


def _edge_histogram(weights: EdgeWeights) -> Markup:
    edges = weights.thresholds[::5]
    above = np.append(weights.kept[::5], 0.0)
    shares = 100 * (above[:-1] - above[1:])
    weak = 1 - float(weights.kept[np.searchsorted(weights.thresholds, ASSIGNED)])
    words = Words(
        title="All edges by their weight",
        description=f"{percent(weak)} of all edges have a weight of {ASSIGNED} or less.",
    )
    bounds = np.append(edges, 1.0)
    plot = binned_plot(shares, bounds, Axis(label="edge score ŝ"), Axis(label="% of edges"), words)
    caption = f"{words.description} In the paper's Table 9 they can go at next to no loss."
    return figure("fig-3-histogram", words.title, plot, caption)


def stage1_figure(weights: EdgeWeights, kept: Array) -> Markup:
    """Return how many of stage 1's edges the learned graph holds (Fig. 7a)."""
    at = int(np.searchsorted(weights.thresholds, ASSIGNED))
    stored, strong = percent(kept[0]), percent(kept[at])
    words = Words(
        title="Stage 1 edges left in the learned graph (Fig. 7a)",
        description=f"{stored} are stored and {strong} weigh more than {ASSIGNED}.",
    )
    lines = [
        Line(name="stage 1 edges", xs=weights.thresholds, ys=100 * kept),
        Line(name="all edges", xs=weights.thresholds, ys=100 * weights.kept),
    ]
    axis = Axis(label="threshold on the edge score ŝ", low=0.0, high=1.0)
    plot = line_plot(lines, axis, Axis(label="% above the threshold", low=0.0, high=100.0), words)
    rows = [
        [f"{t:g}", percent(kept[i]), percent(weights.kept[i])]
        for t, i in ((t, int(np.searchsorted(weights.thresholds, t))) for t in SHOWN_THRESHOLDS)
    ]
    numbers = table(["threshold", "stage 1 edges", "all edges"], rows)
    caption = f"Of the edges from each label to its cluster of stage 1, {words.description}"
    return figure("fig-7a", words.title, plot, caption, numbers)


def clusters_figure(means: Mapping[float, Array]) -> Markup:
    """Return how many clusters the labels of each decile are assigned to (Fig. 7b)."""
    groups = {f"ŝ > {threshold:g}": values for threshold, values in means.items()}
    paper = means[ASSIGNED][np.isfinite(means[ASSIGNED])]
    first, last = float(paper[0]), float(paper[-1])
    verdict = "so head labels hang under more clusters than tail labels, as in the paper"
    if not first > last:
        verdict = (
            "so head labels do not hang under more clusters than tail labels, unlike the paper's"
        )
    words = Words(
        title="Clusters of a label by tenth (Fig. 7b)",
        description=f"At {ASSIGNED}, {number(first)} in the first tenth and {number(last)} in the "
        f"last: {verdict}.",
    )
    plot = bar_plot(DECILES, groups, DECILE_AXIS, Axis(label="clusters, mean", low=0.0), words)
    caption = "A label is assigned to a cluster where its edge weighs more than a threshold; the "
    caption += f"paper's is {ASSIGNED}. {words.description}"
    numbers = table(["tenth", *groups], _by_decile(groups))
    return figure("fig-7b", words.title, plot, caption, numbers)


def size_figures(labels: NDArray[np.int64], points: NDArray[np.int64]) -> list[Markup]:
    """Return how many labels and how many points the clusters have."""
    return [
        _sizes("cluster-labels", "Labels of a cluster", f"labels with ŝ > {ASSIGNED}", labels),
        _sizes(
            "cluster-points",
            "Training points of a cluster",
            f"of {int(points.sum()):,} points, those it is best for",
            points,
        ),
    ]


def _sizes(key: str, title: str, label: str, sizes: NDArray[np.int64]) -> Markup:
    middle, most = float(np.median(sizes)), int(sizes.max())
    words = Words(
        title=title,
        description=f"Median {number(middle)}, from {int(sizes.min()):,} to {most:,}, over "
        f"{len(sizes):,} clusters.",
    )
    step = max(1, -(-(most + 1) // _HISTOGRAM_BARS))
    edges = np.arange(0, most + step + 1, step)
    plot = histogram(sizes, edges, Axis(label=label), Axis(label="clusters", low=0.0), words)
    marks: Sequence[float] = (0, 10, 25, 50, 75, 90, 100)
    rows = [[f"{q}%", float(np.percentile(sizes, q))] for q in marks]
    return figure(key, title, plot, words.description, table(["percentile", label], rows))


OWN = 4
"""The colour of a label's own points: red, as in the paper."""
_OTHERS = (0, 2, 3, 1, 5)


def cloud_figures(clouds: Clouds, name: Callable[[int], str]) -> list[Markup]:
    """Return Figures 8 and 9, and what the spread of all such labels says of them."""
    own = element("span", class_="dot", style=f"background: {colour(OWN)}")
    key = paragraph(
        own,
        " the label's own training points; every other colour is a cluster it is assigned to, "
        f"by its training points with ŝ_c above {ASSIGNED}.",
    )
    several = f"Labels in 2 to {MOST_CLUSTERS} clusters (Fig. 8)"
    return [
        key,
        _figure("fig-8", several, clouds.several, name),
        _figure("fig-9", "Labels in one cluster (Fig. 9)", clouds.one, name),
        spread_words(clouds),
    ]


def _figure(key: str, title: str, panels: Sequence[Panel], name: Callable[[int], str]) -> Markup:
    heading = element("h3", title)
    if not panels:
        told = f"No label with {FEWEST_POINTS} training points or more is of this kind."
        return element("div", heading, paragraph(told, soft=True), id=key)
    drawn = [_panel(panel, name(panel.label)) for panel in panels]
    return element("div", heading, element("div", drawn, class_="panels"), id=key)


def _panel(panel: Panel, name: str) -> Markup:
    n_clusters = len(panel.clusters)
    told = f"{len(panel.own):,} points; {n_clusters} cluster{'s' if n_clusters > 1 else ''}"
    words = Words(title=f"t-SNE of the training points of {name}", description=told)
    groups = [
        Dots(name=f"cluster {c}", points=points, series=_OTHERS[i], radius=4.0, opacity=0.6)
        for i, (c, points) in enumerate(zip(panel.clusters, panel.others, strict=True))
    ]
    groups.append(Dots(name=name, points=panel.own, series=OWN, radius=6.0, opacity=0.95))
    caption = element("figcaption", element("strong", name), element("br"), told)
    return element("figure", scatter_plot(groups, words), caption)


def spread_words(clouds: Clouds) -> Markup:
    """Say whether points of labels in several clusters are spread more widely."""
    several, one = clouds.spread_several, clouds.spread_one
    low, high = LIKE_FREQUENCY
    if several is None or one is None:
        return paragraph(
            f"Too few labels with {low} to {high} points to compare their spread.", soft=True
        )
    verdict = "more widely" if several > one else "no more widely"
    return lines(
        paragraph(
            f"Over all labels with {low} to {high} points in the sample, those in several clusters "
            f"({clouds.n_several:,} labels) spread {verdict} than those in one "
            f"({clouds.n_one:,}): {number(several)} against {number(one)}, where 0 means that all "
            "embeddings point the same way and 1 that they cancel out. Clusters are those with "
            f"ŝ above {ASSIGNED}."
        )
    )


_NONE = (
    "The model knows no probabilities: fewer than twenty points were held out, or it is of before "
    "there were any. elias calibrate adds them."
)


def decisions_section(
    subject: Subject, judged: tuple[str, Split] | None, found: Predictions | None
) -> Markup:
    """Return the section; ``found`` are the last component's predictions for the points judged."""
    known = subject.model.probabilities
    if known is None:
        return section("decisions", "Probabilities and decisions", paragraph(_NONE, soft=True))
    figures = [threshold_figure(known)]
    if judged is not None and found is not None:
        figures.insert(0, reliability_figure(found, judged[1], judged[0]))
    return section("decisions", "Probabilities and decisions", _errors(subject), grid(figures))


def _errors(subject: Subject) -> Markup | None:
    """Return ECE@5 of each split as it was measured when the probabilities were learned."""
    told = subject.model.metadata.get(PROBABILITIES, {}).get("errors", {})
    if not told:
        return None
    rows = [[name, f"{one['before']:.2f}", f"{one['after']:.2f}"] for name, one in told.items()]
    header = ["points", f"ECE@{ECE_AT} of the scores as they are, %", f"ECE@{ECE_AT}, %"]
    return table(header, rows)


def reliability_figure(found: Predictions, split: Split, name: str) -> Markup:
    """Return how often labels of a probability are relevant, before and after calibration."""
    measured = {
        "scores as they are": reliability(found, split.labels, ECE_AT, calibrated=False),
        "probabilities": reliability(found, split.labels, ECE_AT),
    }
    lines = [Line(name="as it should be", xs=[0.0, 1.0], ys=[0.0, 1.0])]
    lines += [_line(title, one) for title, one in measured.items()]
    errors = ", ".join(f"{one.error:.2f}% of the {title}" for title, one in measured.items())
    words = Words(
        title="Said and true",
        description=f"On the {name} points the calibration error is {errors}.",
    )
    plot = line_plot(
        lines,
        Axis(label="probability said", low=0.0, high=1.0),
        Axis(label="share that is relevant", low=0.0, high=1.0),
        words,
    )
    caption = f"The best {ECE_AT} labels of each point in fifteen bins. {words.description}"
    rows = [
        [title, f"{said:.3f}", f"{true:.3f}", f"{count:,}"]
        for title, one in measured.items()
        for said, true, count in zip(one.said, one.true, one.counts.tolist(), strict=True)
        if count
    ]
    return figure(
        "reliability", words.title, plot, caption, table(["", "said", "true", "labels"], rows)
    )


def _line(title: str, one: Reliability) -> Line:
    there = one.counts > 0
    return Line(name=title, xs=one.said[there], ys=one.true[there])


def threshold_figure(known: Probabilities) -> Markup:
    """Return what decisions at each threshold were worth on the held-out points."""
    best = known.threshold("f1")
    place = int(np.searchsorted(known.thresholds, best - 1e-9))
    curves = {"precision": known.precision, "recall": known.recall, "F1": known.f1}
    told = ", ".join(f"{name} {100 * one[place]:.1f}%" for name, one in curves.items())
    words = Words(title="Decisions by threshold", description=f"F1 is best at {best:g}: {told}.")
    plot = line_plot(
        [Line(name=name, xs=known.thresholds, ys=100 * one) for name, one in curves.items()],
        Axis(label="threshold of probability", low=0.0, high=1.0),
        Axis(label="on held-out points, %", low=0.0, high=100.0),
        words,
        rules={best: "best F1"},
    )
    rows = [
        [f"{known.thresholds[i]:.2f}", *(f"{100 * one[i]:.1f}" for one in curves.values())]
        for i in range(0, len(known.thresholds), 10)
    ]
    caption = f"Over all pairs of a point and a label. {words.description}"
    return figure("thresholds", words.title, plot, caption, table(["threshold", *curves], rows))
