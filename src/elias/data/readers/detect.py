"""Which format a file or folder is in, by what it holds."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

from elias.data.readers import lf, pecos, table, xmc
from elias.data.readers import npz as npz_folder
from elias.data.readers.base import Reading, ReadOptions
from elias.data.readers.columns import pick_text
from elias.data.readers.files import (
    EMPTY,
    IS_UTF16,
    SHORT,
    UTF16,
    bad,
    find,
    find_names,
    read_head,
    shown,
    split_files,
)
from elias.data.readers.pecos import looks_pecos
from elias.data.readers.table import column_names
from elias.data.readers.xmc import looks_sparse

if TYPE_CHECKING:
    from pathlib import Path


ACCEPTED = (
    "a table (JSON lines, CSV, TSV, Parquet; gzipped or not) with a text and a labels column, "
    "an XMC `N D L` file, or a folder of raw/trn_X.txt + Y.trn.npz, train.* + test.*, "
    "trn_X_Y.txt, trn.json.gz, or X.trn.txt + Y.trn.npz"
)
_FOREIGN = {
    b"PK\x03\x04": "a zip or npz archive; unpack it, or give the folder it is in",
    b"\xfd7zXZ": "an xz archive; unpack it first",
    b"BZh": "a bzip2 archive; unpack it first",
    b"\x28\xb5\x2f\xfd": "a zstd archive; unpack it first",
    b"\x80\x04\x95": "a pickle, which is never read; write it as JSON lines or Parquet",
}
_DELIMITED = re.compile(r"[\t,;]")


class Files(NamedTuple):
    """The files of a corpus that is made of tables, or of lines of text."""

    by_split: dict[str, list[Path]]
    """Under an empty name where one file holds all."""
    kind: str
    source: Path
    """That file, or the folder."""


class Found(NamedTuple):
    """What a path holds."""

    kind: str
    """``npz``, ``lf``, ``xmc folder``, or the kind of its files."""
    files: Files | None = None
    """Those files, where the kind is theirs."""


def recognise(path: Path) -> Found:
    """Return which format a file or folder is in."""
    if path.is_dir():
        if npz_folder.spelling_of(path) is not None:
            return Found("npz")
        if _is_lf(path):
            return Found("lf")
        if find(path, xmc.LABEL_MATRIX.format(SHORT["train"])):
            return Found("xmc folder")
    files = find_files(path)
    return Found(files.kind, files)


def named_columns(path: Path) -> tuple[str, list[str]]:
    """Return the kind of a corpus and its column names; no names where columns have none."""
    kind, files = recognise(path)
    if kind == "lf":
        points = lf.points_file(path, "train")
        assert points is not None
        return kind, column_names(points, "jsonl")
    if files is None or kind not in table.KINDS:
        return kind, []
    return kind, column_names(next(iter(files.by_split.values()))[0], kind)


def text_columns(path: Path, text: str | None) -> str | None:
    """Return the text columns that are read, as ``title,abstract``; None if there are none."""
    kind, names = named_columns(path)
    if not names:
        return None
    columns = lf.text_columns(names) if kind == "lf" and text is None else None
    return ",".join(columns or pick_text(path, names, text))


def read_path(path: Path, options: ReadOptions) -> Reading:
    """Read a file or folder in whichever format it is."""
    found = recognise(path)
    if found.files is not None:
        return _read_files(found.files, options)
    if found.kind == "npz":
        spelling = npz_folder.spelling_of(path)
        assert spelling is not None
        return npz_folder.read(path, spelling, options)
    return lf.read(path, options) if found.kind == "lf" else xmc.read_folder(path, options)


def _read_files(found: Files, options: ReadOptions) -> Reading:
    files, kind = found.by_split, found.kind
    alone = files[""][0] if "" in files else None
    if kind == "xmc":
        return xmc.read_files(files, options) if alone is None else xmc.read_file(alone, options)
    if kind == "pecos":
        if alone is None:
            return pecos.read_files(files, options)
        return pecos.read_file(alone, options)
    if alone is None:
        return table.read_files(files, kind, options)
    return table.read_file(alone, kind, options, found.source)


def _is_lf(folder: Path) -> bool:
    path = lf.points_file(folder, "train")
    if path is None:
        return False
    return "target_ind" in column_names(path, "jsonl")


def find_files(path: Path) -> Files:
    """Return a corpus's files: the one given, those named after splits, or a folder's only one.

    Raises:
        DataError: If none is there, or they are of several kinds.
    """
    if not path.is_dir():
        return Files({"": [path]}, recognise_file(path), path)
    files = split_files(path)
    if not files and (path / "data").is_dir():  # as data sets lie on the Hugging Face hub
        files = split_files(path / "data")
    if not files:
        alone = _single_file(path)
        return Files({"": [alone]}, recognise_file(alone), path)
    if "train" not in files:
        there = ", ".join(path.name for paths in files.values() for path in paths)
        raise bad(path, f"no training file beside {there}; add train.*")
    kinds = {path: recognise_file(path) for paths in files.values() for path in paths}
    kind = kinds[files["train"][0]]
    odd = next((path for path, other in kinds.items() if other != kind), None)
    if odd is not None:
        raise bad(odd, f"is {kinds[odd]}, but the training file is {kind}; use one format")
    return Files(files, kind, files["train"][0].parent)


def _single_file(folder: Path) -> Path:
    names_file = find_names(folder)
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path != names_file]
    data = [path for path in files if not path.name.lower().startswith((".", "readme", "license"))]
    if len(data) != 1:
        there = ", ".join(path.name for path in sorted(folder.iterdir())[:8]) or "nothing"
        raise bad(folder, f"no corpus recognised in: {there}; expected {ACCEPTED}")
    return data[0]


def recognise_file(path: Path) -> str:
    """Return ``jsonl``, ``csv``, ``tsv``, ``parquet``, ``xmc`` or ``pecos``."""
    head = read_head(path)
    if not head.strip():
        raise bad(path, EMPTY)
    if head.startswith(UTF16):
        raise bad(path, IS_UTF16, 1)
    if head.startswith(b"PAR1"):
        return "parquet"
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            raise bad(path, f"is {what}")
    kind = _recognise_text(head.decode("utf-8", "replace").removeprefix("\ufeff"))
    if kind is None:
        first = head.split(b"\n", 1)[0][:60].decode("utf-8", "replace")
        raise bad(path, f"not recognised from {shown(first)}; expected {ACCEPTED}")
    return kind


def _recognise_text(head: str) -> str | None:
    lines = head.split("\n")
    whole = lines[:-1] if len(lines) > 1 else lines  # the last one may be cut
    if not any(line.strip() for line in whole):
        whole = lines
    first = next((line for line in whole if line.strip()), None)
    if first is None:  # nothing but separators that only Unicode counts as white space
        return None
    if _starts_json(first):
        return "jsonl"
    if looks_sparse(whole, n_sizes=3):
        return "xmc"
    if looks_pecos(whole):
        return "pecos"
    if _DELIMITED.search(first):
        return "tsv" if "\t" in first else "csv"
    return None


def _starts_json(line: str) -> bool:
    text = line.strip()
    if text.startswith("{"):
        return True
    if text == "[" or text.startswith("[{"):
        return True
    try:
        return isinstance(json.loads(text), list)
    except (ValueError, RecursionError):
        return False
