"""A few points with what the model makes of them, and how it came to that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from elias.analysis.markup import Markup, element, join
from elias.analysis.page import details, paragraph
from elias.pipeline.inputs import input_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elias.data.corpus import Split
    from elias.pipeline import Elias, ExplainedLabel, Explanation, LabelPath

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
