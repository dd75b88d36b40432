"""Writing texts one to a line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_LINE_END = re.compile(r"\r\n|\r|\n")


def one_line(text: str) -> str:
    r"""Return the text with each line end as a space.

    >>> one_line("two\r\nlines")
    'two lines'
    """
    return _LINE_END.sub(" ", text) if "\n" in text or "\r" in text else text


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines as UTF-8, making the folder where it is missing."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for line in lines:
            out.write(one_line(line))
            out.write("\n")
