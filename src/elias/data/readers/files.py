"""Open data files safely: compression, encoding, size limits and file names.

Deflate packs a run of one byte a thousandfold, real texts and label ids hardly fortyfold. What is
large and packed tighter than anything real is refused before it is unpacked whole.
"""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zipfile
import zlib
from contextlib import contextmanager
from itertools import count
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix, issparse, load_npz

from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


ALWAYS_ALLOWED = 256 << 20
"""Bytes that anything may unpack to, however tightly it was packed."""
TIGHTEST = 400
"""How many times its packed size anything larger may be."""
_ROWS_ALLOWED = 1_000_000  # rows without an entry, in a matrix that does not store where rows begin
_PLACES = ("indices", "indptr", "row", "col")
_FORMATS = ("csr", "csc", "coo")  # those that store a place for each value
_LARGEST_FACT = 4096  # bytes of the member that names the format, or the shape


class TooTightError(ValueError):
    """A file that unpacks to far more than anything real of its size."""

    def __init__(self, what: str, packed: int, unpacked: int) -> None:
        super().__init__(
            f"{what} unpacks from {packed:,} to {unpacked:,} bytes or more, as no real data does; "
            "if you trust it, unpack it yourself and write it anew"
        )


def check_tightness(what: str, packed: int, unpacked: int) -> None:
    """Refuse what is large and unpacks to more than `TIGHTEST` times its packed size."""
    if unpacked > ALWAYS_ALLOWED and unpacked > TIGHTEST * max(packed, 1):
        raise TooTightError(what, packed, unpacked)


class _Unpacking(io.RawIOBase):
    """The content of a gzip file, refused where it swells beyond all likelihood."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._stream = gzip.GzipFile(fileobj=raw, mode="rb")
        self._unpacked = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._stream.readinto(buffer)
        self._unpacked += count
        check_tightness("the gzip data", self._raw.tell(), self._unpacked)
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def unpacked(raw: IO[bytes]) -> io.BufferedReader:
    """Return a stream of what an open gzip file holds; reading a bomb raises `TooTightError`."""
    return io.BufferedReader(_Unpacking(raw), 1 << 18)


def load_sparse(stream: IO[bytes]) -> csr_matrix:
    """Return the matrix of a SciPy npz file as CSR, its indices checked; nothing is unpickled.

    Before anything is unpacked, the sizes that the archive's members declare must fit together and
    what is packed.

    Raises:
        ValueError: If it is no such file, or a lying one. So does what NumPy, SciPy and zipfile
            raise for a broken one: KeyError, TypeError, EOFError, IndexError, OSError,
            BadZipFile, NotImplementedError, zlib.error.
    """
    with zipfile.ZipFile(stream) as archive:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in _members(archive):
            if name in shapes:
                raise ValueError(f"holds {name} twice")
            shapes[name] = shape
        _check_format(archive)
        rows = _rows(archive)
    _check_rows(rows, shapes)
    stream.seek(0)
    loaded: Any = load_npz(stream)  # SciPy passes allow_pickle=False
    if not issparse(loaded) or loaded.ndim != 2:
        raise ValueError("not a sparse matrix")
    matrix = csr_matrix(loaded)
    matrix.check_format(full_check=True)
    return matrix


def _members(archive: zipfile.ZipFile) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each array; refuse one that is not as large as it says."""
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        with archive.open(info) as member:
            shape, dtype = _header(member)
            begin = member.tell()
        count = 1
        for size in shape:
            count *= size
        if count < 0 or begin + count * dtype.itemsize != info.file_size:
            raise ValueError(f"{name} is not as large as it says")
        _check_member(name, info, dtype)
        yield name, shape
    packed = sum(info.compress_size for info in archive.infolist())
    if packed > _size(archive):
        raise ValueError("the members are larger than the file")


def _check_member(name: str, info: zipfile.ZipInfo, dtype: np.dtype[Any]) -> None:
    """Refuse an array of the wrong kind, or too tight.

    The values of a label matrix are all 1 and pack tighter than anything else, so they are not
    held to that: plain numbers, as many as there are indices, they are bounded by these.
    """
    if name == "data":
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise ValueError(f"holds {dtype} values, not plain numbers of 8 bytes at most")
        return
    if name in _PLACES and dtype.kind not in "iu":
        raise ValueError(f"{name} holds {dtype} values, not whole numbers")
    if name in ("format", "shape") and info.file_size > _LARGEST_FACT:
        raise ValueError(f"{name} is {info.file_size:,} bytes long")
    check_tightness(name, info.compress_size, info.file_size)


def _size(archive: zipfile.ZipFile) -> int:
    stream = archive.fp
    assert stream is not None
    return stream.seek(0, io.SEEK_END)


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(member)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read(member)
    if dtype.hasobject:
        raise ValueError("holds pickled objects, which are never read")
    return shape, dtype


def _check_format(archive: zipfile.ZipFile) -> None:
    with archive.open("format.npy") as member:
        named = np.lib.format.read_array(member, allow_pickle=False)
    if named.shape != () or named.dtype.kind not in "SU":
        raise ValueError("does not name its format")
    found = named.astype("U").item()
    if found not in _FORMATS:
        raise ValueError(f"stored as {found!r}, where {', '.join(_FORMATS)} are read; use tocsr()")


def _rows(archive: zipfile.ZipFile) -> int:
    with archive.open("shape.npy") as member:
        shape = np.lib.format.read_array(member, allow_pickle=False)
    if shape.shape != (2,) or shape.dtype.kind not in "iu" or (shape < 0).any():
        raise ValueError("its shape is not two counts")
    return int(shape[0])


