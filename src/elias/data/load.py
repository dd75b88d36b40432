"""Load a corpus: detect its format, read it into memory or memory-mapped files, and check it.

`TextFile` reads the input texts for prediction, one row at a time, from a text file or a table.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import vstack

from elias.data.atomic import cache_root, mark_in_use, new_cache_entry
from elias.data.corpus import SPLITS, Corpus, Split
from elias.data.near_duplicates import NEAR_DUPLICATES, NO_GROUPS
from elias.data.readers import base, files, xmc
from elias.data.readers.base import ReadOptions
from elias.data.readers.columns import check_columns
from elias.data.readers.files import data_error, iter_lines, sanitize
from elias.data.readers.label_table import FILES as LABEL_TABLE_FILES
from elias.data.readers.label_table import SKOS_FORMATS, read_label_table, read_skos
from elias.data.readers.parquet import as_parquet, list_table, open_parquet
from elias.data.readers.table import (
    FULL_TEXT,
    KINDS,
    Rows,
    TableFile,
    TableReader,
    full_text_folders,
    json_cells,
    looks_annif,
)
from elias.data.splits import DEFAULT_TEST_SHARE, hold_out_test
from elias.data.storage import SplitWriter, open_corpus, write_description
from elias.errors import DataError, did_you_mean, quoted
from elias.labels import LabelTable
from elias.progress import progress

logger = logging.getLogger(__name__)

OnDisk: TypeAlias = Literal["auto", "on", "off"]
ON_DISK_BYTES = 1 << 30
"""Total file size above which ``on_disk="auto"`` keeps a corpus on disk. The size of a gzipped file
counts four times. A table that is read into memory takes about five times its file size."""
ACCEPTED = (
    "a table (JSON lines, CSV, TSV, Parquet, Excel; gzipped or not) with a text and a labels "
    "column, fastText lines, an XMC `N D L` file, or a folder of raw/trn_X.txt + Y.trn.npz, "
    "train.* + test.*, trn_X_Y.txt, trn.json.gz, X.trn.txt + Y.trn.npz, or *.txt + *.key or *.tsv"
)
_FOREIGN = {
    b"PK\x03\x04": "a zip or npz archive; unpack it, or pass the folder that contains it",
    b"\xd0\xcf\x11\xe0": "an old Excel file; save it as .xlsx or CSV",
    b"version https://git-lfs": "a Git LFS pointer, not the data; run `git lfs pull`",
    b"\xfd7zXZ": "an xz archive; unpack it first",
    b"BZh": "a bzip2 archive; unpack it first",
    b"\x28\xb5\x2f\xfd": "a zstd archive; unpack it first",
    b"\x80\x04\x95": "a pickle file, which is unsafe to load; save it as JSON lines or Parquet",
}
_JSON = re.compile(r"\s*(?:\{|\[\s*(?:[{\]]|$))")  # an object, or a list of objects
_DELIMITER = re.compile(r"[\t,;]")
_GZIP_FACTOR = 4
_TEXT_ROWS = 256  # rows that `TextFile` reads at a time
_CACHE_BYTES = 100 * 2**30  # size of the corpus cache above which old entries are removed
_CACHE_VERSION = 3
_ROLES = ("text", "labels", "header")
_FILE_OPTIONS = ("header", "encoding")
READING_OPTIONS = ("text", "labels", "separator", "group", *_FILE_OPTIONS)
"""Arguments of `load_corpus` that say how a table is read."""
LINES = "lines"
"""Name of the format with one text per line."""
_DELIMITED = {".csv": "csv", ".tsv": "tsv"}
_TABLE_SUFFIXES = {".jsonl", ".ndjson", ".json", *_DELIMITED, ".parquet", ".xlsx"}


def load_corpus(
    source: str | Path | Any = None,
    *,
    text: str | Sequence[str] | None = None,
    labels: str | Sequence[Any] | None = None,
    texts: Sequence[str] | None = None,
    separator: str | None = None,
    group: str | None = None,
    header: bool | None = None,
    encoding: str | None = None,
    seed: int = 0,
    test_size: float | None = None,
    label_table: str | Path | LabelTable | Any = None,
    language: str | None = None,
    on_disk: OnDisk = "auto",
) -> Corpus:
    r"""Read a corpus in any supported format. The format is detected from the content.

    Args:
        source: A file, a folder or a table in memory. A table is a pandas or polars DataFrame, an
            Arrow table, a `datasets.Dataset`, a list of dictionaries, or a dictionary that maps
            split names to tables, such as a `DatasetDict`.
        text: The text column of a table. Several columns (``["title", "abstract"]`` or
            ``"title,abstract"``) are joined by a space. By default, all columns with common names
            such as text, title or description that look like text are read. If there are none,
            all columns of prose are read.
        labels: The labels column of a table, or several columns of 0 and 1 (a list of names). By
            default, a column with a common name such as labels, tags or categories is read.
            With ``texts``, the labels of each text: a list of names, or one name.
        texts: A list of texts, instead of ``source``.
        separator: The separator between the labels of one cell. If it is empty, each cell is one
            label. By default, it is detected from the cells: ``|``, ``;``, tab or comma.
        group: A column of a table. Points with the same value stay together in training, validation
            or test when points are held out. By default (``near-duplicates``), texts that are equal
            up to case, digits, punctuation and white space stay together. With ``none``, points
            are held out individually.
        header: Whether the first line of a CSV or TSV file is a header. By default, this is
            detected. Without a header, columns are named by their numbers, from 1.
        encoding: The encoding of a text file. By default UTF-8.
        seed: Seed of the random choice of test points.
        test_size: The number of test points, or a share below 1. With 0, no test points are held
            out. By default, a fifth of the points is held out if the source does not define splits.
        label_table: Names, ids, synonyms and descriptions of the labels: a file or a table in
            memory, or a SKOS vocabulary, see `load_label_table`. By default, ``labels.csv`` (or
            .tsv, .jsonl, .parquet) in the folder ``source``, if there is one. Its rows are matched
            with the labels of the points by id, else by name. A row that matches no label of
            the points becomes a label without points.
        language: The language of the label names, if ``label_table`` has several.
        on_disk: Whether texts and labels stay on disk, in the cache folder, instead of in memory.
            With ``auto``, only large corpora stay on disk (see `ON_DISK_BYTES`).

    Returns:
        The corpus. Its ``notes`` list the decisions of the reader.

    Raises:
        DataError: If the corpus cannot be read. The message gives the file, the line number if
            there is one, and the remedy.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder) / "articles.csv"
        ...     _ = path.write_text("title,tags\ncod quotas,fish;law\nwine labels,law\n")
        ...     corpus = load_corpus(path, test_size=0)
        >>> corpus.train.texts, corpus.label_names
        (['cod quotas', 'wine labels'], ['fish', 'law'])
        >>> rows = {"title": ["cod", "wine"], "body": ["quotas", "labels"], "tags": ["fish", "law"]}
        >>> load_corpus(rows, text=["title", "body"], test_size=0).train.texts
        ['cod quotas', 'wine labels']
        >>> load_corpus(texts=["cod quotas"], labels=[["fish", "law"]], test_size=0).label_names
        ['fish', 'law']
    """
    if (texts is None) == (source is None):
        raise DataError("pass either a path or a table, or texts= and labels=")
    if texts is not None:  # a string is one label, even if it contains a separator
        source = list_table(texts, labels)
        text, labels, separator = "text", "labels", separator or ""
    options = ReadOptions(
        text=_joined(text, "text"),
        labels=_joined(labels, "labels"),
        separator=separator,
        group=None if group in (NEAR_DUPLICATES, NO_GROUPS) else group,
        header=header,
        encoding=encoding,
    )
    is_path = isinstance(source, str | Path)
    with nullcontext(_existing(source)) if is_path else as_parquet(source) as path:
        corpus, has_splits = _read(path, options, on_disk)
        check_corpus(corpus)
        splits = {name: split.without_filtered_labels() for name, split in corpus.splits.items()}
        corpus = corpus.with_splits(**splits)
        if label_table is None and path.is_dir():
            label_table = base.find_file(path, *LABEL_TABLE_FILES)
        if label_table is not None:
            corpus = corpus.with_label_table(load_label_table(label_table, language=language))
        if test_size is None and not has_splits:
            test_size = DEFAULT_TEST_SHARE
        settings = {
            **asdict(options),
            **corpus.reading,
            "group": NEAR_DUPLICATES if group is None else group,
            "test_size": test_size,
            "seed": seed if test_size else None,
            "language": language,
        }
        reading = {name: value for name, value in settings.items() if value is not None}
        corpus = replace(corpus, reading=reading)
        _log_notes(path, corpus)
        if test_size is not None:
            corpus = hold_out_test(corpus, test_size, seed)
            _check_training_labels(corpus)
    if is_path:
        return corpus
    if texts is None:
        return replace(corpus, source=None, format=type(source).__name__)
    for name in ("text", "labels", "separator"):  # these options apply to tables, not to lists
        reading.pop(name, None)
    return replace(corpus, source=None, format="lists", reading=reading)


def _log_notes(path: Path, corpus: Corpus) -> None:
    """Log the format, the number of labels, and the columns that were read."""
    roles = [f"{role}: {corpus.notes[role]}" for role in _ROLES if role in corpus.notes]
    described = "; ".join([f"{corpus.format} format, {corpus.n_labels:,} labels", *roles])
    logger.info("%s: %s", path, described)


def load_label_table(
    source: str | Path | Any, *, language: str | None = None, encoding: str | None = None
) -> LabelTable:
    r"""Read a table of labels with the columns id, name, synonyms, description and broader.

    All columns except the name are optional. They are found by common names, such as ``uri``,
    ``label``, ``altLabel`` or ``definition``. Synonyms and the ids of broader labels are lists, or
    are separated by ``|`` or ``;``.

    Args:
        source: A CSV, TSV, JSON lines, Parquet or Excel file, gzipped or not; a SKOS vocabulary in
            Turtle (.ttl), RDF/XML (.rdf), JSON-LD (.jsonld) or N-Triples (.nt), which needs the
            extra ``skos``; a TSV or CSV vocabulary of Annif; a ``.txt`` file with one name per
            line; a list of names; or a table in memory, as for `load_corpus`.
        language: The language of the names, if the vocabulary has several.
        encoding: The encoding of a text file. By default UTF-8.

    Raises:
        DataError: If the table cannot be read. The message gives the file, the line and the remedy.

    Example:
        >>> rows = [{"uri": "D009369", "label": "Neoplasms", "altLabel": ["Cancer", "Tumors"]}]
        >>> load_label_table(rows).texts()
        ['Neoplasms. Cancer. Tumors']
    """
    if isinstance(source, LabelTable):
        return source
    if not isinstance(source, str | Path):
        if isinstance(source, Sequence) and all(isinstance(name, str) for name in source):
            return LabelTable(tuple(source))
        with as_parquet(source) as folder:
            return read_label_table(folder / "data.parquet", "parquet")
    path = _existing(source, is_file=True)
    if not files.read_head(path, encoding).strip():
        raise data_error(path, "is empty; give a file with a row for each label")
    suffix = files.suffix_of(path)
    if suffix in SKOS_FORMATS:
        return read_skos(path, language)
    kind = {".txt": "lines", **_DELIMITED}.get(suffix) or detect_file(path, encoding)
    return read_label_table(path, kind, encoding, language)


def read_column(corpus: Corpus, split: str, column: str) -> list[str]:
    """Read a column of the table that a corpus was read from, for the points of one split.

    Args:
        corpus: A corpus read by `load_corpus`. Its validation and test points may have been drawn
            from the training split of the source.
        split: Name of the split.
        column: Name of the column.

    Raises:
        DataError: If the corpus was not read from a table, or there is no such column.
    """
    points, path = corpus.split(split), corpus.source
    keys = [key for key in READING_OPTIONS if key != "group"]
    options = ReadOptions(**{key: corpus.reading.get(key) for key in keys})
    kind, source, by_split = ("", None, {}) if path is None else detect(path, options.encoding)
    if source is None or kind not in KINDS:
        raise DataError(f"{path or 'corpus'}: is not a table, so it has no column {column!r}")
    cells: dict[str, list[str]] = {}
    reader = TableReader(source, by_split, kind, options, in_memory=False)
    for row_split, cell in reader.column(column):
        cells.setdefault(row_split, []).append(cell)
    rows = points.rows
    values = cells.get("train" if rows is not None or split not in cells else split, [])
    if rows is not None and rows.max(initial=-1) < len(values):
        values = [values[row] for row in rows.tolist()]
    if len(values) != len(points):
        problem = f"{len(values):,} rows for the {len(points):,} {split} points"
        raise DataError(f"{path}: {problem}; the file has changed; load the corpus again")
    return values


def _existing(source: str | Path, *, is_file: bool = False) -> Path:
    """Return the path of a file or folder. If it does not exist, raise an error with a hint."""
    path = Path(source).expanduser()
    if is_file and path.is_dir():
        raise DataError(f"{path}: is a folder; give a file")
    if not (path.is_file() if is_file else path.exists()):
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        wanted = "file" if is_file else "file or folder"
        raise DataError(f"{path}: no such {wanted}{did_you_mean(path.name, siblings)}")
    return path


def _joined(columns: str | Sequence[Any] | None, role: str) -> str | None:
    """Join a list of column names with commas. Return a string or None unchanged.

    ``role`` is the argument name to show in error messages.
    """
    if columns is None or isinstance(columns, str):
        return columns
    names = list(columns)
    if not all(isinstance(name, str) for name in names):
        raise DataError(
            f"with a file or table, {role}= must name columns; to pass lists instead, leave out "
            "the file or table and give texts= and labels="
        )
    return ",".join(names)


def detect(path: Path, encoding: str | None = None) -> tuple[str, Path, dict[str, list[Path]]]:
    """Detect the format of a file or folder by its content.

    Returns:
        The format (``matrices``, ``lf``, ``xmc``, ``pecos``, ``full-text`` or a kind of table), the
        file or the folder that contains the files, and a dictionary of the files by split. The only
        key is ``""`` if one file contains all points. The dictionary is empty for a folder of
        matrices. For full texts, it contains folders.

    Raises:
        DataError: If the format is unknown, there is no training file, or formats are mixed.
    """
    if not path.is_dir():
        return detect_file(path, encoding), path, {"": [path]}
    if xmc.has_matrices(path, xmc.RAW):
        return "matrices", path, {}
    points = xmc.lf_points_file(path, "train")
    if points is not None and xmc.LF_IDS in TableFile(points, "jsonl").names:
        return "lf", path, {"train": [points]}
    if xmc.has_matrices(path, xmc.TEXT_MATRICES):
        return "matrices", path, {}
    by_split = base.split_files(path)
    if "train" not in by_split and (folders := full_text_folders(path)):
        return FULL_TEXT, path, folders
    if not by_split and (path / "data").is_dir():  # the layout of data sets on the hub
        by_split = base.split_files(path / "data")
    if not by_split:
        single = _single_file(path)
        return detect_file(single, encoding), path, {"": [single]}
    if "train" not in by_split:
        names = ", ".join(path.name for paths in by_split.values() for path in paths)
        raise data_error(path, f"no training file, only {names}; add train.*")
    kind = detect_file(by_split["train"][0], encoding)
    for file in (file for paths in by_split.values() for file in paths):
        other = detect_file(file, encoding)
        if other != kind:
            problem = f"is {other}, but the training file is {kind}; convert one of them"
            raise data_error(file, problem)
    return kind, by_split["train"][0].parent, by_split


def _single_file(folder: Path) -> Path:
    label_names = base.find_label_names(folder)
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and path != label_names]
    data = [path for path in paths if not path.name.lower().startswith((".", "readme", "license"))]
    if len(data) != 1:
        names = ", ".join(path.name for path in sorted(folder.iterdir())[:8]) or "nothing"
        raise data_error(folder, f"no corpus recognised in: {names}; expected {ACCEPTED}")
    return data[0]


def detect_file(path: Path, encoding: str | None = None) -> str:
    """Return the file format: ``xmc``, ``pecos`` or one of `KINDS`."""
    head = files.read_head(path, encoding)
    if not head.strip():
        raise data_error(path, files.EMPTY)
    if head.startswith(files.UTF16):
        raise data_error(path, files.IS_UTF16, 1)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"PK\x03\x04") and files.is_excel(path):
        return "xlsx"
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            raise data_error(path, f"is {what}")
    lines = head.decode("utf-8", "replace").removeprefix("\ufeff").split("\n")
    if any(line.strip() for line in lines[:-1]):
        lines.pop()  # the last line may be incomplete
    first = next((line for line in lines if line.strip()), "")
    if _JSON.match(first):
        return "jsonl"
    if first.lstrip().startswith("__label__"):
        return "fasttext"
    if xmc.looks_xmc(lines):
        return "xmc"
    if xmc.looks_pecos(lines):
        return "pecos"
    if "\t" in first and looks_annif(lines):
        return "annif"
    if _DELIMITER.search(first):
        return "tsv" if "\t" in first else "csv"
    if kind := _DELIMITED.get(files.suffix_of(path)):
        return kind  # a table with one column
    problem = f"unknown format; starts with {files.short_repr(lines[0][:60])}; expected {ACCEPTED}"
    raise data_error(path, problem)


def _open_reader(path: Path, options: ReadOptions, *, in_memory: bool) -> base.Reader:
    """Return the reader of a file or folder.

    Args:
        path: The file or folder, in any format.
        options: The columns to read.
        in_memory: Whether the corpus is read into memory. If so, a reader that needs two passes
            keeps the rows instead of reading the files twice.
    """
    kind, source, by_split = detect(path, options.encoding)
    if kind == "matrices":
        return xmc.MatrixReader(path, options)
    if kind == "lf":
        return xmc.LfReader(path, options)
    if kind == "xmc":
        return xmc.XmcReader(source, by_split, options)
    if kind == "pecos":
        return xmc.PecosReader(source, by_split, options)
    if kind == FULL_TEXT:
        replace(options, encoding=None).check_unused(source, FULL_TEXT)
    return TableReader(source, by_split, kind, options, in_memory=in_memory)


def _named_columns(path: Path, options: ReadOptions) -> tuple[str, list[str]]:
    """Return the format of a corpus, and its column names if the format has named columns."""
    kind, _, by_split = detect(path, options.encoding)
    table = "jsonl" if kind == "lf" else kind
    if table not in KINDS:
        return kind, []
    return kind, TableFile(next(iter(by_split.values()))[0], table, options).names


def _collect(
    reader: base.Reader, path: Path, new_split: Callable[[str], Any]
) -> tuple[dict[str, Any], base.Summary]:
    """Pass each chunk to the collector of its split, and return the collectors and the summary.

    Texts and label names are sanitized.
    """
    collectors: dict[str, Any] = {}
    n_points: Counter[str] = Counter()
    n_uses = n_changed = 0
    with progress(f"Reading {path.name}") as advance:
        for chunk in reader.chunks():
            if chunk.split not in collectors:
                collectors[chunk.split] = new_split(chunk.split)
            if chunk.texts is not None:
                texts, changed = sanitize(chunk.texts)
                n_changed += changed
                chunk = replace(chunk, texts=texts)
            if chunk.labels is not None:
                n_points[chunk.split] += len(chunk.labels.counts)
                n_uses += len(chunk.labels.codes)
                advance(len(chunk.labels.counts))
            collectors[chunk.split].append(chunk)
    in_order = {name: n_points[name] for name in SPLITS if name in n_points}
    summary = reader.finish(in_order, n_uses)
    names, changed = sanitize(summary.label_names)
    notes = dict(summary.notes)
    if n_changed + changed:
        count = n_changed + changed
        notes["sanitized"] = f"NULs or lone surrogates replaced in {count} texts or names"
        logger.warning("%s: %s", path, notes["sanitized"])
    collected = {name: collectors[name] for name in SPLITS if name in collectors}
    return collected, replace(summary, label_names=names, notes=notes)


def _memory_split(
    chunks: Sequence[base.Chunk], summary: base.Summary, filters: NDArray[np.int64] | None
) -> Split:
    """Join the chunks of a split in memory."""
    rows = [chunk.labels for chunk in chunks if chunk.labels is not None]
    codes = np.concatenate([labels.codes for labels in rows])
    weights = [labels.weights for labels in rows if labels.weights is not None]
    labels = base.csr_from_lists(
        np.concatenate([labels.counts for labels in rows]),
        codes if summary.ids is None else summary.ids[codes],
        len(summary.label_names),
        np.concatenate(weights) if weights else None,
    )
    labels.eliminate_zeros()
    texts = [chunk.texts for chunk in chunks if chunk.texts is not None]
    features = [chunk.features for chunk in chunks if chunk.features is not None]
    groups = [chunk.groups for chunk in chunks if chunk.groups is not None]
    return Split(
        labels=labels,
        texts=list(chain.from_iterable(texts)) if texts else None,
        features=vstack(features, format="csr") if features else None,
        filters=filters,
        groups=np.concatenate(groups) if groups else None,
    )


def _read(path: Path, options: ReadOptions, on_disk: OnDisk) -> tuple[Corpus, bool]:
    """Read a corpus into memory or to disk. Also return whether its source defines splits."""
    use_disk = _is_large(path) if on_disk == "auto" else on_disk == "on"
    try:
        return (_read_to_disk if use_disk else _read_to_memory)(path, options)
    except MemoryError as error:
        remedy = "free some memory"
        if not use_disk:
            remedy = "keep it on disk with on_disk='on' (in a configuration: data.on_disk=on)"
        raise DataError(f"{path}: does not fit into memory ({quoted(error)}); {remedy}") from error


def _read_to_memory(path: Path, options: ReadOptions) -> tuple[Corpus, bool]:
    """Read a corpus into memory. Also return whether its source defines splits."""
    reader = _open_reader(path, options, in_memory=True)
    collected, summary = _collect(reader, path, lambda _: [])
    splits: dict[str, Any] = {
        name: _memory_split(chunks, summary, summary.filters.get(name))
        for name, chunks in collected.items()
    }
    corpus = Corpus(
        label_names=summary.label_names,
        source=path,
        format=reader.format,
        notes=summary.notes,
        reading=summary.reading,
        **splits,
    )
    return corpus, reader.has_splits


def _read_to_disk(path: Path, options: ReadOptions) -> tuple[Corpus, bool]:
    """Read a corpus into the cache folder, unless it is already there, and memory-map it.

    A cached corpus is reused if the names, sizes and modification times of the source files, and
    the options, are the same. Also return whether the source defines splits.
    """
    folder = cache_root() / "corpora" / _cache_key(path, options)
    if folder.exists():
        try:
            cached = open_corpus(folder, path)
        except DataError as error:
            logger.warning("the cached corpus is damaged (%s); reading %s again", error, path)
        else:
            mark_in_use(folder)
            logger.info("%s: read from the cache", path)
            return cached
    with new_cache_entry(folder, _CACHE_BYTES) as staging:
        _store(path, options, staging)
    return open_corpus(folder, path)


def _store(path: Path, options: ReadOptions, folder: Path) -> None:
    """Read a corpus in chunks, and store it in an empty folder."""
    reader = _open_reader(path, options, in_memory=False)
    description: dict[str, Any] = {"format": reader.format, "has_splits": reader.has_splits}
    with ExitStack() as stack:

        def new_split(name: str) -> SplitWriter:
            return stack.enter_context(closing(SplitWriter(folder / name)))

        writers, summary = _collect(reader, path, new_split)
    description["notes"], description["reading"] = summary.notes, summary.reading
    description["splits"] = {
        name: writer.finish(summary.ids, len(summary.label_names), summary.filters.get(name))
        for name, writer in writers.items()
    }
    write_description(folder, description, summary.label_names)


def _files(path: Path) -> Iterator[Path]:
    """Yield ``path`` if it is a file, else the files of the folder and of its direct subfolders."""
    if path.is_dir():
        for pattern in ("*", "*/*"):
            yield from sorted(file for file in path.glob(pattern) if file.is_file())
    elif path.is_file():
        yield path


def _is_large(path: Path) -> bool:
    total = 0
    for file in _files(path):
        size = file.stat().st_size
        is_packed = size > ON_DISK_BYTES // _GZIP_FACTOR and files.is_gzip(file)
        total += size * (_GZIP_FACTOR if is_packed else 1)
    return total > ON_DISK_BYTES


def _cache_key(path: Path, options: ReadOptions) -> str:
    """Return a cache key that depends on the options and the state of the source files."""
    stats = [(str(file.resolve()), file.stat()) for file in _files(path)]
    states = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    content = json.dumps([_CACHE_VERSION, str(path.resolve()), asdict(options), states])
    return hashlib.sha256(content.encode()).hexdigest()[:40]


def check_corpus(corpus: Corpus) -> None:
    """Raise `DataError` if parts of the corpus do not match, or no training point has a label.

    Readers check texts and labels, so only the sizes of splits and of features are checked here.
    """
    train = corpus.train.features
    for name, split in corpus.splits.items():
        n_points, features, problem = len(split), split.features, ""
        if n_points == 0:
            problem = f"the {name} split has no points"
        elif features is not None and features.shape[0] != n_points:
            problem = f"{features.shape[0]} rows of {name} features for {n_points} points"
        elif features is not None and train is not None and features.shape[1] != train.shape[1]:
            problem = f"{name} features have {features.shape[1]} columns, not {train.shape[1]}"
        if problem:
            raise DataError(f"{corpus.source or 'corpus'}: {problem}; use files of the same corpus")
    _check_training_labels(corpus)


def _check_training_labels(corpus: Corpus) -> None:
    if corpus.train.labels.nnz == 0:
        raise DataError(
            f"{corpus.source or 'corpus'}: no training point has a label; "
            "check that the labels column (labels=) is the right one"
        )


def reading_options(
    path: str | Path, settings: Mapping[str, Any], explicit: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options for reading a file or folder in the same way as the training data.

    Args:
        path: The file or folder to read.
        settings: The recorded options, with which the training data was read, see
            `Elias.data_settings`.
        explicit: Values of ``text``, ``labels``, ``separator``, ``group``, ``header`` and
            ``encoding`` that take precedence. If a value is None, the recorded value is used.
            Options that are not keys of this mapping are left out.

    Returns:
        Arguments of `load_corpus`. Recorded options are ignored for a format without named columns.
        If the file does not have a recorded column, the option is left out with a warning. The
        reader then looks for a column with a common name.

    Raises:
        DataError: If several text columns are recorded and the file does not have all of them.
    """
    path = Path(path).expanduser()
    options = {key: value for key, value in explicit.items() if value is not None}
    if "group" in explicit and settings.get("group") == NO_GROUPS:
        options.setdefault("group", NO_GROUPS)
    keys = [key for key in explicit if key not in options and settings.get(key) is not None]
    if not keys or not path.exists():  # the reader reports a missing file
        return options
    file_options = {key: settings.get(key) for key in _FILE_OPTIONS if key in keys}
    file_options |= {key: options[key] for key in _FILE_OPTIONS if key in options}
    kind, names = _named_columns(path, ReadOptions(**file_options))
    if kind == "lf":  # its labels are always in the same column
        keys = [key for key in keys if key == "text"]
    for key in keys if names else []:
        value = settings[key]
        if key in ("separator", *_FILE_OPTIONS):
            options[key] = value
            continue
        has_parts = key in ("text", "labels") and value not in names
        parts = value.split(",") if has_parts else [value]
        missing = [part.strip() for part in parts if part.strip() not in names]
        if not missing:
            options[key] = value
        elif key == "group":
            if value != NEAR_DUPLICATES:
                problem = "which defined the groups in training; other points may be held out"
                logger.warning("%s: no column %r, %s", path, value, problem)
        elif len(parts) > 1:
            raise DataError(
                f"{path}: no column {missing[0]!r}, and the model was trained on the columns "
                f"{value}; name the columns to read with {key}="
            )
        else:
            logger.warning(
                "%s: no column %r, which the model was trained on; looking for a %s column by name",
                *(path, value, key),
            )
    return options


