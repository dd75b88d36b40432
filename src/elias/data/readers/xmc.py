"""Read and write the sparse text format of the XMC repository.

One file, ``N D L`` on its first line and then ``label,label feature:value …`` for each point; or a
folder: ``train.txt`` and ``test.txt`` of that kind (also ``eurlex_train.txt``), or ``trn_X_Y.txt``
and ``trn_X_Xf.txt`` with a matrix each. Beside them, where there are any: texts in ``trn_X.txt``,
names in ``Y.txt`` or ``Yf.txt``, label features in ``lbl_X_Xf.txt``, and filter pairs.

Relevance other than 1 has no place in ``N D L`` files. Texts and names are one to a line.
"""

from __future__ import annotations

import logging
import re
import warnings
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.sparse import csr_matrix, vstack

from elias.data.corpus import Corpus, Split
from elias.data.readers.base import Reading, ReadOptions, chunked, from_lists
from elias.data.readers.files import (
    SHORT,
    bad,
    find,
    find_names,
    iter_lines,
    numbered,
    read_filters,
    read_lines,
    read_names,
    shown,
    the_only_file,
    write_filters,
    write_lines,
)
from elias.data.readers.npz import is_binary, tidy_features, tidy_labels
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    _Pairs = tuple[NDArray[np.int64], NDArray[np.float32]]

logger = logging.getLogger(__name__)

_COLON, _SPACE = ord(":"), ord(" ")
_HEADER = re.compile(r"\s*\d+(?:\s+\d+){1,2}\s*")


