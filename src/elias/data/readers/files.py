"""Open data files safely: compression, encoding, size limits, and the file names of a corpus.

Deflate can compress repeated bytes by a factor of 1000, but real texts and label ids by at most
about 40. A large file with a higher compression ratio than any real data is refused.
"""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from contextlib import contextmanager
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


CHUNK_ROWS = 1 << 14
"""Maximum number of rows in a chunk."""
CHUNK_CHARACTERS = 1 << 22
"""Approximate maximum number of characters in a chunk."""
RATIO_CHECK_BYTES = 256 << 20
"""Unpacked size below which the compression ratio is not checked."""
MAX_RATIO = 400
"""Maximum compression ratio of data with an unpacked size above `RATIO_CHECK_BYTES`."""
MAX_LINE = 256 << 20
"""Maximum bytes of a line, and characters of a table cell."""
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""Byte-order marks of UTF-16."""
IS_UTF16 = "save it as UTF-8 (it is UTF-16)"
EMPTY = "is empty; give a file with a row for each text"
_GZIP = b"\x1f\x8b"
_BOM = "\ufeff"
_MAX_PROBLEM = 800  # characters of an error message
_HEAD_BYTES = 1 << 16
_READ_BYTES = 1 << 18
_SANITIZE_TEXTS = 4096  # texts checked at a time


def data_error(path: Path, problem: str, line: int | None = None) -> DataError:
    """Return a one-line error for ``path``, with the 1-based number ``line`` if it is given."""
    where = f"{path}:{line}" if line is not None else f"{path}"
    text = " ".join(problem.split())
    if len(text) > _MAX_PROBLEM:  # e.g. a header of a million columns
        text = f"{text[: _MAX_PROBLEM - 200]} … {text[-200:]}"
    return DataError(f"{where}: {text}")


def short_repr(value: object, limit: int = 60) -> str:
    """Return ``repr(value)``, cut to ``limit`` characters, for an error message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


class CompressionRatioError(ValueError):
    """A file has a higher compression ratio than any real data."""


def check_ratio(what: str, packed: int, unpacked: int) -> None:
    """Refuse data that is large and compressed more than `MAX_RATIO` times."""
    if unpacked > RATIO_CHECK_BYTES and unpacked > MAX_RATIO * max(packed, 1):
        raise CompressionRatioError(
            f"{what} unpacks from {packed:,} to {unpacked:,} bytes or more, as no real data does; "
            "if you trust it, unpack it yourself and write it again"
        )


class _GzipReader(io.RawIOBase):
    """Reads a gzip stream, and checks its compression ratio."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._stream = gzip.GzipFile(fileobj=raw, mode="rb")
        self._unpacked = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._stream.readinto(buffer)
        self._unpacked += count
        check_ratio("the gzip data", self._raw.tell(), self._unpacked)
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def open_gzip(raw: IO[bytes]) -> io.BufferedReader:
    """Return the unpacked stream of an open gzip file.

    Reading it raises `CompressionRatioError` if it is a decompression bomb.
    """
    return io.BufferedReader(_GzipReader(raw), 1 << 18)


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading; unpack it if its first bytes are those of gzip.

    Errors that occur while the file is read are raised as `DataError`.
    """
    check_regular_file(path)
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(2) == _GZIP
            raw.seek(0)
            if is_packed:
                with open_gzip(raw) as stream:
                    yield stream
            else:
                yield raw
    except FileNotFoundError:
        raise data_error(path, "no such file") from None
    except CompressionRatioError as error:
        raise data_error(path, str(error)) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problem = f"the gzip data is cut short or broken ({error}); copy it again"
        raise data_error(path, problem) from None
    except OSError as error:
        raise data_error(path, f"cannot be read ({error.strerror or error})") from None


def check_regular_file(path: Path) -> None:
    """Refuse a pipe or device: opening it may block, and it cannot be read twice."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise data_error(path, "is not a regular file; write its content to one first")


def is_gzip(path: Path) -> bool:
    """Return True if a file is gzipped, whatever its name."""
    with path.open("rb") as raw:
        return raw.read(2) == _GZIP


def read_head(path: Path) -> bytes:
    """Return the first bytes of a file, unpacked."""
    with open_bytes(path) as stream:
        return stream.read(_HEAD_BYTES)


def iter_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file with their line ends, split at newlines only."""
    for block in _line_blocks(path, _READ_BYTES):
        yield from io.StringIO(block, newline="\n")


