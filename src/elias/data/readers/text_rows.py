"""Texts to predict labels for, one row at a time: lines of a file, or columns of a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from elias.data.readers.columns import no_column, pick_text
from elias.data.readers.detect import recognise_file
from elias.data.readers.files import bad, iter_lines, shown
from elias.data.readers.table import column_names, iter_rows, parquet_schema
from elias.errors import DataError

LINES = "lines"
"""The kind of a file with one text per line."""
_TABLES = ("jsonl", "csv", "tsv", "parquet")
_TABLE_SUFFIXES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"}


class TextRow(NamedTuple):
    """One text, where it stands, and what of its row goes along."""

    line: int
    """The 1-based line on which the row ends; its number in Parquet."""
    text: str
    kept: tuple[Any, ...] = ()
    """The cells of the columns to keep, in their order."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of texts, and which of its columns are read."""

    path: Path
    kind: str
    """``lines``, ``jsonl``, ``csv``, ``tsv`` or ``parquet``."""
    columns: tuple[str, ...] = ()
    """The text columns of a table, joined by spaces."""
    keep: tuple[str, ...] = ()
    """Columns of a table whose cells go along with the text."""

    @classmethod
    def find(
        cls, path: str | Path, *, text: str | None = None, keep: Sequence[str] = ()
    ) -> TextFile:
        """Look at a file's beginning and find its columns.

        Args:
            path: A table if its name ends like one's or a column is asked for, else a file with
                one text per line; gzipped or not.
            text: The text column of a table, or several as ``title,abstract``; without it, a
                common name such as ``text``.
            keep: Columns of a table whose cells go along.

        Raises:
            DataError: If it is no such file, or has no such columns.
        """
        path = Path(path)
        if path.is_dir():
            raise bad(path, "is a folder; give a file of texts, or - for stdin")
        if not is_table(path, text, keep):
            return cls(path, LINES)
        kind = recognise_file(path)
        if kind not in _TABLES:
            raise bad(path, "is not a table; write one text per line in a .txt file")
        names = column_names(path, kind)
        for name in keep:
            if name not in names:
                raise no_column(path, name, names)
        return cls(path, kind, pick_text(path, names, text), tuple(keep))

    def rows(self) -> Iterator[TextRow]:
        """Yield the rows from the first on; one that cannot be read is named by its line."""
        if self.kind == LINES:
            for number, text in enumerate(iter_lines(self.path), start=1):
                yield TextRow(number, text.rstrip("\n").rstrip("\r"))
            return
        wanted = [*self.columns, *self.keep]
        # where several columns make a text, or one is kept, a row may well lack some of them
        required = self.columns if len(self.columns) == 1 else ()
        for line, cells in iter_rows(self.path, self.kind, wanted, required):
            parts = cells[: len(self.columns)]
            text = " ".join(filter(None, (_text(part, self.path, line) for part in parts)))
            yield TextRow(line, text, tuple(cells[len(self.columns) :]))

    def arrow_types(self) -> dict[str, Any]:
        """Return the Arrow types of the columns to keep, where the file says them."""
        if self.kind != "parquet":
            return {}
        schema = parquet_schema(self.path)
        return {name: schema.field(name).type for name in self.keep}


def is_table(path: Path, text: str | None, keep: Sequence[str]) -> bool:
    """Return whether a file is read as a table: by its suffix, or since columns are asked for."""
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    return text is not None or bool(keep) or suffix in _TABLE_SUFFIXES


def json_text_rows(
    lines: Iterable[str], source: str, column: str, keep: Sequence[str] = ()
) -> Iterator[TextRow]:
    """Yield the rows of JSON lines that come from no file, such as stdin."""
    place = Path(source)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise bad(place, f"not a JSON object ({error}): {shown(line)}", number) from None
        for name in (column, *keep):
            if not isinstance(row, dict) or name not in row:
                raise bad(place, f"no {name!r} in this row", number)
        yield TextRow(number, _text(row[column], place, number), tuple(row[n] for n in keep))


def _text(value: Any, path: Path, line: int) -> str:
    if value is None:
        return ""
    if not isinstance(value, str | int | float):
        raise DataError(f"{path}:{line}: holds {type(value).__name__}, which is not a text")
    return str(value)
