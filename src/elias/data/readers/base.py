"""Common interface of the corpus readers, and the file names of a corpus.

A reader yields chunks of rows. The caller, `elias.data.load`, collects them in memory or writes
them to disk.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from elias.data.readers.files import data_error, line_chunks, read_lines, short_repr
from elias.errors import DataError

SHORT = {"train": "trn", "validation": "val", "test": "tst"}
"""The short name of each split in npz and XMC folders."""

ALIASES = {
    "train": ("train", "trn", "training", "tr"),
    "validation": ("validation", "validate", "valid", "val", "dev", "development"),
    "test": ("test", "tst", "testing", "te", "eval"),
}
"""Accepted names of each split, in file names and in a ``split`` column."""

LABEL_FILES = (
    *("raw/Y.txt", "Y.txt", "labels.txt", "output-items.txt", "output-labels.txt"),
    *("label_map.txt", "Yf.txt"),
)
"""Files of label names, one per line, in order of preference."""

_MAX_LABELS = 100_000_000
_LABELS_PER_USE = 100
_MAX_UNUSED_LABELS = 5_000_000
"""Maximum number of labels if there are more than `_LABELS_PER_USE` times as many labels as
point-label pairs. A label is created for every id up to the highest, so a wrong id could exhaust
the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options for reading a table. By default, columns are found by common names."""

    text: str | None = None
    """The text column. Several columns, separated by commas, are joined by a space."""
    labels: str | None = None
    """The labels column."""
    separator: str | None = None
    """The separator between the labels of one cell. If it is empty, each cell is one label."""
    group: str | None = None
    """The group column. Points with the same value belong to one group."""
    header: bool | None = None
    """True if the first line of a CSV or TSV file is a header. By default, the reader recognises a
    header. Without a header, columns are named by their numbers, from 1."""
    encoding: str | None = None
    """The encoding of a text file, UTF-8 by default."""

    def check_unused(self, path: Path, format_name: str, *, except_text: bool = False) -> None:
        """Raise `DataError` if an option is set. Call this for a format without named columns."""
        for key, value in asdict(self).items():
            if value is not None and not (except_text and key == "text"):
                problem = f"is in {format_name} format, where {key}= has no meaning; leave it out"
                raise DataError(f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class LabelRows:
    """The labels of consecutive rows, flattened."""

    counts: NDArray[np.int64]
    """(n,) the number of labels of each row."""
    codes: NDArray[np.int64]
    """The label ids of all rows, concatenated, or codes that `Summary.ids` maps to label ids."""
    weights: NDArray[np.float32] | None = None
    """The relevance of each label, or None if all are 1. All chunks of a split have weights, or
    none has."""

    def take(self, chosen: NDArray[np.bool_]) -> LabelRows:
        """Return the rows that a mask chooses."""
        entries = np.repeat(chosen, self.counts)
        weights = None if self.weights is None else self.weights[entries]
        return LabelRows(self.counts[chosen], self.codes[entries], weights)

    @classmethod
    def from_csr(cls, matrix: csr_matrix) -> LabelRows:
        """Return the rows of a relevance matrix."""
        return cls(np.diff(matrix.indptr), matrix.indices, matrix.data)

    @classmethod
    def from_lines(cls, lists: Sequence[str]) -> LabelRows:
        """Parse rows of the form ``id,id,…``. An empty string is a row without labels."""
        counts = np.array([row.count(",") + 1 if row else 0 for row in lists], dtype=np.int64)
        flat = ",".join(filter(None, lists))
        ids = np.array([int(label) for label in flat.split(",")] if flat else [], dtype=np.int64)
        return cls(counts, ids)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of a split. A chunk may hold texts, labels, features, or several of them.

    Texts, labels and features of the same points may be in different chunks, for example if texts
    and labels are in two files. Chunks follow the order of the rows.
    """

    split: str
    texts: list[str] | None = None
    labels: LabelRows | None = None
    features: csr_matrix | None = None
    groups: NDArray[np.int64] | None = None
    """The group key of each row, see `Split.groups`."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Information that is available only after all rows have been read."""

    label_names: list[str]
    ids: NDArray[np.int64] | None = None
    """The label id of each code, or None if the codes are label ids."""
    filters: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """For each split, (M, 2) pairs (point, label) that must not be predicted."""
    notes: Mapping[str, str] = field(default_factory=dict)
    reading: Mapping[str, Any] = field(default_factory=dict)
    """Options of `load_corpus` that the reader chose. They are used to read similar files."""


