"""Read the one-file format of PECOS: lines of ``id,id,…<tab>text``.

Label names are read from a file in the same folder (``output-labels.txt``, ``output-items.txt``,
``labels.txt``, …); without it, labels are named by number. `elias.data.readers.npz` reads the npz
folders of PECOS.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from elias.data.readers.base import Chunk, LabelRows, Reader, ReadOptions, Summary, summarize
from elias.data.readers.files import (
    SHORT,
    data_error,
    line_chunks,
    only_file,
    read_label_names,
    short_repr,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


_SNIFFED_LINES = 20
_LINE = re.compile(r"(?:\d+(?:,\d+)*)?\t.*", re.DOTALL)
_IDS = re.compile(r"(?:\d{1,18}(?:,\d{1,18})*)?")


def looks_pecos(lines: Sequence[str]) -> bool:
    """Return True if all given lines are ``ids<tab>text`` and at least one of them has ids."""
    filled = [line for line in lines[:_SNIFFED_LINES] if line]
    return all(_LINE.fullmatch(line) for line in filled) and any(
        not line.startswith("\t") for line in filled
    )


class PecosReader(Reader):
    """Reads one file of ``ids<tab>text`` lines, or one for each split."""

    format = "pecos"

    def __init__(self, source: Path, files: dict[str, list[Path]], options: ReadOptions) -> None:
        options.check_unused(source, "PECOS text")
        self.has_splits = "" not in files
        self._source = source
        self._files = {split or "train": only_file(split, paths) for split, paths in files.items()}
        self._folder = self._files["train"].parent
        self._names = read_label_names(self._folder)
        self._highest = -1

    def chunks(self) -> Iterator[Chunk]:
        """Yield the texts and labels of each split."""
        for split in (name for name in SHORT if name in self._files):
            n_before = 0
            for lines in line_chunks(self._files[split]):
                yield self._parse(split, lines, n_before)
                n_before += len(lines)

    def _parse(self, split: str, lines: Sequence[str], n_before: int) -> Chunk:
        path = self._files[split]
        texts, heads = [], []
        for number, line in enumerate(lines, start=n_before + 1):
            head, tab, text = line.partition("\t")
            if not tab or not _IDS.fullmatch(head):
                raise data_error(path, f"{short_repr(line)} is not `id,id,…<tab>text`", number)
            texts.append(text)
            heads.append(head)
        counts = np.array([head.count(",") + 1 if head else 0 for head in heads], dtype=np.int64)
        flat = ",".join(filter(None, heads))
        ids = np.array([int(label) for label in flat.split(",")] if flat else [], dtype=np.int64)
        self._highest = max(self._highest, int(ids.max(initial=-1)))
        if self._names is not None and self._highest >= len(self._names):
            entry = int(np.flatnonzero(ids >= len(self._names))[0])
            row = int(np.searchsorted(np.cumsum(counts), entry, side="right"))
            limits = f"there are {len(self._names)} label names, counted from 0"
            problem = f"label id {ids[entry]} is out of range; {limits}"
            raise data_error(path, problem, n_before + 1 + row)
        return Chunk(split, texts=texts, labels=LabelRows(counts, ids))

    def finish(self, n_points: Mapping[str, int], n_uses: int) -> Summary:
        """Return the label names and filters."""
        folder = self._folder if self.has_splits else None
        n_labels = self._highest + 1
        return summarize(self._source, folder, self._names, n_labels, n_points, n_uses)
