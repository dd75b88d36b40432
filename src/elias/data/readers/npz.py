"""Read folders of text lines and npz matrices.

``folder``: ``raw/trn_X.txt``, ``raw/Y.txt``, ``Y.trn.npz`` and optionally ``X.trn.npz`` (features)
and ``X.lbl.npz`` (features of the labels).

``pecos``: ``X.trn.txt``, ``output-items.txt``, ``Y.trn.npz``, features in ``X.trn.npz`` or in a
folder ``tfidf-attnxml``. `elias.data.readers.pecos` reads the one-file text format of PECOS.

Both have splits ``trn``, ``val`` and ``tst``, and optionally ``filter_labels_test.txt``.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from dataclasses import dataclass
from math import prod
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix, issparse, load_npz

from elias.data.readers.base import (
    LABELS,
    Chunk,
    LabelRows,
    Reader,
    ReadOptions,
    Summary,
    summarize_columns,
    text_chunks,
)
from elias.data.readers.files import SHORT, check_ratio, check_regular_file, data_error, find_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from elias.errors import DataError


_MAX_EMPTY_ROWS = 1_000_000  # rows that a matrix may have beyond those it stores entries for
_MAX_TEXT_BYTES = 4096  # size of the members that hold the format and the shape
_FORMATS = ("csr", "csc", "coo")  # those that store an index for each value
NPZ_ERRORS = (
    *(ValueError, LookupError, TypeError, EOFError, OverflowError, MemoryError),
    *(NotImplementedError, RuntimeError, SyntaxError, zipfile.BadZipFile, zlib.error),
)
"""Errors that numpy and scipy raise for a file that is damaged or is not a sparse matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNames:
    """The file names of a folder format; ``{}`` stands for trn, val or tst."""

    format: str
    texts: tuple[str, ...]
    features: tuple[str, ...]
    label_names: str


RAW = FileNames(
    format="folder",
    texts=("raw/{}_X.txt", "{}_X.txt"),
    features=("X.{}.npz",),
    label_names="raw/Y.txt",
)
PECOS = FileNames(
    format="pecos",
    texts=("X.{}.txt", "{long}_raw_texts.txt", "{long}_raw_text.txt", "{long}_texts.txt"),
    features=("X.{}.npz", "tfidf-attnxml/X.{}.npz", "normalized/X.{}.npz"),
    label_names="output-items.txt",
)


class NpzReader(Reader):
    """Reads a folder of text lines and npz matrices, one matrix at a time."""

    def __init__(self, folder: Path, options: ReadOptions) -> None:
        names = RAW if _find(folder, RAW.texts, "train") else PECOS
        options.check_unused(folder, names.format)
        self.format = names.format
        self._folder = folder
        self._names = names
        self._n_columns: dict[str, int] = {}

    def chunks(self) -> Iterator[Chunk]:
        """Yield the labels, texts and features of each split, then the features of the labels."""
        for split, short in SHORT.items():
            path = self._folder / f"Y.{short}.npz"
            if not path.is_file():
                continue
            texts = _find(self._folder, self._names.texts, split)
            features = _find(self._folder, self._names.features, split)
            if texts is None and features is None:
                expected = self._names.texts[0].format(short)
                problem = f"the {split} points have neither texts nor features; add {expected}"
                raise data_error(path, problem)
            labels = clean_matrix(read_npz(path), path, "relevance")
            self._n_columns[split] = labels.shape[1]
            yield Chunk(split, labels=LabelRows.from_csr(labels))
            if texts is not None:
                yield from text_chunks(texts, split, labels.shape[0])
            if features is not None:
                matrix = clean_matrix(read_npz(features), features, "feature")
                yield Chunk(split, features=matrix)
        path = self._folder / "X.lbl.npz"
        if path.is_file():
            yield Chunk(LABELS, features=clean_matrix(read_npz(path), path, "feature"))

    def finish(self, n_points: Mapping[str, int], n_uses: int) -> Summary:
        """Return the label names and filters."""
        return summarize_columns(self._folder, self._folder, self._n_columns, n_points, n_uses)


def _find(folder: Path, names: tuple[str, ...], split: str) -> Path | None:
    return find_file(folder, *(name.format(SHORT[split], long=split) for name in names))


def read_npz(path: Path) -> csr_matrix:
    """Read the sparse matrix of a SciPy npz file as CSR, without unpickling."""
    check_regular_file(path)
    try:
        with path.open("rb") as stream:  # NumPy leaves a file open that it cannot read
            return load_sparse(stream)
    except FileNotFoundError:
        raise data_error(path, "no such file") from None
    except OSError as error:
        raise data_error(path, f"cannot be read ({error.strerror or error})") from None
    except NPZ_ERRORS as error:
        remedy = "write it with scipy.sparse.save_npz"
        raise data_error(path, f"not a whole sparse npz file ({error}); {remedy}") from None