class Reader(ABC):
    """Reader of a corpus in one format."""

    format: str
    has_splits = True
    """True if the source defines the splits. Otherwise all points are in the training split."""

    @abstractmethod
    def chunks(self) -> Iterator[Chunk]:
        """Yield the rows of the corpus."""

    @abstractmethod
    def finish(self, n_points: Mapping[str, int], n_uses: int) -> Summary:
        """Return the label names, filters and notes. Call this after all chunks have been read.

        Args:
            n_points: The number of points of each split.
            n_uses: The total number of point-label pairs.
        """


class IdReader(Reader):
    """Base class of readers for formats with label ids in the points and names in another file."""

    def __init__(self, source: Path, folder: Path, names: list[str] | None) -> None:
        """Store the label names and the paths.

        Args:
            source: The path of the corpus, for error messages.
            folder: The folder that may contain label names and filter files.
            names: The label names, or None to name each label by its id.
        """
        self._source = source
        self._folder = folder
        self._names = names
        self._n_columns: dict[str, int] = {}  # width of the label matrix of each split, if any
        self._highest = -1  # the highest label id, if there are no label matrices

    def finish(self, n_points: Mapping[str, int], n_uses: int) -> Summary:
        """Return the label names and filters."""
        names, notes = self._names, {}
        n_labels = self._n_columns.get("train", self._highest + 1)
        if names is not None and self._n_columns and len(names) != n_labels:
            problem = f"holds {len(names)} names for {n_labels} labels; write one line per label"
            raise data_error(find_label_names(self._folder) or self._source, problem)
        for split, count in self._n_columns.items():
            if count != n_labels:
                counts = f"{count} labels, but there are {n_labels} label names"
                problem = f"the {split} split has {counts}; use files of the same corpus"
                raise data_error(self._source, problem)
        if names is None:
            if too_many_labels(n_labels, n_uses):
                problem = f"label ids up to {n_labels - 1} are implausibly large"
                remedy = "number the labels from 0, or give a file of label names"
                raise data_error(self._source, f"{problem}; {remedy}")
            names = [str(label) for label in range(n_labels)]
            notes = {"labels": "no file of label names; each label is named by its id"}
        filters = read_filters(self._folder, n_points, len(names)) if self.has_splits else {}
        return Summary(names, filters=filters, notes=notes)


def too_many_labels(n_labels: int, n_uses: int) -> bool:
    """Return True if the number of labels, or of unused labels, is implausibly large."""
    return n_labels > min(_MAX_LABELS, max(_MAX_UNUSED_LABELS, _LABELS_PER_USE * n_uses))


def text_chunks(path: Path, split: str, n_points: int) -> Iterator[Chunk]:
    """Yield the lines of a file as the texts of ``n_points`` points."""
    n_texts = 0
    for lines in line_chunks(path):
        n_texts += len(lines)
        yield Chunk(split, texts=lines)
    if n_texts != n_points:
        problem = f"holds {n_texts} texts for {n_points} points; write one line per point"
        raise data_error(path, problem)


def row_of(counts: NDArray[np.int64], entry: int) -> int:
    """Return the row that contains a flattened entry, given the number of entries in each row."""
    return int(np.searchsorted(np.cumsum(counts), entry, side="right"))


