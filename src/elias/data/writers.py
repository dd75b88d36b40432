"""Write a corpus in any supported format.

A table holds texts and labels. Where names alone would not bring the same labels back (they
repeat, are not sorted, or some label has no point), a column ``label_ids`` keeps the ids; a label
that no point has keeps no name. CSV and TSV cells hold the labels joined by ``|`` where that can
be read back, else JSON lists.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import re
import secrets
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from elias.data.atomic import staged_folder
from elias.data.readers import lf, xmc
from elias.data.readers import npz as npz_folder
from elias.data.readers.columns import IDS, SPLIT, WEIGHTS
from elias.data.readers.files import bad, sanitize
from elias.data.readers.label_cells import detect_separator, order_names, split_cells
from elias.data.readers.npz import is_binary
from elias.data.readers.table import KINDS
from elias.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from scipy.sparse import csr_matrix

    from elias.data.corpus import Corpus


logger = logging.getLogger(__name__)

_SEPARATOR = "|"
_DELIMITER = {"csv": ",", "tsv": "\t"}


def left_out(corpus: Corpus) -> list[str]:
    """Say what of a corpus a table cannot hold."""
    splits = corpus.splits.values()
    missing = []
    if any(split.features is not None for split in splits):
        missing.append("features")
    if any(split.filters is not None for split in splits):
        missing.append("filter pairs")
    if corpus.label_features is not None:
        missing.append("label features")
    unused = corpus.n_labels - len(_used(corpus))
    if unused:
        missing.append(f"the names of {unused} labels that no point has")
    return missing


def write_table(corpus: Corpus, stream: IO[bytes], kind: str) -> None:
    """Write all splits to a stream as ``jsonl``, ``csv``, ``tsv`` or ``parquet``."""
    columns = _columns(corpus)
    if kind == "jsonl":
        _write_json(columns, stream)
    elif kind == "parquet":
        _write_parquet(columns, stream)
    else:
        _write_delimited(columns, stream, _DELIMITER[kind])


def _columns(corpus: Corpus) -> dict[str, list[Any]]:
    splits = corpus.splits
    texts = [split.texts for split in splits.values()]
    if any(part is None for part in texts):
        raise DataError(
            f"{corpus.source or 'the corpus'}: has features but no texts, and a table needs "
            "texts; write it as xmc, folder or pecos"
        )
    ids = list(chain.from_iterable(_rows(s.labels, s.labels.indices) for s in splits.values()))
    names = corpus.label_names
    columns: dict[str, list[Any]] = {
        "text": list(chain.from_iterable(part or () for part in texts)),
        "labels": [[names[label] for label in row] for row in ids],
    }
    if not _names_suffice(corpus):
        columns[IDS] = ids
    if not all(is_binary(split.labels) for split in splits.values()):
        weights = (_rows(s.labels, s.labels.data) for s in splits.values())
        columns[WEIGHTS] = list(chain.from_iterable(weights))
    columns[SPLIT] = [name for name, split in splits.items() for _ in range(len(split))]
    return columns


def _rows(matrix: csr_matrix, flat: Any) -> list[list[Any]]:
    values = flat.tolist()
    return [values[start:end] for start, end in pairwise(matrix.indptr.tolist())]


def _used(corpus: Corpus) -> set[int]:
    return set(
        chain.from_iterable(split.labels.indices.tolist() for split in corpus.splits.values())
    )


def _names_suffice(corpus: Corpus) -> bool:
    names = list(corpus.label_names)
    distinct = set(names)
    return (
        len(distinct) == len(names) == len(_used(corpus))
        and "" not in distinct
        and order_names(names) == names
    )


def _write_json(columns: dict[str, list[Any]], stream: IO[bytes]) -> None:
    for values in zip(*columns.values(), strict=True):
        row = dict(zip(columns, values, strict=True))
        stream.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8"))


def _write_parquet(columns: dict[str, list[Any]], stream: IO[bytes]) -> None:
    import pyarrow as pa
    from pyarrow.parquet import write_table as write_parquet

    types = {
        "text": pa.large_string(),
        "labels": pa.large_list(pa.large_string()),
        IDS: pa.large_list(pa.int64()),
        WEIGHTS: pa.large_list(pa.float32()),
        SPLIT: pa.string(),
    }
    schema = pa.schema([(name, types[name]) for name in columns])
    write_parquet(pa.table(columns, schema=schema), stream)


def _write_delimited(columns: dict[str, list[Any]], stream: IO[bytes], delimiter: str) -> None:
    plain = IDS not in columns and WEIGHTS not in columns
    cells = {
        name: _join(values, plain=plain) if name in ("labels", IDS, WEIGHTS) else values
        for name, values in columns.items()
    }
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="", write_through=True)
    # All cells quoted: before Python 3.13 a lone carriage return would go out bare.
    writer = csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(cells)
    writer.writerows(zip(*cells.values(), strict=True))
    text.detach()


def _join(lists: Sequence[list[Any]], *, plain: bool) -> list[str]:
    """Return lists as cells: joined where reading them back gives the same lists, else JSON."""
    if plain:
        joined = [_SEPARATOR.join(row) for row in lists]
        if _reads_back(joined, lists):
            return joined
    return [json.dumps(row, ensure_ascii=False) for row in lists]


def _reads_back(joined: Sequence[str], lists: Sequence[list[Any]]) -> bool:
    def refuse(_: int, problem: str) -> DataError:
        return DataError(problem)

    try:
        found = detect_separator(joined, refuse)
        if found != _SEPARATOR and (found != "" or any(len(row) > 1 for row in lists)):
            return False
        return split_cells(joined, found, refuse).values == list(chain.from_iterable(lists))
    except DataError:  # a name that looks like a list
        return False


log = logging.getLogger(__name__)

FORMATS = (*KINDS, "folder", "xmc", "lf", "pecos")
_SUFFIXES = {f".{kind}": kind for kind in KINDS} | {".ndjson": "jsonl", ".json": "jsonl"}
_OURS = re.compile(
    r"(raw/)?(Y|(trn|val|tst)_X|labels)\.txt|[XY]\.(trn|val|tst|lbl)\.(npz|txt)|output-items\.txt"
    r"|(train|validation|test)\.txt|filter_labels_(train|validation|test)\.txt"
    r"|(trn|val|tst|lbl)(_X_Xf|_X_Y)\.txt|(trn|val|tst|lbl)\.json\.gz|raw"
)


@dataclass(frozen=True, slots=True)
class Written:
    """What `convert` wrote."""

    path: Path
    format: str
    left_out: tuple[str, ...]
    """What of the corpus the format cannot hold, in words."""


def convert(
    corpus: Corpus, dst: str | Path, format: str | None = None, *, overwrite: bool = False
) -> Written:
    """Write a corpus; it appears under its name only when it is whole.

    Tables (``jsonl``, ``csv``, ``tsv``, ``parquet``) are one file with a column ``split``; the
    other formats are folders. Line-based formats (``folder``, ``xmc``, ``pecos``) hold a line end
    inside a text or a name as a space.

    Args:
        corpus: what to write.
        dst: the file or folder to write.
        format: one of `FORMATS`; without it, by the suffix of ``dst`` (``.gz`` allowed after
            it), and a folder of the ``folder`` format where there is none.
        overwrite: whether to replace what is there. A folder is replaced only when every file
            in it is one that a corpus has.

    Raises:
        DataError: if ``dst`` is there already, or the format cannot hold this corpus.
    """
    target = Path(dst).expanduser()
    chosen = _format_of(target, format)
    if target.exists() and not overwrite:
        raise bad(target, "already exists; choose another name, or pass overwrite=True")
    if target.is_dir() == (chosen in KINDS) and target.exists():
        raise bad(target, f"is in the way of the {chosen} format; remove it")
    clean = _encodable(corpus)
    if chosen in KINDS:
        _write_file(clean, target, chosen)
    else:
        _write_folder(clean, target, chosen)
    written = Written(target, chosen, tuple(_left_out(corpus, chosen)))
    if written.left_out:
        log.warning("%s: left out: %s", target, "; ".join(written.left_out))
    return written


def _format_of(target: Path, given: str | None) -> str:
    suffix = Path(target.name.removesuffix(".gz")).suffix.lower()
    if given is None:
        if suffix in _SUFFIXES:
            return _SUFFIXES[suffix]
        if target.name.endswith(".gz") or suffix in (".txt", ".npz", ".xlsx"):
            raise bad(target, f"no format goes with this name; use {', '.join(_SUFFIXES)}")
        return "folder"
    if given not in FORMATS:
        known = ", ".join(FORMATS)
        raise DataError(f"unknown format {given!r}{did_you_mean(given, FORMATS)}; formats: {known}")
    return given


def _left_out(corpus: Corpus, chosen: str) -> list[str]:
    if chosen in KINDS:
        return left_out(corpus)
    return xmc.left_out(corpus) if chosen == "xmc" else []


def _encodable(corpus: Corpus) -> Corpus:
    splits = {
        name: split if split.texts is None else replace(split, texts=sanitize(split.texts)[0])
        for name, split in corpus.splits.items()
    }
    return replace(corpus.with_splits(**splits), label_names=sanitize(corpus.label_names)[0])


def _write_file(corpus: Corpus, target: Path, kind: str) -> None:
    with _staged_file(target) as stream:
        if target.name.endswith(".gz"):
            with gzip.GzipFile("", "wb", 6, stream, mtime=0) as packed:
                write_table(corpus, cast("IO[bytes]", packed), kind)
        else:
            write_table(corpus, stream, kind)


@contextmanager
def _staged_file(target: Path) -> Iterator[IO[bytes]]:
    """Yield a stream that becomes ``target`` when the block ends without an error."""
    staging = _beside(target, "partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with staging.open("wb") as stream:
                yield stream
            staging.replace(target)
        finally:
            staging.unlink(missing_ok=True)
    except OSError as error:
        raise bad(target, f"cannot be written ({error.strerror or error})") from None


def _write_folder(corpus: Corpus, target: Path, chosen: str) -> None:
    replacing = target.exists() and any(target.iterdir())
    if replacing:
        _refuse_foreign(target)
    place = _beside(target, "new") if replacing else target
    try:
        with staged_folder(place) as folder:
            _fill(corpus, folder, chosen)
        if replacing:
            _swap(place, target)
    except OSError as error:
        raise bad(target, f"cannot be written ({error.strerror or error})") from None


def _fill(corpus: Corpus, folder: Path, chosen: str) -> None:
    if chosen == "xmc":
        xmc.write(corpus, folder)
    elif chosen == "lf":
        lf.write(corpus, folder)
    else:
        spelling = npz_folder.PECOS if chosen == "pecos" else npz_folder.RAW
        npz_folder.write(corpus, folder, spelling)


def _refuse_foreign(target: Path) -> None:
    names = (path.relative_to(target).as_posix() for path in sorted(target.rglob("*")))
    stray = next((name for name in names if not _OURS.fullmatch(name)), None)
    if stray is not None:
        raise bad(target, f"also holds {stray}, which is no part of a corpus; remove it yourself")


def _swap(new: Path, target: Path) -> None:
    """Put the folder ``new`` in the place of ``target``, which stays whole until then."""
    old = _beside(target, "old")
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old)


def _beside(target: Path, what: str) -> Path:
    whole = target.resolve()
    return whole.with_name(f".{whole.name}.{secrets.token_hex(4)}.{what}")