def load_sparse(stream: IO[bytes]) -> csr_matrix:
    """Read the matrix of a SciPy npz file as CSR, without unpickling, and check its indices.

    Before unpacking, the declared sizes of the zip members are compared with each other and with
    the size of the packed data.

    Raises:
        ValueError: If the content is inconsistent. A broken file may also raise other errors of
            NumPy, SciPy or zipfile (KeyError, TypeError, EOFError, IndexError, OSError,
            BadZipFile, NotImplementedError, zlib.error).
    """
    with zipfile.ZipFile(stream) as archive:
        shapes: dict[str, tuple[int, ...]] = {}
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name in shapes:
                raise ValueError(f"holds {name} twice")
            shapes[name] = _checked_shape(archive, info, name)
        packed = sum(info.compress_size for info in archive.infolist())
        if packed > stream.seek(0, io.SEEK_END):
            raise ValueError("the members are larger than the file")
        kind, shape = (_read_array(archive, name) for name in ("format", "shape"))
    if kind.shape != () or kind.dtype.kind not in "SU":
        raise ValueError("does not name its format")
    if kind.astype("U").item() not in _FORMATS:
        kinds = ", ".join(_FORMATS)
        raise ValueError(f"stored as {kind.astype('U').item()!r}; use tocsr() ({kinds} are read)")
    if shape.shape != (2,) or shape.dtype.kind not in "iu" or (shape < 0).any():
        raise ValueError("its shape is not two counts")
    n_entries = shapes.get("indices", shapes.get("row"))
    if n_entries is None or len(n_entries) != 1 or shapes["data"] != n_entries:
        raise ValueError(f"values of shape {shapes['data']} for indices of shape {n_entries}")
    n_stored = max(prod(shapes.get("indptr", (0,))), *n_entries)
    if shape[0] > max(_MAX_EMPTY_ROWS, 10 * n_stored):
        raise ValueError(f"declares {shape[0]} rows, but stores nothing of most of them")
    stream.seek(0)
    loaded: Any = load_npz(stream)  # SciPy passes allow_pickle=False
    if not issparse(loaded) or loaded.ndim != 2:
        raise ValueError("not a sparse matrix")
    matrix = csr_matrix(loaded)
    matrix.check_format(full_check=True)
    return matrix


def _checked_shape(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> tuple[int, ...]:
    """Return the shape of an npy array; check its header against the size of the zip member."""
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        formats = np.lib.format
        read = formats.read_array_header_1_0 if version == (1, 0) else formats.read_array_header_2_0
        shape, _, dtype = read(member)
        begin = member.tell()
    if dtype.hasobject:
        raise ValueError("holds pickled objects, which are never read")
    if prod(shape) < 0 or begin + prod(shape) * dtype.itemsize != info.file_size:
        raise ValueError(f"the size of {name} differs from its header")
    if name == "data":
        # The values of a label matrix are all 1 and compress more than anything else, so the ratio
        # is not checked: there are as many as indices, which bounds them.
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise ValueError(f"holds {dtype} values, not plain numbers of 8 bytes at most")
        return shape
    if name in ("indices", "indptr", "row", "col") and dtype.kind not in "iu":
        raise ValueError(f"{name} holds {dtype} values, not whole numbers")
    if name in ("format", "shape") and info.file_size > _MAX_TEXT_BYTES:
        raise ValueError(f"{name} is {info.file_size:,} bytes long")
    check_ratio(name, info.compress_size, info.file_size)
    return shape


def _read_array(archive: zipfile.ZipFile, name: str) -> Any:
    with archive.open(f"{name}.npy") as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def clean_matrix(matrix: csr_matrix, path: Path, what: str, first: int = 0) -> csr_matrix:
    """Return a matrix as float32 CSR, sorted, without duplicates; relevance also without zeros.

    Args:
        matrix: A matrix of any numeric type; it may be changed in place.
        path: The file that contains the matrix, for error messages.
        what: ``relevance``, which must not be negative, or ``feature``.
        first: The number of points before the first row, for error messages.
    """
    if matrix.dtype.kind not in "biuf":
        raise data_error(path, f"holds {matrix.dtype} values; {what} values are numbers")
    clean = matrix.astype(np.float32, copy=False)
    clean.sum_duplicates()
    wrong = ~np.isfinite(clean.data)
    if wrong.any():
        raise _value_error(clean, wrong, path, f"a {what} value must be finite", first)
    if what == "relevance":
        if clean.nnz and clean.data.min() < 0:
            rule = "a relevance must not be negative"
            raise _value_error(clean, clean.data < 0, path, rule, first)
        clean.eliminate_zeros()
    return clean


def _value_error(
    matrix: csr_matrix, wrong: NDArray[np.bool_], path: Path, rule: str, first: int
) -> DataError:
    entry = int(np.flatnonzero(wrong)[0])
    row = first + int(np.searchsorted(matrix.indptr, entry, side="right"))
    column, value = int(matrix.indices[entry]), float(matrix.data[entry])
    problem = f"point {row}, column {column} holds {value}: {rule}; correct or drop the entry"
    return data_error(path, problem)
