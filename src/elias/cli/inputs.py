"""Read the texts to predict labels for, from a file or stdin."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from elias.cli.options import errors_name_options, training_options
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from elias.data.readers.text_rows import TextFile, TextRow


T = TypeVar("T")

STDIN = Path("-")


def read_rows(
    source: Path,
    column: str | None,
    keep: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Iterator[TextRow]:
    """Yield the texts one at a time; an empty line is an empty text.

    Args:
        source: A file, or ``-`` for stdin.
        column: Text column. If given, a file is read as a table and stdin as JSON lines. If None,
            a file is read as a table if it has the extension of a table format; other input has
            one text per line.
        keep: Columns to return with each text.
        settings: Reading options of the model's training data, used if no column is given.
    """
    if source != STDIN:
        return open_file(source, column, keep, settings).rows()

    from elias.data.readers.text_rows import TextRow, json_text_rows

    lines = _stdin_lines()
    if column is not None:
        return json_text_rows(lines, "stdin", column, keep)
    if keep:
        raise DataError("--keep: plain lines on stdin have no columns; name the text's with --text")
    return (TextRow(number, line) for number, line in enumerate(lines, start=1))


def open_file(
    source: Path, column: str | None, keep: Sequence[str], settings: Mapping[str, Any] | None = None
) -> TextFile:
    """Find the text column and the kept columns of a file."""
    from elias.data.readers.text_rows import TextFile, is_table

    if settings and source.is_file() and is_table(source, column, keep):
        column = training_options(source, settings, text=column).get("text")
    with errors_name_options():
        return TextFile.find(source, text=column, keep=keep)


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items as lists of ``size``; the last one may be shorter.

    >>> list(chunks("abc", 2))
    [['a', 'b'], ['c']]
    """
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _stdin_lines() -> Iterator[str]:
    from elias.data.readers.files import describe_utf8_error

    for number, raw in enumerate(sys.stdin.buffer, start=1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"stdin:{number}: {describe_utf8_error(error)}") from None
        if number == 1:
            line = line.removeprefix("\ufeff")
        yield line.rstrip("\n").rstrip("\r")
