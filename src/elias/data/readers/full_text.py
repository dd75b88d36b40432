"""Read full-text folders as Annif uses them: a ``.txt`` file for each document, and its subjects.

The subjects of ``a.txt`` are in ``a.tsv``, with a line ``<URI> label`` (separated by a tab) for
each of them, or in ``a.key``, with a label on each line. Splits are subfolders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from elias.data.readers import base
from elias.data.readers.files import CHUNK_CHARACTERS, CHUNK_ROWS, data_error, iter_lines
from elias.data.readers.label_cells import LabelLists, NamedLabels, strip_uri
from elias.data.readers.table import Rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


_SUBJECTS = (".tsv", ".key")
"""Suffixes of the subject files of a document, in order of preference."""


def find_folders(path: Path) -> dict[str, list[Path]]:
    """Return the full-text folders by split, or an empty dictionary if there are none.

    The only key is ``""`` if the folder has documents of its own, and therefore no splits.
    """
    if _is_full_text(path):
        return {"": [path]}
    folders_by_split = {
        split: [folder for folder in folders if _is_full_text(folder)]
        for split, folders in base.split_files(path, folders=True).items()
    }
    folders_by_split = {split: folders for split, folders in folders_by_split.items() if folders}
    return folders_by_split if "train" in folders_by_split else {}


def _is_full_text(folder: Path) -> bool:
    """Return whether a folder has a document with subjects."""
    return any(_subject_file(document) for document in folder.glob("*.txt"))


def _subject_file(document: Path) -> Path | None:
    paths = (document.with_suffix(suffix) for suffix in _SUBJECTS)
    return next((path for path in paths if path.is_file()), None)


class FullTextReader(base.Reader):
    """Reads full-text folders."""

    format = "full-text"

    def __init__(
        self, source: Path, by_split: Mapping[str, list[Path]], options: base.ReadOptions
    ) -> None:
        self._encoding = options.encoding
        for name in ("text", "labels", "separator", "group", "header"):
            if getattr(options, name) is not None:
                raise data_error(source, f"is a full-text folder, where {name}= has no meaning")
        self.has_splits = "" not in by_split
        self._by_split = by_split
        self._labels = NamedLabels(None)
        self._n_left_out = 0

    def chunks(self) -> Iterator[base.Chunk]:
        """Yield the documents of each split."""
        for split, folders in self._by_split.items():
            for folder in folders:
                yield from self._read(folder, split or "train")

    def _read(self, folder: Path, split: str) -> Iterator[base.Chunk]:
        texts: list[str] = []
        subjects: list[list[str]] = []
        size = 0
        for document in sorted(folder.glob("*.txt")):
            subject_file = _subject_file(document)
            if subject_file is None:
                self._n_left_out += 1
                continue
            texts.append("".join(iter_lines(document, self._encoding)).strip())
            lines = iter_lines(subject_file, self._encoding)
            subjects.append([label for line in lines if (label := _label(line))])
            size += len(texts[-1])
            if len(texts) >= CHUNK_ROWS or size >= CHUNK_CHARACTERS:
                yield self._chunk(folder, split, texts, subjects)
                texts, subjects, size = [], [], 0
        if texts:
            yield self._chunk(folder, split, texts, subjects)

    def _chunk(
        self, folder: Path, split: str, texts: list[str], subjects: list[list[str]]
    ) -> base.Chunk:
        counts = np.array(list(map(len, subjects)), dtype=np.int64)
        lists = LabelLists(counts, [label for labels in subjects for label in labels])
        rows = Rows(folder, split, {}, range(1, len(texts) + 1))
        return base.Chunk(split, texts, base.LabelRows(counts, self._labels.add(lists, None, rows)))

    def finish(self, n_points: Mapping[str, int], n_uses: int) -> base.Summary:
        """Return the label names and notes."""
        del n_points
        ids, names = self._labels.finish(n_uses)
        notes = {"text": "*.txt", "labels": "*.tsv or *.key"}
        if self._n_left_out:
            notes["text"] += f"; left out: {self._n_left_out} without a *.tsv or *.key file"
        return base.Summary(names, ids, notes=notes)


def _label(line: str) -> str:
    """Return the URI of a subject if the line has one, else its label."""
    cells = [cell.strip() for cell in line.split("\t")]
    uris = (strip_uri(cell) for cell in cells if cell != strip_uri(cell))
    return next(uris, None) or next(filter(None, cells), "")
