"""JSON lines, CSV, TSV and Parquet as columns of Python values, with the line of each row."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from elias.bounded import TooTightError, check_tightness
from elias.data.formats import sources
from elias.data.formats.sources import EMPTY, bad, is_gzip, iter_lines, open_bytes, shown
from elias.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

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
    before = csv.field_size_limit(sources.LONGEST_LINE)
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
