"""The texts to predict labels for: lines of a file or of stdin, or a column of a table."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")

STDIN = Path("-")
_TABLES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"}


def read_texts(source: Path, column: str | None) -> Iterator[str]:
    """Yield the texts one at a time; an empty line is an empty text.

    Args:
        source: A file, or ``-`` for stdin.
        column: The text column: then a file is a table, and stdin JSON lines. Without it a file
            is a table if its name ends like one's, and any other has one text per line.
    """
    if source == STDIN:
        lines = _stdin_lines()
        return lines if column is None else _json_texts(lines, Path("stdin"), column)
    if source.is_dir():
        raise DataError(f"{source}: is a folder; give a file of texts, or - for stdin")
    if column is None and Path(source.name.removesuffix(".gz")).suffix.lower() not in _TABLES:
        from elias.data.formats.sources import iter_lines

        return (line.rstrip("\n").rstrip("\r") for line in iter_lines(source))
    return _table_texts(source, column)


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items as lists of ``size``, the last one shorter.

    >>> list(chunks("abc", 2))
    [['a', 'b'], ['c']]
    """
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _stdin_lines() -> Iterator[str]:
    from elias.data.formats.sources import not_utf8

    for number, raw in enumerate(sys.stdin.buffer, start=1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"stdin:{number}: {not_utf8(error)}") from None
        if number == 1:
            line = line.removeprefix("\ufeff")
        yield line.rstrip("\n").rstrip("\r")


def _table_texts(path: Path, column: str | None) -> Iterator[str]:
    from elias.data.formats.columns import TEXT, no_column
    from elias.data.formats.recognise import recognise_file
    from elias.data.formats.sources import bad, iter_lines
    from elias.data.formats.tables import column_names, read_table

    kind = recognise_file(path)
    if kind not in ("jsonl", "csv", "tsv", "parquet"):
        raise bad(path, "is not a table; write one text per line in a .txt file")
    names = column_names(path, kind)
    plain = {name.lower(): name for name in reversed(names)}
    if column is None:
        column = next((plain[name] for name in TEXT if name in plain), None)
        if column is None:
            there = ", ".join(map(repr, names))
            raise bad(path, f"no text column among {there}; name one with --text")
    wanted = [column] if column in names else [part.strip() for part in column.split(",")]
    for name in wanted:
        if name not in names:
            raise no_column(path, name, names)
    if kind == "jsonl" and len(wanted) == 1 and not _is_list(path):
        return _json_texts(iter_lines(path), path, wanted[0])
    table = read_table(path, kind, wanted, wanted)
    rows = zip(*(table.columns[name] for name in wanted), strict=True)
    return (
        " ".join(filter(None, (_text(cell, path, line) for cell in row)))
        for row, line in zip(rows, table.lines, strict=True)
    )


def _is_list(path: Path) -> bool:
    """Say whether a JSON file is one list instead of an object per line."""
    from elias.data.formats.sources import read_head

    return read_head(path).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _json_texts(lines: Iterable[str], path: Path, column: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not a JSON object ({error})") from None
        if not isinstance(row, dict) or column not in row:
            raise DataError(f"{path}:{number}: no {column!r} in this row")
        yield _text(row[column], path, number)


def _text(value: Any, path: Path, line: int) -> str:
    if value is None:
        return ""
    if not isinstance(value, str | int | float):
        raise DataError(f"{path}:{line}: holds {type(value).__name__}, which is not a text")
    return str(value)
