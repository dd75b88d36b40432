"""Read the sparse text format of the XMC repository.

An ``N D L`` file has these sizes on its first line, then ``label,label feature:value …`` for each
point. A corpus is one such file, or a folder of them (``train.txt`` or ``eurlex_train.txt``, and
``test.txt``), or a folder with one matrix per file (``trn_X_Y.txt`` and ``trn_X_Xf.txt``).

Optional files of a folder: texts in ``trn_X.txt``, label names in ``Y.txt`` or ``Yf.txt``, label
features in ``lbl_X_Xf.txt``, and filter pairs.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from elias.data.readers.base import (
    LABELS,
    Chunk,
    LabelRows,
    Reader,
    ReadOptions,
    Summary,
    csr_from_lists,
    summarize_columns,
    text_chunks,
)
from elias.data.readers.files import (
    SHORT,
    data_error,
    find_file,
    line_chunks,
    only_file,
    short_repr,
)
from elias.data.readers.npz import clean_matrix

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.errors import DataError

    _Pairs = tuple[NDArray[np.int64], NDArray[np.float32]]

LABEL_MATRIX = "{}_X_Y.txt"
FEATURE_MATRIX = "{}_X_Xf.txt"
_COLON, _SPACE = ord(":"), ord(" ")
_HEADER = re.compile(r"\s*\d+(?:\s+\d+){1,2}\s*")


def looks_sparse(lines: Sequence[str]) -> bool:
    """Return True if the first lines look like an ``N D L`` file.

    A table of numbers has no colons, and prose has no header of numbers. A file that contains only
    the header is accepted here, so that the reader reports the error.
    """
    if not lines or not _HEADER.fullmatch(lines[0]) or len(lines[0].split()) != 3:
        return False
    return all(
        ":" in line or not line.strip() or "," in line or line.strip().isdigit()
        for line in lines[1:5]
    )


class XmcReader(Reader):
    """Reads ``N D L`` files, or a folder of label and feature matrices (``trn_X_Y.txt``)."""

    format = "xmc"

    def __init__(
        self, source: Path, files: dict[str, list[Path]] | None, options: ReadOptions
    ) -> None:
        """Find the files of the corpus.

        Args:
            source: The file or folder.
            files: The ``N D L`` files by split; the key is empty if one file contains all points.
                None for a folder of matrices.
            options: Reader options; none may be set, because the format has no named columns.
        """
        options.check_unused(source, "XMC")
        self._source = source
        self._labelled = files is not None
        self.has_splits = files is None or "" not in files
        if files is None:
            self._files = {
                split: path
                for split, short in SHORT.items()
                if (path := find_file(source, LABEL_MATRIX.format(short))) is not None
            }
        else:
            self._files = {
                split or "train": only_file(split, paths) for split, paths in files.items()
            }
        self._folder = self._files["train"].parent
        self._n_columns: dict[str, int] = {}

    def chunks(self) -> Iterator[Chunk]:
        """Yield the labels, features and texts of each split, then the features of the labels."""
        for split in (name for name in SHORT if name in self._files):
            n_points = 0
            for chunk in self._label_chunks(split):
                assert chunk.labels is not None
                n_points += len(chunk.labels.counts)
                yield chunk
            if not self.has_splits:
                return
            if not self._labelled:
                yield from feature_chunks(self._folder, split)
            short = SHORT[split]
            texts = find_file(
                self._folder, f"{short}_X.txt", f"raw/{short}_X.txt", f"{split}_raw_texts.txt"
            )
            if texts is not None:
                yield from text_chunks(texts, split, n_points)
        yield from feature_chunks(self._folder, LABELS)

    def _label_chunks(self, split: str) -> Iterator[Chunk]:
        path = self._files[split]
        sizes, blocks = _read(path, 3 if self._labelled else 2)
        n_labels = self._n_columns[split] = sizes[-1]
        for block in blocks:
            if not self._labelled:
                labels = LabelRows.from_csr(_matrix(path, block, n_labels, "label"))
                yield Chunk(split, labels=labels)
                continue
            counts = block.label_counts
            _check_range(path, block.labels, counts, n_labels, "label", block.first)
            features = _matrix(path, block, sizes[1], "feature")
            yield Chunk(split, labels=LabelRows(counts, block.labels), features=features)

    def finish(self, n_points: Mapping[str, int], n_uses: int) -> Summary:
        """Return the label names and filters."""
        folder = self._folder if self.has_splits else None
        return summarize_columns(self._source, folder, self._n_columns, n_points, n_uses)


def feature_chunks(folder: Path, split: str) -> Iterator[Chunk]:
    """Yield the features in ``trn_X_Xf.txt`` (``lbl_X_Xf.txt`` for `LABELS`), if it exists."""
    path = find_file(folder, FEATURE_MATRIX.format(SHORT.get(split, "lbl")))
    if path is None:
        return
    (_, n_columns), blocks = _read(path, 2)
    for block in blocks:
        yield Chunk(split, features=_matrix(path, block, n_columns, "feature"))


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive rows, flattened: their label ids, then their ``index:value`` pairs."""

    first: int
    """The number of rows before this block."""
    label_counts: NDArray[np.int64]
    labels: NDArray[np.int64]
    pair_counts: NDArray[np.int64]
    columns: NDArray[np.int64]
    values: NDArray[np.float32]


