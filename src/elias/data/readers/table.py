"""Read tables: JSON lines, CSV, TSV and Parquet.

One file (a column ``split`` says which rows are for what, where there is one), or a folder with
files for each split: ``train.*``, ``validation.*``, ``test.*``, in shards or not. A ``labels.txt``
in the folder names the labels by row. Columns are found by common names, or given. Two more are
understood beside the labels: ``label_ids`` and ``label_weights``, lists of the same length.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from elias.data.corpus import SPLITS, Corpus, Split
from elias.data.readers import files, label_cells
from elias.data.readers.base import Reading, ReadOptions, from_lists
from elias.data.readers.columns import Picked, no_column, pick_columns
from elias.data.readers.files import (
    EMPTY,
    TooTightError,
    bad,
    check_tightness,
    find_names,
    is_gzip,
    iter_lines,
    open_bytes,
    read_names,
    shown,
    split_called,
)
from elias.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix


logger = logging.getLogger(__name__)

_SAMPLE_ROWS = 100
_SPACE = re.compile(r"\s*")
_DELIMITERS = ("\t", ",", ";")
_PARQUET_ROWS = 1024  # rows read at a time
_NO_ROWS = "holds no rows; it should have one for each text"

Rows = Iterator[tuple[int, list[Any]]]
"""The line of each row, as in `Table.lines`, and some of its cells."""


@dataclass(frozen=True, slots=True)
class Table:
    """Some columns of one file."""

    path: Path
    columns: dict[str, list[Any]]
    lines: Sequence[int]
    """The 1-based line on which each row ends; the row's number in Parquet."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lines)

    def error(self, row: int, problem: str) -> DataError:
        """Return the error for one row."""
        return bad(self.path, problem, self.lines[row])


def column_names(path: Path, kind: str) -> list[str]:
    """Return the names of a table's columns; of JSON lines, the keys of its first rows."""
    if kind == "parquet":
        return _parquet_names(path)
    if kind == "jsonl":
        rows = islice(_json_rows(path), _SAMPLE_ROWS)
        return list(dict.fromkeys(key for _, row in rows for key in row))
    with _long_cells():
        reader = csv.reader(iter_lines(path), delimiter=delimiter_of(path))
        try:
            return _header(path, reader)
        except csv.Error as error:
            raise _not_a_row(path, error, reader.line_num) from None


def read_table(path: Path, kind: str, wanted: Sequence[str], required: Sequence[str]) -> Table:
    """Read the wanted columns of a file.

    Args:
        path: the file.
        kind: ``jsonl``, ``csv``, ``tsv`` or ``parquet``.
        wanted: the columns to keep.
        required: those that every JSON line must have; others may be left out.
    """
    if kind == "parquet":
        table = _read_parquet(path, wanted)
    elif kind == "jsonl":
        table = _read_json(path, wanted, required)
    else:
        table = _read_delimited(path, wanted, kind)
    if not len(table):
        raise bad(path, _NO_ROWS)
    return table


def iter_rows(path: Path, kind: str, wanted: Sequence[str], required: Sequence[str]) -> Rows:
    """Yield the line and the wanted cells of each row, as `read_table` reads them.

    Few rows are in memory at a time, but for two kinds of file that cannot be read in parts: JSON
    that is one list, and Parquet inside gzip.
    """
    if kind == "parquet":
        rows = _parquet_rows(path, wanted)
    elif kind == "jsonl":
        rows = _json_cells(path, wanted, required)
    else:
        quoting = csv.QUOTE_MINIMAL if kind == "csv" or _is_quoted(path) else csv.QUOTE_NONE
        rows = _delimited_rows(path, wanted, delimiter_of(path), quoting)
    count = 0
    for count, row in enumerate(rows, start=1):  # noqa: B007 - the count is read below
        yield row
    if not count:
        raise bad(path, _NO_ROWS)


