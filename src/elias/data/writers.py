"""Write a corpus in any supported format.

A table contains texts and labels. If label names alone would not restore the same label ids (names
repeat, are not sorted, or some label has no point), a column ``label_ids`` stores the ids. The name
of a label without points is lost. In CSV and TSV files, labels are joined by ``|`` if the result is
read back as the same labels; otherwise they are written as JSON lists.

Line-based formats have one text or name per line, so a line end inside a text or name is written as
a space. The ``N D L`` files of the XMC format cannot store relevance values other than 1.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any, cast

from scipy.sparse import csr_matrix, save_npz

from elias.data.atomic import staged_file, staged_folder
from elias.data.corpus import Corpus, Split
from elias.data.readers import xmc
from elias.data.readers.base import SHORT
from elias.data.readers.columns import IDS, SPLIT, WEIGHTS
from elias.data.readers.files import data_error, sanitize, suffix_of
from elias.data.readers.label_cells import SeparatorVotes, order_names, split_cells
from elias.data.readers.xmc import PECOS, RAW, FileNames
from elias.errors import DataError, did_you_mean

logger = logging.getLogger(__name__)

_TABLES = ("jsonl", "csv", "tsv", "parquet")
FORMATS = (*_TABLES, "folder", "xmc", "lf", "pecos")
_SUFFIXES = {f".{kind}": kind for kind in _TABLES} | {".ndjson": "jsonl", ".json": "jsonl"}
_SEPARATOR = "|"
_DELIMITER = {"csv": ",", "tsv": "\t"}
_LINE_END = re.compile(r"\r\n|\r|\n")
_CORPUS_FILE = re.compile(
    r"(raw/)?(Y|(trn|val|tst)_X|labels)\.txt|labels\.jsonl|[XY]\.(trn|val|tst|lbl)\.(npz|txt)|output-items\.txt"
    r"|(train|validation|test)\.txt|filter_labels_(train|validation|test)\.txt"
    r"|(trn|val|tst|lbl)(_X_Xf|_X_Y)\.txt|(trn|val|tst|lbl)\.json\.gz|raw"
)


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """The path and format of a corpus that `convert` wrote, and the parts that it left out."""

    path: Path
    format: str
    left_out: tuple[str, ...]
    """Descriptions of the parts of the corpus that the format cannot store."""


def convert(
    corpus: Corpus, dst: str | Path, format: str | None = None, *, overwrite: bool = False
) -> ConversionResult:
    """Write a corpus to a file or folder, which appears only when it is complete.

    A table (``jsonl``, ``csv``, ``tsv``, ``parquet``) is one file with a column ``split``. The
    other formats are folders. Line-based formats (``folder``, ``xmc``, ``pecos``) replace a line
    end inside a text or a name by a space.

    Args:
        corpus: The corpus to write.
        dst: The file or folder to write.
        format: One of `FORMATS`. By default, it is chosen by the suffix of ``dst``, ignoring
            ``.gz``. Without a suffix, it is ``folder``.
        overwrite: Whether to replace an existing file or folder. A folder is replaced only if all
            of its files belong to a corpus.

    Raises:
        DataError: If ``dst`` exists, or if the format requires texts or features that the corpus
            does not have.
    """
    target = Path(dst).expanduser()
    chosen = _choose_format(target, format)
    if target.exists() and not overwrite:
        raise data_error(target, "already exists; choose another name, or pass overwrite=True")
    if target.is_dir() == (chosen in _TABLES) and target.exists():
        existing, needed = ("folder", "file") if target.is_dir() else ("file", "folder")
        problem = f"is a {existing}, but {chosen} is written as a {needed}; remove it"
        raise data_error(target, problem)
    splits = {
        name: split if split.texts is None else replace(split, texts=sanitize(split.texts)[0])
        for name, split in corpus.splits.items()
    }
    names = sanitize(corpus.label_names)[0]
    table = replace(corpus.label_table, names=tuple(names))
    clean = replace(corpus.with_splits(**splits), label_names=table)
    _check_parts(corpus, chosen)
    try:
        if chosen in _TABLES:
            _write_file(clean, target, chosen)
        else:
            _write_folder(clean, target, chosen)
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error}); choose another place"
        raise data_error(target, problem) from None
    result = ConversionResult(target, chosen, tuple(_left_out(corpus, chosen)))
    if result.left_out:
        logger.warning("%s: the format cannot store: %s", target, "; ".join(result.left_out))
    return result


def _choose_format(target: Path, format: str | None) -> str:
    suffix = suffix_of(target)
    if format is None:
        if suffix in _SUFFIXES:
            return _SUFFIXES[suffix]
        if target.name.endswith(".gz") or suffix in (".txt", ".npz", ".xlsx"):
            raise data_error(target, f"no format has this suffix; use {', '.join(_SUFFIXES)}")
        return "folder"
    if format not in FORMATS:
        problem = f"unknown format {format!r}{did_you_mean(format, FORMATS)}"
        raise DataError(f"{problem}; formats: {', '.join(FORMATS)}")
    return format


def _check_parts(corpus: Corpus, format: str) -> None:
    """Raise `DataError` if the corpus does not have the texts or features that a format needs."""
    needed, others = "texts", "xmc, folder or pecos"
    if format == "xmc":
        needed, others = "features", "lf, folder or jsonl"
    for name, split in corpus.splits.items():
        if format not in ("folder", "pecos") and getattr(split, needed) is None:
            raise DataError(
                f"{corpus.source or 'the corpus'}: the {name} points have no {needed}, which the "
                f"{format} format needs; write it as {others}"
            )


def _left_out(corpus: Corpus, format: str) -> list[str]:
    """Describe the parts of a corpus that a format cannot store."""
    splits = corpus.splits.values()
    missing = []
    if format == "xmc" and not _is_binary(corpus):
        missing.append("relevance other than 1")
    if format in _TABLES:
        if any(split.features is not None for split in splits):
            missing.append("features")
        if any(split.filters is not None for split in splits):
            missing.append("filter pairs")
        if corpus.label_table.has_details:
            missing.append("ids, synonyms and descriptions of the labels")
        n_unused = corpus.n_labels - len(_used_labels(corpus))
        if n_unused:
            missing.append(f"the names of {n_unused} labels that no point has")
    return missing


def _is_binary(corpus: Corpus) -> bool:
    return all((split.labels.data == 1).all() for split in corpus.splits.values())


def _used_labels(corpus: Corpus) -> set[int]:
    return set(
        chain.from_iterable(split.labels.indices.tolist() for split in corpus.splits.values())
    )


def _write_file(corpus: Corpus, target: Path, kind: str) -> None:
    """Write all splits as one table."""
    columns = _columns(corpus)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        staged_file(target) as staging,
        staging.open("wb") as raw,
        _gzip(raw) if target.name.endswith(".gz") else nullcontext(raw) as stream,
    ):
        if kind == "jsonl":
            rows = zip(*columns.values(), strict=True)
            _write_json(stream, (dict(zip(columns, cells, strict=True)) for cells in rows))
        elif kind == "parquet":
            _write_parquet(columns, stream)
        else:
            _write_delimited(columns, stream, _DELIMITER[kind])


def _gzip(stream: IO[bytes]) -> IO[bytes]:
    # store no file name and no date, so that the same corpus gives the same bytes
    return cast("IO[bytes]", gzip.GzipFile("", "wb", 6, stream, mtime=0))


def _columns(corpus: Corpus) -> dict[str, list[Any]]:
    splits = corpus.splits
    ids = list(chain.from_iterable(_rows(s.labels, s.labels.indices) for s in splits.values()))
    names = list(corpus.label_names)
    columns: dict[str, list[Any]] = {
        "text": list(chain.from_iterable(split.texts or () for split in splits.values())),
        "labels": [[names[label] for label in row] for row in ids],
    }
    distinct = set(names)
    names_suffice = (
        len(distinct) == len(names) == len(_used_labels(corpus))
        and "" not in distinct
        and order_names(names) == names
    )
    if not names_suffice:
        columns[IDS] = ids
    if not _is_binary(corpus):
        weights = (_rows(s.labels, s.labels.data) for s in splits.values())
        columns[WEIGHTS] = list(chain.from_iterable(weights))
    columns[SPLIT] = [name for name, split in splits.items() for _ in range(len(split))]
    return columns


def _rows(matrix: csr_matrix, flat: Any) -> list[list[Any]]:
    values = flat.tolist()
    return [values[start:end] for start, end in pairwise(matrix.indptr.tolist())]


def _write_json(stream: IO[bytes], rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        stream.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8"))


def _write_parquet(columns: dict[str, list[Any]], stream: IO[bytes]) -> None:
    import pyarrow as pa
    from pyarrow.parquet import write_table

    types = {
        "text": pa.large_string(),
        "labels": pa.large_list(pa.large_string()),
        IDS: pa.large_list(pa.int64()),
        WEIGHTS: pa.large_list(pa.float32()),
        SPLIT: pa.string(),
    }
    schema = pa.schema([(name, types[name]) for name in columns])
    write_table(pa.table(columns, schema=schema), stream)


def _write_delimited(columns: dict[str, list[Any]], stream: IO[bytes], delimiter: str) -> None:
    plain = IDS not in columns and WEIGHTS not in columns
    cells = {
        name: _join(values, plain=plain) if name in ("labels", IDS, WEIGHTS) else values
        for name, values in columns.items()
    }
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="", write_through=True)
    # Quote all cells, because Python before 3.13 does not quote a lone carriage return.
    writer = csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(cells)
    writer.writerows(zip(*cells.values(), strict=True))
    text.detach()


def _join(lists: Sequence[list[Any]], *, plain: bool) -> list[str]:
    """Format lists as cells: joined by ``|`` if ``plain`` and read back correctly, else JSON."""
    if plain:
        joined = [_SEPARATOR.join(row) for row in lists]
        if _reads_back(joined, lists):
            return joined
    return [json.dumps(row, ensure_ascii=False) for row in lists]


def _reads_back(joined: Sequence[str], lists: Sequence[list[Any]]) -> bool:
    def row_error(_: int, problem: str) -> DataError:
        return DataError(problem)

    votes = SeparatorVotes()
    try:
        votes.add(joined, row_error)
        form = votes.winner()
        if form.separator != _SEPARATOR and (form.separator or any(len(row) > 1 for row in lists)):
            return False
        values = split_cells(joined, form, row_error)[1]
    except DataError:  # a name that looks like a list
        return False
    return values == list(chain.from_iterable(lists))


def _write_folder(corpus: Corpus, target: Path, format: str) -> None:
    if target.exists():
        names = (path.relative_to(target).as_posix() for path in sorted(target.rglob("*")))
        foreign = next((name for name in names if not _CORPUS_FILE.fullmatch(name)), None)
        if foreign is not None:
            problem = f"contains {foreign}, which is not a corpus file; move it elsewhere"
            raise data_error(target, problem)
    with staged_folder(target, overwrite=True) as folder:
        if format == "xmc":
            _write_xmc(corpus, folder)
        elif format == "lf":
            _write_lf(corpus, folder)
        else:
            write_npz_folder(corpus, folder, PECOS if format == "pecos" else RAW)
        if corpus.label_table.has_details:
            keys = ("name", "id", "synonyms", "description", "broader")
            labels = ((one_line(name), *details) for name, *details in corpus.label_table.rows())
            with (folder / "labels.jsonl").open("wb") as stream:
                _write_json(stream, (dict(zip(keys, label, strict=True)) for label in labels))
        for name, split in corpus.splits.items():
            if split.filters is not None:
                pairs = (f"{point} {label}" for point, label in split.filters.tolist())
                write_lines(folder / f"filter_labels_{name}.txt", pairs)


def write_npz_folder(corpus: Corpus, folder: Path, names: FileNames) -> None:
    """Write a corpus into a folder as text lines and npz matrices."""
    write_lines(folder / names.label_names, corpus.label_names)
    for name, split in corpus.splits.items():
        short = SHORT[name]
        save_npz(folder / names.labels.format(short), split.labels)
        if split.texts is not None:
            write_lines(folder / names.texts[0].format(short), split.texts)
        if split.features is not None:
            save_npz(folder / names.features[0].format(short), split.features)


def _write_xmc(corpus: Corpus, folder: Path) -> None:
    write_lines(folder / "Y.txt", corpus.label_names)
    for name, split in corpus.splits.items():
        assert split.features is not None
        sizes = f"{len(split)} {split.features.shape[1]} {split.labels.shape[1]}"
        ids = _rows(split.labels, split.labels.indices)
        rows = zip(ids, _pairs(split.features), strict=True)
        lines = (f"{','.join(map(str, labels))} {pairs}" for labels, pairs in rows)
        write_lines(folder / f"{name}.txt", chain([sizes], lines))
        if split.texts is not None:
            write_lines(folder / f"{SHORT[name]}_X.txt", split.texts)


def _write_lf(corpus: Corpus, folder: Path) -> None:
    labels = ({"uid": str(i), "title": name} for i, name in enumerate(corpus.label_names))
    parts: dict[str, Iterable[dict[str, Any]]] = {"lbl": labels}
    parts |= {SHORT[name]: _lf_points(split) for name, split in corpus.splits.items()}
    for short, rows in parts.items():
        with (folder / f"{short}.json.gz").open("wb") as raw, _gzip(raw) as stream:
            _write_json(stream, rows)
    for name, split in corpus.splits.items():
        if split.features is not None:
            n_rows, n_columns = split.features.shape
            path = folder / xmc.FEATURE_MATRIX.format(SHORT[name])
            write_lines(path, chain([f"{n_rows} {n_columns}"], _pairs(split.features)))


def _lf_points(split: Split) -> Iterator[dict[str, Any]]:
    ids, weights = (_rows(split.labels, f) for f in (split.labels.indices, split.labels.data))
    for row, (text, labels, values) in enumerate(zip(split.texts or (), ids, weights, strict=True)):
        point = {"uid": str(row), "title": text, "content": ""}
        yield point | {xmc.LF_IDS: labels, xmc.LF_WEIGHTS: values}


def _pairs(matrix: csr_matrix) -> Iterator[str]:
    """Yield each row as ``index:value`` pairs."""
    columns, values = matrix.indices.tolist(), matrix.data.tolist()
    for start, end in pairwise(matrix.indptr.tolist()):
        # nine digits represent every float32 exactly
        yield " ".join(f"{columns[i]}:{values[i]:.9g}" for i in range(start, end))


def one_line(text: str) -> str:
    r"""Return the text with each line end replaced by a space.

    >>> one_line("two\r\nlines")
    'two lines'
    """
    return _LINE_END.sub(" ", text) if "\n" in text or "\r" in text else text


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines as UTF-8. Create the folder if it does not exist."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as out:
        out.writelines(f"{one_line(line)}\n" for line in lines)
