"""``elias data``: look at corpora, convert them, make them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elias.cli import console
from elias.cli.options import (
    AsJson,
    DataPath,
    LabelsColumn,
    Overwrite,
    Separator,
    TestSize,
    TextColumn,
    read_corpus,
)

if TYPE_CHECKING:
    from rich.table import Table

    from elias.data import CorpusStats, SplitStats


app = typer.Typer(no_args_is_help=True, help="Look at corpora, convert them, make them.")

NewFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make.")]


@app.command()
def info(
    path: DataPath,
    text: TextColumn = None,
    labels: LabelsColumn = None,
    separator: Separator = None,
    as_json: AsJson = False,
) -> None:
    """Count a corpus: points, labels, text lengths, rare labels, duplicates."""
    from elias.data import corpus_stats

    corpus = read_corpus(path, text, labels, separator)
    stats = corpus_stats(corpus)
    if as_json:
        facts = {"format": corpus.format, **stats.to_dict(), "notes": dict(corpus.notes)}
        typer.echo(json.dumps(facts, ensure_ascii=False))
        return
    notes = [("format", corpus.format), *corpus.notes.items()]
    console.print_out(_split_table(stats), "", console.grid(_label_rows(stats)))
    console.print_out("", console.grid(notes))


def _split_table(stats: CorpusStats) -> Table:
    named = {name: _split_column(split) for name, split in stats.splits.items()}
    properties = next(iter(named.values()))
    rows = [[key, *(column[key] for column in named.values())] for key in properties]
    return console.columns(["", *named], [row for row in rows if any(row[1:])])


def _split_column(split: SplitStats) -> dict[str, str]:
    """Return the rows of one split's column; what does not apply is empty."""
    lengths = split.words_percentiles
    return {
        "points": f"{split.points:,}",
        "point-label pairs": f"{split.pairs:,}",
        "labels per point": f"{split.labels_per_point:.2f}",
        "labels with points": f"{split.labels_with_points:,}",
        "points without labels": f"{split.points_without_labels:,}",
        "words per text": "" if split.words_mean is None else f"{split.words_mean:.1f}",
        "words: 10/50/90/99 %": "" if lengths is None else " / ".join(map(str, lengths)),
        "empty texts": _count(split.empty_texts),
        "texts found before in the split": _count(split.duplicate_texts),
        "texts found in the training split": _count(split.texts_in_train),
        "filtered pairs": _count(split.filter_pairs or None),
    }


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _label_rows(stats: CorpusStats) -> list[tuple[str, Any]]:
    *most, largest = stats.points_per_label_percentiles
    return [
        ("labels", stats.labels),
        ("features (bag of words)", stats.features),
        ("training points per label", stats.points_per_label),
        ("  10/50/90/99 %", " / ".join(f"{value:,}" for value in most)),
        ("  most frequent label", largest),
        ("labels without training points", stats.labels_without_training_points),
        ("labels with 1 training point", stats.labels_with_one_training_point),
        ("labels with at most 5", stats.labels_with_up_to_five_training_points),
        ("labels named like another", stats.repeated_names),
    ]


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The corpus to read.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The file or folder to write.")],
    to: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="jsonl, csv, tsv, parquet, folder, xmc, lf or pecos; by default after DST's name.",
        ),
    ] = None,
    text: TextColumn = None,
    labels: LabelsColumn = None,
    separator: Separator = None,
    test_size: TestSize = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a corpus in another format."""
    from elias.data import convert as write
    from elias.errors import DataError

    corpus = read_corpus(source, text, labels, separator, test_size=test_size)
    try:
        written = write(corpus, target, to, overwrite=overwrite)
    except DataError as error:  # the library names its argument, the user typed an option
        raise DataError(str(error).replace("overwrite=True", "--overwrite")) from error
    console.note(f"written in {written.format} format")
    typer.echo(written.path)


@app.command()
def demo(directory: NewFolder) -> None:
    """Build the demo corpus: MEDLINE titles and their MeSH headings (needs a network)."""
    from elias.data.demo import build_demo_corpus

    typer.echo(build_demo_corpus(directory))


@app.command()
def synthetic(
    directory: NewFolder,
    points: Annotated[int, typer.Option(min=1, help="Training points.")] = 10_000,
    labels: Annotated[int, typer.Option(min=1, help="Labels.")] = 1_000,
    seed: Annotated[int, typer.Option(min=0, help="Decides everything that is drawn.")] = 0,
    test: Annotated[
        int | None, typer.Option(min=0, help="Test points; by default a quarter as many.")
    ] = None,
    validation: Annotated[int, typer.Option(min=0, help="Validation points.")] = 0,
    tail: Annotated[
        float, typer.Option(min=0, help="Exponent of the power law; 0: all labels alike.")
    ] = 1.0,
    modes: Annotated[int, typer.Option(min=1, help="Most topics one label belongs to.")] = 3,
    labels_per_point: Annotated[float, typer.Option(min=1, help="Labels of a point.")] = 3.0,
) -> None:
    """Generate a corpus of any size, the same for the same options."""
    from elias.data.synthetic import write_synthetic

    folder = write_synthetic(
        directory,
        n_points=points,
        n_labels=labels,
        seed=seed,
        n_test=test,
        n_validation=validation,
        tail=tail,
        modes=modes,
        labels_per_point=labels_per_point,
    )
    typer.echo(folder)
