"""Read tables: JSON lines, CSV, TSV, Parquet, Excel, fastText and Annif's corpora.

A table is one file (optionally with a column ``split``), or a folder with one or more files for
each split: ``train.*``, ``validation.*``, ``test.*``. A ``labels.txt`` in the folder contains the
label names, one per line. Columns are chosen by common names, by content or by options. Two
optional columns, ``label_ids`` and ``label_weights``, contain lists of the same lengths as the
lists of labels.

A full-text folder of Annif is read like a table with a row for each document. The subjects of
``a.txt`` are in ``a.tsv``, with one line ``<URI><tab>label`` per subject, or in ``a.key``, with one
label per line. Splits are subfolders.
"""

from __future__ import annotations

import csv
import json
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any

import numpy as np

from elias.data.near_duplicates import cell_keys
from elias.data.readers import base, files, label_cells
from elias.data.readers.columns import (
    FALSE_CELLS,
    LABEL_COLUMNS,
    TRUE_CELLS,
    Columns,
    check_columns,
    choose_columns,
    guess_text,
    is_header,
    named_columns,
    numbered_columns,
)
from elias.data.readers.files import data_error, iter_lines, read_text, short_repr
from elias.data.readers.label_cells import (
    NamedLabels,
    NumberedLabels,
    is_uri_list,
    parse_weights,
    split_cells,
    strip_uri,
)
from elias.data.readers.parquet import open_parquet, parquet_rows
from elias.errors import DataError, quoted
from elias.progress import progress

Cells = Iterator[tuple[int, list[Any]]]
"""Iterator over the line number (see `Rows.lines`) and the wanted cells of each row."""


KINDS = ("jsonl", "csv", "tsv", "parquet", "xlsx", "fasttext", "annif")
FULL_TEXT = "full-text"
_DELIMITED = ("csv", "tsv", "xlsx")
_SUBJECTS = (".tsv", ".key")
"""Suffixes of the file with the subjects of a document, in order of preference."""
_SAMPLE_ROWS = 100
_SPACE = re.compile(r"\s*")
_FASTTEXT = re.compile(r"__label__(\S+)\s?")
_DELIMITERS = ("\t", ",", ";")
# quotation mark that starts a cell; \xbf ends a BOM
_CELL_QUOTE = re.compile(rb'"(?<=[\t,;\r\n\xbf]")')
_SIZED = (str, list)  # types of cells whose length counts towards the size of a chunk


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of one file, by column."""

    path: Path
    split: str
    """The split of the file. It is empty if a column gives the split, or if there are no splits."""
    columns: dict[str, list[Any]]
    lines: Sequence[int]
    """The 1-based number of the line on which each row ends. For Parquet, it is the row number."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lines)

    def error(self, row: int, problem: str) -> DataError:
        """Return a `DataError` that names the file and the line of a row."""
        return data_error(self.path, problem, self.lines[row])

    def texts(self, names: tuple[str, ...]) -> list[str]:
        """Return the text of every row. Several columns are joined by spaces."""
        columns = [self._strings(name) for name in names]
        if len(columns) == 1:
            return columns[0]
        return [" ".join(filter(None, parts)) for parts in zip(*columns, strict=True)]

    def _strings(self, name: str) -> list[str]:
        values = list(self.columns[name])
        for row, value in enumerate(values):
            if not isinstance(value, str):
                if isinstance(value, list | dict | bytes):
                    problem = f"column {name!r} holds {short_repr(value)}, which is not a text"
                    raise self.error(row, problem)
                values[row] = "" if label_cells.is_missing(value) else str(value)
        return values

    def indicated(self, names: Sequence[str]) -> list[list[str]]:
        """Return, for every row, the names of the columns that hold 1."""
        rows: list[list[str]] = [[] for _ in self.lines]
        for name in names:
            for row, cell in enumerate(self.columns[name]):
                value = "" if label_cells.is_missing(cell) else str(cell).strip().lower()
                if value in TRUE_CELLS:
                    rows[row].append(name)
                elif value not in FALSE_CELLS:
                    problem = f"column {name!r} holds {short_repr(cell)}, which is neither 0 nor 1"
                    raise self.error(
                        row, f"{problem}; correct it, or name other label columns with labels="
                    )
        return rows

    def splits(self, column: str | None) -> list[str]:
        """Return the split of every row."""
        if column is None:
            return [self.split or "train"] * len(self)
        values = [str(value or "") for value in self.columns[column]]
        known = {value: base.split_alias(value) for value in set(values)}
        for row, value in enumerate(values):
            if known[value] is None:
                remedy = "use train, validation or test, or rename the column"
                raise self.error(row, f"split {short_repr(value)} is unknown; {remedy}")
        return [known[value] or "" for value in values]