def check_entries(
    path: Path,
    values: NDArray[np.generic],
    is_wrong: NDArray[np.bool_],
    counts: NDArray[np.int64],
    problem: str,
    first_line: int,
) -> None:
    """Raise `DataError` with the line number of the first wrong entry, if there is one.

    Args:
        path: The file.
        values: The entries of consecutive lines, flattened.
        is_wrong: True for each wrong entry.
        counts: The number of entries of each line.
        problem: The error message. ``{}`` is replaced by the wrong value.
        first_line: The number of the first line.
    """
    if is_wrong.any():
        entry = int(is_wrong.argmax())
        raise data_error(path, problem.format(values[entry]), first_line + row_of(counts, entry))


def csr_from_lists(
    counts: NDArray[np.int64],
    columns: NDArray[np.int64],
    n_columns: int,
    values: NDArray[np.float32] | None = None,
) -> csr_matrix:
    """Convert flattened lists to a CSR matrix in canonical form (sorted, without duplicates).

    Args:
        counts: (N,) the number of entries of each row.
        columns: The columns of all entries, row after row, each below ``n_columns``.
        n_columns: The width of the matrix.
        values: The values of the entries. The values of duplicates are added up. If None, every
            entry is 1.
    """
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])
    data = np.ones(len(columns), dtype=np.float32) if values is None else values
    matrix = csr_matrix((data, columns, ends), shape=(len(counts), n_columns), dtype=np.float32)
    matrix.sum_duplicates()
    if values is None:
        matrix.data[:] = 1
    return matrix


def split_alias(name: str) -> str | None:
    """Return the split that ``name`` is an alias of, or None."""
    plain = name.strip().lower()
    return next((split for split, names in ALIASES.items() if plain in names), None)


def find_file(folder: Path, *names: str) -> Path | None:
    """Return the first of the named files that exists, gzipped or not, or None."""
    candidates = (folder / (name + suffix) for name in names for suffix in ("", ".gz"))
    # a pipe or device is returned, too, so that the reader refuses it instead of ignoring it
    return next((path for path in candidates if path.exists() and not path.is_dir()), None)


def find_label_names(folder: Path) -> Path | None:
    """Return the file of label names in a folder, or None."""
    return find_file(folder, *LABEL_FILES)


def read_label_names(folder: Path) -> list[str] | None:
    """Read the label names from the file in a folder, or return None if there is no such file."""
    path = find_label_names(folder)
    if path is None:
        return None
    names = read_lines(path)
    if not names:
        raise data_error(path, "is empty; write one label name per line")
    return names


def split_files(folder: Path, *, folders: bool = False) -> dict[str, list[Path]]:
    """Return the files of each split, found by name (``train.csv``, ``eurlex_test.txt``, shards).

    A file whose name is exactly the split is preferred to one whose name only ends in the split.
    With ``folders=True``, return subfolders instead of files.
    """
    paths = sorted(folder.iterdir())
    files = [path for path in paths if path.is_dir() == folders]
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


def one_file_each(by_split: Mapping[str, list[Path]]) -> dict[str, Path]:
    """Return the file of each split. Raise `DataError` if a split has several files."""
    for split, paths in by_split.items():
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            problem = f"several files for the {split} split ({names}); keep one"
            raise data_error(paths[0].parent, problem)
    return {split or "train": paths[0] for split, paths in by_split.items()}


def read_filters(
    folder: Path, n_points: Mapping[str, int], n_labels: int
) -> dict[str, NDArray[np.int64]]:
    """Read the (M, 2) pairs (point, label) to exclude, for each split that has a filter file.

    Args:
        folder: The folder of ``filter_labels_test.txt`` or ``tst_filter_labels.txt``.
        n_points: The number of points of each split. A point out of range is an error.
        n_labels: Number of labels L. A label out of range is an error.
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
        if not line.strip():
            continue
        try:
            point, label = map(int, line.split())
        except ValueError:
            problem = f"{short_repr(line)} is not a pair `point label`; write two ids per line"
            raise data_error(path, problem, number) from None
        if not (0 <= point < n_points and 0 <= label < n_labels):
            limits = f"there are {n_points} points and {n_labels} labels, counted from 0"
            raise data_error(path, f"the pair {point} {label} is out of range; {limits}", number)
        pairs.append((point, label))
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)