def _check_rows(rows: int, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse more rows than the members bear out, and values that are not those of the indices."""
    stored = {name: shape[0] for name, shape in shapes.items() if len(shape) == 1}
    n_entries = stored.get("indices", stored.get("row"))
    values = shapes["data"]
    if n_entries is None or values != (n_entries,):
        raise ValueError(f"values of shape {values} for {n_entries} indices")
    known = stored.get("indptr", 0), n_entries
    if rows > max(_ROWS_ALLOWED, 10 * max(known)):
        raise ValueError(f"says {rows} rows, but stores nothing of most of them")


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


def sanitize(texts: Sequence[str]) -> tuple[list[str], int]:
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


SHORT = {"train": "trn", "validation": "val", "test": "tst"}
"""The short name of each split in npz and XMC folders."""

ALIASES = {
    "train": ("train", "trn", "training", "tr"),
    "validation": ("validation", "valid", "val", "dev", "development"),
    "test": ("test", "tst", "testing", "te", "eval"),
}
"""What a file, or a row in a ``split`` column, may call each split."""

LABEL_FILES = (
    "raw/Y.txt",
    "Y.txt",
    "labels.txt",
    "output-items.txt",
    "output-labels.txt",
    "label_map.txt",
    "Yf.txt",
)
"""Files of label names, one per line, in the order in which they are looked for."""

_MOST_LABELS = 100_000_000
_LABELS_PER_USE = 100
_FEW_LABELS = 5_000_000
"""Labels without names are counted up to the highest id. More than five million of them, of which
not one in a hundred is ever used, is a slip in the ids, and would fill the memory with names."""
_SHARD = r"(?:-\d+-of-\d+)?"


def split_called(name: str) -> str | None:
    """Return the split that ``name`` is an alias of, or None."""
    plain = name.strip().lower()
    return next((split for split, names in ALIASES.items() if plain in names), None)


def find(folder: Path, *names: str) -> Path | None:
    """Return the first of the files that is there, gzipped or not."""
    candidates = (folder / (name + suffix) for name in names for suffix in ("", ".gz"))
    return next((path for path in candidates if path.is_file()), None)


def find_names(folder: Path) -> Path | None:
    """Return the file of label names in a folder, or None."""
    return find(folder, *LABEL_FILES)


def split_files(folder: Path) -> dict[str, list[Path]]:
    """Return the files named after splits (``train.csv``, ``eurlex_test.txt``, shards), by split.

    The exact name wins over a name that only ends in it.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file())
    found = {}
    for split, names in ALIASES.items():
        called = "|".join(names)
        exact = re.compile(rf"(?:{called}){_SHARD}(?:\..+)?", re.IGNORECASE)
        ending = re.compile(rf".+[_.-](?:{called})(?:\..+)?", re.IGNORECASE)
        for pattern in (exact, ending):
            matching = [path for path in files if pattern.fullmatch(path.name)]
            if matching:
                found[split] = [path for path in matching if "filter" not in path.name]
                break
    return {split: paths for split, paths in found.items() if paths}


def numbered(path: Path, n_labels: int, n_uses: int) -> list[str]:
    """Return the names of labels that have none: their numbers.

    Args:
        path: what the ids come from, for the error.
        n_labels: one more than the highest id.
        n_uses: how many labels the points have in all.
    """
    if too_many_labels(n_labels, n_uses):
        raise bad(
            path,
            f"label ids up to {n_labels - 1} are too large to count labels by; number the labels "
            "from 0, or give a file of label names",
        )
    return [str(label) for label in range(n_labels)]


def too_many_labels(n_labels: int, n_uses: int) -> bool:
    """Say whether there are more labels, or more unused ones, than ids are a sensible count of."""
    return n_labels > min(_MOST_LABELS, max(_FEW_LABELS, _LABELS_PER_USE * n_uses))


def the_only_file(split: str, paths: Iterable[Path]) -> Path:
    """Return the one file of a split, or refuse to choose among several."""
    chosen = list(paths)
    if len(chosen) > 1:
        names = ", ".join(path.name for path in chosen)
        raise bad(chosen[0].parent, f"several files for the {split} split ({names}); keep one")
    return chosen[0]


def read_filters(folder: Path, split: str, shape: tuple[int, int]) -> NDArray[np.int64] | None:
    """Return the (M, 2) pairs (point, label) never to predict in a split, or None without a file.

    Args:
        folder: where ``filter_labels_test.txt`` (or ``tst_filter_labels.txt``) is looked for.
        split: the split's name.
        shape: (N, L), what the pairs must stay within.
    """
    names = [f"filter_labels_{name}.txt" for name in ALIASES[split]]
    names += [f"{SHORT[split]}_filter_labels.txt"]
    path = find(folder, *names, *(f"raw/{name}" for name in names))
    return None if path is None else _read_pairs(path, shape)


def _read_pairs(path: Path, shape: tuple[int, int]) -> NDArray[np.int64]:
    rows = [(number, line.split()) for number, line in enumerate(read_lines(path), start=1)]
    pairs = []
    for number, cells in rows:
        if not cells:
            continue
        try:
            point, label = (int(cell) for cell in cells)
        except ValueError:
            raise bad(path, f"{shown(' '.join(cells))} is not `point label`", number) from None
        if not (0 <= point < shape[0] and 0 <= label < shape[1]):
            limits = f"there are {shape[0]} points and {shape[1]} labels, counted from 0"
            raise bad(path, f"the pair {point} {label} is out of range; {limits}", number)
        pairs.append((point, label))
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def write_filters(folder: Path, split: str, filters: NDArray[np.int64] | None) -> None:
    """Write the filter pairs of a split, where there are any."""
    if filters is not None:
        lines = (f"{point} {label}" for point, label in filters.tolist())
        write_lines(folder / f"filter_labels_{split}.txt", lines)
