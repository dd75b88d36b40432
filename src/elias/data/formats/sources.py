"""Opening files: compression found by content, UTF-8 checked, every failure one clear line."""

from __future__ import annotations

import codecs
import gzip
import zlib
from contextlib import contextmanager
from itertools import count
from typing import IO, TYPE_CHECKING

from elias.bounded import TooTightError, unpacked
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_GZIP = b"\x1f\x8b"
_BOM = "\ufeff"
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""What a file in UTF-16 begins with."""
IS_UTF16 = "save it as UTF-8 (it is UTF-16)"
EMPTY = "is empty; give a file with a row for each text"
LONGEST_LINE = 256 << 20
"""Bytes of the longest line, and characters of the longest cell of a table, that are read."""
_LONGEST_PROBLEM = 800
_HEAD_BYTES = 1 << 16
_MEND_BLOCK = 4096


def bad(path: Path, problem: str, line: int | None = None) -> DataError:
    """Return the error for ``path`` (at a 1-based ``line``), on one line."""
    place = f"{path}:{line}" if line is not None else f"{path}"
    told = " ".join(problem.split())
    if len(told) > _LONGEST_PROBLEM:  # a header of a million columns, say
        told = f"{told[: _LONGEST_PROBLEM - 200]} … {told[-200:]}"
    return DataError(f"{place}: {told}")


def shown(value: object, limit: int = 60) -> str:
    """Return ``repr(value)``, cut to ``limit`` characters, for use in an error."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, through gzip where its first bytes say so.

    Whatever goes wrong while the file is being read leaves here as a `DataError`.
    """
    must_be_file(path)
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP
            raw.seek(0)
            if packed:
                with unpacked(raw) as stream:
                    yield stream
            else:
                yield raw
    except FileNotFoundError:
        raise bad(path, "no such file") from None
    except TooTightError as error:
        raise bad(path, str(error)) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise bad(path, f"the gzip data is cut short or broken ({error}); copy it again") from None
    except OSError as error:
        raise bad(path, f"cannot be read ({error.strerror or error})") from None


def must_be_file(path: Path) -> None:
    """Refuse a pipe or a device: to open one may wait for ever, and none can be read twice."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise bad(path, "is not a file; write what it gives to one first")


def is_gzip(path: Path) -> bool:
    """Say whether a file is gzipped, whatever its name."""
    with path.open("rb") as raw:
        return raw.read(2) == _GZIP


def read_head(path: Path) -> bytes:
    """Return the first bytes of a file, uncompressed."""
    with open_bytes(path) as stream:
        return stream.read(_HEAD_BYTES)


def read_lines(path: Path) -> list[str]:
    r"""Return the lines of a UTF-8 file, split at ``\n`` only, without line ends.

    A final newline ends the last line; a byte-order mark and the ``\r`` of Windows line ends go.
    """
    with open_bytes(path) as stream:
        data = stream.read()
    _check_lines(path, data)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad(path, not_utf8(error), data.count(b"\n", 0, error.start) + 1) from None
    del data
    lines = text.removeprefix(_BOM).split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines] if "\r" in text else lines


def iter_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file with their line ends, one at a time."""
    with open_bytes(path) as stream:
        for number in count(1):
            raw = stream.readline(LONGEST_LINE + 1)
            if not raw:
                return
            if len(raw) > LONGEST_LINE:
                raise _too_long(path, number)
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise bad(path, not_utf8(error), number) from None
            yield line.removeprefix(_BOM) if number == 1 else line


def _check_lines(path: Path, data: bytes) -> None:
    """Refuse a line that is too long, hopping from line end to line end."""
    place = 0
    while len(data) - place > LONGEST_LINE:
        end = data.rfind(b"\n", place, place + LONGEST_LINE)
        if end < 0:
            raise _too_long(path, data.count(b"\n", 0, place) + 1)
        place = end + 1


def _too_long(path: Path, line: int) -> DataError:
    most = LONGEST_LINE >> 20
    return bad(path, f"the line is longer than {most} MiB; give each text its own line", line)


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return what is wrong with bytes that cannot be decoded, and the remedy."""
    if error.object.startswith(UTF16):
        return IS_UTF16
    return (
        f"not UTF-8 (byte 0x{error.object[error.start]:02x}); convert it first, "
        "e.g. with `iconv -f latin1 -t utf-8`, or remove the line"
    )


def read_names(path: Path) -> list[str]:
    """Return the label names of a file with one name per line."""
    names = read_lines(path)
    if not names:
        raise bad(path, "is empty; it should hold one label name per line")
    return names


def mend(texts: Sequence[str]) -> tuple[list[str], int]:
    """Return the texts with NULs as spaces and lone surrogates as U+FFFD, and how many changed.

    Both are legal in JSON and fatal later: a tokenizer cannot encode the one, and many tools
    end a string at the other.
    """
    mended: list[str] = []
    changed = 0
    for start in range(0, len(texts), _MEND_BLOCK):
        block = list(texts[start : start + _MEND_BLOCK])
        if _needs_mending(block):
            whole = [_mend_one(text) for text in block]
            changed += sum(new != old for new, old in zip(whole, block, strict=True))
            block = whole
        mended += block
    return mended, changed


def _needs_mending(block: Sequence[str]) -> bool:
    try:
        return b"\0" in "\n".join(block).encode("utf-8")
    except UnicodeEncodeError:
        return True


def _mend_one(text: str) -> str:
    # Through UTF-16, a pair of surrogates becomes the character it stands for.
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return whole.replace("\0", " ")
