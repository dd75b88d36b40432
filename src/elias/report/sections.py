"""The sections of the report: metrics, data, times, configuration, examples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from elias.data.stats import PERCENTILES, corpus_stats
from elias.inference.predict import input_of
from elias.report.page import (
    Markup,
    best_cells,
    details,
    element,
    join,
    paragraph,
    seconds,
    section,
    table,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elias.data.corpus import Split
    from elias.inference.explain import ExplainedLabel, Explanation, LabelPath
    from elias.inference.predictor import Elias
    from elias.report.run_data import Subject


COMPONENTS = {"rerank": "+ ranker", "calibrate": "+ calibration", "names": "+ label names"}
"""What components that are no stages are called."""

_SPLIT_ROWS = {
    "points": "points",
    "pairs": "point-label pairs",
    "labels_per_point": "labels per point",
    "labels_with_points": "labels with points",
    "points_without_labels": "points without labels",
    "words_mean": "words per text",
    "words_percentiles": f"words: {'/'.join(map(str, PERCENTILES))} %",
    "empty_texts": "empty texts",
    "duplicate_texts": "texts found before in the split",
    "texts_in_train": "texts found in the training split",
    "filter_pairs": "filtered pairs",
}
_LABEL_ROWS = {
    "labels": "all",
    "features": "features (bag of words)",
    "points_per_label": "training points per label",
    "points_per_label_percentiles": f"  {'/'.join(map(str, PERCENTILES))}/100 %",
    "labels_without_training_points": "labels without training points",
    "labels_with_one_training_point": "labels with 1 training point",
    "labels_with_up_to_five_training_points": "labels with at most 5",
    "repeated_names": "labels named like another",
}


def component_name(key: str) -> str:
    """Return what a component is called on the page."""
    return COMPONENTS.get(key, key)


def metrics_section(subject: Subject) -> Markup:
    """Return the metrics of every component on every split that was measured."""
    metrics = subject.model.metadata.get("metrics", {})
    splits = dict.fromkeys(split for found in metrics.values() for split in found)
    tables = [_metrics_table(metrics, name) for name in sorted(splits, key=lambda n: n != "test")]
    told = "A row for each component, each added to those above it; the best of a column is bold."
    if not tables:
        told = "The model was saved without metrics."
    return section("metrics", "Metrics by component", paragraph(told, soft=True), tables)


def _metrics_table(metrics: Mapping[str, Mapping[str, Any]], split: str) -> Markup:
    found = {name: splits[split] for name, splits in metrics.items() if split in splits}
    columns = list(dict.fromkeys(name for values in found.values() for name in values))
    highest = [max(v[name] for v in found.values() if name in v) for name in columns]
    rows = [
        [component_name(name), *best_cells([v.get(c) for c in columns], highest)]
        for name, v in found.items()
    ]
    return table(["", *columns], rows, caption=f"On the {split} points, in percent")


def data_section(subject: Subject) -> Markup:
    """Return the corpus in numbers (Table 5)."""
    data = subject.model.metadata.get("data") or corpus_stats(subject.corpus).to_dict()
    splits = data["splits"]
    rows = [
        [title, *(_shown(split.get(key)) for split in splits.values())]
        for key, title in _SPLIT_ROWS.items()
    ]
    by_split = table(["", *splits], [row for row in rows if any(row[1:])])
    labels = [[title, _shown(data.get(key))] for key, title in _LABEL_ROWS.items()]
    notes = {"format": subject.corpus.format, **subject.corpus.notes}
    read = [[key, value] for key, value in notes.items() if value]
    by_label = table(["labels", "count"], [row for row in labels if row[1]])
    how = table(["how it was read", ""], read, wide=True) if read else None
    tables = element("div", by_split, by_label, how, class_="beside")
    return section("data", "Data", tables)


def times_section(subject: Subject) -> Markup:
    """Return how long each step took."""
    times = subject.records.times()
    if not times:
        told = paragraph("A saved model alone does not know how long it took.", soft=True)
        return section("times", "Times", told)
    total = sum(times.values())
    rows = [[step, seconds(value), f"{value / total:.0%}"] for step, value in times.items()]
    rows.append(["all", seconds(total), ""])
    return section("times", "Times", table(["step", "time", "share"], rows))


def config_section(subject: Subject) -> Markup:
    """Return every key of the resolved configuration."""
    keys = dict(_leaves(subject.model.config.to_dict()))
    rows = [[element("code", key), element("code", _value(v))] for key, v in keys.items()]
    told = paragraph("Resolved: sizes left open were derived from the data.", soft=True)
    listed = details(f"All {len(keys)} keys", table(["key", "value"], rows, wide=True))
    return section("configuration", "Configuration", told, listed)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a configuration under its dotted name; a stage goes by its own name."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
    elif isinstance(tree, list) and tree and isinstance(tree[0], dict):
        for place, value in enumerate(tree):
            yield from _leaves(value, f"{path}.{value.get('name', place)}")
    else:
        yield path, tree


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shown(value: Any) -> str:
    if value is None or value == []:
        return ""
    if isinstance(value, list | tuple):
        return " / ".join(f"{item:,}" for item in value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


N_EXAMPLES = 20
TOP_K = 5
N_PATHS = 3
N_DESCRIBING = 3
"""Labels that describe a cluster."""
LONGEST = 400
"""Letters of a text that are shown."""
_MOST_TRUE = 30


def example_articles(model: Elias, split: Split, seed: int) -> list[Markup]:
    """Return some points, the same for the same seed, with their predictions and paths."""
    order = np.random.default_rng(seed).permutation(len(split))[:N_EXAMPLES]
    rows = np.sort(order)
    points = split.take(rows)
    explained = model.explain(input_of(points, model.model.encoder), top_k=TOP_K, paths=N_PATHS)
    bounds = points.labels.indptr
    return [
        _article(
            int(rows[i]),
            points.texts[i] if points.texts is not None else None,
            explanation,
            {
                int(label): model.label_names[label]
                for label in points.labels.indices[bounds[i] : bounds[i + 1]]
            },
        )
        for i, explanation in enumerate(explained)
    ]


def _article(
    row: int, text: str | None, explanation: Explanation, true: Mapping[int, str]
) -> Markup:
    shown = f"Point {row}" if text is None else shortened(text) or "(an empty text)"
    names = list(true.values())
    listed = " · ".join(names[:_MOST_TRUE]) or "none"
    if len(names) > _MOST_TRUE:
        listed += f" · and {len(names) - _MOST_TRUE} more"
    items = [_item(label, explanation.clusters, label.id in true) for label in explanation.labels]
    return element(
        "article",
        element("blockquote", shown),
        paragraph(f"True labels: {listed}", soft=True),
        element("ol", items),
        "\n",
    )


def shortened(text: str) -> str:
    """Return the beginning of a text, cut at a word."""
    if len(text) <= LONGEST:
        return text
    begun = text[:LONGEST]
    return f"{begun[: max(begun.rfind(' '), LONGEST // 2)]} …"


def _item(label: ExplainedLabel, clusters: Mapping[int, Sequence[str]], right: bool) -> Markup:
    told = element("span", " (a true label)", class_="unseen") if right else None
    line = element(
        "div",
        element("span", "✓" if right else "", class_="right", aria_hidden="true"),
        element("strong" if right else "span", label.label, told),
        element("span", f"{label.score:.3f}", class_="score"),
        class_="label",
    )
    width = f"width: {100 * min(max(label.score, 0.0), 1.0):.1f}%"
    meter = element("div", element("span", style=width), class_="meter", aria_hidden="true")
    first = [_path(path, clusters) for path in label.paths if path.won]
    if first:
        first.insert(0, Markup(f"classifier {label.classifier_score:.3f} × "))
    lost = [element("li", _path(path, clusters)) for path in label.paths if not path.won]
    if lost:
        first.append(details(_of_other_paths(label.n_paths - 1), element("ul", lost)))
    return element("li", line, meter, element("div", _beside(label), first, class_="paths"))


def _of_other_paths(count: int) -> str:
    return "1 other path" if count == 1 else f"{count} other paths; the best of them"


def _path(path: LabelPath, clusters: Mapping[int, Sequence[str]]) -> Markup:
    names = " · ".join(clusters[path.cluster][:N_DESCRIBING])
    return join(
        [
            f"cluster {path.cluster_score:.3f} × edge {path.edge_score:.3f}, by {path.cluster}: ",
            element("em", names),
        ]
    )


def _beside(label: ExplainedLabel) -> Markup | None:
    """Return what the ranker and the calibration say, where the model has them."""
    scores = {
        "p": label.p,
        "ranker q": label.ranker_score,
        "name": label.name_likeness,
        "calibrated": label.calibrated_score,
    }
    known = {name: value for name, value in scores.items() if value is not None}
    if len(known) == 1:
        return None
    return element("div", ", ".join(f"{name} {value:.3f}" for name, value in known.items()))
