"""The sections of a report that say what was recorded: metrics, data, times, configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elias.analysis.markup import Markup, element
from elias.analysis.page import best_cells, details, paragraph, seconds, section, table
from elias.data.stats import PERCENTILES, corpus_stats

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elias.analysis.subject import Subject

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
    metrics = subject.model.facts.get("metrics", {})
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
    data = subject.model.facts.get("data") or corpus_stats(subject.corpus).to_dict()
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
