"""Open data files safely: unpack them, check their encoding, and limit their size.

Deflate can compress repeated bytes by a factor of 1000, but real texts and label ids by at most
about 40. A large file with a higher compression ratio than any real data is refused.
"""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from elias.errors import DataError

CHUNK_ROWS = 1 << 14
"""Maximum number of rows in a chunk."""
CHUNK_CHARACTERS = 1 << 22
"""Approximate maximum number of characters in a chunk of a table."""
READ_BYTES = 1 << 18
"""Number of bytes to read from a file at a time."""
RATIO_CHECK_BYTES = 16 << 20
"""Unpacked size below which the compression ratio is not checked.

The limit is small because short lines and cells take many times their size as Python objects."""
MAX_RATIO = 200
"""Maximum compression ratio of data with an unpacked size above `RATIO_CHECK_BYTES`."""
MAX_LINE = 256 << 20
"""Maximum number of bytes in a line, and of characters in a table cell or a document."""
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""Byte-order marks of UTF-16."""
IS_UTF16 = "is UTF-16; save it as UTF-8, or pass encoding=utf-16"
EMPTY = "is empty; give a file with a row for each text"
_GZIP = b"\x1f\x8b"
_HEAD_BYTES = 1 << 16
_SURROGATE = re.compile("[\ud800-\udfff]")


def data_error(path: Path, problem: str, line: int | None = None) -> DataError:
    """Return a one-line error for ``path``, and for the 1-based ``line`` if it is given."""
    where = f"{path}:{line}" if line is not None else f"{path}"
    return DataError(f"{where}: {' '.join(problem.split())}")


def short_repr(value: object, limit: int = 60) -> str:
    """Return ``repr(value)``, cut to ``limit`` characters, for an error message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


class CompressionRatioError(ValueError):
    """A file has a higher compression ratio than any real data."""


def is_implausible(packed: int, unpacked: int) -> bool:
    """Return True if data is large and its compression ratio is above `MAX_RATIO`."""
    return unpacked > RATIO_CHECK_BYTES and unpacked > MAX_RATIO * max(packed, 1)


def check_ratio(what: str, packed: int, unpacked: int) -> None:
    """Raise an error if data is large and its compression ratio is above `MAX_RATIO`."""
    if is_implausible(packed, unpacked):
        raise CompressionRatioError(
            f"{what} unpacks from {packed:,} to {unpacked:,} bytes or more, which is implausible; "
            "if you trust the file, save it without compression"
        )


class _GzipReader(io.RawIOBase):
    """Reader of a gzip stream that checks its compression ratio."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._stream = gzip.GzipFile(fileobj=raw, mode="rb")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._stream.readinto(buffer)
        check_ratio("the gzip data", self._raw.tell(), self._stream.tell())
        return count


def open_gzip(raw: IO[bytes]) -> io.BufferedReader:
    """Return the unpacked stream of an open gzip file.

    Reading it raises `CompressionRatioError` if it is a decompression bomb.
    """
    return io.BufferedReader(_GzipReader(raw), 1 << 18)


def _is_utf8(path: Path, encoding: str | None) -> bool:
    """Return True if an encoding is UTF-8 or None. Raise `DataError` if it is unknown."""
    try:
        "a".encode(encoding or "utf-8")  # fails if it is not an encoding of text
        return codecs.lookup(encoding or "utf-8").name == "utf-8"
    except (LookupError, ValueError):
        problem = f"unknown encoding= {encoding!r}; use, for example, cp1252, latin-1 or utf-16"
        raise data_error(path, problem) from None


@contextmanager
def open_bytes(path: Path, encoding: str | None = None) -> Iterator[IO[bytes]]:
    """Open a file for reading, and unpack it if it is gzipped. Text is recoded as UTF-8.

    Errors that occur while the file is read are raised as `DataError`.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        # opening a pipe or device may block, and it cannot be read twice
        raise data_error(path, "is not a regular file; save its content to a file first")
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(2) == _GZIP
            raw.seek(0)
            stream = open_gzip(raw) if is_packed else raw
            if not _is_utf8(path, encoding):
                stream = codecs.EncodedFile(stream, "utf-8", encoding)  # type: ignore[assignment]
            yield stream
    except FileNotFoundError:
        raise data_error(path, "no such file") from None
    except CompressionRatioError as error:
        raise data_error(path, str(error)) from None
    except UnicodeError as error:
        raise data_error(
            path, f"is not in the encoding {encoding or 'utf-8'} ({error}); try latin-1"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problem = f"the gzip data is cut short or broken ({error}); copy it again"
        raise data_error(path, problem) from None
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error}); check the file and its permissions"
        raise data_error(path, problem) from None


