"""Detect the format of a file or folder by its content, and choose its reader."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

from elias.data.readers import lf, xmc
from elias.data.readers.columns import choose_text
from elias.data.readers.files import (
    EMPTY,
    IS_UTF16,
    SHORT,
    UTF16,
    data_error,
    find_file,
    find_label_names,
    read_head,
    short_repr,
    split_files,
)
from elias.data.readers.npz import NpzReader
from elias.data.readers.pecos import PecosReader, looks_pecos
from elias.data.readers.table import KINDS, TableReader, column_names

if TYPE_CHECKING:
    from pathlib import Path

    from elias.data.readers.base import Reader, ReadOptions


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


class Detected(NamedTuple):
    """The format of a corpus, and its files."""

    kind: str
    """``npz``, ``lf``, ``xmc folder``, ``xmc``, ``pecos`` or a kind of table."""
    source: Path
    """The file, or the folder that holds the files."""
    by_split: dict[str, list[Path]]
    """Files by split, for tables, ``N D L`` and PECOS text; the key is empty for all splits."""


def detect(path: Path) -> Detected:
    """Return the format of a file or folder.

    Raises:
        DataError: If the format is unknown, there is no training file, or formats are mixed.
    """
    if not path.is_dir():
        return Detected(detect_file(path), path, {"": [path]})
    if (path / "Y.trn.npz").is_file():
        return Detected("npz", path, {})
    points = lf.points_file(path, "train")
    if points is not None and lf.IDS in column_names(points, "jsonl"):
        return Detected("lf", path, {})
    if find_file(path, xmc.LABEL_MATRIX.format(SHORT["train"])):
        return Detected("xmc folder", path, {})
    files = split_files(path)
    if not files and (path / "data").is_dir():  # the layout of data sets on the Hugging Face hub
        files = split_files(path / "data")
    if not files:
        single = _single_file(path)
        return Detected(detect_file(single), path, {"": [single]})
    if "train" not in files:
        names = ", ".join(path.name for paths in files.values() for path in paths)
        raise data_error(path, f"no training file beside {names}; add train.*")
    kinds = {path: detect_file(path) for paths in files.values() for path in paths}
    kind = kinds[files["train"][0]]
    odd = next((path for path, other in kinds.items() if other != kind), None)
    if odd is not None:
        raise data_error(odd, f"is {kinds[odd]}, but the training file is {kind}; use one format")
    return Detected(kind, files["train"][0].parent, files)


def open_reader(path: Path, options: ReadOptions, *, in_memory: bool) -> Reader:
    """Return the reader of a file or folder.

    Args:
        path: The file or folder, in any format.
        options: The columns to read.
        in_memory: Whether the corpus is read into memory, so that a reader that needs two passes
            may keep the rows instead of reading the files twice.
    """
    kind, source, files = detect(path)
    if kind == "npz":
        return NpzReader(path, options)
    if kind == "lf":
        return lf.LfReader(path, options)
    if kind == "xmc folder":
        return xmc.XmcReader(path, None, options)
    if kind == "xmc":
        return xmc.XmcReader(source, files, options)
    if kind == "pecos":
        return PecosReader(source, files, options)
    return TableReader(source, files, kind, options, in_memory=in_memory)


def named_columns(path: Path) -> tuple[str, list[str]]:
    """Return the format and the column names of a corpus; no names if the format has none."""
    kind, _, files = detect(path)
    if kind == "lf":
        points = lf.points_file(path, "train")
        assert points is not None
        return kind, column_names(points, "jsonl")
    return kind, column_names(next(iter(files.values()))[0], kind) if kind in KINDS else []


def text_columns(path: Path, text: str | None) -> str | None:
    """Return the text columns to read, as ``title,abstract``; None if columns have no names."""
    kind, names = named_columns(path)
    if not names:
        return None
    columns = lf.text_columns(names) if kind == "lf" and text is None else None
    return ",".join(columns or choose_text(path, names, text))


def _single_file(folder: Path) -> Path:
    label_names = find_label_names(folder)
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path != label_names]
    data = [path for path in files if not path.name.lower().startswith((".", "readme", "license"))]
    if len(data) != 1:
        names = ", ".join(path.name for path in sorted(folder.iterdir())[:8]) or "nothing"
        raise data_error(folder, f"no corpus recognised in: {names}; expected {ACCEPTED}")
    return data[0]


def detect_file(path: Path) -> str:
    """Return the file format: ``jsonl``, ``csv``, ``tsv``, ``parquet``, ``xmc`` or ``pecos``."""
    head = read_head(path)
    if not head.strip():
        raise data_error(path, EMPTY)
    if head.startswith(UTF16):
        raise data_error(path, IS_UTF16, 1)
    if head.startswith(b"PAR1"):
        return "parquet"
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            raise data_error(path, f"is {what}")
    kind = _detect_text(head.decode("utf-8", "replace").removeprefix("\ufeff"))
    if kind is None:
        first = head.split(b"\n", 1)[0][:60].decode("utf-8", "replace")
        raise data_error(path, f"not recognised from {short_repr(first)}; expected {ACCEPTED}")
    return kind


def _detect_text(head: str) -> str | None:
    lines = head.split("\n")
    whole = lines[:-1] if len(lines) > 1 else lines  # the last line may be cut
    if not any(line.strip() for line in whole):
        whole = lines
    first = next((line for line in whole if line.strip()), None)
    if first is None:  # only separators that Unicode counts as white space
        return None
    if _starts_json(first):
        return "jsonl"
    if xmc.looks_sparse(whole):
        return "xmc"
    if looks_pecos(whole):
        return "pecos"
    if _DELIMITED.search(first):
        return "tsv" if "\t" in first else "csv"
    return None


def _starts_json(line: str) -> bool:
    text = line.strip()
    if text == "[" or text.startswith(("{", "[{")):
        return True
    try:
        return isinstance(json.loads(text), list)
    except (ValueError, RecursionError):
        return False
