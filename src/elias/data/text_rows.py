"""Read the input texts for prediction, one row at a time, from a text file or a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from elias.data.load import detect_file
from elias.data.readers import table
from elias.data.readers.base import ReadOptions
from elias.data.readers.columns import check_columns
from elias.data.readers.files import data_error, iter_lines
from elias.data.readers.parquet import open_parquet

LINES = "lines"
"""Name of the format with one text per line."""
_TABLE_SUFFIXES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".xlsx"}


class TextRow(NamedTuple):
    """One text, its line number, and selected other cells of its row."""

    line: int
    """The 1-based number of the line on which the row ends. For Parquet, it is the row number."""
    text: str
    kept: tuple[Any, ...] = ()
    """The cells of the columns in `TextFile.keep`, in the same order."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of texts, and the columns to read from it."""

    path: Path
    kind: str
    """``lines``, ``jsonl``, ``csv``, ``tsv`` or ``parquet``."""
    columns: tuple[str, ...] = ()
    """The text columns of a table. Their cells are joined by spaces."""
    keep: tuple[str, ...] = ()
    """Columns of a table whose cells are returned with the text."""
    options: ReadOptions = ReadOptions()  # noqa: RUF009 - it is frozen
    """The encoding of the file, and whether a CSV or TSV file has a header."""

    @classmethod
    def find(
        cls,
        path: str | Path,
        *,
        text: str | None = None,
        keep: Sequence[str] = (),
        header: bool | None = None,
        encoding: str | None = None,
    ) -> TextFile:
        """Detect the kind of a file and choose its columns.

        Args:
            path: A file, gzipped or not. It is read as a table if it has the suffix of a table, or
                if ``text`` or ``keep`` is given. Otherwise each line is one text.
            text: The text column of a table, or several such as ``title,abstract``. By default,
                columns that look like text are read, see `load_corpus`.
            keep: Columns of a table whose cells are returned with the text.
            header: Whether a CSV or TSV file has a header. By default it is recognised.
            encoding: The encoding of the file, UTF-8 by default.

        Raises:
            DataError: If the file is a folder, is not a table, or does not have the columns.
        """
        path = Path(path)
        if path.is_dir():
            raise data_error(path, "is a folder; give a file of texts, or - for stdin")
        options = ReadOptions(text=text, header=header, encoding=encoding)
        if not is_table(path, text, keep):
            return cls(path, LINES, options=options)
        kind = detect_file(path, encoding)
        if kind not in table.KINDS:
            raise data_error(path, "is not a table; write one text per line in a .txt file")
        check_columns(path, keep, table.column_names(path, kind, options))
        return cls(path, kind, table.choose_text(path, kind, options), tuple(keep), options)

    def rows(self) -> Iterator[TextRow]:
        """Yield the rows. If a row cannot be read, the error gives its line number."""
        if self.kind == LINES:
            for number, text in enumerate(iter_lines(self.path, self.options.encoding), start=1):
                yield TextRow(number, text.removesuffix("\n").removesuffix("\r"))
            return
        wanted = [*self.columns, *self.keep]
        # a single text column must be in every row; other columns may be missing in some rows
        required = self.columns if len(self.columns) == 1 else ()
        for line, cells in table.iter_rows(self.path, self.kind, wanted, required, self.options):
            parts = cells[: len(self.columns)]
            text = " ".join(filter(None, (_text(part, self.path, line) for part in parts)))
            yield TextRow(line, text, tuple(cells[len(self.columns) :]))

    def arrow_types(self) -> dict[str, Any]:
        """Return the Arrow types of the columns in ``keep`` if the file is Parquet, else ``{}``."""
        if self.kind != "parquet":
            return {}
        schema = open_parquet(self.path).schema_arrow
        return {name: schema.field(name).type for name in self.keep}


def is_table(path: Path, text: str | None, keep: Sequence[str]) -> bool:
    """Return True if a file has the suffix of a table, or if ``text`` or ``keep`` is given."""
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    return text is not None or bool(keep) or suffix in _TABLE_SUFFIXES


def json_text_rows(
    lines: Iterable[str], source: str, column: str, keep: Sequence[str] = ()
) -> Iterator[TextRow]:
    """Yield the rows of JSON lines that do not come from a file but, for example, from stdin."""
    path, columns = Path(source), [column, *keep]
    for line, [text, *cells] in table.json_cells(path, lines, columns, columns):
        yield TextRow(line, _text(text, path, line), tuple(cells))


def _text(value: Any, path: Path, line: int) -> str:
    if value is None:
        return ""
    if not isinstance(value, str | int | float):
        raise data_error(path, f"holds {type(value).__name__}, which is not a text", line)
    return str(value)