def suffix_of(path: Path) -> str:
    """Return the suffix of a file name in lower case, without ``.gz``: ``.csv`` of ``A.CSV.gz``."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def is_gzip(path: Path) -> bool:
    """Return True if a file is gzipped, whatever its name."""
    with path.open("rb") as raw:
        return raw.read(2) == _GZIP


def is_excel(path: Path) -> bool:
    """Return True if a zip archive is an Excel workbook or, if it is damaged, named like one."""
    try:
        with zipfile.ZipFile(path) as archive:
            return "xl/workbook.xml" in archive.namelist()
    except (OSError, ValueError, zipfile.BadZipFile):
        return suffix_of(path) == ".xlsx"


def read_head(path: Path, encoding: str | None = None) -> bytes:
    """Return the first bytes of a file, unpacked if it is gzipped."""
    with open_bytes(path, encoding) as stream:
        return stream.read(_HEAD_BYTES)


def head_lines(path: Path, encoding: str | None = None) -> list[str]:
    """Return the first lines of a file, without byte-order mark and with their line ends."""
    head = read_head(path, encoding)
    text = head.decode("utf-8", "replace").removeprefix("\ufeff")
    lines = list(io.StringIO(text, newline="\n"))
    return lines[:-1] if len(head) == _HEAD_BYTES and len(lines) > 1 else lines


def _line_blocks(path: Path, encoding: str | None = None) -> Iterator[str]:
    """Yield consecutive whole lines of a UTF-8 file, many at a time. Drop the byte-order mark."""
    n_lines, rest = 0, b""
    with open_bytes(path, encoding) as stream:
        while more := stream.read(max(READ_BYTES, len(rest))):
            block, newline, rest = (rest + more).rpartition(b"\n")
            if len(rest) > MAX_LINE:
                problem = f"the line is longer than {MAX_LINE >> 20} MiB"
                number = n_lines + block.count(b"\n") + len(newline) + 1
                raise data_error(path, f"{problem}; write each text on its own line", number)
            if newline:
                yield _decode(path, block + newline, n_lines)
                n_lines += block.count(b"\n") + 1
    if rest:
        yield _decode(path, rest, n_lines)


def _decode(path: Path, block: bytes, n_before: int) -> str:
    """Decode lines of a file. ``n_before`` is the number of lines before them."""
    try:
        text = block.decode("utf-8")
    except UnicodeDecodeError as error:
        number = n_before + block.count(b"\n", 0, error.start) + 1
        raise data_error(path, describe_utf8_error(error), number) from None
    return text if n_before else text.removeprefix("\ufeff")


def iter_lines(path: Path, encoding: str | None = None) -> Iterator[str]:
    """Yield the lines of a file with their line ends, split at newlines only."""
    for block in _line_blocks(path, encoding):
        yield from io.StringIO(block, newline="\n")


def read_text(path: Path, encoding: str | None = None) -> str:
    """Return the content of a file that is a single text.

    Raises:
        DataError: If it is longer than `MAX_LINE`, or cannot be read.
    """
    blocks: list[str] = []
    for block in _line_blocks(path, encoding):
        blocks.append(block)
        if sum(map(len, blocks)) > MAX_LINE:
            problem = f"the text is longer than {MAX_LINE >> 20} MiB; divide it into several"
            raise data_error(path, problem)
    return "".join(blocks)


def line_chunks(path: Path) -> Iterator[list[str]]:
    r"""Yield lists of lines of a UTF-8 file, without line ends (``\n`` or ``\r\n``)."""
    for block in _line_blocks(path):
        lines = block.removesuffix("\n").split("\n")
        if "\r" in block:
            lines = [line.removesuffix("\r") for line in lines]
        for start in range(0, len(lines), CHUNK_ROWS):
            yield lines[start : start + CHUNK_ROWS]


def read_lines(path: Path) -> list[str]:
    """Return all lines of a UTF-8 file, without line ends and byte-order mark."""
    return [line for lines in line_chunks(path) for line in lines]


def describe_utf8_error(error: UnicodeDecodeError) -> str:
    """Describe bytes that are not UTF-8, and the remedy, for an error message."""
    if error.object.startswith(UTF16):
        return IS_UTF16
    return (
        f"not UTF-8 (byte 0x{error.object[error.start]:02x}); save it as UTF-8, "
        "or pass encoding=cp1252 (or latin-1, …)"
    )


def sanitize(texts: Sequence[str]) -> tuple[list[str], int]:
    """Replace NULs by spaces and lone surrogates by U+FFFD, and count the texts that changed.

    Both are legal in JSON, but tokenizers cannot encode surrogates, and many tools end a string
    at a NUL.
    """
    clean = list(texts)
    n_changed = 0
    joined = "".join(clean)
    if "\0" not in joined and (joined.isascii() or _SURROGATE.search(joined) is None):
        return clean, 0
    for row, text in enumerate(clean):
        if "\0" in text or not (text.isascii() or _SURROGATE.search(text) is None):
            # encoding as UTF-16 turns a surrogate pair into the character that it stands for
            whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            clean[row] = whole.replace("\0", " ")
            n_changed += 1
    return clean, n_changed
