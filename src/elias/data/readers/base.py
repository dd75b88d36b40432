"""Types that every corpus reader shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from scipy.sparse import csr_matrix

from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from elias.data.corpus import Corpus


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Which columns of a table to read, where the common names do not fit."""

    text: str | None = None
    """The text column; several, separated by commas, are joined by a space."""
    labels: str | None = None
    """The labels column."""
    separator: str | None = None
    """What separates the labels in one cell; an empty string: each cell is one label."""

    def refuse(self, path: Path, name: str, *, text: bool = True) -> None:
        """Refuse options that a format without named columns has no use for."""
        given = {"text": self.text if text else None, "labels": self.labels}
        given["separator"] = self.separator
        unused = [key for key, value in given.items() if value is not None]
        if unused:
            raise DataError(f"{path}: is in {name} format, where {unused[0]}= has no meaning")


class Reading(NamedTuple):
    """A corpus, and whether its source said which points are for training."""

    corpus: Corpus
    has_splits: bool


T = TypeVar("T")

CHUNK = 1 << 14
"""Rows at a time."""
LARGE = 1 << 22
"""Characters at a time."""


def chunked(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in lists that are neither long nor, by the sum of their sizes, large."""
    chunk: list[T] = []
    total = 0
    for item in items:
        chunk.append(item)
        total += size(item)
        if len(chunk) >= CHUNK or total >= LARGE:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def from_lists(
    counts: NDArray[np.int64],
    columns: NDArray[np.int64],
    n_columns: int,
    values: NDArray[np.float32] | None = None,
) -> csr_matrix:
    """Return the CSR matrix of flattened lists, row by row.

    Args:
        counts: (N,) how many entries each row has.
        columns: their columns, all rows after one another, each below ``n_columns``.
        n_columns: the width of the matrix.
        values: the entries' values; without them an entry is 1, however often it is repeated.
    """
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    data = np.ones(len(columns), dtype=np.float32) if values is None else values
    matrix = csr_matrix((data, columns, ends), shape=(len(counts), n_columns), dtype=np.float32)
    matrix.sum_duplicates()
    if values is None:
        matrix.data[:] = 1
    return matrix