def looks_sparse(lines: Sequence[str], n_sizes: int) -> bool:
    """Say whether the first lines are those of a sparse file with that many sizes.

    A table of numbers has no colons and prose has no header of numbers; a file of nothing but
    the header is let through for its reader to refuse.
    """
    if not lines or not _HEADER.fullmatch(lines[0]) or len(lines[0].split()) != n_sizes:
        return False
    return all(
        ":" in line or not line.strip() or "," in line or line.strip().isdigit()
        for line in lines[1:5]
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """Some rows, flattened: their label ids, then their ``index:value`` pairs."""

    first: int
    """How many rows come before."""
    label_counts: list[int]
    labels: NDArray[np.int64]
    pair_counts: list[int]
    columns: NDArray[np.int64]
    values: NDArray[np.float32]


class Labelled(NamedTuple):
    """Some points of an ``N D L`` file."""

    labels: csr_matrix
    features: csr_matrix


def read_labelled(path: Path) -> Labelled:
    """Read an ``N D L`` file: labels (N, L) and features (N, D)."""
    parts = list(stream_labelled(path))
    return Labelled(*(vstack(part, format="csr") for part in zip(*parts, strict=True)))


def stream_labelled(path: Path) -> Iterator[Labelled]:
    """Yield the points of an ``N D L`` file, a chunked at a time."""
    (_, n_features, n_labels), blocks = _read(path, 3)
    for block in blocks:
        counts = np.array(block.label_counts, dtype=np.int64)
        _check_range(path, block.labels, counts, n_labels, "label id", block.first)
        labels = from_lists(counts, block.labels, n_labels)
        features = _matrix(path, block, n_features, "feature")
        yield Labelled(labels, tidy_features(features, path, block.first))


def read_matrix(path: Path, what: str) -> csr_matrix:
    """Read an ``N D`` file of ``index:value`` rows.

    Args:
        path: the file.
        what: ``label`` for relevance, which must not be negative, or ``feature``.
    """
    return vstack(list(stream_matrix(path, what)), format="csr")


def stream_matrix(path: Path, what: str) -> Iterator[csr_matrix]:
    """Yield what `read_matrix` reads, a chunked rows at a time."""
    (_, n_columns), blocks = _read(path, 2)
    tidy = tidy_labels if what == "label" else tidy_features
    for block in blocks:
        yield tidy(_matrix(path, block, n_columns, what), path, block.first)


def _read(path: Path, n_sizes: int) -> tuple[list[int], Iterator[_Block]]:
    lines = iter_lines(path)
    header = next(lines, "").split()
    if len(header) != n_sizes or not all(_is_id(size) for size in header):
        sizes = "`points features labels`" if n_sizes == 3 else "`rows columns`"
        raise bad(path, f"the first line is {shown(' '.join(header))}, not {sizes}", 1)
    sizes_found = [int(size) for size in header]
    return sizes_found, _blocks(path, lines, sizes_found[0], with_labels=n_sizes == 3)


def _blocks(
    path: Path, lines: Iterator[str], n_rows: int, *, with_labels: bool
) -> Iterator[_Block]:
    done = 0
    for chunk in chunked(_at_most(lines, n_rows), len):
        yield _parse(path, chunk, done, with_labels=with_labels)
        done += len(chunk)
    if not done:
        raise bad(path, "holds no points after its first line")
    if done != n_rows:
        remedy = "mend the first line, or the file is cut short"
        raise bad(path, f"the first line says {n_rows} points, but {done} follow; {remedy}")


def _at_most(lines: Iterator[str], n_rows: int) -> Iterator[str]:
    """Yield the rows; blank lines beyond the number the header gives are no rows."""
    for number, line in enumerate(lines):
        if number < n_rows or line.strip():
            yield line


def _parse(path: Path, lines: list[str], first: int, *, with_labels: bool) -> _Block:
    cut = [_cut(line) if with_labels else ("", line.strip()) for line in lines]
    heads = [head for head, _ in cut if head]
    text = " ".join(rest for _, rest in cut if rest)
    try:
        labels = np.array([int(i) for i in ",".join(heads).split(",")] if heads else [], np.int64)
        columns, values = _pairs(text) or _odd_pairs(text)
    except (ValueError, OverflowError):
        raise _broken_line(path, lines, first + 2, with_labels=with_labels) from None
    label_counts = [head.count(",") + 1 if head else 0 for head, _ in cut]
    pair_counts = [rest.count(":") for _, rest in cut]
    return _Block(first, label_counts, labels, pair_counts, columns, values)


def _cut(line: str) -> tuple[str, str]:
    """Return the labels and the pairs of a line; a line without labels starts with a space."""
    head, _, rest = line.rstrip().partition(" ")
    return ("", line.strip()) if ":" in head else (head, rest.strip())


def _pairs(text: str) -> _Pairs | None:
    """Parse ``index:value`` pairs with single spaces between them; None for anything else."""
    buffer = np.frombuffer(text.encode(), dtype=np.uint8)
    marks = buffer[(buffer == _COLON) | (buffer <= _SPACE)]
    n_pairs = (len(marks) + 1) // 2
    if len(marks) % 2 == 0 or (marks[0::2] != _COLON).any() or (marks[1::2] != _SPACE).any():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # at text that is no number
        try:
            numbers = np.fromstring(text.replace(":", " "), sep=" ")
        except ValueError:
            return None
    columns = numbers[0::2].astype(np.int64) if np.isfinite(numbers[0::2]).all() else None
    if len(numbers) != 2 * n_pairs or columns is None or (columns != numbers[0::2]).any():
        return None
    return columns, _single(numbers[1::2])


def _odd_pairs(text: str) -> _Pairs:
    """Parse pairs between any white space, more slowly."""
    pairs = text.split()
    flat = ":".join(pairs).split(":") if pairs else []
    if len(flat) != 2 * len(pairs) or not all(":" in pair for pair in pairs):
        raise ValueError("not index:value pairs")
    columns = np.fromiter(map(int, flat[0::2]), np.int64, len(pairs))
    values = np.fromiter(map(float, flat[1::2]), np.float64, len(pairs))
    return columns, _single(values)


def _single(values: NDArray[np.float64]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what is too large becomes inf, which is refused by its line
        return values.astype(np.float32)


def _broken_line(path: Path, lines: list[str], first: int, *, with_labels: bool) -> Exception:
    """Find the line that could not be parsed, now that one is known to be there."""
    for number, line in enumerate(lines, start=first):
        head, rest = _cut(line) if with_labels else ("", line)
        if head and not all(_is_id(label) for label in head.split(",")):
            return bad(path, f"{shown(head)} is not a list of label ids like 3,17", number)
        for pair in rest.split():
            index, _, value = pair.partition(":")
            if not (_is_id(index) and _is_number(value)):
                return bad(path, f"{shown(pair)} is not an index:value pair", number)
    return bad(path, "a number is too large", first)


def _is_id(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and len(text) < 19


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _matrix(path: Path, block: _Block, n_columns: int, what: str) -> csr_matrix:
    counts = np.array(block.pair_counts, dtype=np.int64)
    _check_range(path, block.columns, counts, n_columns, f"{what} id", block.first)
    _check_finite(path, block, counts, what)
    return from_lists(counts, block.columns, n_columns, block.values)


def _check_range(
    path: Path,
    ids: NDArray[np.int64],
    counts: NDArray[np.int64],
    size: int,
    what: str,
    first: int,
) -> None:
    wrong = np.flatnonzero((ids < 0) | (ids >= size))
    if len(wrong):
        limits = f"the first line allows 0 to {size - 1}"
        problem = f"{what} {ids[wrong[0]]} is out of range; {limits}"
        raise bad(path, problem, first + _line_of(wrong[0], counts))


def _check_finite(path: Path, block: _Block, counts: NDArray[np.int64], what: str) -> None:
    wrong = np.flatnonzero(~np.isfinite(block.values))
    if len(wrong):
        kind = "relevance" if what == "label" else what
        value = block.values[wrong[0]]
        problem = f"{value}: a {kind} value must be finite; mend or drop the entry"
        raise bad(path, problem, block.first + _line_of(wrong[0], counts))


def _line_of(entry: np.intp, counts: NDArray[np.int64]) -> int:
    """Return the line that a flattened entry stands on; the first holds the sizes."""
    return 2 + int(np.searchsorted(np.cumsum(counts), entry, side="right"))


def labelled_lines(labels: csr_matrix, features: csr_matrix) -> Iterator[str]:
    """Yield the lines of an ``N D L`` file."""
    yield f"{labels.shape[0]} {features.shape[1]} {labels.shape[1]}"
    ids = labels.indices.tolist()
    for (start, end), pairs in zip(
        pairwise(labels.indptr.tolist()), _pair_lines(features), strict=True
    ):
        yield f"{','.join(map(str, ids[start:end]))} {pairs}"


def matrix_lines(matrix: csr_matrix) -> Iterator[str]:
    """Yield the lines of an ``N D`` file."""
    yield f"{matrix.shape[0]} {matrix.shape[1]}"
    yield from _pair_lines(matrix)


def _pair_lines(matrix: csr_matrix) -> Iterator[str]:
    columns, values = matrix.indices.tolist(), matrix.data.tolist()
    for start, end in pairwise(matrix.indptr.tolist()):
        # nine digits bring every float32 back exactly
        yield " ".join(f"{columns[i]}:{values[i]:.9g}" for i in range(start, end))


log = logging.getLogger(__name__)

LABEL_MATRIX = "{}_X_Y.txt"
FEATURE_MATRIX = "{}_X_Xf.txt"


def read_file(path: Path, options: ReadOptions) -> Reading:
    """Read one ``N D L`` file."""
    options.refuse(path, "XMC")
    labels, features = read_labelled(path)
    names = numbered(path, labels.shape[1], labels.nnz)
    train = Split(labels=labels, features=features)
    corpus = Corpus(train=train, label_names=names, source=path, format="xmc")
    return Reading(corpus, has_splits=False)


def read_files(files: dict[str, list[Path]], options: ReadOptions) -> Reading:
    """Read a folder with an ``N D L`` file for each split."""
    chosen = {split: the_only_file(split, paths) for split, paths in files.items()}
    folder = chosen["train"].parent
    splits = {split: read_labelled(path) for split, path in chosen.items()}
    return _assemble(folder, options, splits, chosen)


def read_folder(folder: Path, options: ReadOptions) -> Reading:
    """Read a folder of ``trn_X_Y.txt`` files, with texts or features for the points."""
    files = {split: find(folder, LABEL_MATRIX.format(SHORT[split])) for split in SHORT}
    chosen = {split: path for split, path in files.items() if path is not None}
    splits = {
        split: (read_matrix(path, "label"), read_features(folder, split))
        for split, path in chosen.items()
    }
    return _assemble(folder, options, splits, chosen)


def read_features(folder: Path, split: str) -> csr_matrix | None:
    """Return the features in ``trn_X_Xf.txt``, or None."""
    path = find(folder, FEATURE_MATRIX.format(SHORT[split]))
    return None if path is None else read_matrix(path, "feature")


def read_label_features(folder: Path) -> csr_matrix | None:
    """Return the label features in ``lbl_X_Xf.txt``, or None."""
    path = find(folder, FEATURE_MATRIX.format("lbl"))
    return None if path is None else read_matrix(path, "feature")


def _assemble(
    folder: Path,
    options: ReadOptions,
    matrices: Mapping[str, tuple[csr_matrix, csr_matrix | None]],
    files: dict[str, Path],
) -> Reading:
    options.refuse(folder, "XMC")
    splits: dict[str, Any] = {}
    for split, (labels, features) in matrices.items():
        log.info("%s: %d points, %d labels", files[split], *labels.shape)
        splits[split] = Split(
            labels=labels,
            features=features,
            texts=_read_texts(folder, split, labels.shape[0]),
            filters=read_filters(folder, split, labels.shape),
        )
    n_labels = splits["train"].labels.shape[1]
    n_uses = sum(split.labels.nnz for split in splits.values())
    corpus = Corpus(
        label_names=label_names(folder, n_labels, n_uses),
        label_features=read_label_features(folder),
        source=folder,
        format="xmc",
        **splits,
    )
    return Reading(corpus, has_splits=True)


def find_texts(folder: Path, split: str) -> Path | None:
    """Return the file of a split's texts, or None."""
    stem = f"{SHORT[split]}_X.txt"
    return find(folder, stem, f"raw/{stem}", f"{split}_raw_texts.txt")


def _read_texts(folder: Path, split: str, n_points: int) -> list[str] | None:
    path = find_texts(folder, split)
    if path is None:
        return None
    texts = read_lines(path)
    if len(texts) != n_points:
        raise bad(path, f"holds {len(texts)} texts for {n_points} points; give one line for each")
    return texts


def label_names(folder: Path, n_labels: int, n_uses: int) -> list[str]:
    """Return the names of a folder's labels, their numbers where there are none."""
    path = find_names(folder)
    if path is None:
        return numbered(folder, n_labels, n_uses)
    names = read_names(path)
    if len(names) != n_labels:
        raise bad(path, f"holds {len(names)} names for {n_labels} labels; give one line for each")
    return names


def left_out(corpus: Corpus) -> list[str]:
    """Say what of a corpus this format cannot hold."""
    binary = all(is_binary(split.labels) for split in corpus.splits.values())
    return [] if binary else ["relevance other than 1"]


def write(corpus: Corpus, folder: Path) -> None:
    """Write a corpus with features into an empty folder, a file for each split."""
    write_lines(folder / "Y.txt", corpus.label_names)
    if corpus.label_features is not None:
        write_lines(folder / FEATURE_MATRIX.format("lbl"), matrix_lines(corpus.label_features))
    for name, split in corpus.splits.items():
        if split.features is None:
            raise DataError(
                f"{corpus.source or 'the corpus'}: the {name} points have texts but no features, "
                "which the xmc format is made of; write it as lf, folder or jsonl"
            )
        write_lines(folder / f"{name}.txt", labelled_lines(split.labels, split.features))
        if split.texts is not None:
            write_lines(folder / f"{SHORT[name]}_X.txt", split.texts)
        write_filters(folder, name, split.filters)
