"""Read and write folders of text lines and npz matrices.

``folder``: ``raw/trn_X.txt``, ``raw/Y.txt``, ``Y.trn.npz`` and, where there are any,
``X.trn.npz`` (features) and ``X.lbl.npz`` (the labels' features).

``pecos``: ``X.trn.txt``, ``output-items.txt``, ``Y.trn.npz``, features in ``X.trn.npz`` or in a
folder ``tfidf-attnxml``; see `elias.data.readers.pecos` for PECOS's other format, one text file.

Both have splits ``trn``, ``val`` and ``tst``, and ``filter_labels_test.txt`` where there is one.
Texts and names are one to a line, so a line end inside one is written as a space.
"""

from __future__ import annotations

import logging
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_matrix, save_npz

from elias.data.corpus import Corpus, Split
from elias.data.readers.base import Reading, ReadOptions
from elias.data.readers.files import (
    SHORT,
    bad,
    find,
    find_names,
    load_sparse,
    must_be_file,
    numbered,
    read_filters,
    read_lines,
    read_names,
    write_filters,
    write_lines,
)

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from elias.errors import DataError


logger = logging.getLogger(__name__)

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


def is_binary(matrix: csr_matrix) -> bool:
    """Say whether every stored entry is 1."""
    return bool((matrix.data == 1).all())


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """The names of the files; ``{}`` stands for trn, val or tst."""

    name: str
    texts: tuple[str, ...]
    features: tuple[str, ...]
    names: str


RAW = Spelling(
    name="folder", texts=("raw/{}_X.txt", "{}_X.txt"), features=("X.{}.npz",), names="raw/Y.txt"
)
PECOS = Spelling(
    name="pecos",
    texts=("X.{}.txt", "{long}_raw_texts.txt", "{long}_raw_text.txt", "{long}_texts.txt"),
    features=("X.{}.npz", "tfidf-attnxml/X.{}.npz", "normalized/X.{}.npz"),
    names="output-items.txt",
)


def spelling_of(folder: Path) -> Spelling | None:
    """Return how the folder's files are called, or None when it holds no ``Y.trn.npz``."""
    if not (folder / "Y.trn.npz").is_file():
        return None
    return RAW if find_texts(folder, RAW, "train") else PECOS


def read(folder: Path, spelling: Spelling, options: ReadOptions) -> Reading:
    """Read a folder of matrices and text lines."""
    options.refuse(folder, spelling.name)
    splits = {}
    for split in SHORT:
        if (folder / f"Y.{SHORT[split]}.npz").is_file():
            splits[split] = _read_split(folder, spelling, split)
    n_uses = sum(split.labels.nnz for split in splits.values())
    names, notes = label_names(folder, splits["train"].labels.shape[1], n_uses)
    corpus = Corpus(
        label_names=names,
        label_features=_features(folder / "X.lbl.npz"),
        source=folder,
        format=spelling.name,
        notes=notes,
        **splits,  # type: ignore[arg-type]  # its keys are the names of splits
    )
    return Reading(corpus, has_splits=True)


def label_names(folder: Path, n_labels: int, n_uses: int) -> tuple[list[str], dict[str, str]]:
    """Return the names of a folder's labels, and what is to be said of them."""
    names_file = find_names(folder)
    if names_file is None:
        note = "no file of names: named by number"
        return numbered(folder, n_labels, n_uses), {"labels": note}
    names = read_names(names_file)
    if len(names) != n_labels:
        raise bad(
            names_file,
            f"holds {len(names)} names, but Y.trn.npz has {n_labels} columns; "
            "give one name for each column",
        )
    return names, {}


def read_split_labels(folder: Path, split: str) -> csr_matrix | None:
    """Return the labels of a split, or None where there is no such split."""
    path = folder / f"Y.{SHORT[split]}.npz"
    return tidy_labels(read_npz(path), path) if path.is_file() else None


def _read_split(folder: Path, spelling: Spelling, split: str) -> Split:
    path = folder / f"Y.{SHORT[split]}.npz"
    labels = tidy_labels(read_npz(path), path)
    text_file = find_texts(folder, spelling, split)
    feature_file = find_features(folder, spelling, split)
    if text_file is None and feature_file is None:
        raise neither(folder, spelling, split)
    texts = None if text_file is None else read_lines(text_file)
    if text_file is not None and texts is not None and len(texts) != labels.shape[0]:
        counts = f"holds {len(texts)} texts, but {path.name} has {labels.shape[0]} rows"
        raise bad(text_file, f"{counts}; give one line for each point")
    log.info("%s: %d points, %d labels", path, *labels.shape)
    return Split(
        labels=labels,
        texts=texts,
        features=None if feature_file is None else _features(feature_file),
        filters=read_filters(folder, split, labels.shape),
    )


def find_texts(folder: Path, spelling: Spelling, split: str) -> Path | None:
    """Return the file of a split's texts, or None."""
    return find(folder, *(name.format(SHORT[split], long=split) for name in spelling.texts))


def find_features(folder: Path, spelling: Spelling, split: str) -> Path | None:
    """Return the file of a split's features, or None."""
    return find(folder, *(name.format(SHORT[split]) for name in spelling.features))


def neither(folder: Path, spelling: Spelling, split: str) -> DataError:
    """Return the error for points without texts and features."""
    path, expected = folder / f"Y.{SHORT[split]}.npz", spelling.texts[0].format(SHORT[split])
    return bad(path, f"the {split} points have neither texts nor features; add {expected}")


def _features(path: Path) -> csr_matrix | None:
    return tidy_features(read_npz(path), path) if path.is_file() else None


def write(corpus: Corpus, folder: Path, spelling: Spelling) -> None:
    """Write a corpus into an empty folder."""
    write_lines(folder / spelling.names, corpus.label_names)
    if corpus.label_features is not None:
        write_npz(folder / "X.lbl.npz", corpus.label_features)
    for name, split in corpus.splits.items():
        short = SHORT[name]
        write_npz(folder / f"Y.{short}.npz", split.labels)
        if split.texts is not None:
            write_lines(folder / spelling.texts[0].format(short), split.texts)
        if split.features is not None:
            write_npz(folder / f"X.{short}.npz", split.features)
        write_filters(folder, name, split.filters)
