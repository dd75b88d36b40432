"""Read the formats of the XMC repository and of PECOS.

``folder``: Folders of matrices in npz files and lines of text. The texts are in ``raw/trn_X.txt``,
label names in ``raw/Y.txt``, labels in ``Y.trn.npz`` and optionally features in ``X.trn.npz``.

``pecos``: The same with texts in ``X.trn.txt``, label names in ``output-items.txt``, labels in
``Y.trn.npz``, and features in ``X.trn.npz`` or in a folder ``tfidf-attnxml``. A corpus may also be
a file of lines ``id,id,…<tab>text``, with label names in the same folder (``output-labels.txt``,
``labels.txt`` and others). Without a file of label names, each label is named by its id.

``xmc``: The first line of an ``N D L`` file gives the numbers of points, features and labels. Each
further line is a point, ``label,label feature:value …``. A corpus is one such file, or a folder of
them (``train.txt`` or ``eurlex_train.txt``, and ``test.txt``), or a folder with one matrix per text
file (``trn_X_Y.txt`` and ``trn_X_Xf.txt``). Optional files of a folder are texts in ``trn_X.txt``
and label names in ``Y.txt`` or ``Yf.txt``.

``lf``: Each line of ``trn.json.gz`` and ``tst.json.gz`` is an object ``{"uid", "title", "content",
"target_ind", "target_rel"}``. Each line of ``lbl.json.gz`` is an object ``{"uid", "title"}`` for a
label; without this file, label names are read from ``Yf.txt``. A text is the title and the content,
joined by a space. Features are optional, in ``trn_X_Xf.txt``.

The splits of a folder are called ``trn``, ``val`` and ``tst``. It may have filter pairs, such as
``filter_labels_test.txt``.
"""

from __future__ import annotations

import io
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, load_npz

from elias.data.readers import base
from elias.data.readers.columns import check_columns
from elias.data.readers.files import (
    check_ratio,
    data_error,
    line_chunks,
    open_bytes,
    short_repr,
    suffix_of,
)
from elias.data.readers.label_cells import parse_weights
from elias.data.readers.table import Rows, TableFile
from elias.errors import DataError

