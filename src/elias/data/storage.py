"""Memory-mapped corpora: texts and matrices in files, and the writers of these files.

The texts of a split are one UTF-8 file and a file of offsets; its labels are the three arrays of a
CSR matrix. Mapped pages count as resident memory until the system takes them back, so they are
released from time to time; they stay in the page cache, which makes mapping them again cheap.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, overload
from weakref import WeakSet

import numpy as np
from scipy.sparse import csr_matrix

from elias.data.atomic import cache_root
from elias.data.readers.base import from_lists
from elias.data.readers.files import sanitize
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy import memmap
    from numpy.typing import NDArray


LIMIT = 512 << 20
"""Bytes of mapped pages that may gather before they are given back."""
_STATM = Path("/proc/self/statm")  # Linux; elsewhere nothing is given back

_lock = threading.Lock()  # batches are read by a thread of their own
_maps: WeakSet[mmap.mmap] = WeakSet()
_remaining = 0
"""Bytes of pages that were there after the last time: the program's own files, mostly."""


def track_pages(array: memmap[Any, Any]) -> None:
    """Have the pages of a mapped array given back when there are many."""
    with _lock:
        _maps.add(array._mmap)  # type: ignore[attr-defined]


def release_pages() -> None:
    """Give the pages of mapped arrays back if many have gathered; called between chunks of work."""
    global _remaining
    if not _maps or not hasattr(mmap, "MADV_DONTNEED") or mapped_bytes() < _remaining + LIMIT:
        return
    with _lock:
        for each in _maps:
            each.madvise(mmap.MADV_DONTNEED)
        _remaining = mapped_bytes()