def line_chunks(path: Path) -> Iterator[list[str]]:
    r"""Yield lists of lines of a UTF-8 file, without line ends (``\n`` or ``\r\n``)."""
    for block in _line_blocks(path, CHUNK_CHARACTERS):
        lines = block.split("\n")
        if not lines[-1]:  # the block ends with a line end
            lines.pop()
        if "\r" in block:
            lines = [line.removesuffix("\r") for line in lines]
        for start in range(0, len(lines), CHUNK_ROWS):
            yield lines[start : start + CHUNK_ROWS]


def read_lines(path: Path) -> list[str]:
    """Return all lines of a UTF-8 file without line ends; the byte-order mark is dropped."""
    return list(chain.from_iterable(line_chunks(path)))


def _line_blocks(path: Path, size: int) -> Iterator[str]:
    """Yield a UTF-8 file as blocks of whole lines, each about ``size`` bytes long."""
    size = min(size, MAX_LINE)
    number = 1  # the line on which the block starts
    parts: list[bytes] = []
    with open_bytes(path) as stream:
        while True:
            data = stream.read(size)
            first, last = data.find(b"\n"), data.rfind(b"\n")
            if sum(map(len, parts)) + (len(data) if first < 0 else first) > MAX_LINE:
                problem = f"the line is longer than {MAX_LINE >> 20} MiB"
                raise data_error(path, f"{problem}; give each text its own line", number)
            if data and last < 0:
                parts.append(data)
                continue
            block = b"".join([*parts, data[: last + 1]])
            yield from _decode(path, block, number)
            if not data:
                return
            number += block.count(b"\n")
            parts = [data[last + 1 :]]


def _decode(path: Path, block: bytes, number: int) -> Iterator[str]:
    """Decode and yield a non-empty block; at invalid UTF-8, yield the lines before it and raise."""
    try:
        text = block.decode("utf-8")
    except UnicodeDecodeError as error:
        good = block.rfind(b"\n", 0, error.start) + 1
        if good:
            yield block[:good].decode("utf-8").removeprefix(_BOM if number == 1 else "")
        line = number + block.count(b"\n", 0, error.start)
        raise data_error(path, describe_utf8_error(error), line) from None
    text = text.removeprefix(_BOM) if number == 1 else text
    if text:
        yield text


def describe_utf8_error(error: UnicodeDecodeError) -> str:
    """Describe bytes that are not UTF-8, and the remedy, for an error message."""
    if error.object.startswith(UTF16):
        return IS_UTF16
    return (
        f"not UTF-8 (byte 0x{error.object[error.start]:02x}); convert it first, "
        "e.g. with `iconv -f latin1 -t utf-8`, or remove the line"
    )


def sanitize(texts: Sequence[str]) -> tuple[list[str], int]:
    """Replace NULs by spaces and lone surrogates by U+FFFD; return the texts and how many changed.

    Both are legal in JSON, but tokenizers cannot encode surrogates, and many tools end a string
    at a NUL.
    """
    clean = list(texts)
    n_changed = 0
    for start in range(0, len(clean), _SANITIZE_TEXTS):
        block = clean[start : start + _SANITIZE_TEXTS]
        try:
            if b"\0" not in "\n".join(block).encode("utf-8"):
                continue
        except UnicodeEncodeError:
            pass
        for row, text in enumerate(block, start):
            # through UTF-16, a pair of surrogates becomes the character it stands for
            whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            clean[row] = whole.replace("\0", " ")
            n_changed += clean[row] != text
    return clean, n_changed


SHORT = {"train": "trn", "validation": "val", "test": "tst"}
"""The short name of each split in npz and XMC folders."""

ALIASES = {
    "train": ("train", "trn", "training", "tr"),
    "validation": ("validation", "valid", "val", "dev", "development"),
    "test": ("test", "tst", "testing", "te", "eval"),
}
"""Accepted names of each split, in file names and in a ``split`` column."""

LABEL_FILES = (
    "raw/Y.txt",
    "Y.txt",
    "labels.txt",
    "output-items.txt",
    "output-labels.txt",
    "label_map.txt",
    "Yf.txt",
)
"""Files of label names, one per line, in order of preference."""

_MAX_LABELS = 100_000_000
_LABELS_PER_USE = 100
_MAX_UNUSED_LABELS = 5_000_000
"""Labels without names are numbered up to the highest id. If there are more labels than this, and
fewer than one in a hundred is used, the ids are assumed to be wrong: the names would exhaust
memory."""