FEATURE_MATRIX = "{}_X_Xf.txt"
LF_IDS, LF_WEIGHTS = "target_ind", "target_rel"
_LF_TEXT = ("title", "content")
_MAX_ID = 2**31 - 1
_COLON, _SPACE = ord(":"), ord(" ")
_ID = re.compile(r"-?\d{1,18}")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+|inf|nan)(?:e[-+]?\d+)?"
_PAIR = re.compile(rf"{_ID.pattern}:{_NUMBER}", re.IGNORECASE)
_HEADER = re.compile(r"\s*\d+(?:\s+\d+){2}\s*")
_PECOS_LINE = re.compile(r"(?:\d+(?:,\d+)*)?\t.*", re.DOTALL)
_PECOS_IDS = re.compile(r"(?:\d{1,18}(?:,\d{1,18})*)?")
_PECOS_SAMPLE = 20  # lines from which the format is detected
_MAX_EMPTY_ROWS = 1_000_000  # a matrix with more rows must not be mostly empty
_MAX_TEXT_BYTES = 4096  # maximum size of the zip members that hold the format and the shape
_FORMATS = ("csr", "csc", "coo")  # sparse formats that store an index for each value
NPZ_ERRORS = (
    *(ValueError, LookupError, TypeError, EOFError, OverflowError, MemoryError),
    *(NotImplementedError, RuntimeError, SyntaxError, zipfile.BadZipFile, zlib.error),
)
"""Errors that numpy and scipy raise for a file that is damaged or is not a sparse matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNames:
    """The file names of a folder of matrices.

    ``{}`` stands for trn, val or tst, and ``{long}`` for train, validation or test.
    """

    format: str
    labels: str
    texts: tuple[str, ...]
    features: tuple[str, ...]
    label_names: str


RAW = FileNames(
    format="folder",
    labels="Y.{}.npz",
    texts=("raw/{}_X.txt", "{}_X.txt"),
    features=("X.{}.npz",),
    label_names="raw/Y.txt",
)
PECOS = FileNames(
    format="pecos",
    labels="Y.{}.npz",
    texts=("X.{}.txt", "{long}_raw_texts.txt", "{long}_raw_text.txt", "{long}_texts.txt"),
    features=("X.{}.npz", "tfidf-attnxml/X.{}.npz", "normalized/X.{}.npz"),
    label_names="output-items.txt",
)
TEXT_MATRICES = FileNames(
    format="xmc",
    labels="{}_X_Y.txt",
    texts=("{}_X.txt", "raw/{}_X.txt", "{long}_raw_texts.txt"),
    features=(FEATURE_MATRIX,),
    label_names="Y.txt",
)


def has_matrices(folder: Path, names: FileNames) -> bool:
    """Return True if a folder has a label matrix of the training points."""
    return _find(folder, (names.labels,), "train") is not None


def _find(folder: Path, names: tuple[str, ...], split: str) -> Path | None:
    return base.find_file(folder, *(name.format(base.SHORT[split], long=split) for name in names))


class MatrixReader(base.IdReader):
    """Reader of a folder of label matrices, feature matrices and lines of text."""

    def __init__(self, folder: Path, options: base.ReadOptions) -> None:
        """Find out which file names the folder uses."""
        self._file_names = PECOS
        if not has_matrices(folder, PECOS):
            self._file_names = TEXT_MATRICES
        elif _find(folder, RAW.texts, "train"):
            self._file_names = RAW
        self.format = self._file_names.format
        options.check_unused(folder, self.format)
        super().__init__(folder, folder, base.read_label_names(folder))

    def chunks(self) -> Iterator[base.Chunk]:
        """Yield the labels, texts and features of each split."""
        names = self._file_names
        for split, short in base.SHORT.items():
            path = _find(self._folder, (names.labels,), split)
            if path is None:
                continue
            texts = _find(self._folder, names.texts, split)
            features = _find(self._folder, names.features, split)
            if texts is None and features is None:
                expected = names.texts[0].format(short)
                problem = f"the {split} points have neither texts nor features; add {expected}"
                raise data_error(path, problem)
            n_points = 0
            for labels in _matrix_blocks(path, "relevance"):
                self._n_columns[split] = labels.shape[1]
                n_points += labels.shape[0]
                yield base.Chunk(split, labels=base.LabelRows.from_csr(labels))
            if texts is not None:
                yield from base.text_chunks(texts, split, n_points)
            if features is not None:
                yield from _feature_chunks(features, split)


def _matrix_blocks(path: Path, what: str) -> Iterator[csr_matrix]:
    """Yield blocks of the rows of a matrix in an npz or a text file.

    ``what`` is the kind of its values, ``relevance`` or ``feature``.
    """
    if suffix_of(path) == ".npz":
        yield _read_npz(path, what)
    else:
        for _, matrix in _read(path, 2, "label" if what == "relevance" else what)[1]:
            yield matrix


def _feature_chunks(path: Path, split: str) -> Iterator[base.Chunk]:
    return (base.Chunk(split, features=matrix) for matrix in _matrix_blocks(path, "feature"))


def looks_xmc(lines: Sequence[str]) -> bool:
    """Return True if the first lines look like an ``N D L`` file.

    A table of numbers has no colons, and prose has no header of numbers. A file that contains only
    the header is accepted here, so that the reader reports the error.
    """
    return _HEADER.fullmatch(lines[0]) is not None and all(
        ":" in line or not line.strip() or "," in line or line.strip().isdigit()
        for line in lines[1:5]
    )


class _FileReader(base.IdReader):
    """Base class of readers of one file, or of one file for each split."""

    title: str
    """Name of the format in error messages."""
    single_has_names = True
    """True if a single file can have a file of label names in its folder."""

    def __init__(
        self, source: Path, files: dict[str, list[Path]], options: base.ReadOptions
    ) -> None:
        options.check_unused(source, self.title)
        self.has_splits = "" not in files
        self._files = base.one_file_each(files)
        folder = self._files["train"].parent
        has_names = self.has_splits or self.single_has_names
        super().__init__(source, folder, base.read_label_names(folder) if has_names else None)


class XmcReader(_FileReader):
    """Reader of one ``N D L`` file, or of one such file for each split."""

    format, title = "xmc", "XMC"
    single_has_names = False

    def chunks(self) -> Iterator[base.Chunk]:
        """Yield the labels, features and texts of each split."""
        for split, path in self._files.items():
            sizes, blocks = _read(path, 3, "feature")
            for labels, matrix in blocks:
                yield base.Chunk(split, labels=labels, features=matrix)
            self._n_columns[split] = sizes[-1]
            texts = _find(self._folder, TEXT_MATRICES.texts, split)
            if texts is not None and self.has_splits:
                yield from base.text_chunks(texts, split, sizes[0])


def _read(
    path: Path, n_sizes: int, what: str
) -> tuple[list[int], Iterator[tuple[base.LabelRows, csr_matrix]]]:
    """Return the sizes on the first line of a file, and an iterator over its rows in blocks.

    Args:
        path: The file.
        n_sizes: 3 if the first line is ``N D L`` and rows start with labels, or 2 if it is ``N D``.
        what: The kind of the matrix columns, ``label`` or ``feature``.
    """
    chunks = line_chunks(path)
    first_lines = next(chunks, [""])
    header = first_lines[0].split()
    if len(header) != n_sizes or not all(map(_ID.fullmatch, header)):
        expected = "`points features labels`" if n_sizes == 3 else "`rows columns`"
        problem = f"the first line is {short_repr(' '.join(header))}, not {expected}"
        raise data_error(path, problem, 1)
    sizes = [int(size) for size in header]

    def blocks() -> Iterator[tuple[base.LabelRows, csr_matrix]]:
        n_rows, done = sizes[0], 0
        for chunk in chain([first_lines[1:]], chunks):
            n_wanted = max(n_rows - done, 0)
            # ignore blank lines after the last row
            lines = chunk[:n_wanted] + [line for line in chunk[n_wanted:] if line.strip()]
            if lines:
                yield _parse(path, lines, done, sizes, what)
                done += len(lines)
        if not done:
            raise data_error(path, "has no points after its first line; copy it again")
        if done != n_rows:
            remedy = "correct the first line, or copy the file again if it is truncated"
            counts = f"the first line says {n_rows} points, but {done} follow"
            raise data_error(path, f"{counts}; {remedy}")

    return sizes, blocks()


def _parse(
    path: Path, lines: list[str], n_before: int, sizes: Sequence[int], what: str
) -> tuple[base.LabelRows, csr_matrix]:
    """Parse consecutive rows into labels and a matrix. ``n_before`` rows come before them."""
    first = n_before + 2  # the number of the first line
    rows = [_split_line(line) if len(sizes) == 3 else ("", line.strip()) for line in lines]
    try:
        labels = base.LabelRows.from_lines([head for head, _ in rows])
        columns, values = _parse_pairs(" ".join([pairs for _, pairs in rows if pairs]))
    except (ValueError, OverflowError):
        raise _broken_line(path, rows, first) from None
    counts = np.array([pairs.count(":") for _, pairs in rows], dtype=np.int64)
    for name, ids, row_counts, size in (
        ("label", labels.codes, labels.counts, sizes[-1]),
        (what, columns, counts, sizes[1]),
    ):
        problem = f"{name} id {{}} is out of range; the first line allows 0 to {size - 1}"
        base.check_entries(path, ids, (ids < 0) | (ids >= size), row_counts, problem, first)
    kind = "relevance" if what == "label" else what
    problem = f"{{}}: a {kind} value must be finite; correct or drop the entry"
    base.check_entries(path, values, ~np.isfinite(values), counts, problem, first)
    matrix = base.csr_from_lists(counts, columns, sizes[1], values)
    return labels, clean_matrix(matrix, path, kind, n_before)


def _split_line(line: str) -> tuple[str, str]:
    """Split a line into its labels and its ``index:value`` pairs.

    A line without labels starts with a space, or with a pair.
    """
    head, _, rest = line.rstrip().partition(" ")
    return ("", line.strip()) if ":" in head else (head, rest.strip())


def _parse_pairs(text: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Parse ``index:value`` pairs separated by white space. Raise `ValueError` on failure."""
    if not text:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
    buffer = np.frombuffer(text.encode(), dtype=np.uint8)
    marks = buffer[(buffer == _COLON) | (buffer <= _SPACE)]
    if len(marks) % 2 == 0 or (marks[0::2] != _COLON).any() or (marks[1::2] != _SPACE).any():
        regular = " ".join(text.split())
        if regular == text:
            raise ValueError("not index:value pairs")
        return _parse_pairs(regular)
    with warnings.catch_warnings():
        # NumPy warns about text that is not a number
        warnings.simplefilter("ignore", DeprecationWarning)
        numbers = np.fromstring(text.replace(":", " "), sep=" ")
    with np.errstate(over="ignore", invalid="ignore"):  # a value that becomes inf is refused later
        columns, values = numbers[0::2].astype(np.int64), numbers[1::2].astype(np.float32)
    if len(numbers) != len(marks) + 1 or (columns != numbers[0::2]).any():
        raise ValueError("not numbers")
    return columns, values


