"""``elias explain``: show why a model predicts the labels of a text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

import elias
from elias import progress
from elias.cli import console, options
from elias.cli.predict import STDIN, stdin_lines
from elias.errors import DataError, escape_controls

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


CHUNK = 64
N_WORDS = 6
"""Maximum number of words or terms in one line."""

LEGEND = (
    "p = classifier · path, and path = cluster · edge on the best path (▸) to the label.\n"
    "A cluster is described by its strongest labels."
)
LEGEND_WITHOUT_INDEX = "p is the score of the label's classifier."
CALIBRATED = (
    "calibrated is estimated from p, ranker{} and the label's frequency, by decision trees."
)
NAME = (
    "name is the similarity of the label's name and the text; --json also has the share of the "
    "name that the text covers."
)

_OPTIONAL_COLUMNS = {
    "ranker": "ranker_score",
    "name": "name_likeness",
    "calibrated": "calibrated_score",
}
"""Columns shown only if the model computes them, with the attribute of `ExplainedLabel`."""


def explain(
    model: options.ModelPath,
    text: Annotated[
        str, Argument(metavar="[TEXT|-]", help="A text. If omitted or -, read texts from stdin.")
    ] = str(STDIN),
    top_k: options.TopK = 5,
    member: Annotated[int, Option(min=0, help="Ensemble member to explain, counted from 0.")] = 0,
    words: Annotated[
        bool | None,
        Option(help="Leave out words to measure their effect (default: only if TEXT is given)."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per text.")] = False,
    device: options.DeviceName = "auto",
) -> None:
    """Show the words, clusters, edges and score factors that lead to the labels of a text."""
    from elias.data.readers.files import sanitize

    is_given = text != str(STDIN)
    words = is_given if words is None else words
    lines = iter([text]) if is_given else stdin_lines()
    loaded = elias.Elias.from_pretrained(model, device=device)
    if loaded.model.encoder.reads_features:
        raise DataError(
            f"{model}: was trained on features, but this command reads texts; use Elias.explain "
            "with a CSR matrix in Python"
        )
    if not is_given:
        progress.enable(False)  # a bar for every chunk would flicker
    count = 0
    while chunk := list(islice(lines, CHUNK)):
        texts, _ = sanitize(chunk)
        for explanation in loaded.explain(texts, top_k=top_k, member=member, words=words):
            if as_json:
                console.print_json(explanation.to_dict())
            else:
                if count:
                    console.print_out("")
                else:
                    console.note(_legend(loaded, member))
                title = explanation.text or "(an empty text)"
                console.print_out(
                    title,
                    "",
                    _label_table(explanation, averaged=bool(loaded.others)),
                    *_word_lines(explanation),
                )
            count += 1
    if not count:
        raise DataError("stdin: no texts; give a text as an argument, or one per line on stdin")


def _legend(model: elias.Elias, member: int) -> str:
    """Return a legend for the columns, with the ensemble member that is explained."""
    from elias.rerank.calibration import MIXTURES

    lines, formula = [], ""
    reranker = model.members[member].reranker if member < len(model.members) else None
    if reranker is not None:
        formula = "p · ranker"
        if reranker.calibration is not None:
            weights = (f"{w:g} · " if w != 1 else "" for w in MIXTURES[reranker.mixture])
            formula = "{}calibrated + {}p · ranker".format(*weights)
        if reranker.sharpness > 1:  # a sharpness of 1 leaves p as it is
            formula = formula.replace("p · ranker", f"p^{1 / reranker.sharpness:.3g} · ranker")
    score = formula or "p"
    if model.others:
        score = f"the mean of the members' {score}"
    if model.probabilities is not None:
        lines.append(f"prob is the probability of the label. Labels are ranked by {score}.")
    elif score != "p":
        lines.append(f"Labels are ranked by score = {score}.")
    if model.others:
        lines.append(f"The other columns show member {member} of {len(model.members)} (--member).")
    if reranker is not None and reranker.calibration is not None:
        lines.append(CALIBRATED.format("" if reranker.by_name is None else ", name"))
        if reranker.by_name is not None:
            lines.append(NAME)
    has_index = model.members[member].config.index.kind != "all"
    return "\n".join([*lines, LEGEND if has_index else LEGEND_WITHOUT_INDEX])


def _label_table(explanation: elias.Explanation, *, averaged: bool) -> Table:
    """Return the labels of a text as a table, with the paths to each label below it.

    Args:
        explanation: The explanation of the text.
        averaged: Whether the score is the mean of several members, and therefore differs from p.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    labels = explanation.labels
    known = all(label.probability is not None for label in labels)
    extra = {
        column: name
        for column, name in _OPTIONAL_COLUMNS.items()
        if any(getattr(label, name) is not None for label in labels)
    }
    main = ["prob" if known else "score", *extra] if known or extra or averaged else []
    has_paths = any(label.paths for label in labels)
    header = [*main, "p", *(["classifier", "path", "cluster", "edge"] if has_paths else [])]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in header:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("label and clusters" if has_paths else "label")

    def add(numbers: Sequence[float | None], title: str, style: str = "") -> None:
        cells = [*[""] * (len(header) - len(numbers)), *map(_number, numbers)]
        name = Text(escape_controls(title), style=style, no_wrap=True, overflow="ellipsis")
        table.add_row(*cells, name, style="dim" if style == "dim" else "")

    for rank, label in enumerate(labels, start=1):
        strength = label.probability if known else label.score
        scores = [strength, *(getattr(label, name) for name in extra.values())]
        factors = [label.p, label.classifier_score, label.path_score, None, None]
        factors = factors if has_paths else factors[:1]
        title = label.label if label.uri is None else f"{label.label} ({label.uri})"
        add([*scores, *factors] if main else factors, f"{rank}. {title}", "bold")
        about = ". ".join(filter(None, (", ".join(label.synonyms), label.description)))
        if about:
            add([], f"   {console.one_line(about)}", "dim")
        for path in label.paths:
            title = f"  {'▸' if path.won else ' '} {path.cluster}: "
            title += " | ".join(explanation.clusters[path.cluster])
            numbers = [path.score, path.cluster_score, path.edge_score]
            add(numbers, title, "" if path.won else "dim")
        if label.n_paths > len(label.paths):
            add([], f"    … and {label.n_paths - len(label.paths)} more", "dim")
    return table


