r"""Names in a text file, one per line, whatever characters they hold.

What would end or upset a line is written as an escape: ``\\``, ``\n``, ``\r``, and ``\uXXXX`` for
other control characters, line separators, the byte order mark and lone surrogates. Everything
else stands as it is, in UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from elias.errors import ModelError, broken, quoted

_SPECIAL = re.compile("[\\\\\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")
_ESCAPE = re.compile(r"\\(?:([\\nr])|u([0-9a-f]{4})|)")
_SHORT = {"\\": "\\", "n": "\n", "r": "\r"}
_SHORT_OF = {character: letter for letter, character in _SHORT.items()}


def escape(name: str) -> str:
    r"""Return the name as one line.

    >>> print(escape("two\nlines"))
    two\nlines
    """
    return _SPECIAL.sub(_escaped, name)


def unescape(line: str) -> str:
    r"""Return the name that `escape` made a line of.

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
    try:
        text = path.read_bytes().decode("utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise broken(path, f"cannot be read ({quoted(error)})") from error
    lines = text.split("\n")
    if lines.pop() != "" or len(lines) != n_names:
        raise broken(path, f"has {len(lines)} whole lines where the model has {n_names} names")
    names = []
    for number, line in enumerate(lines, start=1):
        try:
            names.append(unescape(line))
        except ValueError as error:
            raise ModelError(f"{path}:{number}: {error}; write a backslash as \\\\") from error
    return tuple(names)
