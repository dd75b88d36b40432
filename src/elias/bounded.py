"""Compressed files within bounds: a small file must not fill the memory when it is unpacked.

Deflate packs a run of one byte a thousandfold, real texts and label ids hardly fortyfold. What is
large and packed tighter than anything real is refused before it is unpacked whole.
"""

from __future__ import annotations

import gzip
import io
import zipfile
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix, issparse, load_npz

if TYPE_CHECKING:
    from collections.abc import Iterator

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