def _word_lines(explanation: elias.Explanation) -> list[RenderableType]:
    """Return the words and ranker terms with the largest effects, a few lines for each label."""
    from rich.text import Text

    lines: list[RenderableType] = []
    text = explanation.text or ""
    for label in explanation.labels:
        words = sorted(label.words, key=lambda word: -abs(word.effect))
        strong = [word for word in words if abs(word.effect) > 0.05 * abs(words[0].effect)]
        rows: dict[str, list[str]] = {"for": [], "against": []}
        now = console.likelihood(label.probability, label.score)
        for word in strong:
            without = console.likelihood(word.probability, label.score - word.effect)
            if without == now:
                continue
            shown = f"{console.one_line(text[word.start : word.end])} ({without} without it)"
            rows["for" if word.effect > 0 else "against"].append(shown)
        rows["in the ranker"] = [f"{one.term} {one.weight:+.2f}" for one in label.terms]
        if any(rows.values()):
            title = escape_controls(f"{label.label} ({now})")
            lines += ["", Text(title, style="bold")]
        for name, shown_words in rows.items():
            if shown_words:
                style = {"for": "green", "against": "red"}.get(name, "dim")
                line = f"  {name}: {', '.join(shown_words[:N_WORDS])}"
                lines.append(Text(escape_controls(line), style=style))
    return lines


def _number(value: float | None) -> str:
    """Return a score with three decimals, or in scientific notation if it is tiny."""
    if value is None:
        return ""
    return f"{value:.3f}" if value >= 0.001 or value == 0 else f"{value:.0e}"
