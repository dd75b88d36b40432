"""``elias explain``: why a text gets its labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elias import progress
from elias.cli import console
from elias.cli.inputs import STDIN, chunks, read_rows
from elias.cli.options import DeviceName
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.table import Table

    from elias.inference.explain import ExplainedLabel, Explanation
    from elias.inference.predictor import Elias
    from elias.rerank import Reranker


CHUNK = 64

LEGEND = (
    "p = classifier · path, and path = cluster · edge on the best way (▸) to the label.\n"
    "A cluster is described by its strongest labels."
)
RANKER_SCORE = "score = p · ranker."
SCORES = {"sum": "score = T + p · ranker", "blend": "score = 0.3·T + 0.7·p · ranker"}
CALIBRATED = ", T being what the calibration makes of p and ranker."
NAMED = (
    ", T being what the calibration makes of p, ranker and name: how alike the label's name and "
    "the text are, and (in --json) how much of it the text covers."
)

_EXTRA: dict[str, Callable[[ExplainedLabel], float | None]] = {
    "ranker": lambda label: label.ranker_score,
    "name": lambda label: label.name_likeness,
    "T": lambda label: label.calibrated_score,
}
"""Columns that are there if the model has the component."""


def explain(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A saved model, or a run.")],
    text: Annotated[
        str, typer.Argument(metavar="[TEXT|-]", help="A text; - (or nothing): one per line, stdin.")
    ] = str(STDIN),
    top_k: Annotated[int, typer.Option("-k", "--top-k", min=1, help="Labels per text.")] = 5,
    paths: Annotated[int, typer.Option(min=1, help="Clusters shown for a label, at most.")] = 3,
    member: Annotated[
        int, typer.Option(min=0, help="Of an ensemble: whose clusters, counted from 0.")
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each text.")
    ] = False,
    device: DeviceName = "auto",
) -> None:
    """Show how a model comes to its labels: clusters, edges and every factor of a score."""
    lines: Iterable[str] = (
        (row.text for row in read_rows(STDIN, None)) if text == str(STDIN) else [text]
    )

    from elias.data.readers.files import sanitize
    from elias.inference.predictor import Elias

    elias = Elias.from_pretrained(model, device=device)
    if elias.model.encoder.reads_features:
        raise DataError(
            f"{model}: was trained on features, and this command reads texts; in Python, "
            "Elias.explain takes a CSR matrix"
        )
    progress.enable(False)  # a bar for every chunk would flicker
    legend = _legend(elias, member)
    count = 0
    for raw in chunks(lines, CHUNK):
        chunk, _ = sanitize(raw)
        for explanation in elias.explain(chunk, top_k=top_k, paths=paths, member=member):
            _show(explanation, as_json=as_json, legend=None if count else legend)
            count += 1
    if not count:
        console.note("no texts were given")


def _legend(model: Elias, member: int) -> str:
    """Return what the columns are, and what is explained of an ensemble."""
    lines = [LEGEND]
    if model.others:
        lines.insert(
            0,
            f"score is the mean of {len(model.members)} members, by which elias predict ranks; "
            f"the rest is what member {member} makes of the label (--member).",
        )
    reranker = model.members[member].reranker if member < len(model.members) else None
    if reranker is not None:
        lines.insert(len(lines) - 1, ("its own " if model.others else "") + _score(reranker))
    return "\n".join(lines)


def _score(reranker: Reranker) -> str:
    if reranker.calibration is None:
        return RANKER_SCORE
    told = CALIBRATED if reranker.by_name is None else NAMED
    return SCORES[reranker.mixture] + told


def _show(explanation: Explanation, *, as_json: bool, legend: str | None) -> None:
    if as_json:
        typer.echo(json.dumps(explanation.to_dict(), ensure_ascii=False))
        return
    if legend is not None:
        console.note(legend)
    console.print_out(
        *([] if legend else [""]), explanation.text or "(an empty text)", "", explained(explanation)
    )


def explained(explanation: Explanation) -> Table:
    """Return the labels of a text as a table, the paths to each below it."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    extra = [
        name
        for name, value in _EXTRA.items()
        if any(value(label) is not None for label in explanation.labels)
    ]
    header = [*(["score", *extra] if extra else []), "p", "classifier", "path", "cluster", "edge"]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in header:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("label and clusters")

    def add(numbers: Sequence[float | None], title: str, style: str = "") -> None:
        cells = [_number(value) for value in numbers]
        name = Text(title, style=style, no_wrap=True, overflow="ellipsis")
        table.add_row(*cells, name, style="dim" if style == "dim" else "")

    for place, label in enumerate(explanation.labels, start=1):
        more = [label.score, *(_EXTRA[name](label) for name in extra)] if extra else []
        own = [label.p, label.classifier_score, label.path_score, None, None]
        add([*more, *own], f"{place}. {label.label}", "bold")
        for path in label.paths:
            title = f"  {'▸' if path.won else ' '} {path.cluster}: "
            title += " | ".join(explanation.clusters[path.cluster])
            numbers = [path.score, path.cluster_score, path.edge_score]
            add([*[None] * (len(header) - 3), *numbers], title, "" if path.won else "dim")
        if label.n_paths > len(label.paths):
            hidden = label.n_paths - len(label.paths)
            add([None] * len(header), f"    … and {hidden} more", "dim")
    return table


def _number(value: float | None) -> str:
    """Return a score with three decimals, and as many as it takes to see one that is tiny."""
    if value is None:
        return ""
    return f"{value:.3f}" if value >= 0.001 or value == 0 else f"{value:.0e}"