def _broken_line(path: Path, rows: Sequence[tuple[str, str]], first: int) -> DataError:
    """Return the error for the first row that cannot be parsed. ``rows[0]`` is line ``first``."""
    for number, (head, pairs) in enumerate(rows, start=first):
        if head and not all(map(_ID.fullmatch, head.split(","))):
            problem = f"{short_repr(head)} is not a list of label ids like 3,17"
            return data_error(path, problem, number)
        for pair in pairs.split():
            if not _PAIR.fullmatch(pair):
                return data_error(path, f"{short_repr(pair)} is not an index:value pair", number)
    return data_error(path, "an id or a value is too large; correct it", first)


def looks_pecos(lines: Sequence[str]) -> bool:
    """Return True if all given lines are ``ids<tab>text`` and at least one of them has ids."""
    filled = [line for line in lines[:_PECOS_SAMPLE] if line]
    return all(map(_PECOS_LINE.fullmatch, filled)) and not all(
        line.startswith("\t") for line in filled
    )


class PecosReader(_FileReader):
    """Reader of one file of ``ids<tab>text`` lines, or of one such file for each split."""

    format, title = "pecos", "PECOS text"

    def chunks(self) -> Iterator[base.Chunk]:
        """Yield the texts and labels of each split."""
        for split, path in self._files.items():
            first = 1
            for lines in line_chunks(path):
                yield self._parse(split, lines, first)
                first += len(lines)

    def _parse(self, split: str, lines: Sequence[str], first: int) -> base.Chunk:
        path = self._files[split]
        heads, texts = [], []
        for number, line in enumerate(lines, start=first):
            head, tab, text = line.partition("\t")
            if not tab or not _PECOS_IDS.fullmatch(head):
                raise data_error(path, f"{short_repr(line)} is not `id,id,…<tab>text`", number)
            heads.append(head)
            texts.append(text)
        labels = base.LabelRows.from_lines(heads)
        if self._names is None:
            self._highest = max(self._highest, int(labels.codes.max(initial=-1)))
        else:
            n_labels = len(self._names)
            limits = f"there are {n_labels} label names, counted from 0"
            problem = f"label id {{}} is out of range; {limits}"
            base.check_entries(
                path, labels.codes, labels.codes >= n_labels, labels.counts, problem, first
            )
        return base.Chunk(split, texts=texts, labels=labels)


