"""Opening files: compression found by content, UTF-8 checked, every failure one clear line."""

from __future__ import annotations

import codecs
import gzip
import zlib
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, cast

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
_HEAD_BYTES = 1 << 16
_MEND_BLOCK = 4096


def bad(path: Path, problem: str, line: int | None = None) -> DataError:
    """Return the error for ``path`` (at a 1-based ``line``), on one line."""
    place = f"{path}:{line}" if line is not None else f"{path}"
    return DataError(f"{place}: {' '.join(problem.split())}")


def shown(value: object, limit: int = 60) -> str:
    """Return ``repr(value)``, cut to ``limit`` characters, for use in an error."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, through gzip where its first bytes say so.

    Whatever goes wrong while the file is being read leaves here as a `DataError`.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP
            raw.seek(0)
            if packed:
                with gzip.open(raw, "rb") as unpacked:
                    yield cast("IO[bytes]", unpacked)
            else:
                yield raw
    except FileNotFoundError:
        raise bad(path, "no such file") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise bad(path, f"the gzip data is cut short or broken ({error}); copy it again") from None
    except OSError as error:
        raise bad(path, f"cannot be read ({error.strerror or error})") from None


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
        for number, raw in enumerate(stream, start=1):
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise bad(path, not_utf8(error), number) from None
            yield line.removeprefix(_BOM) if number == 1 else line


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