def mapped_bytes() -> int:
    """Return how much of this process's memory is pages of files; 0 where that is not known."""
    try:
        return int(_STATM.read_bytes().split()[2]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


TEXTS, OFFSETS = "texts.bin", "offsets.bin"
INDPTR, INDICES, VALUES = "indptr.bin", "indices.bin", "values.bin"
FEATURES = "features-"
"""What the names of the files begin with that are a split's features, in place of its labels."""
_ROWS = 1 << 16  # rows copied at a time
_READ = 1 << 13  # texts read at a time
_INT32_MAX = np.iinfo(np.int32).max


class DiskTexts(Sequence[str]):
    """N texts of a folder; a choice of them costs a row number each.

    A slice is a list: it is meant for a few texts at a time.
    """

    def __init__(self, folder: Path, digest: str, rows: NDArray[np.int64] | None = None) -> None:
        self.folder = folder
        self.rows = rows
        """Which texts of the folder these are; None: all."""
        self._digest = digest
        self._offsets = mapped(folder / OFFSETS, "<i8")
        self._blob = memoryview(mapped(folder / TEXTS, "u1").data)
        if not len(self._offsets) or len(self._blob) != int(self._offsets[-1]):
            raise DataError(f"{folder}: {TEXTS} and {OFFSETS} do not fit; remove the folder")

    def __len__(self) -> int:
        """Return N."""
        return len(self._offsets) - 1 if self.rows is None else len(self.rows)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        """Return one text, or a list of some."""
        if isinstance(place, slice):
            return [str(part, "utf-8") for part in self._parts(range(len(self))[place])]
        row = range(len(self))[place]  # refuses one that is out of range
        return str(next(self._parts(range(row, row + 1))), "utf-8")

    def __iter__(self) -> Iterator[str]:
        """Yield all texts, read a few at a time."""
        for start in range(0, len(self), _READ):
            yield from self[start : start + _READ]

    def __eq__(self, other: object) -> bool:
        """Say whether the other is a sequence of the same texts, on disk or not."""
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # equal to a list, which has none

    def _parts(self, places: range) -> Iterator[memoryview]:
        chosen = np.arange(places.start, places.stop, places.step, dtype=np.int64)
        if self.rows is not None:
            chosen = self.rows[chosen]
        if len(chosen) > 1:
            release_pages()
        begins, ends = self._offsets[chosen].tolist(), self._offsets[chosen + 1].tolist()
        for begin, end in zip(begins, ends, strict=True):
            yield self._blob[begin:end]

    def encoded(self) -> Iterator[bytes]:
        """Yield the UTF-8 of each text."""
        for start in range(0, len(self), _READ):
            for part in self._parts(range(start, min(start + _READ, len(self)))):
                yield bytes(part)

    def take(self, rows: NDArray[np.int64]) -> DiskTexts:
        """Return the texts of ``rows``, in that order; nothing is copied."""
        rows = np.asarray(rows, dtype=np.int64)
        return DiskTexts(self.folder, self._digest, rows if self.rows is None else self.rows[rows])

    @property
    def digest(self) -> str:
        """Return a name for the texts, known without reading them."""
        if self.rows is None:
            return self._digest
        rows = hashlib.sha256(np.ascontiguousarray(self.rows, dtype="<i8").data)
        return f"{self._digest} {rows.hexdigest()}"


def mapped(path: Path, kind: str) -> NDArray[Any]:
    """Return the numbers of a file, memory-mapped."""
    try:
        if path.stat().st_size == 0:  # which cannot be mapped
            return np.empty(0, dtype=kind)
        found = np.memmap(path, kind, mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: is missing or damaged ({error}); remove its folder") from error
    track_pages(found)
    return np.asarray(found)


def mapped_csr(
    values: NDArray[np.float32],
    indices: NDArray[Any],
    indptr: NDArray[Any],
    shape: tuple[int, int],
) -> csr_matrix:
    """Return a CSR matrix over arrays as they lie on disk, sorted and without duplicates.

    Both index arrays have one type, int32 where that suffices: SciPy copies them otherwise.
    """
    matrix = csr_matrix((values, indices, indptr), shape=shape, copy=False)
    matrix.has_canonical_format = True
    return matrix


def index_type(n_entries: int, n_columns: int) -> str:
    """Return the type of both index arrays of a CSR matrix, by its sizes."""
    return "<i4" if max(n_entries, n_columns) <= _INT32_MAX else "<i8"


def read_csr(folder: Path, shape: tuple[int, int], n_entries: int, prefix: str = "") -> csr_matrix:
    """Return the labels of a split, or what is stored beside them, memory-mapped."""
    kind = index_type(n_entries, shape[1])
    indptr, indices = (mapped(folder / f"{prefix}{name}", kind) for name in (INDPTR, INDICES))
    values = mapped(folder / f"{prefix}{VALUES}", "<f4")
    if (len(indptr), len(indices), len(values)) != (shape[0] + 1, n_entries, n_entries):
        raise DataError(f"{folder}: its {prefix or 'labels'} files are not whole; remove it")
    return mapped_csr(values, indices, indptr, shape)


def is_mapped(matrix: csr_matrix | None) -> bool:
    """Say whether the values of a matrix are in a file."""
    owner = None if matrix is None else matrix.data
    while isinstance(owner, np.ndarray) and not isinstance(owner, np.memmap):
        owner = owner.base
    return isinstance(owner, np.memmap | mmap.mmap)


def take_rows(labels: csr_matrix, rows: NDArray[np.int64]) -> csr_matrix:
    """Return some rows of a mapped matrix in a file of their own that goes with the matrix."""
    counts = labels.indptr[rows + 1] - labels.indptr[rows]
    kind = labels.indptr.dtype
    indptr = np.zeros(len(rows) + 1, dtype=kind)
    np.cumsum(counts, out=indptr[1:])
    indices = scratch_array(int(indptr[-1]), labels.indices.dtype)
    values = scratch_array(int(indptr[-1]), labels.data.dtype)
    for start in range(0, len(rows), _ROWS):
        part = labels[rows[start : start + _ROWS]]
        place = slice(int(indptr[start]), int(indptr[min(start + _ROWS, len(rows))]))
        indices[place], values[place] = part.indices, part.data
        release_pages()
    return mapped_csr(values, indices, indptr, (len(rows), labels.shape[1]))


def scratch_array(size: int, kind: np.dtype[Any]) -> NDArray[Any]:
    """Return an array in a file without a name: it goes when the array does."""
    if size == 0:
        return np.empty(0, dtype=kind)
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            _reserve(file.fileno(), size * kind.itemsize)
            found = np.memmap(file, kind, mode="w+", shape=(size,))
    except OSError as error:
        raise DataError(
            f"{root}: no room for a scratch file ({error.strerror}); free some, or set "
            "XDG_CACHE_HOME to a folder on another disk"
        ) from error
    track_pages(found)
    return np.asarray(found)


def _reserve(handle: int, n_bytes: int) -> None:
    """Take the room on disk at once, where the system can.

    A mapped file with holes would end the process by a signal when the disk is full.
    """
    if not hasattr(os, "posix_fallocate"):  # macOS, Windows
        return
    try:
        os.posix_fallocate(handle, 0, n_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system without it
            raise


DESCRIPTION = "corpus.json"
NAMES = "names.json"
LABELS = "labels"
"""The folder of the labels' own features."""
_CODES, _WEIGHTS, _WIDE = "codes.spool", "weights.spool", "{}wide.spool"
_FORMAT = 1
_WIDENED = 1 << 20


class MatrixWriter:
    """Writes a CSR matrix a few rows at a time."""

    def __init__(self, folder: Path, n_columns: int, prefix: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._prefix = prefix
        self._n_columns = n_columns
        self._lengths: list[NDArray[np.int32]] = []
        self._indices = (folder / _WIDE.format(prefix)).open("wb")
        self._values = (folder / f"{prefix}{VALUES}").open("wb")

    def append(self, rows: csr_matrix) -> None:
        """Add rows in canonical form."""
        self._indices.write(rows.indices.astype("<i4").data)
        self._values.write(rows.data.astype("<f4").data)
        self._lengths.append(np.diff(rows.indptr).astype(np.int32))

    def close(self) -> None:
        """Close the files."""
        self._indices.close()
        self._values.close()

    def finish(self) -> dict[str, int]:
        """Write where each row begins, and return the sizes."""
        self.close()
        lengths = np.concatenate([np.zeros(1, np.int32), *self._lengths])
        indptr = np.cumsum(lengths, dtype=np.int64)
        # SciPy wants one type for both arrays: the wider one, where there are so many entries
        kind = index_type(int(indptr[-1]), self._n_columns)
        wide, target = (
            self._folder / name for name in (_WIDE.format(self._prefix), f"{self._prefix}{INDICES}")
        )
        if kind == "<i4":
            wide.rename(target)
        else:
            _widen(wide, target)
        (self._folder / f"{self._prefix}{INDPTR}").write_bytes(indptr.astype(kind).data)
        return {
            "rows": len(indptr) - 1,
            "columns": self._n_columns,
            "entries": int(indptr[-1]),
        }


def store_matrix(parts: Iterable[csr_matrix], folder: Path, prefix: str = "") -> dict[str, int]:
    """Write a matrix that comes a few rows at a time, and return its sizes."""
    writer = None
    try:
        for rows in parts:
            if writer is None:
                writer = MatrixWriter(folder, rows.shape[1], prefix)
            writer.append(rows)
    finally:
        if writer is not None:
            writer.close()
    assert writer is not None, "a reader refuses a matrix without rows"
    return writer.finish()


class SplitWriter:
    """Takes the rows of one split; `finish` puts its labels into canonical form."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.n_mended = 0
        self.weighted = True
        """Whether weights that were given count."""
        self._files: dict[str, IO[bytes]] = {}
        self._digest = hashlib.sha256()
        self._sizes: list[NDArray[np.int32]] = []
        self._counts: list[NDArray[np.int32]] = []

    def __len__(self) -> int:
        """Return how many rows there are."""
        return sum(map(len, self._counts))

    @property
    def n_entries(self) -> int:
        """Return how many labels the rows have, repeats included."""
        return sum(int(counts.sum()) for counts in self._counts)

    def add(
        self,
        texts: Sequence[str] | None,
        counts: NDArray[np.int64],
        codes: NDArray[np.int64],
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        """Add rows: their texts, how many labels each has, and all their labels.

        Args:
            texts: NULs and lone surrogates are mended; None where there are features alone, in all
                calls or in none.
            counts: (rows,) labels of each row.
            codes: numbers that stand for the labels until `finish` is told which are which.
            weights: relevance; in all calls or in none.
        """
        if texts is not None:
            self._add_texts(texts)
        self._counts.append(counts.astype(np.int32))
        self._write(_CODES, codes.astype("<i4").tobytes())
        if weights is not None:
            self._write(_WEIGHTS, weights.astype("<f4").tobytes())

    def _add_texts(self, texts: Sequence[str]) -> None:
        whole, changed = sanitize(texts)
        self.n_mended += changed
        encoded = [text.encode("utf-8") for text in whole]
        sizes = np.fromiter(map(len, encoded), np.int32, len(encoded))
        joined = b"".join(encoded)
        self._digest.update(sizes.tobytes())
        self._digest.update(joined)
        self._sizes.append(sizes)
        self._write(TEXTS, joined)

    def _write(self, name: str, content: bytes) -> None:
        if name not in self._files:
            self._files[name] = (self.folder / name).open("wb")
        self._files[name].write(content)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def finish(self, new_ids: NDArray[np.int64] | None, n_labels: int) -> dict[str, Any]:
        """Write the labels, ``new_ids[code]`` each, sorted and once; return what describes all."""
        weighted = _WEIGHTS in self._files and self.weighted
        self.close()
        counts = np.concatenate([np.zeros(0, np.int32), *self._counts])
        sizes = store_matrix(
            self._entries(counts, new_ids, n_labels, weighted=weighted), self.folder
        )
        for name in (_CODES, _WEIGHTS):
            (self.folder / name).unlink(missing_ok=True)
        if self._sizes:
            lengths = np.concatenate([np.zeros(1, np.int32), *self._sizes])
            (self.folder / OFFSETS).write_bytes(np.cumsum(lengths, dtype="<i8").data)
        return {
            "points": len(counts),
            "entries": sizes["entries"],
            "texts": bool(self._sizes),
            "digest": self._digest.hexdigest(),
        }

    def _entries(
        self,
        counts: NDArray[np.int32],
        new_ids: NDArray[np.int64] | None,
        n_labels: int,
        *,
        weighted: bool,
    ) -> Iterator[csr_matrix]:
        """Yield the labels of all rows."""
        bounds = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        codes = mapped(self.folder / _CODES, "<i4")
        weights = mapped(self.folder / _WEIGHTS, "<f4") if weighted else None
        for start in range(0, len(counts), _ROWS):
            part = counts[start : start + _ROWS].astype(np.int64)
            entries = slice(bounds[start], bounds[start + len(part)])
            ids = codes[entries].astype(np.int64)
            ids = ids if new_ids is None else new_ids[ids]
            own = None if weights is None else np.array(weights[entries])
            matrix = from_lists(part, ids, n_labels, own)
            matrix.eliminate_zeros()
            yield matrix


def _widen(source: Path, target: Path) -> None:
    narrow = mapped(source, "<i4")
    with target.open("wb") as out:
        for start in range(0, len(narrow), _WIDENED):
            out.write(narrow[start : start + _WIDENED].astype("<i8").tobytes())
    source.unlink()


def write_description(folder: Path, description: dict[str, Any], names: Sequence[str]) -> None:
    """Write what a corpus is beside its splits; last, so that it is there if all is."""
    (folder / NAMES).write_text(json.dumps(list(names), ensure_ascii=False), encoding="utf-8")
    described = {"format_version": _FORMAT, **description}
    (folder / DESCRIPTION).write_text(json.dumps(described, indent=2), encoding="utf-8")
