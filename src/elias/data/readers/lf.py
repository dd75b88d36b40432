"""The XMC repository's "LF" format: points and labels as JSON lines.

``trn.json.gz``, ``tst.json.gz``: ``{"uid", "title", "content", "target_ind", "target_rel"}``;
``lbl.json.gz``: ``{"uid", "title"}`` for each label (or names in ``Yf.txt``);
``filter_labels_test.txt``: the pairs never to predict. Features in ``trn_X_Xf.txt`` and
``lbl_X_Xf.txt`` are read where they are there. A text is its title and content, joined by a space.
"""

from __future__ import annotations

import gzip
import json
import logging
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from elias.data.corpus import Corpus, Split
from elias.data.readers import xmc
from elias.data.readers.base import Reading, ReadOptions, from_lists
from elias.data.readers.columns import no_column
from elias.data.readers.files import (
    SHORT,
    find,
    find_names,
    numbered,
    read_filters,
    read_names,
    shown,
    write_filters,
    write_lines,
)
from elias.data.readers.label_cells import parse_weights
from elias.data.readers.table import Table, column_names, read_table
from elias.data.readers.xmc import matrix_lines
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


logger = logging.getLogger(__name__)

log = logging.getLogger(__name__)

_TEXT = ("title", "content")
_INDEX, _WEIGHT = "target_ind", "target_rel"
_MOST = 2**31 - 1


def points_file(folder: Path, split: str) -> Path | None:
    """Return the JSON file of a split, or None."""
    short = SHORT[split]
    return find(folder, f"{short}.json", f"{short}.raw.json", f"{short}.jsonl")


def read(folder: Path, options: ReadOptions) -> Reading:
    """Read a folder of JSON lines."""
    options.refuse(folder, "LF", text=False)
    found = {split: points_file(folder, split) for split in SHORT}
    files = {split: path for split, path in found.items() if path is not None}
    tables = {split: _read_points(path, options.text) for split, path in files.items()}
    names = _read_label_names(folder, tables.values())
    splits: dict[str, Any] = {
        split: _split(folder, split, table, len(names)) for split, table in tables.items()
    }
    label_features = xmc.read_label_features(folder)
    corpus = Corpus(
        label_names=names, label_features=label_features, source=folder, format="lf", **splits
    )
    return Reading(corpus, has_splits=True)


def text_columns(known: Sequence[str]) -> list[str]:
    """Return the columns that texts are read from by default."""
    return [name for name in _TEXT if name in known]


def points_columns(path: Path, text: str | None) -> tuple[list[str], list[str]]:
    """Return the columns to read of a file of points, and those that each row must have."""
    known = column_names(path, "jsonl")
    wanted = [part.strip() for part in text.split(",")] if text else list(_TEXT)
    missing = next((name for name in wanted if name not in known), None)
    if text is not None and missing is not None:
        raise no_column(path, missing, known)
    if _INDEX not in known:
        raise no_column(path, _INDEX, known)
    columns = [name for name in wanted if name in known]
    if not columns:
        raise no_column(path, "title", known)
    return [*columns, _INDEX, _WEIGHT], [columns[0], _INDEX]


def _read_points(path: Path, text: str | None) -> Table:
    table = read_table(path, "jsonl", *points_columns(path, text))
    log.info("%s: read %d points", path, len(table))
    return table


def known_names(folder: Path) -> list[str] | None:
    """Return the names of the labels, or None where no file has them."""
    path = find(folder, "lbl.json", "lbl.raw.json", "lbl.jsonl")
    if path is not None:
        titles = read_table(path, "jsonl", ["title"], ["title"]).columns["title"]
        return [str(title or "") for title in titles]
    names_file = find_names(folder)
    return None if names_file is None else read_names(names_file)


def _read_label_names(folder: Path, tables: Iterable[Table]) -> list[str]:
    names = known_names(folder)
    if names is not None:
        return names
    cells = [cell for table in tables for cell in table.columns[_INDEX] if isinstance(cell, list)]
    largest = max((label for cell in cells for label in cell if isinstance(label, int)), default=-1)
    return numbered(folder, largest + 1, sum(map(len, cells)))


