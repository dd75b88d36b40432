"""File names the formats share: splits, label names and filter pairs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from elias.data.formats.sources import bad, read_lines, shown
from elias.data.formats.text_lines import write_lines

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

SHORT = {"train": "trn", "validation": "val", "test": "tst"}
"""The short name of each split in npz and XMC folders."""

ALIASES = {
    "train": ("train", "trn", "training", "tr"),
    "validation": ("validation", "valid", "val", "dev", "development"),
    "test": ("test", "tst", "testing", "te", "eval"),
}
"""What a file, or a row in a ``split`` column, may call each split."""

LABEL_FILES = (
    "raw/Y.txt",
    "Y.txt",
    "labels.txt",
    "output-items.txt",
    "output-labels.txt",
    "label_map.txt",
    "Yf.txt",
)
"""Files of label names, one per line, in the order in which they are looked for."""

_MOST_LABELS = 100_000_000
_LABELS_PER_USE = 100
_FEW_LABELS = 5_000_000
"""Labels without names are counted up to the highest id. More than five million of them, of which
not one in a hundred is ever used, is a slip in the ids, and would fill the memory with names."""
_SHARD = r"(?:-\d+-of-\d+)?"


def split_called(name: str) -> str | None:
    """Return the split that ``name`` is an alias of, or None."""
    plain = name.strip().lower()
    return next((split for split, names in ALIASES.items() if plain in names), None)


def find(folder: Path, *names: str) -> Path | None:
    """Return the first of the files that is there, gzipped or not."""
    candidates = (folder / (name + suffix) for name in names for suffix in ("", ".gz"))
    return next((path for path in candidates if path.is_file()), None)


def find_names(folder: Path) -> Path | None:
    """Return the file of label names in a folder, or None."""
    return find(folder, *LABEL_FILES)


def split_files(folder: Path) -> dict[str, list[Path]]:
    """Return the files named after splits (``train.csv``, ``eurlex_test.txt``, shards), by split.

    The exact name wins over a name that only ends in it.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file())
    found = {}
    for split, names in ALIASES.items():
        called = "|".join(names)
        exact = re.compile(rf"(?:{called}){_SHARD}(?:\..+)?", re.IGNORECASE)
        ending = re.compile(rf".+[_.-](?:{called})(?:\..+)?", re.IGNORECASE)
        for pattern in (exact, ending):
            matching = [path for path in files if pattern.fullmatch(path.name)]
            if matching:
                found[split] = [path for path in matching if "filter" not in path.name]
                break
    return {split: paths for split, paths in found.items() if paths}


def numbered(path: Path, n_labels: int, n_uses: int) -> list[str]:
    """Return the names of labels that have none: their numbers.

    Args:
        path: what the ids come from, for the error.
        n_labels: one more than the highest id.
        n_uses: how many labels the points have in all.
    """
    if too_many_labels(n_labels, n_uses):
        raise bad(
            path,
            f"label ids up to {n_labels - 1} are too large to count labels by; number the labels "
            "from 0, or give a file of label names",
        )
    return [str(label) for label in range(n_labels)]


def too_many_labels(n_labels: int, n_uses: int) -> bool:
    """Say whether there are more labels, or more unused ones, than ids are a sensible count of."""
    return n_labels > min(_MOST_LABELS, max(_FEW_LABELS, _LABELS_PER_USE * n_uses))


def the_only_file(split: str, paths: Iterable[Path]) -> Path:
    """Return the one file of a split, or refuse to choose among several."""
    chosen = list(paths)
    if len(chosen) > 1:
        names = ", ".join(path.name for path in chosen)
        raise bad(chosen[0].parent, f"several files for the {split} split ({names}); keep one")
    return chosen[0]


def read_filters(folder: Path, split: str, shape: tuple[int, int]) -> NDArray[np.int64] | None:
    """Return the (M, 2) pairs (point, label) never to predict in a split, or None without a file.

    Args:
        folder: where ``filter_labels_test.txt`` (or ``tst_filter_labels.txt``) is looked for.
        split: the split's name.
        shape: (N, L), what the pairs must stay within.
    """
    names = [f"filter_labels_{name}.txt" for name in ALIASES[split]]
    names += [f"{SHORT[split]}_filter_labels.txt"]
    path = find(folder, *names, *(f"raw/{name}" for name in names))
    return None if path is None else _read_pairs(path, shape)


def _read_pairs(path: Path, shape: tuple[int, int]) -> NDArray[np.int64]:
    rows = [(number, line.split()) for number, line in enumerate(read_lines(path), start=1)]
    pairs = []
    for number, cells in rows:
        if not cells:
            continue
        try:
            point, label = (int(cell) for cell in cells)
        except ValueError:
            raise bad(path, f"{shown(' '.join(cells))} is not `point label`", number) from None
        if not (0 <= point < shape[0] and 0 <= label < shape[1]):
            limits = f"there are {shape[0]} points and {shape[1]} labels, counted from 0"
            raise bad(path, f"the pair {point} {label} is out of range; {limits}", number)
        pairs.append((point, label))
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def write_filters(folder: Path, split: str, filters: NDArray[np.int64] | None) -> None:
    """Write the filter pairs of a split, where there are any."""
    if filters is not None:
        lines = (f"{point} {label}" for point, label in filters.tolist())
        write_lines(folder / f"filter_labels_{split}.txt", lines)