def split_alias(name: str) -> str | None:
    """Return the split that ``name`` is an alias of, or None."""
    plain = name.strip().lower()
    return next((split for split, names in ALIASES.items() if plain in names), None)


def find_file(folder: Path, *names: str) -> Path | None:
    """Return the first of the named files that exists, gzipped or not."""
    candidates = (folder / (name + suffix) for name in names for suffix in ("", ".gz"))
    return next((path for path in candidates if path.is_file()), None)


def find_label_names(folder: Path) -> Path | None:
    """Return the file of label names in a folder, or None."""
    return find_file(folder, *LABEL_FILES)


def read_label_names(folder: Path) -> list[str] | None:
    """Read the label names from the file in a folder, one per line; None without such a file."""
    path = find_label_names(folder)
    if path is None:
        return None
    names = read_lines(path)
    if not names:
        raise data_error(path, "is empty; it should hold one label name per line")
    return names


def split_files(folder: Path) -> dict[str, list[Path]]:
    """Return the files named after splits (``train.csv``, ``eurlex_test.txt``, shards), by split.

    A file whose name is exactly the split is preferred to one whose name only ends in the split.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file())
    by_split = {}
    for split, names in ALIASES.items():
        name = "|".join(names)
        exact = re.compile(rf"(?:{name})(?:-\d+-of-\d+)?(?:\..+)?", re.IGNORECASE)
        ending = re.compile(rf".+[_.-](?:{name})(?:\..+)?", re.IGNORECASE)
        for pattern in (exact, ending):
            matching = [path for path in files if pattern.fullmatch(path.name)]
            if matching:
                by_split[split] = [path for path in matching if "filter" not in path.name]
                break
    return {split: paths for split, paths in by_split.items() if paths}


def only_file(split: str, paths: Iterable[Path]) -> Path:
    """Return the only file of a split; raise `DataError` if there are several."""
    first, *others = paths
    if others:
        names = ", ".join(path.name for path in (first, *others))
        problem = f"several files for the {split} split ({names}); keep one"
        raise data_error(first.parent, problem)
    return first


def number_labels(path: Path, n_labels: int, n_uses: int) -> list[str]:
    """Return label names for labels without names: their numbers.

    Args:
        path: The source of the ids, for the error message.
        n_labels: One more than the highest id.
        n_uses: The total number of point-label pairs.
    """
    if too_many_labels(n_labels, n_uses):
        raise data_error(
            path,
            f"label ids up to {n_labels - 1} are too large to count labels by; number the labels "
            "from 0, or give a file of label names",
        )
    return [str(label) for label in range(n_labels)]


def too_many_labels(n_labels: int, n_uses: int) -> bool:
    """Return True if the number of labels, or of unused labels, is implausibly large."""
    return n_labels > min(_MAX_LABELS, max(_MAX_UNUSED_LABELS, _LABELS_PER_USE * n_uses))


def read_filters(
    folder: Path, n_points: Mapping[str, int], n_labels: int
) -> dict[str, NDArray[np.int64]]:
    """Read the (M, 2) pairs (point, label) to exclude, for each split that has a filter file.

    Args:
        folder: The folder of ``filter_labels_test.txt`` or ``tst_filter_labels.txt``.
        n_points: The number of points of each split.
        n_labels: L; points and labels must be in range.
    """
    filters = {}
    for split, count in n_points.items():
        names = [f"filter_labels_{name}.txt" for name in ALIASES[split]]
        names += [f"{SHORT[split]}_filter_labels.txt"]
        path = find_file(folder, *names, *(f"raw/{name}" for name in names))
        if path is not None:
            filters[split] = _read_pairs(path, count, n_labels)
    return filters


def _read_pairs(path: Path, n_points: int, n_labels: int) -> NDArray[np.int64]:
    pairs = []
    for number, line in enumerate(read_lines(path), start=1):
        cells = line.split()
        if not cells:
            continue
        try:
            point, label = (int(cell) for cell in cells)
        except ValueError:
            problem = f"{short_repr(' '.join(cells))} is not `point label`"
            raise data_error(path, problem, number) from None
        if not (0 <= point < n_points and 0 <= label < n_labels):
            limits = f"there are {n_points} points and {n_labels} labels, counted from 0"
            raise data_error(path, f"the pair {point} {label} is out of range; {limits}", number)
        pairs.append((point, label))
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)
