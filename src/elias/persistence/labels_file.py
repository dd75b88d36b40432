r"""Read and write names and the label table as text, one entry per line.

Any string is allowed. Special characters are escaped: ``\\``, ``\n``, ``\r``, and ``\uXXXX`` for
other control characters, line separators, the byte order mark and lone surrogates. All other
characters are written as UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from elias.errors import ModelError, damaged_file, quoted

LABEL_COLUMNS = ("name", "id", "synonyms", "description")
"""Columns of the label table; all but the name are optional.

An ``id`` is an identifier or URI in the user's vocabulary, ``synonyms`` a JSON array of strings.
"""

_SPECIAL = re.compile("[\\\\\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")
_ESCAPE = re.compile(r"\\(?:([\\nr])|u([0-9a-f]{4})|)")
_SHORT = {"\\": "\\", "n": "\n", "r": "\r"}
_SHORT_OF = {character: letter for letter, character in _SHORT.items()}


def escape(name: str) -> str:
    r"""Return the name as one line without tabs.

    >>> print(escape("two\nlines"))
    two\nlines
    """
    return _SPECIAL.sub(_escaped, name)


def unescape(line: str) -> str:
    r"""Return the name that `escape` turned into a line.

    >>> unescape(escape("two\nlines"))
    'two\nlines'
    """
    return _ESCAPE.sub(_unescaped, line) if "\\" in line else line


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    return f"\\{_SHORT_OF.get(character) or f'u{ord(character):04x}'}"


def _unescaped(match: re.Match[str]) -> str:
    if match[1]:
        return _SHORT[match[1]]
    if match[2]:
        return chr(int(match[2], 16))
    raise ValueError("a backslash that starts none of \\\\, \\n, \\r, \\uXXXX")


def write_names(path: Path, names: Sequence[str]) -> None:
    """Write one name per line."""
    path.write_bytes("".join(f"{escape(name)}\n" for name in names).encode("utf8"))


def read_names(path: Path, n_names: int) -> tuple[str, ...]:
    """Return the names in a file that must hold ``n_names`` of them."""
    return _unescape_all(path, _read_lines(path, n_names), first_line=1)


def write_labels(path: Path, columns: Mapping[str, Sequence[str]]) -> None:
    """Write the label table as tab-separated values; each column has a cell for every label."""
    rows = zip(*(map(escape, cells) for cells in columns.values()), strict=True)
    text = "".join("\t".join(row) + "\n" for row in [tuple(columns), *rows])
    path.write_bytes(text.encode("utf8"))


def read_labels(path: Path, n_labels: int) -> dict[str, tuple[str, ...]]:
    """Return the columns of the label table of a model with ``n_labels`` labels."""
    header, *lines = _read_lines(path, n_labels + 1)
    columns = header.split("\t")
    if "name" not in columns or len({*LABEL_COLUMNS} & {*columns}) != len(columns):
        raise damaged_file(path, f"has the columns {header!r:.80}")
    if any(line.count("\t") != len(columns) - 1 for line in lines):
        raise damaged_file(path, f"not every line has {len(columns)} columns")
    cells = "\t".join(lines).split("\t")  # flat: a list for each of millions of lines is slow
    return {
        column: _unescape_all(path, cells[i :: len(columns)], first_line=2)
        for i, column in enumerate(columns)
    }


def _read_lines(path: Path, n_lines: int) -> list[str]:
    try:
        lines = path.read_bytes().decode("utf8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise damaged_file(path, f"cannot be read ({quoted(error)})") from error
    if lines.pop() != "" or len(lines) != n_lines:
        raise damaged_file(path, f"has {len(lines)} complete lines, not {n_lines}")
    return lines


def _unescape_all(path: Path, cells: Iterable[str], first_line: int) -> tuple[str, ...]:
    names: list[str] = []
    try:
        for cell in cells:
            names.append(unescape(cell))
    except ValueError as error:
        line = first_line + len(names)
        raise ModelError(f"{path}:{line}: {error}; write a backslash as \\\\") from error
    return tuple(names)
