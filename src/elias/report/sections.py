"""Write the sections of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from elias.data.stats import PERCENTILES, corpus_stats
from elias.inference.predict import split_inputs
from elias.report import figures
from elias.report.html import Markup, details, element, grid, join, note, seconds, table
from elias.report.statistics import (
    ASSIGNED,
    clusters_per_label,
    edge_scores,
    label_maps,
    recalls,
    stage1_edges_above,
    true_scores,
)
from elias.rerank.probabilities import ECE_AT, PROBABILITIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elias.inference.explain import ExplainedLabel, Explanation, LabelPath
    from elias.report.run_data import FinishedRun


COMPONENTS = {"rerank": "+ ranker", "calibrate": "+ calibration", "names": "+ label names"}
"""Titles of the components that are not stages."""
_CLUSTER_THRESHOLDS = (0.1, ASSIGNED, 0.5)
_NO_INDEX = note("The model has no index: it scores every label (one-vs-all).")
_NO_POINTS = note("The corpus has neither test nor validation points.")


def component_name(key: str) -> str:
    """Return the title of a stage or another component."""
    return COMPONENTS.get(key, key)


def metrics_section(run: FinishedRun) -> list[Markup]:
    """Return a table of the metrics of all components for each evaluated split."""
    metrics: dict[str, dict[str, dict[str, float]]] = run.model.metadata.get("metrics", {})
    splits = dict.fromkeys(split for values in metrics.values() for split in values)
    if not splits:
        return [note("The model was saved without metrics.")]
    tables = []
    for split in sorted(splits, key=lambda name: name != "test"):
        values = {name: by_split[split] for name, by_split in metrics.items() if split in by_split}
        columns = list(dict.fromkeys(name for v in values.values() for name in v))
        best = {c: max(v[c] for v in values.values() if c in v) for c in columns}
        rows = []
        for name, v in values.items():
            cells = [
                element("td", f"{v[c]:.2f}", class_="best" if v[c] == best[c] else None)
                if c in v
                else ""
                for c in columns
            ]
            rows.append([component_name(name), *cells])
        tables.append(table(["", *columns], rows, caption=f"On the {split} points, in percent"))
    text = "Each component is added to those above it. The best value of a column is bold."
    return [note(text), *tables]


def learning_section(run: FinishedRun) -> list[Markup]:
    """Return the learning curves."""
    epochs = run.records.of("epoch")
    if not epochs:
        return [note("A model saved without its run has no learning curves.")]
    return [grid(figures.learning_figures(epochs))]


def recall_section(run: FinishedRun) -> list[Markup]:
    """Return recall and scores of true labels (Fig. 4 and 5)."""
    if run.evaluated is None:
        return [_NO_POINTS]
    name, split = run.evaluated
    frequencies = run.corpus.label_frequencies()
    predictions = {component_name(key): one for key, one in run.predictions.items()}
    drawn = figures.recall_figures(
        {key: recalls(one, split.labels, frequencies) for key, one in predictions.items()},
        {key: true_scores(one, split.labels, frequencies) for key, one in predictions.items()},
        {k: v for k, v in _recorded_recall(run, name).items() if k not in predictions},
        name,
    )
    return [note(f"On the {len(split):,} {name} points."), grid(drawn)]


def _recorded_recall(run: FinishedRun, split: str) -> dict[str, dict[int, float]]:
    """Return the R@k of each component that the run recorded; earlier stages are not saved."""
    recorded = {}
    for key, metrics in run.model.metadata.get("metrics", {}).items():
        values = metrics.get(split, {}).items()
        by_k = {int(name[2:]): value for name, value in values if name.startswith("R@")}
        if by_k:
            recorded[component_name(key)] = dict(sorted(by_k.items()))
    return recorded


def probabilities_section(run: FinishedRun) -> list[Markup]:
    """Return the calibration error, the reliability diagram and the thresholds."""
    probabilities = run.model.probabilities
    if probabilities is None:
        text = (
            "The model has no probabilities: fewer than twenty points were held out, or an older "
            "version saved it. Add them with elias calibrate."
        )
        return [note(text)]
    drawn = [figures.threshold_figure(probabilities)]
    if run.evaluated is not None:
        name, split = run.evaluated
        predictions = run.predictions[run.model.components[-1]]
        drawn.insert(0, figures.reliability_figure(predictions, split.labels, name))
    errors = run.model.metadata.get(PROBABILITIES, {}).get("errors", {})
    header = ["points", f"ECE@{ECE_AT} of raw scores, %", f"ECE@{ECE_AT} of probabilities, %"]
    rows = [[key, f"{e['before']:.2f}", f"{e['after']:.2f}"] for key, e in errors.items()]
    return [*([table(header, rows)] if rows else []), grid(drawn)]


def index_section(run: FinishedRun) -> list[Markup]:
    """Return the edges of the graph (Fig. 3 and 7) and the sizes of the clusters."""
    edges = run.edges
    if edges is None:
        return [_NO_INDEX]
    drawn, notes = [], []
    if run.model.model.graph.learned:
        scores = edge_scores(edges)
        drawn += figures.edge_figures(scores)
        if run.partition is None:
            notes.append(note("Fig. 7a is missing because the run did not store its partition."))
        else:
            stage1 = stage1_edges_above(edges, run.partition)
            drawn.append(figures.stage1_figure(scores, stage1))
        frequencies = run.corpus.label_frequencies()
        means = clusters_per_label(edges, frequencies, _CLUSTER_THRESHOLDS)
        drawn.append(figures.clusters_figure(means))
    else:
        text = "The graph is fixed: each label has one cluster and each edge scores 1. Therefore "
        notes.append(note(text, "there are no Figures 3 and 7."))
    points = np.bincount(run.sample.best, minlength=edges.n_clusters)
    labels = edges.above(ASSIGNED).per_cluster()
    points_axis = f"points with this best cluster, of {points.sum():,}"
    drawn += [
        figures.size_figure(
            "cluster-labels", "Labels per cluster", f"labels with ŝ > {ASSIGNED}", labels
        ),
        figures.size_figure("cluster-points", "Training points per cluster", points_axis, points),
    ]
    return [*notes, grid(drawn)]


def embeddings_section(run: FinishedRun) -> list[Markup]:
    """Return t-SNE maps of labels in several clusters and in one (Fig. 8 and 9)."""
    if run.edges is None:
        return [_NO_INDEX]
    text = (
        "φ of training points, projected to the plane by t-SNE. A label is assigned to the "
        f"clusters whose edge to it scores more than {ASSIGNED}."
    )
    maps = label_maps(run.sample, run.edges, run.model.config.seed)
    return [element("p", text), *figures.map_figures(maps, run.model.label_names)]


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
    by_split = [
        [_title(key), *(_statistic(split.get(key)) for split in splits.values())] for key in keys
    ]
    by_label = [[_title(key), _statistic(value)] for key, value in stats.items()]
    source = {"format": run.corpus.format, **run.corpus.notes}
    tables = [
        table(["", *splits], [row for row in by_split if any(row[1:])]),
        table(["labels", ""], [row for row in by_label if row[1]]),
        table(["source", ""], [row for row in source.items() if row[1]], wide=True),
    ]
    return [element("div", tables, class_="side-by-side")]


def _title(key: str) -> str:
    return _STATISTICS.get(key, key.replace("_", " "))


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
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
    elif isinstance(tree, list) and tree and isinstance(tree[0], dict):
        for i, value in enumerate(tree):
            yield from _leaves(value, f"{path}.{value.get('name', i)}")
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
    return element(
        "article",
        element("blockquote", title or "(empty text)"),
        note(f"True labels: {listed}"),
        element("ol", items),
        "\n",
    )


def shorten(text: str) -> str:
    """Return the beginning of a long text, cut at the end of a word if possible."""
    if len(text) <= MAX_LETTERS:
        return text
    start = text[:MAX_LETTERS]
    return f"{start[: max(start.rfind(' '), MAX_LETTERS // 2)]} …"


def _item(label: ExplainedLabel, clusters: Mapping[int, Sequence[str]], is_true: bool) -> Markup:
    hidden = element("span", " (a true label)", class_="unseen") if is_true else None
    line = element(
        "div",
        element("span", "✓" if is_true else "", class_="right", aria_hidden="true"),
        element("strong" if is_true else "span", label.label, hidden),
        element("span", f"{label.score:.3f}", class_="score"),
        class_="label",
    )
    width = f"width: {100 * min(max(label.score, 0.0), 1.0):.1f}%"
    meter = element("div", element("span", style=width), class_="meter", aria_hidden="true")
    parts = {
        "p": label.p,
        "ranker q": label.ranker_score,
        "name": label.name_likeness,
        "calibrated": label.calibrated_score,
    }
    known = [f"{name} {value:.3f}" for name, value in parts.items() if value is not None]
    paths: list[object] = [element("div", ", ".join(known)) if len(known) > 1 else None]
    paths += [
        [f"classifier {label.classifier_score:.3f} × ", _path(path, clusters)]
        for path in label.paths
        if path.won
    ]
    others = [element("li", _path(path, clusters)) for path in label.paths if not path.won]
    if others:
        n_others = label.n_paths - 1
        summary = "1 other path" if n_others == 1 else f"best of {n_others} other paths"
        paths.append(details(summary, element("ul", others)))
    return element("li", line, meter, element("div", paths, class_="paths"))


def _path(path: LabelPath, clusters: Mapping[int, Sequence[str]]) -> Markup:
    names = " · ".join(clusters[path.cluster][:N_CLUSTER_LABELS])
    factors = f"cluster {path.cluster_score:.3f} × edge {path.edge_score:.3f}"
    return join([f"{factors}, by cluster {path.cluster}: ", element("em", names)])
