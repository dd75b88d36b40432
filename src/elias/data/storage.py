"""Store the texts and matrices of a corpus in files, and open them memory-mapped.

A split is stored as npy files: the UTF-8 bytes of all texts and their offsets, and the three arrays
of each CSR matrix.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from scipy.sparse import csr_matrix

from elias.data.atomic import ArrayWriter, cache_error, cache_root, find_damage, write_manifest
from elias.data.readers.base import Chunk, csr_from_lists
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from elias.data.corpus import Corpus, Split


FORMAT_VERSION = 3
_TEXTS, _OFFSETS, _GROUPS, _FILTERS = "texts.npy", "offsets.npy", "groups.npy", "filters.npy"
_INDPTR, _INDICES, _VALUES = "indptr.npy", "indices.npy", "values.npy"
_FEATURES = "features-"  # prefix of the files of a feature matrix
_DESCRIPTION, _NAMES = "corpus.json", "names.json"
_CODES, _WEIGHTS = "codes.spool", "weights.spool"
_ROWS = 1 << 16  # rows copied at a time
_READ_TEXTS = 1 << 13  # texts read at a time
_WIDEN_ITEMS = 1 << 20  # indices converted at a time
_INT32_MAX = np.iinfo(np.int32).max


class DiskTexts(Sequence[str]):
    """N texts that are stored in a folder. Selecting some of them with `take` copies no text.

    Slicing loads the texts into a list, so use short slices.
    """

    def __init__(self, folder: Path, digest: str, rows: NDArray[np.int64] | None = None) -> None:
        self.folder = folder
        self.rows = rows
        """The rows of the stored texts that this object selects, or None for all rows."""
        self._digest = digest
        self._offsets = _map_array(folder / _OFFSETS)
        self._blob = memoryview(_map_array(folder / _TEXTS).data)
        if not len(self._offsets) or len(self._blob) != int(self._offsets[-1]):
            raise _damaged(folder, f"{_TEXTS} and {_OFFSETS} do not match")

    def is_valid(self) -> bool:
        """Return whether the offsets of the texts start at 0 and ascend."""
        return bool(self._offsets[0] == 0 and (np.diff(self._offsets) >= 0).all())

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._offsets) - 1 if self.rows is None else len(self.rows)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return one text, or a list of texts."""
        positions = range(len(self))[index]  # raises IndexError out of range
        if isinstance(positions, int):
            return self._read(np.array([positions]))[0]
        return self._read(np.arange(positions.start, positions.stop, positions.step))

    def _read(self, positions: NDArray[np.int64]) -> list[str]:
        rows = positions if self.rows is None else self.rows[positions]
        begins, ends = self._offsets[rows].tolist(), self._offsets[rows + 1].tolist()
        return [str(self._blob[i:j], "utf-8") for i, j in zip(begins, ends, strict=True)]

    def __iter__(self) -> Iterator[str]:
        """Yield all texts, with only a part of them in memory at a time."""
        for start in range(0, len(self), _READ_TEXTS):
            yield from self[start : start + _READ_TEXTS]

    def __eq__(self, other: object) -> bool:
        """Return True if ``other`` is a sequence of the same texts, on disk or in memory."""
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # unhashable like a list

    def take(self, rows: NDArray[np.int64]) -> DiskTexts:
        """Return the texts of ``rows``, in that order, without copying them."""
        rows = np.asarray(rows, dtype=np.int64)
        return DiskTexts(self.folder, self._digest, rows if self.rows is None else self.rows[rows])

    @property
    def digest(self) -> str:
        """Return the stored hash of all texts. Append a hash of ``rows``, unless it is None."""
        if self.rows is None:
            return self._digest
        rows = hashlib.sha256(np.ascontiguousarray(self.rows, dtype="<i8").data)
        return f"{self._digest} {rows.hexdigest()}"


def _damaged(folder: Path, problem: str) -> DataError:
    """Return the error for a folder whose files are not a valid corpus."""
    return DataError(f"{folder}: {problem}; remove the folder to read the corpus again")


def _map_array(path: Path) -> NDArray[Any]:
    """Memory-map the array in an npy file."""
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path}: is missing or damaged ({error}); remove its folder to read the corpus again"
        ) from error


def widen(matrix: csr_matrix, n_columns: int) -> csr_matrix:
    """Return ``matrix`` with ``n_columns`` columns. The result shares its arrays."""
    shape = (matrix.shape[0], n_columns)
    return csr_matrix((matrix.data, matrix.indices, matrix.indptr), shape=shape, copy=False)


def _index_type(n_entries: int, n_columns: int) -> str:
    """Return the dtype of both CSR index arrays: int32 if it is large enough, else int64.

    SciPy would copy arrays of any other type.
    """
    return "<i4" if max(n_entries, n_columns) <= _INT32_MAX else "<i8"


