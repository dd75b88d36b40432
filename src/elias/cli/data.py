"""``elias data``: inspect, convert and generate corpora."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

import elias
from elias.cli import console, options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elias.data import CorpusStats, SplitStats


app = typer.Typer(
    cls=options.Group, no_args_is_help=True, help="Inspect, convert and generate corpora."
)

_EXAMPLE_LENGTH = 200  # characters

NewFolder = Annotated[Path, Argument(metavar="DIR", help="The folder to create.")]


@app.command(cls=options.Command)
@options.expand_groups
def info(
    path: options.DataPath,
    reading: options.CorpusOptions,
    group: options.GroupColumn = None,
    as_json: options.AsJson = False,
) -> None:
    """Show examples and statistics of a corpus, and hints about problems in the data."""
    from elias.data.stats import data_hints, example_labels, example_points

    corpus = reading.read(path, group=group)
    stats = elias.corpus_stats(corpus)
    examples, (frequent, rare) = example_points(corpus), example_labels(corpus)
    hints = list(map(console.name_options, data_hints(corpus, stats)))
    notes = dict(corpus.notes)
    if as_json:
        shown = {"examples": examples, "frequent_labels": frequent, "rare_labels": rare}
        values = {**stats.to_dict(), **shown, "hints": hints, "notes": notes}
        console.print_json({"format": corpus.format, **values})
        return
    for text, names in examples:
        labels = console.one_line(" | ".join(names)) or "(no label)"
        console.print_out(f"{_shortened(text) or '(empty)'}\n  → {labels}")
    console.print_out("" if examples else "no texts, only features\n")
    by_split = {name: _split_column(split) for name, split in stats.splits.items()}
    rows = [[name, *(column[name] for column in by_split.values())] for name in by_split["train"]]
    table = console.columns(["", *by_split], [row for row in rows if any(row[1:])])
    console.print_out(table, "", console.grid(_label_rows(stats)))
    counted = [("frequent labels", _counted(frequent)), ("rare labels", _counted(rare) or None)]
    console.print_out("", console.grid([*counted, *(("hint", hint) for hint in hints)]))
    console.print_out("", console.grid([("format", corpus.format), *notes.items()]))


def _shortened(text: str) -> str:
    line = console.one_line(text)
    return line if len(line) <= _EXAMPLE_LENGTH else f"{line[: _EXAMPLE_LENGTH - 1]}…"


def _counted(labels: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{_shortened(name)} ({count:,})" for name, count in labels)


def _split_column(split: SplitStats) -> dict[str, str]:
    """Return the table column of a split, with empty cells for values that do not apply."""

    def count(value: int | None) -> str:
        return "" if value is None else f"{value:,}"

    lengths = split.words_percentiles
    return {
        "points": count(split.points),
        "point-label pairs": count(split.pairs),
        "labels per point": f"{split.labels_per_point:.2f}",
        "labels: percentiles 10/50/90/99": " / ".join(map(str, split.labels_percentiles)),
        "labels with points": count(split.labels_with_points),
        "points without labels": count(split.points_without_labels),
        "words per text": "" if split.words_mean is None else f"{split.words_mean:.1f}",
        "words: percentiles 10/50/90/99": "" if lengths is None else " / ".join(map(str, lengths)),
        "empty texts": count(split.empty_texts),
        "duplicate texts": count(split.duplicate_texts),
        "texts also in the training split": count(split.texts_in_train),
        "groups of near-duplicates": count(split.near_duplicate_groups),
        "texts in these groups": count(split.near_duplicates),
        "near-duplicates of train texts": count(split.near_duplicates_in_train),
        "groups of the group column": count(split.groups),
        "points in these groups": count(split.points_in_groups),
        "points with a group in train": count(split.points_with_group_in_train),
        "filtered pairs": count(split.filter_pairs or None),
    }


def _label_rows(stats: CorpusStats) -> list[tuple[str, Any]]:
    *percentiles, largest = stats.points_per_label_percentiles
    return [
        ("labels", stats.labels),
        ("features (bag of words)", stats.features),
        ("training points per label", stats.points_per_label),
        ("  percentiles 10/50/90/99", " / ".join(f"{value:,}" for value in percentiles)),
        ("  most frequent label", largest),
        ("labels without training points", stats.labels_without_training_points),
        ("labels with 1 training point", stats.labels_with_one_training_point),
        ("labels with at most 5", stats.labels_with_up_to_five_training_points),
        ("labels with a repeated name", stats.repeated_names),
    ]


@app.command(cls=options.Command)
@options.expand_groups
def convert(
    *,
    source: Annotated[Path, Argument(metavar="SRC", help="The corpus to read.")],
    target: Annotated[Path, Argument(metavar="DST", help="The file or folder to write.")],
    to: Annotated[
        str | None,
        Option(
            "--format",
            metavar="NAME",
            help="jsonl, csv, tsv, parquet, folder, xmc, lf or pecos (default: by suffix of DST).",
        ),
    ] = None,
    reading: options.CorpusOptions,
    group: options.GroupColumn = None,
    test_size: options.TestSize = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Write a corpus in another format."""
    corpus = reading.read(source, group=group, test_size=test_size)
    written = elias.convert(corpus, target, to, overwrite=overwrite)
    console.note(f"written in {written.format} format")
    typer.echo(written.path)


@app.command(cls=options.Command)
def demo(directory: NewFolder) -> None:
    """Build the demo corpus: MEDLINE titles and their MeSH headings (requires internet access)."""
    from elias.data.mesh_titles import build_demo_corpus

    typer.echo(build_demo_corpus(directory))


@app.command(cls=options.Command)
def synthetic(
    directory: NewFolder,
    points: Annotated[int, Option(min=1, help="Number of training points.")] = 10_000,
    labels: Annotated[int, Option(min=1, help="Number of labels.")] = 1_000,
    seed: Annotated[int, Option(min=0, help="Random seed.")] = 0,
    test: Annotated[int | None, Option(min=0, help="Test points (default: points / 4).")] = None,
) -> None:
    """Generate a synthetic corpus. The same options always give the same corpus."""
    from elias.data.synthetic import write_synthetic

    typer.echo(write_synthetic(directory, n_points=points, n_labels=labels, seed=seed, n_test=test))
