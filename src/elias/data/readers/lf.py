"""Read the "LF" format of the XMC repository: points and labels as JSON lines.

``trn.json.gz``, ``tst.json.gz``: ``{"uid", "title", "content", "target_ind", "target_rel"}``;
``lbl.json.gz``: ``{"uid", "title"}`` for each label (or names in ``Yf.txt``);
``filter_labels_test.txt``: pairs not to predict. Features are read from ``trn_X_Xf.txt`` and
``lbl_X_Xf.txt`` if they exist. A text is the title and the content, joined by a space.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from elias.data.readers import xmc
from elias.data.readers.base import (
    LABELS,
    Chunk,
    LabelRows,
    Reader,
    ReadOptions,
    Summary,
    summarize,
)
from elias.data.readers.columns import missing_column
from elias.data.readers.files import SHORT, find_file, read_label_names, short_repr
from elias.data.readers.label_cells import parse_weights
from elias.data.readers.table import column_names, iter_rows, row_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from elias.data.readers.table import Rows
    from elias.errors import DataError


IDS, WEIGHTS = "target_ind", "target_rel"
_TEXT = ("title", "content")
_MAX_ID = 2**31 - 1


def points_file(folder: Path, split: str) -> Path | None:
    """Return the JSON file of a split, or None."""
    short = SHORT[split]
    return find_file(folder, f"{short}.json", f"{short}.raw.json", f"{short}.jsonl")


def text_columns(names: Sequence[str]) -> list[str]:
    """Return the columns that texts are read from by default."""
    return [name for name in _TEXT if name in names]


class LfReader(Reader):
    """Reads a folder of JSON lines with label ids."""

    format = "lf"

    def __init__(self, folder: Path, options: ReadOptions) -> None:
        options.check_unused(folder, "LF", text=False)
        self._folder = folder
        self._text = options.text
        self._names = self._read_names()
        self._highest = -1

    def _read_names(self) -> list[str] | None:
        path = find_file(self._folder, "lbl.json", "lbl.raw.json", "lbl.jsonl")
        if path is None:
            return read_label_names(self._folder)
        return [str(title or "") for _, [title] in iter_rows(path, "jsonl", ["title"], ["title"])]

    def chunks(self) -> Iterator[Chunk]:
        """Yield the texts, labels and features of each split, then the features of the labels."""
        for split in SHORT:
            path = points_file(self._folder, split)
            if path is not None:
                yield from self._points(path, split)
                yield from xmc.feature_chunks(self._folder, split)
        yield from xmc.feature_chunks(self._folder, LABELS)

    def _points(self, path: Path, split: str) -> Iterator[Chunk]:
        """Yield texts and labels of a split. Relevance values must be in all rows or in none."""
        text = self._text_columns(path)
        has_weights = False
        unweighted: DataError | None = None  # for the first row with labels but no relevance
        for rows in row_chunks(path, split, "jsonl", [*text, IDS, WEIGHTS], [text[0], IDS]):
            cells = [self._checked_ids(rows, row) for row in range(len(rows))]
            counts = np.array([len(cell) for cell in cells], dtype=np.int64)
            ids = np.fromiter(chain.from_iterable(cells), np.int64, int(counts.sum()))
            self._highest = max(self._highest, int(ids.max(initial=-1)))
            weights = None
            has_weights = has_weights or any(cell is not None for cell in rows.columns[WEIGHTS])
            if has_weights:
                if unweighted is not None:
                    raise unweighted
                weights = parse_weights(rows.columns[WEIGHTS], counts, rows.error)
            elif unweighted is None and len(ids):
                row = int(np.flatnonzero(counts)[0])
                problem = f"{counts[row]} labels but 0 relevance values; give one for each"
                unweighted = rows.error(row, problem)
            yield Chunk(split, _texts(rows, text), LabelRows(counts, ids, weights))

    def _text_columns(self, path: Path) -> list[str]:
        names = column_names(path, "jsonl")
        required = [part.strip() for part in self._text.split(",")] if self._text else []
        missing = next((name for name in (*required, IDS) if name not in names), None)
        if missing is not None:
            raise missing_column(path, missing, names)
        columns = required or text_columns(names)
        if not columns:
            raise missing_column(path, _TEXT[0], names)
        return columns

    def _checked_ids(self, rows: Rows, row: int) -> list[int]:
        """Return the label ids of a row; raise an error if the cell is not a list of valid ids."""
        cell: Any = rows.columns[IDS][row] or []
        limit = _MAX_ID if self._names is None else len(self._names)
        wrong: Any = cell
        if isinstance(cell, list):
            wrong = next((i for i in cell if type(i) is not int or not 0 <= i < limit), None)
        if wrong is not None:
            limits = "labels are counted from 0"
            if self._names is not None:
                limits = f"there are {limit} labels, counted from 0"
            raise rows.error(row, f"{IDS} {short_repr(wrong)} is out of range; {limits}")
        ids: list[int] = cell
        return ids

    def finish(self, n_points: Mapping[str, int], n_uses: int) -> Summary:
        """Return the label names and filters."""
        n_labels = self._highest + 1
        return summarize(self._folder, self._folder, self._names, n_labels, n_points, n_uses)


def _texts(rows: Rows, columns: Sequence[str]) -> list[str]:
    texts = []
    for row, parts in enumerate(zip(*(rows.columns[name] for name in columns), strict=True)):
        wrong = next((part for part in parts if not isinstance(part, str | None)), None)
        if wrong is not None:
            raise rows.error(row, f"{short_repr(wrong)} is not a text")
        texts.append(" ".join(filter(None, parts)))
    return texts