def _open_csr(folder: Path, n_columns: int, prefix: str = "") -> csr_matrix:
    """Memory-map the CSR matrix in the files of a folder whose names start with ``prefix``."""
    arrays = (_map_array(folder / f"{prefix}{name}") for name in (_VALUES, _INDICES, _INDPTR))
    values, indices, indptr = arrays
    damage = f"the stored {'features' if prefix else 'labels'} are damaged"
    try:
        shape = (len(indptr) - 1, n_columns)
        matrix = csr_matrix((values, indices, indptr), shape=shape, copy=False)
        matrix.check_format(full_check=True)  # kernels do not check indices
    except ValueError as error:
        raise _damaged(folder, f"{damage} ({error})") from error
    if matrix.nnz != len(values):
        raise _damaged(folder, damage)
    matrix.has_canonical_format = True
    return matrix


def is_mapped(matrix: csr_matrix | None) -> bool:
    """Return True if the values of a matrix are memory-mapped."""
    owner = None if matrix is None else matrix.data
    while isinstance(owner, np.ndarray) and not isinstance(owner, np.memmap):
        owner = owner.base
    return isinstance(owner, np.memmap | mmap.mmap)


def take_rows(matrix: csr_matrix, rows: NDArray[np.int64]) -> csr_matrix:
    """Return the given rows of a matrix.

    Rows of a memory-mapped matrix are copied to a temporary file that is deleted with the result.
    """
    if not is_mapped(matrix):
        return matrix[rows]
    counts = matrix.indptr[rows + 1] - matrix.indptr[rows]
    indptr = np.zeros(len(rows) + 1, dtype=matrix.indptr.dtype)
    np.cumsum(counts, out=indptr[1:])
    indices = scratch_array(int(indptr[-1]), matrix.indices.dtype)
    values = scratch_array(int(indptr[-1]), matrix.data.dtype)
    for start in range(0, len(rows), _ROWS):
        part = matrix[rows[start : start + _ROWS]]
        entries = slice(int(indptr[start]), int(indptr[min(start + _ROWS, len(rows))]))
        indices[entries], values[entries] = part.indices, part.data
    taken = csr_matrix((values, indices, indptr), shape=(len(rows), matrix.shape[1]))
    taken.has_canonical_format = True
    return taken