def _read(path: Path, n_sizes: int) -> tuple[list[int], Iterator[_Block]]:
    """Read a file: return the sizes on its first line (``N D L`` or ``N D``) and blocks of rows."""
    chunks = line_chunks(path)
    first_lines = next(chunks, [""])
    header = first_lines[0].split()
    if len(header) != n_sizes or not all(_is_id(size) for size in header):
        sizes = "`points features labels`" if n_sizes == 3 else "`rows columns`"
        problem = f"the first line is {short_repr(' '.join(header))}, not {sizes}"
        raise data_error(path, problem, 1)

    def blocks() -> Iterator[_Block]:
        n_rows, done = int(header[0]), 0
        for chunk in chain([first_lines[1:]], chunks):
            n_wanted = max(n_rows - done, 0)
            # blank lines after the last row are no rows
            lines = chunk[:n_wanted] + [line for line in chunk[n_wanted:] if line.strip()]
            if lines:
                yield _parse(path, lines, done, with_labels=n_sizes == 3)
                done += len(lines)
        if not done:
            raise data_error(path, "holds no points after its first line")
        if done != n_rows:
            remedy = "correct the first line, or the file is cut short"
            counts = f"the first line says {n_rows} points, but {done} follow"
            raise data_error(path, f"{counts}; {remedy}")

    return [int(size) for size in header], blocks()


def _parse(path: Path, lines: list[str], first: int, *, with_labels: bool) -> _Block:
    parts = [_split_line(line) if with_labels else ("", line.strip()) for line in lines]
    heads = [head for head, _ in parts if head]
    text = " ".join(rest for _, rest in parts if rest)
    try:
        labels = np.array([int(i) for i in ",".join(heads).split(",")] if heads else [], np.int64)
        columns, values = _parse_pairs(text) or _parse_odd_pairs(text)
    except (ValueError, OverflowError):
        raise _broken_line(path, lines, first + 2, with_labels=with_labels) from None
    label_counts = [head.count(",") + 1 if head else 0 for head, _ in parts]
    pair_counts = [rest.count(":") for _, rest in parts]
    return _Block(
        first,
        np.array(label_counts, dtype=np.int64),
        labels,
        np.array(pair_counts, dtype=np.int64),
        columns,
        values,
    )


def _split_line(line: str) -> tuple[str, str]:
    """Return the labels and the pairs of a line; a line without labels starts with a space."""
    head, _, rest = line.rstrip().partition(" ")
    return ("", line.strip()) if ":" in head else (head, rest.strip())


