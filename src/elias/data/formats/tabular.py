"""Tables with a text column and a labels column: JSON lines, CSV, TSV, Parquet.

One file (a column ``split`` says which rows are for what, where there is one), or a folder with
files for each split: ``train.*``, ``validation.*``, ``test.*``, in shards or not. A ``labels.txt``
in the folder names the labels by row. Columns are found by common names, or given. Two more are
understood beside the labels: ``label_ids`` and ``label_weights``, lists of the same length.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from elias.data.corpus import SPLITS, Corpus, Split
from elias.data.formats import labels as label_cells
from elias.data.formats.columns import Picked, no_column, pick_columns
from elias.data.formats.layout import find_names, split_called
from elias.data.formats.matrices import from_lists
from elias.data.formats.options import Reading, ReadOptions
from elias.data.formats.sources import bad, read_names, shown
from elias.data.formats.tables import Table, column_names, read_table

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.errors import DataError

log = logging.getLogger(__name__)

KINDS = ("jsonl", "csv", "tsv", "parquet")


def read_file(path: Path, kind: str, options: ReadOptions, source: Path) -> Reading:
    """Read a table of one file; ``source`` is that file, or the folder it alone makes up."""
    return _read({"": [path]}, kind, options, source)


def read_files(files: dict[str, list[Path]], kind: str, options: ReadOptions) -> Reading:
    """Read a table with files for each split."""
    source = next(iter(files.values()))[0].parent
    return _read(files, kind, options, source)


def _read(files: dict[str, list[Path]], kind: str, options: ReadOptions, source: Path) -> Reading:
    picked = picked_columns(files, kind, options)
    rows = _read_rows(files, kind, picked)
    log.info("%s: read %d rows", source, sum(map(len, rows.tables)))
    matrix, names, note = _labels(rows, picked, options, source)
    splits = _cut(rows.split_names(picked.split), matrix, rows.texts(picked.text))
    if "train" not in splits:
        raise bad(source, f"no training rows, only: {', '.join(splits)}; name some rows train")
    notes = {"text": text_note(picked), "labels": note}
    corpus = Corpus(
        label_names=names,
        source=source,
        format=kind,
        notes=notes,
        **splits,  # type: ignore[arg-type]  # its keys are the names of splits
    )
    return Reading(corpus, has_splits="" not in files or picked.split is not None)


def picked_columns(files: dict[str, list[Path]], kind: str, options: ReadOptions) -> Picked:
    """Return the columns to read of all files, by the first of them."""
    first = next(iter(files.values()))[0]
    picked = pick_columns(first, column_names(first, kind), options)
    # the files' names say what a column might
    return picked if "" in files else replace(picked, split=None)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of several files, one file after the other."""

    tables: list[Table]
    splits: list[str]
    """The split of each table; empty for a table of all."""

    def column(self, name: str) -> list[Any]:
        """Return the cells of a column."""
        return list(chain.from_iterable(table.columns[name] for table in self.tables))

    def error(self, row: int, problem: str) -> DataError:
        """Return the error for a row."""
        for table in self.tables:
            if row < len(table):
                return table.error(row, problem)
            row -= len(table)
        raise IndexError(row)

    def split_names(self, column: str | None) -> NDArray[np.str_]:
        """Return the split of every row."""
        if column is None:
            names = [split or "train" for split in self.splits]
            return np.repeat(np.array(names), [len(table) for table in self.tables])
        values = [str(value or "") for value in self.column(column)]
        known = {value: split_called(value) for value in set(values)}
        for row, value in enumerate(values):
            if known[value] is None:
                remedy = "use train, validation or test, or rename the column"
                raise self.error(row, f"split {shown(value)} is unknown; {remedy}")
        return np.array([known[value] for value in values])

    def texts(self, names: tuple[str, ...]) -> list[str]:
        """Return the text of every row, of several columns joined by spaces."""
        columns = [self._strings(name) for name in names]
        if len(columns) == 1:
            return columns[0]
        return [" ".join(filter(None, parts)) for parts in zip(*columns, strict=True)]

    def _strings(self, name: str) -> list[str]:
        values = self.column(name)
        for row, value in enumerate(values):
            if not isinstance(value, str):
                if isinstance(value, list | dict | bytes):
                    problem = f"column {name!r} holds {shown(value)}, which is not a text"
                    raise self.error(row, problem)
                values[row] = "" if label_cells.is_missing(value) else str(value)
        return values


def _read_rows(files: dict[str, list[Path]], kind: str, picked: Picked) -> Rows:
    pairs = [(split, path) for split, paths in files.items() for path in paths]
    tables = []
    for _, path in pairs:
        check_columns(path, kind, picked)
        tables.append(read_table(path, kind, picked.all, picked.text))
    return Rows(tables, [split for split, _ in pairs])


def check_columns(path: Path, kind: str, picked: Picked) -> None:
    """Refuse a file that lacks a column; JSON lines may leave out what is empty, but the text."""
    known = column_names(path, kind)
    required = picked.text if kind == "jsonl" else picked.all
    missing = next((name for name in required if name not in known), None)
    if missing is not None:
        raise no_column(path, missing, known)


def _labels(
    rows: Rows, picked: Picked, options: ReadOptions, source: Path
) -> tuple[csr_matrix, list[str], str]:
    """Return relevance (N, L), the labels' names, and a note on how they were read."""
    column = rows.column(picked.labels)
    given = options.separator
    separator = label_cells.detect_separator(column, rows.error) if given is None else given
    has_ids = picked.ids is not None
    lists = label_cells.split_cells(
        column, separator, rows.error, lists=given is None, keep_empty=has_ids
    )
    found = _number(rows, lists, picked, source)
    weights = None
    if picked.weights is not None:
        cells = rows.column(picked.weights)
        weights = label_cells.parse_weights(cells, lists.counts, rows.error)
    matrix = from_lists(lists.counts, found.ids, len(found.names), weights)
    matrix.eliminate_zeros()
    return matrix, found.names, labels_note(picked, separator)


def text_note(picked: Picked) -> str:
    """Say where the texts were read."""
    return f"column {', '.join(map(repr, picked.text))}"


def labels_note(picked: Picked, separator: str) -> str:
    """Say how the labels were read."""
    how = f", separated by {separator!r}" if separator else ""
    return f"column {picked.labels!r}{how}"


def _number(
    rows: Rows, lists: label_cells.LabelLists, picked: Picked, source: Path
) -> label_cells.LabelIds:
    if picked.ids is not None:
        column = rows.column(picked.ids)
        separator = label_cells.detect_separator(column, rows.error)
        id_lists = label_cells.split_cells(column, separator, rows.error)
        return label_cells.pair_ids(lists, id_lists, rows.error)
    names_file = find_names(source) if source.is_dir() else None
    if names_file is not None:
        return label_cells.look_up(lists, read_names(names_file), rows.error)
    return label_cells.number_names(lists)


def _cut(split_of: NDArray[np.str_], matrix: csr_matrix, texts: list[str]) -> dict[str, Split]:
    everything = Split(labels=matrix, texts=texts)
    rows = {name: np.flatnonzero(split_of == name) for name in SPLITS}
    if len(rows["train"]) == len(texts):
        return {"train": everything}
    return {name: everything.take(chosen) for name, chosen in rows.items() if len(chosen)}
