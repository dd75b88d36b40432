"""Write the model card: the README.md of a saved model, for people and for the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import elias
from elias.config import ResolvedConfig

_NO_LICENSE = "# license: choose one before publishing"
_HUB_METRICS = {"P": "precision", "nDCG": "ndcg", "R": "recall"}
"""Names of metrics on the hub; other metrics keep their own name."""

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

Scores rank the labels of one text, best first. If the model has probabilities, they estimate how
often such labels are right. The model predicts only labels of its training data, and repeats the
errors of that data.

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
        config: The configuration.
        label_names: One name for each label.
        metadata: Metadata of the model. ``metrics``, ``probabilities`` and ``data`` are nested
            dictionaries of numbers; each becomes a table.
        name: The name of the model in the example.
        license: License identifier of the hub, such as ``mit``.
    """
    index, encoder = config.index, config.encoder
    parts = "a text encoder and one classifier per\nlabel, all of which are scored (one-vs-all)"
    if index.kind != "all":
        parts = (
            f"a text encoder, an index of {index.n_clusters:,} clusters\n"
            "over the labels that is learned with it, and one classifier per label"
        )
    about = f"learned word and character n-gram vectors, {encoder.dim} wide"
    if encoder.kind != "bag":
        about = (
            f"transformer {_code(encoder.model)}, fine-tuned, {encoder.pooling} pooling, "
            f"texts up to {encoder.max_length} tokens"
        )
    metrics = metadata.get("metrics") or {}
    return _TEMPLATE.format(
        n_labels=len(label_names),
        parts=parts,
        examples=", ".join(map(_code, label_names[:5])),
        encoder=about,
        sections=_sections(metrics, metadata),
        versions="\n".join(_versions()),
        name=name,
        license=f"license: {json.dumps(license)}" if license else _NO_LICENSE,
        results=_front_matter(metrics, len(label_names)),
    )


def _front_matter(metrics: Mapping[str, Any], n_labels: int) -> str:
    """Return the test metrics of the last component as YAML front matter for the hub."""
    trees = [tree for tree in metrics.values() if isinstance(tree, Mapping)]
    tested = [tree["test"] for tree in trees if isinstance(tree.get("test"), Mapping)]
    values = {path[-1]: value for path, value in _leaves(tested[-1])} if tested else {}
    if not values:
        return ""
    types = {name: _HUB_METRICS.get(name.partition("@")[0], name) for name in values}
    results = {
        "task": {"type": "text-classification", "name": "Extreme multi-label classification"},
        "dataset": {"type": "custom", "name": f"{n_labels:,} labels", "split": "test"},
        "metrics": [{"type": types[k], "name": k, "value": value} for k, value in values.items()],
    }
    lines = {
        "metrics": [name for name in _HUB_METRICS.values() if name in types.values()],
        "model-index": [{"name": f"ELIAS model of {n_labels:,} labels", "results": [results]}],
    }
    # JSON is valid YAML and needs no quoting rules
    return "".join(f"{k}: {json.dumps(v, ensure_ascii=False)}\n" for k, v in lines.items())


def _sections(metrics: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    """Return the non-empty tables of metrics, probabilities and training data."""
    groups: dict[str, dict[str, str]] = {}
    for path, value in _leaves(metrics):
        groups.setdefault(", ".join(path[:-1]), {})[path[-1]] = f"{value:.2f}"
    columns = list(dict.fromkeys(name for group in groups.values() for name in group))
    results = [[title, *(group.get(c, "") for c in columns)] for title, group in groups.items()]
    probabilities = [
        [" ".join(path), f"{value:,.2f}"]
        for path, value in _leaves(metadata.get("probabilities") or {})
    ]
    data = [
        [" ".join(path).replace("_", " "), f"{value:,}" if type(value) is int else f"{value:,.2f}"]
        for path, value in _leaves(metadata.get("data") or {})
    ]
    ece = "Expected calibration error of the best five labels, and the best F1, in percent.\n\n"
    return "".join(
        f"## {title}\n\n{note}{_table(head, rows)}\n"
        for title, note, head, rows in (
            ("Results", "In percent.\n\n", ["", *columns], results),
            ("Probabilities", ece, ["", ""], probabilities),
            ("Training data", "", ["", "count"], data),
        )
        if rows
    )


def _leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield every number of a tree with the path of keys that leads to it."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*path, key), value


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _code(text: str) -> str:
    """Return the text as inline code on one line of Markdown."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"


def _versions() -> Iterator[str]:
    yield f"- elias-xmc {elias.__version__}"
    for package in ("torch", "transformers", "numpy"):
        try:
            yield f"- {package} {version(package)}"
        except PackageNotFoundError:
            continue