def _split(folder: Path, split: str, table: Table, n_labels: int) -> Split:
    points = read_rows(table, n_labels)
    weighted = any(cell is not None for cell in table.columns[_WEIGHT])
    labels = from_lists(points.counts, points.ids, n_labels, points.weights if weighted else None)
    labels.eliminate_zeros()
    return Split(
        labels=labels,
        texts=points.texts,
        features=xmc.read_features(folder, split),
        filters=read_filters(folder, split, labels.shape),
    )


class Points(NamedTuple):
    """Texts, and their labels one after the other."""

    texts: list[str]
    counts: NDArray[np.int64]
    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    """Ones where no row has any."""
    weighted: bool


def read_rows(table: Table, n_labels: int | None, *, weighted: bool = False) -> Points:
    """Return the points of some rows.

    Args:
        table: The rows.
        n_labels: How many labels there are; None where only the highest id tells.
        weighted: Whether rows before these have had relevance, so that these must have it.
    """
    cells = [cell or [] for cell in table.columns[_INDEX]]
    for row, cell in enumerate(cells):
        wrong = _wrong_id(cell, _MOST if n_labels is None else n_labels)
        if wrong is not None:
            limits = f"there are {n_labels} labels, counted from 0"
            if n_labels is None:
                limits = "labels are counted from 0"
            raise table.error(row, f"{_INDEX} {shown(wrong)} is out of range; {limits}")
    counts = np.array([len(cell) for cell in cells], dtype=np.int64)
    ids = np.fromiter((label for cell in cells for label in cell), np.int64, int(counts.sum()))
    weights = np.ones(len(ids), dtype=np.float32)
    weighted = weighted or any(cell is not None for cell in table.columns[_WEIGHT])
    if weighted:
        weights = parse_weights(table.columns[_WEIGHT], counts, table.error)
    return Points(_texts(table), counts, ids, weights, weighted)


def _texts(table: Table) -> list[str]:
    names = [name for name in table.columns if name not in (_INDEX, _WEIGHT)]
    rows = zip(*(table.columns[name] for name in names), strict=True)
    texts = []
    for row, parts in enumerate(rows):
        wrong = next((part for part in parts if not isinstance(part, str | None)), None)
        if wrong is not None:
            raise table.error(row, f"{shown(wrong)} is not a text")
        texts.append(" ".join(filter(None, parts)))
    return texts


def _wrong_id(cell: Any, n_labels: int) -> object:
    """Return what in a cell is no label id, or None."""
    if not isinstance(cell, list):
        return cell
    return next((i for i in cell if type(i) is not int or not 0 <= i < n_labels), None)


def write(corpus: Corpus, folder: Path) -> None:
    """Write a corpus with texts into an empty folder."""
    labels = ({"uid": str(i), "title": name} for i, name in enumerate(corpus.label_names))
    _write_json(folder / "lbl.json.gz", labels)
    if corpus.label_features is not None:
        write_lines(folder / "lbl_X_Xf.txt", matrix_lines(corpus.label_features))
    for name, split in corpus.splits.items():
        if split.texts is None:
            raise DataError(
                f"{corpus.source or 'the corpus'}: the {name} points have features but no texts, "
                "which the lf format is made of; write it as xmc, folder or pecos"
            )
        short = SHORT[name]
        _write_json(folder / f"{short}.json.gz", _points(split, split.texts))
        if split.features is not None:
            write_lines(folder / f"{short}_X_Xf.txt", matrix_lines(split.features))
        write_filters(folder, name, split.filters)


def _points(split: Split, texts: Sequence[str]) -> Iterable[dict[str, Any]]:
    ids, weights = split.labels.indices.tolist(), split.labels.data.tolist()
    bounds = pairwise(split.labels.indptr.tolist())
    for row, (text, (start, end)) in enumerate(zip(texts, bounds, strict=True)):
        point = {"uid": str(row), "title": text, "content": ""}
        yield point | {_INDEX: ids[start:end], _WEIGHT: weights[start:end]}


def _write_json(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    # without a name or a date inside, the same corpus gives the same bytes
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as out:
        for row in rows:
            out.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8"))