def _gather(path: Path, wanted: Sequence[str], rows: Rows) -> Table:
    columns: list[list[Any]] = [[] for _ in wanted]
    lines = []
    for line, cells in rows:
        for values, cell in zip(columns, cells, strict=True):
            values.append(cell)
        lines.append(line)
    return Table(path, dict(zip(wanted, columns, strict=True)), lines)


def _read_json(path: Path, wanted: Sequence[str], required: Sequence[str]) -> Table:
    return _gather(path, wanted, _json_cells(path, wanted, required))


def _json_cells(path: Path, wanted: Sequence[str], required: Sequence[str]) -> Rows:
    for number, row in _json_rows(path):
        for name in required:
            if name not in row:
                there = ", ".join(row)
                raise bad(path, f"no {name!r} in this row; it has: {there}", number)
        yield number, [row.get(name) for name in wanted]


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line, object); a file that is one JSON list of objects is read whole."""
    lines = iter_lines(path)
    is_first = True
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if is_first and line.lstrip().startswith("["):
            yield from _json_list(path, line + "".join(lines), number)
            return
        is_first = False
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)
            raise bad(path, f"not a JSON object ({reason}): {shown(line)}", number) from None
        if not isinstance(row, dict):
            raise bad(path, f"{shown(row)} is not a JSON object; give one per line", number)
        yield number, row


def _json_list(path: Path, text: str, line: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line, object) from the text of a JSON list that starts on ``line``."""
    decode = json.JSONDecoder().raw_decode
    place = text.index("[")
    while True:
        start = _SPACE.match(text, place + 1).end()  # type: ignore[union-attr]
        line += text.count("\n", place, start)
        try:
            row, end = decode(text, start)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)
            raise bad(path, f"not a JSON list of objects ({reason})", line) from None
        if not isinstance(row, dict):
            raise bad(path, f"{shown(row)} is not a JSON object", line)
        yield line, row
        place = _SPACE.match(text, end).end()  # type: ignore[union-attr]
        line += text.count("\n", start, place)
        if text[place : place + 1] == "]":
            return
        if text[place : place + 1] != ",":
            raise bad(path, "the JSON list is cut short here; copy it again", line)


def delimiter_of(path: Path) -> str:
    """Return tab, comma or semicolon: what the header line of a table has most of."""
    header = next(iter_lines(path), "")
    return max(_DELIMITERS, key=header.count)


@contextmanager
def _long_cells() -> Iterator[None]:
    """Let cells be longer than the 131,072 characters the csv module allows by itself.

    Not without bound: a quotation mark that is never closed makes one cell of the whole file.
    """
    before = csv.field_size_limit(files.LONGEST_LINE)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _header(path: Path, rows: Any) -> list[str]:
    header = next((row for row in rows if row), None)
    if header is None:
        raise bad(path, EMPTY)
    names = [name.strip() for name in header]
    _must_differ(path, names, line=rows.line_num)
    return names


def _must_differ(path: Path, names: list[str], line: int | None = None) -> None:
    """Refuse two columns of one name; columns without a name cannot be asked for anyway."""
    twice = next((name for name, count in Counter(names).items() if name and count > 1), None)
    if twice is not None:
        count = names.count(twice)
        raise bad(path, f"{count} columns are called {twice!r}; rename all but one", line)


def _read_delimited(path: Path, wanted: Sequence[str], kind: str) -> Table:
    delimiter = delimiter_of(path)
    try:
        return _read_cells(path, wanted, delimiter, csv.QUOTE_MINIMAL)
    except DataError:
        # Many TSV files do not quote: there a quotation mark is a character like any other.
        if kind != "tsv":
            raise
        try:
            return _read_cells(path, wanted, delimiter, csv.QUOTE_NONE)
        except DataError as plain:
            error = plain
    raise error


def _read_cells(path: Path, wanted: Sequence[str], delimiter: str, quoting: Any) -> Table:
    return _gather(path, wanted, _delimited_rows(path, wanted, delimiter, quoting))


def _is_quoted(path: Path) -> bool:
    """Say whether all rows of a TSV file can be read with quotation marks around cells."""
    try:
        for _ in _delimited_rows(path, (), delimiter_of(path), csv.QUOTE_MINIMAL):
            pass
    except DataError:
        return False
    return True