def lf_points_file(folder: Path, split: str) -> Path | None:
    """Return the JSON file of a split of an LF folder, or None."""
    short = base.SHORT[split]
    return base.find_file(folder, f"{short}.json", f"{short}.raw.json", f"{short}.jsonl")


class LfReader(base.IdReader):
    """Reader of an LF folder: JSON lines with texts and label ids, and the titles of the labels."""

    format = "lf"

    def __init__(self, folder: Path, options: base.ReadOptions) -> None:
        options.check_unused(folder, "LF", except_text=True)
        self._text = options.text
        path = base.find_file(folder, "lbl.json", "lbl.raw.json", "lbl.jsonl")
        if path is None:
            names = base.read_label_names(folder)
        else:
            rows = TableFile(path, "jsonl").rows(["title"], ["title"])
            names = [str(title or "") for _, [title] in rows]
        super().__init__(folder, folder, names)

    def chunks(self) -> Iterator[base.Chunk]:
        """Yield the texts, labels and features of each split."""
        for split in base.SHORT:
            path = lf_points_file(self._folder, split)
            if path is not None:
                yield from self._points(path, split)
                features = _find(self._folder, (FEATURE_MATRIX,), split)
                if features is not None:
                    yield from _feature_chunks(features, split)

    def _points(self, path: Path, split: str) -> Iterator[base.Chunk]:
        """Yield texts and labels of a split. Relevance values must be in all rows or in none."""
        text = self._text_columns(path)
        has_weights = False
        unweighted: DataError | None = None  # for the first row with labels but no relevance
        columns = [*text, LF_IDS, LF_WEIGHTS]
        for rows in TableFile(path, "jsonl").chunks(split, columns, [text[0], LF_IDS]):
            lists = [self._checked_ids(rows, row) for row in range(len(rows))]
            counts = np.array([len(ids) for ids in lists], dtype=np.int64)
            codes = np.array(list(chain.from_iterable(lists)), dtype=np.int64)
            self._highest = max(self._highest, int(codes.max(initial=-1)))
            weights = None
            cells = rows.columns[LF_WEIGHTS]
            has_weights = has_weights or any(cell is not None for cell in cells)
            if has_weights:
                if unweighted is not None:
                    raise unweighted
                weights = parse_weights(cells, counts, rows.error)
            elif unweighted is None and counts.any():
                row = int(np.flatnonzero(counts)[0])
                problem = f"{counts[row]} labels but 0 relevance values; give one per label"
                unweighted = rows.error(row, problem)
            yield base.Chunk(split, rows.texts(text), base.LabelRows(counts, codes, weights))

    def finish(self, n_points: Mapping[str, int], n_uses: int) -> base.Summary:
        """Return the label names, the filters, and the text columns of the training points."""
        path = lf_points_file(self._folder, "train")
        assert path is not None
        reading = {"text": ",".join(self._text_columns(path))}
        return replace(super().finish(n_points, n_uses), reading=reading)

    def _text_columns(self, path: Path) -> tuple[str, ...]:
        table = TableFile(path, "jsonl", base.ReadOptions(text=self._text or None))
        columns = tuple(name for name in _LF_TEXT if name in table.names)
        if self._text:
            columns = table.text_columns()
        check_columns(path, [*(columns or _LF_TEXT[:1]), LF_IDS], table.names)
        return columns

    def _checked_ids(self, rows: Rows, row: int) -> list[int]:
        """Return the label ids of a row. Raise an error if the cell is not a list of valid ids."""
        cell: Any = rows.columns[LF_IDS][row] or []
        limit = _MAX_ID if self._names is None else len(self._names)
        wrong: Any = cell
        if isinstance(cell, list):
            wrong = next((i for i in cell if type(i) is not int or not 0 <= i < limit), None)
        if wrong is not None:
            count = "labels are" if self._names is None else f"there are {limit} labels,"
            problem = f"{LF_IDS} {short_repr(wrong)} is out of range; {count} counted from 0"
            raise rows.error(row, problem)
        ids: list[int] = cell
        return ids


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
        raise ValueError(f"format {format_name!r} is not one of {names}; convert it with tocsr()")
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