def _parse_pairs(text: str) -> _Pairs | None:
    """Parse ``index:value`` pairs separated by single spaces; return None for any other text."""
    buffer = np.frombuffer(text.encode(), dtype=np.uint8)
    marks = buffer[(buffer == _COLON) | (buffer <= _SPACE)]
    n_pairs = (len(marks) + 1) // 2
    if len(marks) % 2 == 0 or (marks[0::2] != _COLON).any() or (marks[1::2] != _SPACE).any():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about text that is not a number
        try:
            numbers = np.fromstring(text.replace(":", " "), sep=" ")
        except ValueError:
            return None
    columns = numbers[0::2].astype(np.int64) if np.isfinite(numbers[0::2]).all() else None
    if len(numbers) != 2 * n_pairs or columns is None or (columns != numbers[0::2]).any():
        return None
    return columns, _to_float32(numbers[1::2])


def _parse_odd_pairs(text: str) -> _Pairs:
    """Parse pairs separated by any white space; slower than `_parse_pairs`."""
    pairs = text.split()
    flat = ":".join(pairs).split(":") if pairs else []
    if len(flat) != 2 * len(pairs) or not all(":" in pair for pair in pairs):
        raise ValueError("not index:value pairs")
    columns = np.fromiter(map(int, flat[0::2]), np.int64, len(pairs))
    values = np.fromiter(map(float, flat[1::2]), np.float64, len(pairs))
    return columns, _to_float32(values)


def _to_float32(values: NDArray[np.float64]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # too large a value becomes inf, which is refused later
        return values.astype(np.float32)


def _broken_line(path: Path, lines: list[str], first: int, *, with_labels: bool) -> DataError:
    """Return the error for the first line that cannot be parsed; ``lines[0]`` is line ``first``."""
    for number, line in enumerate(lines, start=first):
        head, rest = _split_line(line) if with_labels else ("", line)
        if head and not all(_is_id(label) for label in head.split(",")):
            problem = f"{short_repr(head)} is not a list of label ids like 3,17"
            return data_error(path, problem, number)
        for pair in rest.split():
            index, _, value = pair.partition(":")
            if not (_is_id(index) and _is_number(value)):
                return data_error(path, f"{short_repr(pair)} is not an index:value pair", number)
    return data_error(path, "a number is too large", first)


def _is_id(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and len(text) < 19


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _matrix(path: Path, block: _Block, n_columns: int, what: str) -> csr_matrix:
    """Return the pairs of a block as a matrix; ``what`` is ``label`` or ``feature``."""
    counts = block.pair_counts
    _check_range(path, block.columns, counts, n_columns, what, block.first)
    kind = "relevance" if what == "label" else what
    wrong = np.flatnonzero(~np.isfinite(block.values))
    if len(wrong):
        value = block.values[wrong[0]]
        problem = f"{value}: a {kind} value must be finite; correct or drop the entry"
        raise data_error(path, problem, block.first + _line_of(wrong[0], counts))
    matrix = csr_from_lists(counts, block.columns, n_columns, block.values)
    return clean_matrix(matrix, path, kind, block.first)


def _check_range(
    path: Path, ids: NDArray[np.int64], counts: NDArray[np.int64], size: int, what: str, first: int
) -> None:
    wrong = np.flatnonzero((ids < 0) | (ids >= size))
    if len(wrong):
        limits = f"the first line allows 0 to {size - 1}"
        problem = f"{what} id {ids[wrong[0]]} is out of range; {limits}"
        raise data_error(path, problem, first + _line_of(wrong[0], counts))


def _line_of(entry: np.intp, counts: NDArray[np.int64]) -> int:
    """Return the line number of a flattened entry; rows start at line 2, after the sizes."""
    return 2 + int(np.searchsorted(np.cumsum(counts), entry, side="right"))