class TextRow(NamedTuple):
    """One text, its line number, and selected other cells of its row."""

    line: int
    """The 1-based number of the line on which the row ends. For Parquet, it is the row number."""
    text: str
    kept: tuple[Any, ...] = ()
    """The cells of the columns in `TextFile.keep`, in the same order."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of texts, and the columns to read from it."""

    path: Path
    kind: str
    """``lines``, ``jsonl``, ``csv``, ``tsv`` or ``parquet``."""
    columns: tuple[str, ...] = ()
    """The text columns of a table. Their cells are joined by spaces."""
    keep: tuple[str, ...] = ()
    """Columns of a table whose cells are returned with the text."""
    options: ReadOptions = ReadOptions()  # noqa: RUF009 - it is frozen
    """The encoding of the file, and whether a CSV or TSV file has a header."""

    @classmethod
    def find(
        cls,
        path: str | Path,
        *,
        text: str | None = None,
        keep: Sequence[str] = (),
        header: bool | None = None,
        encoding: str | None = None,
    ) -> TextFile:
        """Detect the kind of a file and choose its columns.

        Args:
            path: A file, gzipped or not. It is read as a table if it has the suffix of a table, or
                if ``text`` or ``keep`` is given. Otherwise each line is one text.
            text: The text column of a table, or several such as ``title,abstract``. By default,
                columns that look like text are read, see `load_corpus`.
            keep: Columns of a table whose cells are returned with the text.
            header: Whether a CSV or TSV file has a header. By default, this is detected.
            encoding: The encoding of the file, UTF-8 by default.

        Raises:
            DataError: If the file is a folder, is not a table, or does not have the columns.
        """
        path = Path(path)
        if path.is_dir():
            raise data_error(path, "is a folder; give a file of texts, or - for stdin")
        options = ReadOptions(text=text, header=header, encoding=encoding)
        if not is_table(path, text, keep):
            return cls(path, LINES, options=options)
        kind = detect_file(path, encoding)
        if kind not in KINDS:
            raise data_error(path, "is not a table; write one text per line in a .txt file")
        table = TableFile(path, kind, options)
        check_columns(path, keep, table.names)
        return cls(path, kind, table.text_columns(), tuple(keep), options)

    def rows(self) -> Iterator[TextRow]:
        """Yield the rows. If a row cannot be read, the error gives its line number."""
        if self.kind == LINES:
            for number, text in enumerate(iter_lines(self.path, self.options.encoding), start=1):
                yield TextRow(number, text.removesuffix("\n").removesuffix("\r"))
            return
        wanted = list(dict.fromkeys([*self.columns, *self.keep]))
        # a single text column must be in every row; other columns may be missing in some rows
        required = self.columns if len(self.columns) == 1 else ()
        table = TableFile(self.path, self.kind, self.options)
        for rows in table.chunks("", wanted, required, max_rows=_TEXT_ROWS):
            columns = [rows.columns[name] for name in self.keep]
            cells = zip(*columns, strict=True) if columns else repeat(())
            yield from map(TextRow, rows.lines, rows.texts(self.columns), cells)

    def arrow_types(self) -> dict[str, Any]:
        """Return the Arrow types of the columns in ``keep`` if the file is Parquet, else ``{}``."""
        if self.kind != "parquet":
            return {}
        schema = open_parquet(self.path).schema_arrow
        return {name: schema.field(name).type for name in self.keep}


def is_table(path: Path, text: str | None, keep: Sequence[str]) -> bool:
    """Return True if a file has the suffix of a table, or if ``text`` or ``keep`` is given."""
    return text is not None or bool(keep) or files.suffix_of(path) in _TABLE_SUFFIXES


def json_text_rows(
    lines: Iterable[str], source: str, column: str, keep: Sequence[str] = ()
) -> Iterator[TextRow]:
    """Yield the rows of JSON lines. ``source`` names the file in error messages, e.g. stdin."""
    path, columns = Path(source), [column, *keep]
    for line, cells in json_cells(path, lines, columns, columns):
        (text,) = Rows(path, "", {column: cells[:1]}, [line]).texts((column,))
        yield TextRow(line, text, tuple(cells[1:]))