def _delimited_rows(path: Path, wanted: Sequence[str], delimiter: str, quoting: Any) -> Rows:
    with _long_cells():
        reader = csv.reader(iter_lines(path), delimiter=delimiter, quoting=quoting, strict=True)
        try:
            yield from _cells(path, reader, wanted)
        except csv.Error as error:
            raise _not_a_row(path, error, reader.line_num) from None


def _not_a_row(path: Path, error: csv.Error, line: int) -> DataError:
    remedy = "quote cells that hold quotation marks or line ends"
    return bad(path, f"not a valid table row ({error}); {remedy}", line)


def _cells(path: Path, reader: Any, wanted: Sequence[str]) -> Rows:
    header = _header(path, reader)
    missing = next((name for name in wanted if name not in header), None)
    if missing is not None:  # they were found with another idea of quotation marks
        raise bad(path, f"no column {missing!r} in the header; quote every cell, or none", 1)
    places = [header.index(name) for name in wanted]
    for row in reader:
        if not row:
            continue
        if len(row) != len(header):
            counts = f"{len(row)} cells in this row but {len(header)} columns in the header"
            raise bad(path, f"{counts}; quote cells that hold the delimiter", reader.line_num)
        yield reader.line_num, [row[place] for place in places]


def _parquet_file(path: Path) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise bad(path, "reading Parquet needs pyarrow: pip install pyarrow") from None
    source: Any = path
    if is_gzip(path):
        with open_bytes(path) as stream:
            source = io.BytesIO(stream.read())
    try:
        return ParquetFile(source)
    except (ArrowException, ValueError, OSError) as error:
        raise bad(path, f"not a whole Parquet file ({error}); copy it again") from None


def _parquet_names(path: Path) -> list[str]:
    names = list(_parquet_file(path).schema_arrow.names)
    _must_differ(path, names)
    return names


def parquet_schema(path: Path) -> Any:
    """Return the Arrow schema of a Parquet file."""
    return _parquet_file(path).schema_arrow


def _read_parquet(path: Path, wanted: Sequence[str]) -> Table:
    return _gather(path, wanted, _parquet_rows(path, wanted))


def _parquet_rows(path: Path, wanted: Sequence[str]) -> Rows:
    file, line, unpacked = _parquet_file(path), 0, 0
    packed = path.stat().st_size
    with _broken_parquet(path):
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=list(wanted)):
            unpacked += batch.nbytes  # a value that repeats is stored once in the file
            check_tightness("the Parquet data", packed, unpacked)
            columns = [batch.column(name).to_pylist() for name in wanted]
            for cells in zip(*columns, strict=True):
                line += 1
                yield line, list(cells)


@contextmanager
def _broken_parquet(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:
        raise bad(path, "a string column is not UTF-8; write it again as UTF-8") from None
    except TooTightError as error:
        raise bad(path, str(error)) from None
    except (OSError, ValueError) as error:
        raise bad(path, f"the Parquet data is broken ({error}); copy it again") from None


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
class TableRows:
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


def _read_rows(files: dict[str, list[Path]], kind: str, picked: Picked) -> TableRows:
    pairs = [(split, path) for split, paths in files.items() for path in paths]
    tables = []
    for _, path in pairs:
        check_columns(path, kind, picked)
        tables.append(read_table(path, kind, picked.all, picked.text))
    return TableRows(tables, [split for split, _ in pairs])


def check_columns(path: Path, kind: str, picked: Picked) -> None:
    """Refuse a file that lacks a column; JSON lines may leave out what is empty, but the text."""
    known = column_names(path, kind)
    required = picked.text if kind == "jsonl" else picked.all
    missing = next((name for name in required if name not in known), None)
    if missing is not None:
        raise no_column(path, missing, known)


def _labels(
    rows: TableRows, picked: Picked, options: ReadOptions, source: Path
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
    rows: TableRows, lists: label_cells.LabelLists, picked: Picked, source: Path
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
