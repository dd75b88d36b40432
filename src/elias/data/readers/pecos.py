"""PECOS's one-file format: ``id,id,…<tab>text`` lines, with a file of label names beside it.

The names are looked for beside the file (``output-labels.txt``, ``output-items.txt``,
``labels.txt``, …); without them labels are named by number. PECOS's npz folders are read by
`elias.data.readers.npz`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from elias.data.corpus import Corpus, Split
from elias.data.readers.base import Reading, ReadOptions, from_lists
from elias.data.readers.files import (
    bad,
    find_names,
    numbered,
    read_filters,
    read_lines,
    read_names,
    shown,
    the_only_file,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray


_SNIFFED = 20
_LINE = re.compile(r"(?:\d+(?:,\d+)*)?\t.*", re.DOTALL)
_IDS = re.compile(r"(?:\d{1,18}(?:,\d{1,18})*)?")


def looks_pecos(lines: Sequence[str]) -> bool:
    """Say whether the first lines are all ``ids<tab>text``, at least one of them with ids."""
    filled = [line for line in lines[:_SNIFFED] if line]
    return all(_LINE.fullmatch(line) for line in filled) and any(
        not line.startswith("\t") for line in filled
    )


def read_file(path: Path, options: ReadOptions) -> Reading:
    """Read one file of training points."""
    return _read({"train": path}, options, path, has_splits=False)


def read_files(files: dict[str, list[Path]], options: ReadOptions) -> Reading:
    """Read one file for each split."""
    chosen = {split: the_only_file(split, paths) for split, paths in files.items()}
    return _read(chosen, options, chosen["train"].parent, has_splits=True)


def _read(
    files: dict[str, Path], options: ReadOptions, source: Path, *, has_splits: bool
) -> Reading:
    options.refuse(source, "PECOS text")
    folder = files["train"].parent
    points = {split: parse(path, read_lines(path)) for split, path in files.items()}
    names_file = find_names(folder)
    if names_file is not None:
        names = read_names(names_file)
    else:
        all_ids = [found.ids for found in points.values()]
        names = numbered(source, _n_labels(all_ids), sum(map(len, all_ids)))
    splits = {}
    for split, found in points.items():
        check_range(files[split], found, len(names))
        labels = from_lists(found.counts, found.ids, len(names))
        filters = read_filters(folder, split, labels.shape) if has_splits else None
        splits[split] = Split(labels=labels, texts=found.texts, filters=filters)
    notes = {} if names_file is not None else {"labels": "no file of names: named by number"}
    corpus = Corpus(
        label_names=names,
        source=source,
        format="pecos",
        notes=notes,
        **splits,  # type: ignore[arg-type]  # its keys are the names of splits
    )
    return Reading(corpus, has_splits=has_splits)


class Points(NamedTuple):
    """Texts, how many labels each has, and all label ids."""

    texts: list[str]
    counts: NDArray[np.int64]
    ids: NDArray[np.int64]


def parse(path: Path, lines: Sequence[str], first: int = 0) -> Points:
    """Return the points of some lines, of which ``first`` come before."""
    texts, heads = [], []
    for number, line in enumerate(lines, start=first + 1):
        head, tab, text = line.partition("\t")
        if not tab or not _IDS.fullmatch(head):
            raise bad(path, f"{shown(line)} is not `id,id,…<tab>text`", number)
        texts.append(text)
        heads.append(head)
    counts = np.array([head.count(",") + 1 if head else 0 for head in heads], dtype=np.int64)
    flat = ",".join(filter(None, heads))
    ids = np.array([int(label) for label in flat.split(",")] if flat else [], dtype=np.int64)
    return Points(texts, counts, ids)


def _n_labels(ids: Sequence[NDArray[np.int64]]) -> int:
    return 1 + max((int(part.max()) for part in ids if len(part)), default=-1)


def check_range(path: Path, points: Points, n_labels: int, first: int = 0) -> None:
    """Refuse label ids that have no name; ``first`` points come before these."""
    wrong = np.flatnonzero(points.ids >= n_labels)
    if len(wrong):
        row = int(np.searchsorted(np.cumsum(points.counts), wrong[0], side="right"))
        limits = f"there are {n_labels} label names, counted from 0"
        problem = f"label id {points.ids[wrong[0]]} is out of range; {limits}"
        raise bad(path, problem, first + 1 + row)
