"""The model card: the README.md of a saved model, for people and for the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import elias
from elias.config import EncoderConfig, ResolvedConfig, ResolvedIndex

_PACKAGES = ("torch", "transformers", "numpy")
_EXAMPLES = 5  # labels named in the card
_NO_LICENSE = "# license: choose one before publishing"

_TYPES = {"P": "precision", "R": "recall", "nDCG": "ndcg"}
"""How the hub calls metrics; the others have no name there and go by their own."""

_TEMPLATE = """\
---
library_name: elias
pipeline_tag: text-classification
tags:
- elias
- text-classification
- multi-label
- extreme-classification
{license}
{results}---

# ELIAS model of {n_labels:,} labels

Ranks the few labels that fit a text, out of {n_labels:,}: {parts}.

- Encoder: {encoder}
- Labels: {n_labels:,}, such as {examples} (see `labels.tsv`)

{sections}## Use

```python
from elias import Elias

model = Elias.from_pretrained("{name}")
for prediction in model.predict(["a text to label"], top_k=5):
    print(prediction)
```

Scores rank the labels of one text, best first; where the model learned probabilities, they say how
often such labels are right. The model knows the labels it was trained with and
no others, and repeats what its training data got wrong.

## Versions

{versions}
"""


def model_card(
    config: ResolvedConfig,
    label_names: Sequence[str],
    metadata: Mapping[str, Any],
    *,
    name: str = "path/to/this/folder",
    license: str | None = None,
) -> str:
    """Return the card of a model as Markdown with YAML front matter.

    Args:
        config: The resolved configuration.
        label_names: One name for each label.
        metadata: ``metrics``, named percentages below one or more levels of names such as stage
            and split, ``probabilities``, errors and a threshold, and ``data``, named counts on any
            level, become tables. Anything else is left out.
        name: What the model is read by in the example.
        license: As the hub spells it, such as ``mit``.
    """
    sections = [
        _metrics_section(metadata.get("metrics") or {}),
        _decisions_section(metadata.get("probabilities") or {}),
        _data_section(metadata.get("data") or {}),
    ]
    return _TEMPLATE.format(
        n_labels=len(label_names),
        parts=_parts(config.index),
        examples=", ".join(_code(name) for name in label_names[:_EXAMPLES]),
        encoder=_encoder_line(config.encoder),
        sections="".join(sections),
        versions=_versions(),
        name=name,
        license=f"license: {json.dumps(license)}" if license else _NO_LICENSE,
        results=_front_results(metadata.get("metrics") or {}, len(label_names)),
    )


def _front_results(metrics: Mapping[str, Any], n_labels: int) -> str:
    """Return the metrics of the last component on the test split, as the hub's front matter."""
    tested = [
        found["test"]
        for found in metrics.values()
        if isinstance(found, Mapping) and "test" in found
    ]
    found = list(_leaves(tested[-1])) if tested and isinstance(tested[-1], Mapping) else []
    if not found:
        return ""
    types = {path[-1]: _TYPES.get(path[-1].partition("@")[0], path[-1]) for path, _ in found}
    named = [name for name in dict.fromkeys(types.values()) if name in _TYPES.values()]
    results = {
        "task": {"type": "text-classification", "name": "Extreme multi-label classification"},
        "dataset": {"type": "custom", "name": f"{n_labels:,} labels", "split": "test"},
        "metrics": [
            {"type": types[path[-1]], "name": path[-1], "value": value} for path, value in found
        ],
    }
    index = [{"name": f"ELIAS model of {n_labels:,} labels", "results": [results]}]
    # JSON is YAML, and quotes what must be quoted
    lines = {"metrics": named, "model-index": index}
    return "".join(
        f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in lines.items()
    )


def _parts(index: ResolvedIndex) -> str:
    if index.kind == "all":
        return "a text encoder and one classifier per\nlabel, all of which are asked (one-vs-all)"
    return (
        f"a text encoder, an index of {index.n_clusters:,} clusters\n"
        "over the labels that is learned with it, and one classifier per label"
    )


def _encoder_line(encoder: EncoderConfig) -> str:
    if encoder.kind == "bag":
        return f"learned word and character n-gram vectors, {encoder.dim} wide"
    return (
        f"transformer {_code(encoder.model)}, fine-tuned, {encoder.pooling} pooling, "
        f"texts up to {encoder.max_length} tokens"
    )


def _metrics_section(metrics: Mapping[str, Any]) -> str:
    """Return a table with a row for each group of metrics and a column for each metric."""
    rows: dict[str, dict[str, str]] = {}
    for path, value in _leaves(metrics):
        rows.setdefault(", ".join(path[:-1]), {})[path[-1]] = f"{value:.2f}"
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    if not columns:
        return ""
    cells = [[title, *(row.get(name, "") for name in columns)] for title, row in rows.items()]
    return f"## Results\n\nIn percent.\n\n{_table(['', *columns], cells)}\n"


def _decisions_section(told: Mapping[str, Any]) -> str:
    """Return how good probabilities are, and decisions at the threshold of the best F1."""
    rows = [[" ".join(path), f"{value:,.2f}"] for path, value in _leaves(told)]
    if not rows:
        return ""
    about = "Expected calibration error of the best five labels, and the best F1, in percent."
    return f"## Probabilities\n\n{about}\n\n{_table(['', ''], rows)}\n"


def _data_section(data: Mapping[str, Any]) -> str:
    rows = [
        [" ".join(path).replace("_", " "), f"{value:,}" if type(value) is int else f"{value:,.2f}"]
        for path, value in _leaves(data)
    ]
    return f"## Training data\n\n{_table(['', 'count'], rows)}\n" if rows else ""


def _leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield every number of a tree with the keys that lead to it."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*path, key), value


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _code(text: str) -> str:
    """Return the text as Markdown that shows it as it is, on one line."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"


def _versions() -> str:
    lines = [f"- elias-xmc {elias.__version__}"]
    for package in _PACKAGES:
        try:
            lines.append(f"- {package} {version(package)}")
        except PackageNotFoundError:
            continue
    return "\n".join(lines)
