"""``elias labels``: list, add, rename, merge and remove labels of a trained model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

import elias
from elias.cli import console, options
from elias.cli.predict import parse_labels

app = typer.Typer(
    cls=options.Group,
    no_args_is_help=True,
    help="List, add, rename, merge and remove labels of a trained model.",
)

NewModel = Annotated[Path, Option(metavar="MODEL2", help="The folder of the new model.")]
Label = Annotated[
    str,
    Argument(
        metavar="LABEL", help="Name, id in the label table, or number (see elias labels list)."
    ),
]


@app.command("list", cls=options.Command)
def list_labels(
    model: options.ModelPath,
    search: Annotated[
        str, Option(metavar="WORDS", help="List only labels with these words in a name.")
    ] = "",
    limit: Annotated[int | None, Option(min=1, help="Maximum number of labels.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print a JSON object per label.")] = False,
) -> None:
    """List each label with its number (0 to L-1), training points, name and id."""
    from elias.inference.explain import LabelSearch

    loaded = elias.Elias.from_pretrained(model, device="cpu")
    table, n_index = loaded.label_table, loaded.model.n_labels
    chosen = list(range(loaded.n_labels))
    if search:
        chosen = LabelSearch(table).find(search, loaded.n_labels)
    cells = []
    for label in chosen[:limit]:
        points, is_added, key = loaded.label_frequency(label), label >= n_index, table.id(label)
        if as_json:
            row = {"number": label, "name": table[label], "id": key, "points": points}
            console.print_json({**row, "added": is_added})
            continue
        count, name = "" if points is None else f"{points:,}", console.one_line(table[label])
        cells.append([str(label), count, "added" * is_added, name, key or ""])
    if not as_json:
        console.print_out(console.columns(["number", "points", "", "name", "id"], cells, n_left=5))


@app.command(cls=options.Command)
@options.expand_groups
def add(
    *,
    model: options.ModelPath,
    table: Annotated[Path, Argument(metavar="FILE", help="Label table, or a .txt file of names.")],
    examples: Annotated[
        Path | None, Option(metavar="DATA", help="Corpus with example texts of the new labels.")
    ] = None,
    out: NewModel,
    skip_known: Annotated[
        bool, Option("--skip-known", help="Leave out labels that the model has already.")
    ] = False,
    reading: options.CorpusOptions,
    overwrite: options.Overwrite = False,
) -> None:
    """Add labels without training. The scores of all other labels do not change."""
    loaded = elias.Elias.from_pretrained(model, device="cpu")
    labels = elias.load_label_table(table, language=reading.language, encoding=reading.encoding)
    corpus = None if examples is None else reading.read(examples, test_size=0)
    start = time.monotonic()
    larger = loaded.add_labels(labels, corpus, skip_known=skip_known)
    seconds = time.monotonic() - start
    count = larger.n_labels - loaded.n_labels
    what = f"{count:,} label{'s' * (count != 1)}"
    if corpus is not None and count:
        assert larger.added is not None
        what += f" with {larger.added.n_examples[-count:].sum():,} examples"
    note = f"added {what} in {seconds:.1f} s; the model has {larger.n_labels:,}"
    _save(larger, out, note, overwrite=overwrite)


@app.command(cls=options.Command)
def rename(
    model: options.ModelPath,
    label: Label,
    name: Annotated[str, Argument(metavar="NAME", help="The new name.")],
    out: NewModel,
    overwrite: options.Overwrite = False,
) -> None:
    """Give a label another name. The old name becomes a synonym."""
    loaded = elias.Elias.from_pretrained(model, device="cpu")
    renamed = loaded.rename_label(parse_labels([label], loaded.label_names)[0], name)
    _save(renamed, out, f"renamed {label} to {name}", overwrite=overwrite)


@app.command(cls=options.Command)
def merge(
    model: options.ModelPath,
    label: Label,
    into: Annotated[str, Argument(metavar="INTO", help="The label that stays.")],
    out: NewModel,
    overwrite: options.Overwrite = False,
) -> None:
    """Merge LABEL into INTO. The label INTO keeps its name and id."""
    loaded = elias.Elias.from_pretrained(model, device="cpu")
    first, second = (parse_labels([one], loaded.label_names)[0] for one in (label, into))
    merged = loaded.merge_labels(first, second)
    note = f"merged {label} into {into}; the model has {merged.n_labels:,} labels"
    _save(merged, out, note, overwrite=overwrite)


@app.command(cls=options.Command)
def remove(
    model: options.ModelPath,
    labels: Annotated[
        list[str],
        Argument(
            metavar="LABEL...", help="Names, ids or numbers of labels, or @FILE with one per line."
        ),
    ],
    out: NewModel,
    overwrite: options.Overwrite = False,
) -> None:
    """Remove labels. The remaining labels are renumbered."""
    loaded = elias.Elias.from_pretrained(model, device="cpu")
    smaller = loaded.remove_labels(parse_labels(labels, loaded.label_names))
    count = loaded.n_labels - smaller.n_labels
    note = f"removed {count:,} label{'s' * (count != 1)}; the model has {smaller.n_labels:,}"
    _save(smaller, out, note, overwrite=overwrite)


def _save(model: elias.Elias, out: Path, note: str, *, overwrite: bool) -> None:
    folder = model.save_pretrained(out, overwrite=overwrite)
    console.note(note)
    typer.echo(folder)