class TableReader(base.Reader):
    """Reader of the files of a table.

    The label separator depends on all cells of the labels column, so two passes are needed. If the
    corpus is read into memory, the files are read once and the rows are kept. Otherwise the label
    columns are read first, and then all columns.
    """

    def __init__(
        self,
        source: Path,
        by_split: dict[str, list[Path]],
        kind: str,
        options: base.ReadOptions,
        *,
        in_memory: bool,
    ) -> None:
        self.format = kind
        self._source = source
        self._files = [
            (split, TableFile(path, kind, options))
            for split, paths in by_split.items()
            for path in paths
        ]
        self._options = options
        self._in_memory = in_memory
        self._first = first = self._files[0][1]
        columns, self._left_out = choose_columns(first.path, first.sample(), options)
        others = [name for name in first.names if name.strip().lower() in LABEL_COLUMNS]
        taken = columns.all if options.labels is None else others
        self._other_labels = [name for name in others if name not in taken]
        if "" not in by_split:  # the split is given by the file name, not by a column
            columns = replace(columns, split=None)
        self._columns: Columns = columns
        self.has_splits = "" not in by_split or columns.split is not None
        # a JSON row may omit any column except a single text column
        self._required = columns.text if len(columns.text) == 1 else ()
        for _, file in self._files:
            needed = self._required if kind == "jsonl" else columns.all
            check_columns(file.path, needed, file.names)
        self._labels: NamedLabels | NumberedLabels = NumberedLabels()
        if columns.ids is None:
            has_names = source.is_dir() and kind != FULL_TEXT
            self._labels = NamedLabels(base.read_label_names(source) if has_names else None)
        self._format = label_cells.CellFormat("")

    def chunks(self) -> Iterator[base.Chunk]:
        """Yield the texts and labels of each split."""
        columns = self._columns
        rows_in_memory = list(self._read(columns.all)) if self._in_memory else None

        def read(*names: str) -> Iterable[Rows]:
            return self._read(names) if rows_in_memory is None else rows_in_memory

        if not columns.indicators:
            separator = self._options.separator
            self._format = _cell_format(read(columns.labels), columns.labels, separator)
        id_format = label_cells.CellFormat("")
        if columns.ids is not None:
            id_format = _cell_format(read(columns.ids), columns.ids, None)
        for rows in read(*columns.all):
            cells: Sequence[object] = (
                rows.indicated(columns.indicators)
                if columns.indicators
                else rows.columns[columns.labels]
            )
            keep_empty = columns.ids is not None
            lists = split_cells(cells, self._format, rows.error, keep_empty=keep_empty)
            counts, id_lists, weights = lists[0], None, None
            if columns.ids is not None:
                id_lists = split_cells(rows.columns[columns.ids], id_format, rows.error)
            codes = self._labels.add(lists, id_lists, rows)
            if columns.weights is not None:
                weights = parse_weights(rows.columns[columns.weights], counts, rows.error)
            labels = base.LabelRows(counts, codes, weights)
            texts = rows.texts(columns.text)
            groups = None if columns.group is None else cell_keys(rows.columns[columns.group])
            splits = np.array(rows.splits(columns.split))
            for name in sorted(set(splits.tolist())):
                chosen = splits == name
                yield base.Chunk(
                    name,
                    list(compress(texts, chosen)),
                    labels.take(chosen),
                    groups=None if groups is None else groups[chosen],
                )

    def column(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield the split of each row, and its cell as text, in the order of the points."""
        for _, file in self._files:
            check_columns(file.path, [name], file.names)
        split = self._columns.split
        for rows in self._read([name] if split is None else list(dict.fromkeys([name, split]))):
            yield from zip(rows.splits(split), rows.texts((name,)), strict=True)

    def _read(self, names: Sequence[str]) -> Iterator[Rows]:
        required = [name for name in self._required if name in names]
        for split, file in self._files:
            yield from file.chunks(split, names, required)

    def finish(self, n_points: Mapping[str, int], n_uses: int) -> base.Summary:
        """Return the label names, and notes on the columns."""
        if "train" not in n_points:
            problem = f"no training rows, only: {', '.join(n_points)}; mark some rows as train"
            raise data_error(self._source, problem)
        ids, names = self._labels.finish(n_uses)
        if self.format == FULL_TEXT:
            notes = {"text": "*.txt", "labels": "*.tsv or *.key"}
            n_documents = sum(len(list(file.path.glob("*.txt"))) for _, file in self._files)
            if n_left_out := n_documents - sum(n_points.values()):
                notes["text"] += f"; left out: {n_left_out} without a *.tsv or *.key file"
            return base.Summary(names, ids, notes=notes)
        columns = self._columns
        notes = {"text": _listed(columns.text)}
        if self._left_out:
            notes["text"] += f"; left out: {_listed(self._left_out)}"
        notes["labels"] = f"{_listed([columns.labels])}{self._format.describe()}"
        recorded: dict[str, Any] = {"text": ",".join(columns.text)}
        if columns.indicators:
            notes["labels"] = f"{_listed(columns.indicators)}, each 0 or 1"
            recorded["labels"] = ",".join(columns.indicators)
        if not self._first.has_header:
            notes["header"] = "none; columns are named by their numbers"
            recorded |= {"header": False, "labels": recorded.get("labels", columns.labels)}
        if self._other_labels:
            notes["labels"] += f"; left out: {_listed(self._other_labels)}"
        if columns.group is not None:
            notes["groups"] = _listed([columns.group])
        if self._format.separator and not self._format.any_list:
            recorded["separator"] = self._format.separator
        return base.Summary(names, ids, notes=notes, reading=recorded)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:6])) + (", …" if len(names) > 6 else "")
    return f"column {shown}" if len(names) == 1 else f"{len(names)} columns, {shown}"


def _cell_format(
    rows: Iterable[Rows], column: str, separator: str | None
) -> label_cells.CellFormat:
    """Return the format with this separator. If it is None, detect the format from all cells."""
    if separator is not None:
        return label_cells.CellFormat(separator, lists=False)
    votes = label_cells.SeparatorVotes()
    with progress("Reading labels") as advance:
        for chunk in rows:
            votes.add(chunk.columns[column], chunk.error)
            advance(len(chunk))
    return votes.winner()


@dataclass(frozen=True)
class TableFile:
    """A file of a table. The rows are read a few at a time.

    Only gzipped Parquet, and a file that is a single JSON list, are read as a whole.
    """

    path: Path
    kind: str
    """The format, one of `KINDS`."""
    options: base.ReadOptions = base.ReadOptions()  # noqa: RUF009 - it is frozen
    """The encoding, and whether there is a header."""

    @cached_property
    def names(self) -> list[str]:
        """Return the column names. For JSON lines, these are the keys of the first rows."""
        if self.kind == "parquet":
            names = open_parquet(self.path).schema_arrow.names
            self._header(names)
            return list(names)
        if self.kind == "jsonl":
            rows = islice(_json_rows(self.path, self._lines()), _SAMPLE_ROWS)
            return list(dict.fromkeys(key for _, row in rows for key in row))
        if self.kind in ("fasttext", "annif", FULL_TEXT):
            return ["text", "labels"]
        if not self.has_header:
            return numbered_columns(len(self._head[0]))
        with self._reader(self._quoting) as (reader, first):
            return self._header(first, reader.line_num)

    @cached_property
    def has_header(self) -> bool:
        """Return True if the file has a header. Only CSV, TSV and Excel files may lack one."""
        if self.kind not in _DELIMITED:
            return True
        return is_header(self._head if self.options.header is None else (), self.options)

    @cached_property
    def _head(self) -> list[list[str]]:
        """Return the stripped cells of the first rows of a CSV, TSV or Excel file."""
        with self._reader(self._quoting) as (reader, first):
            rows = chain([first], filter(None, reader))
            return [[cell.strip() for cell in row] for row in islice(rows, _SAMPLE_ROWS)]

    def sample(self) -> dict[str, list[Any]]:
        """Return the first cells of each column."""
        names = self.names
        if self.kind in _DELIMITED:
            rows = [row for row in self._head[self.has_header :] if len(row) == len(names)]
        else:
            cells = self.rows(list(dict.fromkeys(names)))
            rows = [row for _, row in islice(cells, _SAMPLE_ROWS)]
        columns = zip(*rows, strict=True) if rows else ([] for _ in names)
        return dict(zip(names, map(list, columns), strict=True))

    def text_columns(self) -> tuple[str, ...]:
        """Return the text columns in the options or, by default, columns that look like text."""
        if self.options.text is not None:
            return named_columns(self.path, self.options.text, self.names)
        return guess_text(self.path, self.sample(), set())[0]

    def chunks(
        self,
        split: str,
        wanted: Sequence[str],
        required: Sequence[str],
        *,
        max_rows: int | None = None,
    ) -> Iterator[Rows]:
        """Yield the rows in chunks with a limited number of rows and characters."""
        max_rows = max_rows or files.CHUNK_ROWS
        lines: list[int] = []
        columns: list[list[Any]] = [[] for _ in wanted]
        size = 0
        for line, cells in self.rows(wanted, required):
            lines.append(line)
            for column, cell in zip(columns, cells):  # noqa: B905 - strict takes time
                column.append(cell)
                if isinstance(cell, _SIZED):
                    size += len(cell)
            if len(lines) >= max_rows or size >= files.CHUNK_CHARACTERS:
                yield Rows(self.path, split, dict(zip(wanted, columns, strict=True)), lines)
                lines, columns, size = [], [[] for _ in wanted], 0
        if lines:
            yield Rows(self.path, split, dict(zip(wanted, columns, strict=True)), lines)

    def rows(self, wanted: Sequence[str], required: Sequence[str] = ()) -> Cells:
        """Yield the line number and the wanted cells of each row.

        Args:
            wanted: The columns to return.
            required: The columns that every JSON object must have. Other missing cells are None.
        """
        if self.kind == "parquet":
            rows = parquet_rows(self.path, wanted)
        elif self.kind == "jsonl":
            rows = json_cells(self.path, self._lines(), wanted, required)
        elif self.kind in ("fasttext", "annif"):
            rows = self._line_rows(wanted)
        elif self.kind == FULL_TEXT:
            rows = self._documents(wanted)
        else:
            rows = self._delimited_rows(wanted)
        first = next(rows, None)
        if first is None:
            raise data_error(self.path, "has no rows; add at least one")
        yield first
        yield from rows

    def _lines(self) -> Iterator[str]:
        return iter_lines(self.path, self.options.encoding)

    def _line_rows(self, wanted: Sequence[str]) -> Cells:
        """Yield the rows of a fastText file, or of a short-text file of Annif."""
        for number, line in enumerate(self._lines(), start=1):
            if not line.strip():
                continue
            if self.kind == "fasttext":
                text, labels = _FASTTEXT.sub("", line), _FASTTEXT.findall(line)
            else:
                text, _, subjects = line.partition("\t")
                labels = list(map(strip_uri, subjects.split()))
            cells = {"text": text.strip(), "labels": labels}
            yield number, [cells[name] for name in wanted]

    def _documents(self, wanted: Sequence[str]) -> Cells:
        """Yield the documents of a full-text folder. Skip documents without subjects."""
        for number, path in enumerate(sorted(self.path.glob("*.txt")), start=1):
            subjects = _subject_file(path)
            if subjects is not None:
                lines = iter_lines(subjects, self.options.encoding)
                cells: dict[str, Any] = {"labels": [x for line in lines if (x := _label(line))]}
                if "text" in wanted:
                    cells["text"] = read_text(path, self.options.encoding).strip()
                yield number, [cells[name] for name in wanted]

    def _delimited_rows(self, wanted: Sequence[str]) -> Cells:
        positions = [self.names.index(name) for name in wanted]
        with self._reader(self._quoting) as (reader, first):
            for row in reader if self.has_header else chain([first], reader):
                if not row:
                    continue
                if len(row) != len(first):
                    where = "the header" if self.has_header else "the first row"
                    counts = f"{len(row)} cells in this row but {len(first)} columns in {where}"
                    problem = f"{counts}; quote cells that contain the delimiter"
                    raise data_error(self.path, problem, reader.line_num)
                yield reader.line_num, [row[position] for position in positions]

    @contextmanager
    def _reader(self, quoting: Any) -> Iterator[tuple[Any, list[str]]]:
        """Open a CSV, TSV or Excel file. Yield the reader and the first row.

        The maximum cell length is larger than the default of 131,072 characters, but finite.
        Without a limit, an unclosed quotation mark would turn the whole file into one cell.
        """
        reader: Any = _Sheet(self.path)
        if self.kind != "xlsx":
            delimiter = _delimiter(files.head_lines(self.path, self.options.encoding))
            reader = csv.reader(self._lines(), delimiter=delimiter, quoting=quoting, strict=True)
        limit = csv.field_size_limit(files.MAX_LINE)
        try:
            first = next(filter(None, reader), None)
            if first is None:
                raise data_error(self.path, files.EMPTY)
            yield reader, first
        except csv.Error as error:
            remedy = "quote cells that contain quotation marks or line ends"
            problem = f"not a valid table row ({error}); {remedy}"
            raise data_error(self.path, problem, reader.line_num) from None
        finally:
            csv.field_size_limit(limit)

    def _header(self, first: list[str], line: int | None = None) -> list[str]:
        """Return the column names in the first row. Raise an error if two are the same."""
        names = [name.strip() for name in first]
        for name, count in Counter(names).items():
            if name and count > 1:  # columns without a name are ignored
                problem = f"{count} columns are called {name!r}; rename all but one"
                raise data_error(self.path, problem, line)
        return names

    @cached_property
    def _quoting(self) -> int:
        """Return the quoting constant of `csv` for this file.

        A TSV file is read with quoting if a cell starts with a quotation mark, and all rows then
        have the same number of cells. Otherwise, a quotation mark is an ordinary character.
        """
        if self.kind != "tsv":
            return csv.QUOTE_MINIMAL
        with files.open_bytes(self.path, self.options.encoding) as stream:
            last, block = b"\n", stream.read(files.READ_BYTES)
            while block and not _CELL_QUOTE.search(last + block):
                last, block = block[-1:], stream.read(files.READ_BYTES)
        if not block:
            return csv.QUOTE_NONE
        try:
            with self._reader(csv.QUOTE_MINIMAL) as (reader, first):
                is_quoted = set(map(len, reader)) <= {0, len(first)}
        except DataError:
            is_quoted = False
        return csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE


def json_cells(
    path: Path, lines: Iterable[str], wanted: Sequence[str], required: Sequence[str]
) -> Cells:
    """Yield the line number and the wanted cells of each JSON object."""
    for number, row in _json_rows(path, lines):
        for name in required:
            if name not in row:
                problem = f"no {name!r} in this row, only: {', '.join(row)}; add it"
                raise data_error(path, problem, number)
        yield number, [row.get(name) for name in wanted]


def _json_rows(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the object of each row.

    A file that is a single JSON list of objects is read at once.
    """
    lines = iter(lines)
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
            problem = f"not a JSON object ({reason}): {short_repr(line)}; correct the line"
            raise data_error(path, problem, number) from None
        if not isinstance(row, dict):
            problem = f"{short_repr(row)} is not a JSON object; write one object per line"
            raise data_error(path, problem, number)
        yield number, row


def _json_list(path: Path, text: str, line: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the object of each item of a JSON list that starts on ``line``."""
    decode = json.JSONDecoder().raw_decode
    position, mark = text.index("["), ","
    while mark == ",":
        start = _SPACE.match(text, position + 1).end()  # type: ignore[union-attr]
        line += text.count("\n", position, start)
        try:
            row, end = decode(text, start)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)
            problem = f"not a JSON list of objects ({reason}); correct it"
            raise data_error(path, problem, line) from None
        if not isinstance(row, dict):
            problem = f"{short_repr(row)} is not a JSON object; write a list of objects"
            raise data_error(path, problem, line)
        yield line, row
        position = _SPACE.match(text, end).end()  # type: ignore[union-attr]
        line += text.count("\n", start, position)
        mark = text[position : position + 1]
    if mark != "]":
        raise data_error(path, "the JSON list is cut short here; copy it again", line)


def looks_annif(lines: Sequence[str]) -> bool:
    """Return True if the lines look like a short-text corpus of Annif: text, tab, URIs."""
    subjects = [line.partition("\t")[2].strip() for line in lines]
    return any(subjects) and all(is_uri_list(cell) for cell in subjects if cell)


def _delimiter(lines: Sequence[str]) -> str:
    """Return the delimiter of the cells.

    It is a tab if all lines have the same number of tabs, else the most frequent delimiter of the
    first line.
    """
    lines = [line for line in lines if line.strip()] or [""]
    n_tabs = {line.count("\t") for line in lines}
    if len(n_tabs) == 1 and 0 not in n_tabs:
        return "\t"
    return max(_DELIMITERS, key=lines[0].count)


class _Sheet:
    """Reader of the rows of an Excel file's first sheet as text, like `csv.reader`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.line_num = 0
        self._rows = self._read()

    def __iter__(self) -> Iterator[list[str]]:
        return self._rows

    def _read(self) -> Iterator[list[str]]:
        try:
            from openpyxl import load_workbook
        except ImportError:
            remedy = "install elias-xmc[excel], or save it as CSV"
            raise data_error(self._path, f"Excel files need openpyxl; {remedy}") from None
        try:
            with files.open_bytes(self._path) as stream:
                for member in zipfile.ZipFile(stream).infolist():
                    files.check_ratio(member.filename, member.compress_size, member.file_size)
                with warnings.catch_warnings(action="ignore"):
                    sheet = load_workbook(stream, read_only=True, data_only=True).worksheets[0]
                width = 0
                for self.line_num, cells in enumerate(sheet.iter_rows(values_only=True), start=1):
                    row = list(map(_excel_text, cells))
                    while row and not row[-1] and (not width or len(row) > width):
                        row.pop()
                    width = width or len(row)
                    if any(row):
                        yield row + [""] * (width - len(row))
        except (DataError, GeneratorExit):
            raise
        except Exception as error:  # openpyxl raises errors of many types for a damaged file
            problem = f"not a complete Excel file ({quoted(error)}); save it again, or as CSV"
            raise data_error(self._path, problem) from None


def _excel_text(cell: object) -> str:
    if cell is None:
        return ""
    return str(int(cell) if isinstance(cell, float) and cell.is_integer() else cell)


def full_text_folders(path: Path) -> dict[str, list[Path]]:
    """Return the full-text folders by split, or an empty dictionary if there are none.

    The only key is ``""`` if the folder has documents of its own, and therefore no splits.
    """
    if _is_full_text(path):
        return {"": [path]}
    folders_by_split = {
        split: [folder for folder in folders if _is_full_text(folder)]
        for split, folders in base.split_files(path, folders=True).items()
    }
    folders_by_split = {split: folders for split, folders in folders_by_split.items() if folders}
    return folders_by_split if "train" in folders_by_split else {}


def _is_full_text(folder: Path) -> bool:
    """Return whether a folder has a document with subjects."""
    return any(_subject_file(document) for document in folder.glob("*.txt"))


def _subject_file(document: Path) -> Path | None:
    paths = (document.with_suffix(suffix) for suffix in _SUBJECTS)
    return next((path for path in paths if path.is_file()), None)


def _label(line: str) -> str:
    """Return the URI of a subject if the line has one, else its label."""
    cells = [cell.strip() for cell in line.split("\t")]
    uris = (strip_uri(cell) for cell in cells if cell != strip_uri(cell))
    return next(uris, None) or next(filter(None, cells), "")
