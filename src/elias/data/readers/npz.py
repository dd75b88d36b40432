"""Read folders of text lines and npz matrices.

The format ``folder`` has texts in ``raw/trn_X.txt``, label names in ``raw/Y.txt``, labels in
``Y.trn.npz`` and optionally features in ``X.trn.npz``.

The format ``pecos`` has texts in ``X.trn.txt``, label names in ``output-items.txt``, labels in
``Y.trn.npz``, and features in ``X.trn.npz`` or in a folder ``tfidf-attnxml``.
`elias.data.readers.xmc` reads the one-file text format of PECOS.

Both formats have the splits ``trn``, ``val`` and ``tst``, and optionally
``filter_labels_test.txt``.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

import numpy as np
from scipy.sparse import csr_matrix, load_npz

from elias.data.readers import base
from elias.data.readers.files import check_ratio, data_error, open_bytes

_MAX_EMPTY_ROWS = 1_000_000  # number of rows up to which most rows of a matrix may be empty
_MAX_TEXT_BYTES = 4096  # maximum size of the zip members that contain the format and the shape
_FORMATS = ("csr", "csc", "coo")  # sparse formats that store an index for each value
NPZ_ERRORS = (
    *(ValueError, LookupError, TypeError, EOFError, OverflowError, MemoryError),
    *(NotImplementedError, RuntimeError, SyntaxError, zipfile.BadZipFile, zlib.error),
)
"""Errors that numpy and scipy raise for a file that is damaged or is not a sparse matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNames:
    """The file names of a folder format, in which ``{}`` stands for trn, val or tst."""

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


class NpzReader(base.IdReader):
    """Reads a folder of text lines and npz matrices, one matrix at a time."""

    def __init__(self, folder: Path, options: base.ReadOptions) -> None:
        self._file_names = RAW if _find(folder, RAW.texts, "train") else PECOS
        self.format = self._file_names.format
        options.check_unused(folder, self.format)
        super().__init__(folder, folder, base.read_label_names(folder))

    def chunks(self) -> Iterator[base.Chunk]:
        """Yield the labels, texts and features of each split."""
        for split, short in base.SHORT.items():
            path = self._folder / f"Y.{short}.npz"
            if not path.is_file():
                continue
            texts = _find(self._folder, self._file_names.texts, split)
            features = _find(self._folder, self._file_names.features, split)
            if texts is None and features is None:
                expected = self._file_names.texts[0].format(short)
                problem = f"the {split} points have neither texts nor features; add {expected}"
                raise data_error(path, problem)
            labels = _read_npz(path, "relevance")
            self._n_columns[split] = labels.shape[1]
            yield base.Chunk(split, labels=base.LabelRows.from_csr(labels))
            if texts is not None:
                yield from base.text_chunks(texts, split, labels.shape[0])
            if features is not None:
                yield base.Chunk(split, features=_read_npz(features, "feature"))


def _find(folder: Path, names: tuple[str, ...], split: str) -> Path | None:
    return base.find_file(folder, *(name.format(base.SHORT[split], long=split) for name in names))


def _read_npz(path: Path, what: str) -> csr_matrix:
    """Read the sparse matrix of a SciPy npz file. ``what`` is ``relevance`` or ``feature``."""
    try:
        with open_bytes(path) as stream:  # NumPy does not close a file that it cannot read
            matrix = load_sparse(stream)
    except NPZ_ERRORS as error:
        remedy = "write it with scipy.sparse.save_npz"
        raise data_error(path, f"not a complete sparse npz file ({error}); {remedy}") from None
    return clean_matrix(matrix, path, what)


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
                raise ValueError(f"contains {name} twice")
            shapes[name] = _checked_shape(archive, info, name)
        packed = sum(info.compress_size for info in archive.infolist())
        if packed > stream.seek(0, io.SEEK_END):
            raise ValueError("its parts are larger than the whole file")
        kind, shape = (np.load(archive.open(f"{name}.npy")) for name in ("format", "shape"))
    format_name = kind.astype("U").item()
    if format_name not in _FORMATS:
        names = ", ".join(_FORMATS)
        raise ValueError(f"format {format_name!r} is not one of {names}; convert it by tocsr()")
    if shape.shape != (2,) or shape.dtype.kind not in "iu" or (shape < 0).any():
        raise ValueError("its shape is not a pair of non-negative integers")
    n_entries = shapes.get("indices", shapes.get("row"))
    if n_entries is None or len(n_entries) != 1 or shapes["data"] != n_entries:
        raise ValueError(f"data has shape {shapes['data']}, but indices have shape {n_entries}")
    n_stored = max(prod(shapes.get("indptr", (0,))), *n_entries)
    if shape[0] > max(_MAX_EMPTY_ROWS, 10 * n_stored):
        raise ValueError(f"declares {shape[0]} rows, but most of them are empty")
    stream.seek(0)
    matrix = csr_matrix(load_npz(stream))  # SciPy passes allow_pickle=False
    matrix.check_format(full_check=True)
    return matrix


def _checked_shape(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> tuple[int, ...]:
    """Return the shape of an npy array, and check its header against the size of the zip member."""
    with archive.open(info) as member:
        np.lib.format.read_magic(member)
        shape, _, dtype = np.lib.format.read_array_header_1_0(member)
        begin = member.tell()
    if dtype.hasobject:
        raise ValueError("contains pickled objects, which are unsafe to load")
    if prod(shape) < 0 or begin + prod(shape) * dtype.itemsize != info.file_size:
        raise ValueError(f"the size of {name} does not match its header")
    if name == "data":
        # The values of a label matrix are all 1 and compress extremely well, so their ratio is not
        # checked. There must be as many values as indices, whose ratio is checked.
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise ValueError(f"{dtype} data; expected bool, integer or float of at most 64 bits")
        return shape
    if name in ("indices", "indptr", "row", "col") and dtype.kind not in "iu":
        raise ValueError(f"{name} has {dtype} values; expected integers")
    if name in ("format", "shape") and info.file_size > _MAX_TEXT_BYTES:
        raise ValueError(f"{name} is {info.file_size:,} bytes long")
    check_ratio(name, info.compress_size, info.file_size)
    return shape


def clean_matrix(matrix: csr_matrix, path: Path, what: str, first: int = 0) -> csr_matrix:
    """Convert a matrix to float32 CSR in canonical form. Drop the zeros of a relevance matrix.

    Args:
        matrix: A matrix of any numeric type; it may be changed in place.
        path: The file that contains the matrix, for error messages.
        what: ``relevance`` or ``feature``. Relevance values must not be negative.
        first: The number of points before the first row, for error messages.
    """
    clean = matrix.astype(np.float32, copy=False)
    clean.sum_duplicates()
    rules = {"must be finite": ~np.isfinite(clean.data)}
    if what == "relevance":
        rules["must not be negative"] = clean.data < 0
    for rule, is_wrong in rules.items():
        if is_wrong.any():
            entry = int(is_wrong.argmax())
            point = first + 1 + base.row_of(np.diff(clean.indptr), entry)
            where = f"point {point}, column {clean.indices[entry]} holds {clean.data[entry]}"
            remedy = "correct or drop the entry"
            raise data_error(path, f"{where}: a {what} value {rule}; {remedy}")
    if what == "relevance":
        clean.eliminate_zeros()
    return clean