def scratch_array(size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array in an unnamed temporary file that is deleted together with the array."""
    if size == 0:
        return np.empty(0, dtype=dtype)
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            _reserve(file.fileno(), size * dtype.itemsize)
            array = np.memmap(file, dtype, mode="w+", shape=(size,))
    except OSError as error:
        raise cache_error(root, error) from error
    return np.asarray(array)


def _reserve(handle: int, n_bytes: int) -> None:
    """Allocate disk space for a file, if the system (Linux) and the file system support it.

    Without this, a full disk would kill the process with a signal when it writes to the mapped
    file.
    """
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, 0, n_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise


class _MatrixWriter:
    """Writer of a CSR matrix in chunks of rows."""

    def __init__(self, folder: Path, n_columns: int, prefix: str = "") -> None:
        self.n_columns = n_columns
        self._indptr, self._path = folder / f"{prefix}{_INDPTR}", folder / f"{prefix}{_INDICES}"
        self._lengths = [np.zeros(1, dtype=np.int32)]
        self._indices = ArrayWriter(self._path, "<i4")
        self._values = ArrayWriter(folder / f"{prefix}{_VALUES}", "<f4")

    def append(self, rows: csr_matrix) -> None:
        """Append rows, which must be in canonical form."""
        self._indices.append(rows.indices)
        self._values.append(rows.data)
        self._lengths.append(np.diff(rows.indptr).astype(np.int32))

    def close(self) -> None:
        self._indices.close()
        self._values.close()

    def finish(self) -> None:
        """Write the row offsets. Widen the column indices to int64 if necessary."""
        self.close()
        indptr = np.cumsum(np.concatenate(self._lengths), dtype=np.int64)
        dtype = _index_type(int(indptr[-1]), self.n_columns)
        np.save(self._indptr, indptr.astype(dtype))
        if dtype == "<i8":
            narrow = self._path.rename(self._path.with_suffix(".spool"))
            indices = _map_array(narrow)
            with ArrayWriter(self._path, dtype) as wide:
                for start in range(0, len(indices), _WIDEN_ITEMS):
                    wide.append(indices[start : start + _WIDEN_ITEMS])
            narrow.unlink()


class SplitWriter:
    """Writer of the chunks of one split to a new folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._arrays: dict[str, ArrayWriter] = {}
        self._features: _MatrixWriter | None = None
        self._digest = hashlib.sha256()
        self._text_sizes = [np.zeros(1, dtype=np.int32)]
        self._counts: list[NDArray[np.int32]] = []

    def append(self, chunk: Chunk) -> None:
        """Write the texts, labels and features of a chunk."""
        if chunk.texts is not None:
            encoded = [text.encode("utf-8") for text in chunk.texts]
            sizes = np.fromiter(map(len, encoded), np.int32, len(encoded))
            joined = b"".join(encoded)
            self._digest.update(sizes.tobytes())
            self._digest.update(joined)
            self._text_sizes.append(sizes)
            self._write(_TEXTS, "u1", np.frombuffer(joined, dtype="u1"))
        if chunk.labels is not None:
            self._counts.append(chunk.labels.counts.astype(np.int32))
            self._write(_CODES, "<i4", chunk.labels.codes)
            if chunk.labels.weights is not None:
                self._write(_WEIGHTS, "<f4", chunk.labels.weights)
        if chunk.groups is not None:
            self._write(_GROUPS, "<i8", chunk.groups)
        if chunk.features is not None:
            if self._features is None:
                self._features = _MatrixWriter(self._folder, chunk.features.shape[1], _FEATURES)
            self._features.append(chunk.features)

    def _write(self, name: str, dtype: str, array: NDArray[Any]) -> None:
        if name not in self._arrays:
            self._arrays[name] = ArrayWriter(self._folder / name, dtype)
        self._arrays[name].append(array)

    def close(self) -> None:
        """Close the files."""
        for writer in self._arrays.values():
            writer.close()
        if self._features is not None:
            self._features.close()

    def finish(
        self, ids: NDArray[np.int64] | None, n_labels: int, filters: NDArray[np.int64] | None
    ) -> dict[str, Any]:
        """Write the labels in canonical form, and return the description of the split.

        Args:
            ids: The label id of each code in the chunks, or None if the codes are label ids.
            n_labels: Number of labels L.
            filters: (M, 2) pairs (point, label) that must not be predicted.
        """
        self.close()
        counts = np.concatenate(self._counts).astype(np.int64)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        codes = _map_array(self._folder / _CODES)
        weights = _map_array(self._folder / _WEIGHTS) if _WEIGHTS in self._arrays else None
        with closing(_MatrixWriter(self._folder, n_labels)) as writer:
            for start in range(0, len(counts), _ROWS):
                rows = counts[start : start + _ROWS]
                entries = slice(bounds[start], bounds[start + len(rows)])
                chunk = codes[entries].astype(np.int64)
                chunk = chunk if ids is None else ids[chunk]
                values = None if weights is None else np.array(weights[entries])
                matrix = csr_from_lists(rows, chunk, n_labels, values)
                matrix.eliminate_zeros()
                writer.append(matrix)
            writer.finish()
        for name in (_CODES, _WEIGHTS):
            (self._folder / name).unlink(missing_ok=True)
        if _TEXTS in self._arrays:
            offsets = np.cumsum(np.concatenate(self._text_sizes), dtype="<i8")
            np.save(self._folder / _OFFSETS, offsets)
        if filters is not None:
            np.save(self._folder / _FILTERS, filters)
        description: dict[str, Any] = {"digest": self._digest.hexdigest()}
        if self._features is not None:
            self._features.finish()
            description["features"] = self._features.n_columns
        return description


def write_description(folder: Path, description: dict[str, Any], names: Sequence[str]) -> None:
    """Write the description of a stored corpus, which marks it as complete. Call this last."""
    (folder / _NAMES).write_text(json.dumps(list(names), ensure_ascii=False), encoding="utf-8")
    content = json.dumps({"format_version": FORMAT_VERSION, **description}, indent=2)
    (folder / _DESCRIPTION).write_text(content, encoding="utf-8")
    write_manifest(folder, FORMAT_VERSION)


def open_corpus(folder: Path, source: Path) -> tuple[Corpus, bool]:
    """Memory-map a stored corpus. Also return whether its source defines splits.

    Raises:
        DataError: If the stored corpus does not exist, or is damaged.
    """
    from elias.data.corpus import Corpus  # avoids a circular import

    if problem := find_damage(folder, FORMAT_VERSION, trust_times=True):
        raise _damaged(folder, problem)
    try:
        description = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
        names = json.loads((folder / _NAMES).read_text(encoding="utf-8"))
        splits = {
            name: _open_split(folder / name, split, len(names))
            for name, split in description["splits"].items()
        }
        corpus = Corpus(
            label_names=names,
            source=source,
            format=description["format"],
            notes=description["notes"],
            reading=description["reading"],
            **splits,
        )
        return corpus, bool(description["has_splits"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, f"is not a complete stored corpus ({error})") from error


def _open_split(folder: Path, description: dict[str, Any], n_labels: int) -> Split:
    from elias.data.corpus import Split

    texts = DiskTexts(folder, description["digest"]) if (folder / _TEXTS).exists() else None
    if texts is not None and not texts.is_valid():
        raise _damaged(folder, "the offsets of the texts are damaged")
    n_features = description.get("features")
    filters, groups = folder / _FILTERS, folder / _GROUPS
    return Split(
        labels=_open_csr(folder, n_labels),
        texts=texts,
        features=n_features and _open_csr(folder, n_features, _FEATURES),
        filters=np.load(filters, allow_pickle=False) if filters.exists() else None,
        groups=_map_array(groups) if groups.exists() else None,
    )
