"""The interface of all corpus readers: a reader yields chunks of rows.

The caller, `elias.data.load`, decides where the chunks go: into memory, or into mapped files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_matrix

from elias.data.readers.files import (
    data_error,
    find_label_names,
    line_chunks,
    number_labels,
    read_filters,
    read_label_names,
)
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray


LABELS = "labels"
"""Pseudo-split of chunks that contain features of the labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options that name the columns of a table, if they do not have common names."""

    text: str | None = None
    """The text column; several, separated by commas, are joined by a space."""
    labels: str | None = None
    """The labels column."""
    separator: str | None = None
    """The separator of the labels in one cell; with an empty string, each cell is one label."""

    def check_unused(self, path: Path, format_name: str, *, text: bool = True) -> None:
        """Raise `DataError` if options are set, for a format without named columns."""
        values = {"text": self.text if text else None, "labels": self.labels}
        values["separator"] = self.separator
        unused = next((key for key, value in values.items() if value is not None), None)
        if unused is not None:
            raise DataError(f"{path}: is in {format_name} format, where {unused}= has no meaning")


@dataclass(frozen=True, slots=True)
class LabelRows:
    """The labels of consecutive rows, flattened."""

    counts: NDArray[np.int64]
    """(n,) the number of labels of each row."""
    codes: NDArray[np.int64]
    """The labels of all rows: ids, or numbers that `Summary.ids` turns into ids."""
    weights: NDArray[np.float32] | None = None
    """The relevance of each label, or None if all are 1; None for all chunks of a split or none."""

    @classmethod
    def from_csr(cls, matrix: csr_matrix) -> LabelRows:
        """Return the rows of a relevance matrix."""
        return cls(np.diff(matrix.indptr), matrix.indices, matrix.data)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of a split: texts, labels, features, or a combination of them.

    Texts, labels and features of the same points may be in different chunks, e.g. if texts and
    labels are in two files. Each of them is yielded in the order of the rows.
    """

    split: str
    texts: list[str] | None = None
    labels: LabelRows | None = None
    features: csr_matrix | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Information that a reader has only after all rows are read."""

    label_names: list[str]
    ids: NDArray[np.int64] | None = None
    """The label id of each code; None if codes are ids."""
    filters: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """(M, 2) pairs (point, label) that must not be predicted, by split."""
    notes: Mapping[str, str] = field(default_factory=dict)


class Reader(ABC):
    """Reads a corpus of one format."""

    format: str
    has_splits = True
    """True if the source names its splits; otherwise all points are in the training split."""

    @abstractmethod
    def chunks(self) -> Iterator[Chunk]:
        """Yield the rows of the corpus."""

    @abstractmethod
    def finish(self, n_points: Mapping[str, int], n_uses: int) -> Summary:
        """Return the label names, filters and notes, after all chunks were read.

        Args:
            n_points: The number of points of each split.
            n_uses: The total number of point-label pairs.
        """


def text_chunks(path: Path, split: str, n_points: int) -> Iterator[Chunk]:
    """Yield the lines of a file as the texts of ``n_points`` points."""
    n_texts = 0
    for lines in line_chunks(path):
        n_texts += len(lines)
        yield Chunk(split, texts=lines)
    if n_texts != n_points:
        problem = f"holds {n_texts} texts for {n_points} points; give one line for each"
        raise data_error(path, problem)


def summarize(
    source: Path,
    folder: Path | None,
    names: list[str] | None,
    n_labels: int,
    n_points: Mapping[str, int],
    n_uses: int,
) -> Summary:
    """Return the summary of a corpus whose codes are label ids.

    Args:
        source: The path of the corpus, for error messages.
        folder: The folder that may contain a filter file, or None.
        names: The label names, or None to name labels by number.
        n_labels: The number of labels if there are no names.
        n_points: The number of points of each split.
        n_uses: The total number of point-label pairs.
    """
    notes = {} if names is not None else {"labels": "no file of names: named by number"}
    if names is None:
        names = number_labels(source, n_labels, n_uses)
    filters = {} if folder is None else read_filters(folder, n_points, len(names))
    return Summary(names, filters=filters, notes=notes)


def summarize_columns(
    source: Path,
    folder: Path | None,
    n_columns: Mapping[str, int],
    n_points: Mapping[str, int],
    n_uses: int,
) -> Summary:
    """Return the summary of a corpus of label matrices, whose columns are the labels.

    Args:
        source: The path of the corpus, for error messages.
        folder: The folder that may contain label names and a filter file, or None.
        n_columns: The number of columns of each split's label matrix; all must be equal.
        n_points: The number of points of each split.
        n_uses: The total number of point-label pairs.
    """
    n_labels = n_columns["train"]
    names = None if folder is None else read_label_names(folder)
    if names is not None and len(names) != n_labels:
        problem = f"holds {len(names)} names for {n_labels} labels; give one line for each"
        raise data_error(find_label_names(folder or source) or source, problem)
    for split, count in n_columns.items():
        if count != n_labels:
            counts = f"{count} labels, but there are {n_labels} label names"
            problem = f"the {split} split is over {counts}; the files must belong together"
            raise data_error(source, problem)
    return summarize(source, folder, names, n_labels, n_points, n_uses)


def csr_from_lists(
    counts: NDArray[np.int64],
    columns: NDArray[np.int64],
    n_columns: int,
    values: NDArray[np.float32] | None = None,
) -> csr_matrix:
    """Return flattened lists as a CSR matrix in canonical form (sorted, without duplicates).

    Args:
        counts: (N,) the number of entries of each row.
        columns: The columns of all entries, row after row, each below ``n_columns``.
        n_columns: The width of the matrix.
        values: The values of the entries, summed over duplicates; None makes every entry 1.
    """
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])
    data = np.ones(len(columns), dtype=np.float32) if values is None else values
    matrix = csr_matrix((data, columns, ends), shape=(len(counts), n_columns), dtype=np.float32)
    matrix.sum_duplicates()
    if values is None:
        matrix.data[:] = 1
    return matrix
