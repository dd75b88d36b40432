"""CSR matrices: from npz files and lists, checked and in canonical form."""

from __future__ import annotations

import zipfile
import zlib
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_matrix, save_npz

from elias.bounded import load_sparse
from elias.data.formats.sources import bad, must_be_file

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_BROKEN = (
    *(ValueError, KeyError, TypeError, EOFError, IndexError, OverflowError, MemoryError),
    *(NotImplementedError, RuntimeError, SyntaxError, zipfile.BadZipFile, zlib.error),
)


def read_npz(path: Path) -> csr_matrix:
    """Return the sparse matrix of a SciPy npz file as CSR; nothing is ever unpickled."""
    must_be_file(path)
    try:
        with path.open("rb") as stream:  # NumPy leaves open a file that it cannot read
            matrix = load_sparse(stream)
    except FileNotFoundError:
        raise bad(path, "no such file") from None
    except OSError as error:
        raise bad(path, f"cannot be read ({error.strerror or error})") from None
    except _BROKEN as error:
        remedy = "write it with scipy.sparse.save_npz"
        raise bad(path, f"not a whole sparse npz file ({error}); {remedy}") from None
    return matrix


def write_npz(path: Path, matrix: csr_matrix) -> None:
    """Write a CSR matrix as a SciPy npz file."""
    save_npz(path, matrix)


def tidy_labels(matrix: csr_matrix, path: Path, first: int = 0) -> csr_matrix:
    """Return relevance as float32 CSR, sorted, without duplicates or zeros.

    Args:
        matrix: (N, L), any numeric type; left as it is.
        path: the file it came from, for errors.
        first: how many points come before these.
    """
    tidy = _canonical(matrix, path, "relevance", first)
    if tidy.nnz and tidy.data.min() < 0:
        _refuse_value(tidy, tidy.data < 0, path, "a relevance must not be negative", first)
    tidy.eliminate_zeros()
    return tidy


def tidy_features(matrix: csr_matrix, path: Path, first: int = 0) -> csr_matrix:
    """Return features as float32 CSR, sorted, without duplicates; negative values may stay."""
    return _canonical(matrix, path, "feature", first)


def _canonical(matrix: csr_matrix, path: Path, what: str, first: int) -> csr_matrix:
    if matrix.dtype.kind not in "biuf":
        raise bad(path, f"holds {matrix.dtype} values; {what} values are numbers")
    tidy = matrix.astype(np.float32)  # a copy: the caller's matrix stays as it is
    tidy.sum_duplicates()
    wrong = ~np.isfinite(tidy.data)
    if wrong.any():
        _refuse_value(tidy, wrong, path, f"a {what} value must be finite", first)
    return tidy


def _refuse_value(
    matrix: csr_matrix, wrong: NDArray[np.bool_], path: Path, rule: str, first: int
) -> None:
    entry = int(np.flatnonzero(wrong)[0])
    row = first + int(np.searchsorted(matrix.indptr, entry, side="right"))
    column, value = int(matrix.indices[entry]), float(matrix.data[entry])
    raise bad(path, f"point {row}, column {column} holds {value}: {rule}; mend or drop the entry")


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


def is_binary(matrix: csr_matrix) -> bool:
    """Say whether every stored entry is 1."""
    return bool((matrix.data == 1).all())
