"""Load a corpus: detect its format, read it into memory or memory-mapped files, and check it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
from scipy.sparse import vstack

from elias.data.atomic import cache_root, evict_oldest, mark_in_use, staged_folder
from elias.data.corpus import SPLITS, Corpus, Split
from elias.data.readers.base import LABELS, Chunk, ReadOptions, csr_from_lists
from elias.data.readers.detect import named_columns, open_reader, text_columns
from elias.data.readers.files import is_gzip, sanitize
from elias.data.splits import DEFAULT_TEST_SHARE, hold_out_test
from elias.data.storage import SplitWriter, open_corpus, write_description
from elias.errors import DataError, did_you_mean
from elias.progress import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.data.readers.base import LabelRows, Reader, Summary


logger = logging.getLogger(__name__)

OnDisk: TypeAlias = Literal["auto", "on", "off"]
ON_DISK_BYTES = 1 << 30
"""Total file size from which ``auto`` keeps a corpus on disk; gzipped files count four times.
Reading a table into memory takes about five times the size of its file."""
_GZIP_FACTOR = 4
_CACHE_BYTES = 100 * 2**30  # size of the cache of corpora before the oldest is removed
_CACHE_VERSION = 1


def load_corpus(
    path: str | Path,
    *,
    text: str | None = None,
    labels: str | None = None,
    separator: str | None = None,
    seed: int = 0,
    test_size: float | None = None,
    on_disk: OnDisk = "auto",
) -> Corpus:
    r"""Read a corpus in any supported format, which is detected by content.

    Args:
        path: A file or folder.
        text: The text column of a table; several (``"title,abstract"``) are joined by a space.
            By default a column called text, title, content …
        labels: The labels column; by default a column called labels, tags, categories …
        separator: The separator of labels in one cell (``""``: each cell is one label); by
            default ``|``, ``;``, tab or comma, detected from the cells.
        seed: Seed of the random choice of test points.
        test_size: The number of points to test on, or a share below 1; 0 for none. By default, a
            fifth of the points if the source names no splits.
        on_disk: Whether texts and labels stay on disk, in the cache folder, instead of in memory;
            ``auto``: if the files are large (see `elias.data.load`).

    Returns:
        The corpus; its ``notes`` list the decisions of the reader.

    Raises:
        DataError: If the corpus cannot be read. The message names the file, the line number if
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
    """
    path = Path(path).expanduser()
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(f"{path}: no such file or folder{did_you_mean(path.name, siblings)}")
    options = ReadOptions(text=text, labels=labels, separator=separator)
    use_disk = _is_large(path) if on_disk == "auto" else on_disk == "on"
    corpus, has_splits = (_read_to_disk if use_disk else _read_to_memory)(path, options)
    check_corpus(corpus)
    wanted = test_size if has_splits or test_size is not None else DEFAULT_TEST_SHARE
    used = {**asdict(options), "text": text_columns(path, text), "test_size": wanted}
    used["seed"] = seed if wanted else None
    settings = {name: value for name, value in used.items() if value is not None}
    corpus = replace(corpus, reading=settings)
    if wanted is not None:
        corpus = hold_out_test(corpus, wanted, seed)
        _check_training_labels(corpus)
    logger.info("%s: %s format, %d labels", path, corpus.format, corpus.n_labels)
    return corpus


class _SplitCollector(Protocol):
    """Collects the chunks of one split."""

    def add(self, chunk: Chunk) -> None: ...

    def close(self) -> None: ...


_Collector = TypeVar("_Collector", bound=_SplitCollector)


def _collect(
    reader: Reader, path: Path, new_split: Callable[[str], _Collector]
) -> tuple[dict[str, _Collector], Summary]:
    """Pass each chunk of a reader to the collector of its split; return collectors and summary.

    Texts and label names are sanitized. Features of the labels go to the pseudo-split `LABELS`.
    """
    collectors: dict[str, _Collector] = {}
    n_points: dict[str, int] = {}
    n_uses = n_changed = 0
    try:
        with progress(f"Reading {path.name}") as advance:
            for chunk in reader.chunks():
                if chunk.split not in collectors:
                    collectors[chunk.split] = new_split(chunk.split)
                if chunk.texts is not None:
                    texts, changed = sanitize(chunk.texts)
                    n_changed += changed
                    chunk = replace(chunk, texts=texts)
                if chunk.labels is not None:
                    count = len(chunk.labels.counts)
                    n_points[chunk.split] = n_points.get(chunk.split, 0) + count
                    n_uses += len(chunk.labels.codes)
                    advance(count)
                collectors[chunk.split].add(chunk)
    finally:
        for collector in collectors.values():
            collector.close()
    in_order = {name: n_points[name] for name in SPLITS if name in n_points}
    summary = reader.finish(in_order, n_uses)
    names, changed = sanitize(summary.label_names)
    notes = dict(summary.notes)
    if n_changed + changed:
        count = n_changed + changed
        notes["sanitized"] = f"NULs or lone surrogates replaced in {count} texts or names"
        logger.warning("%s: %s", path, notes["sanitized"])
    order = [*in_order, *(name for name in collectors if name == LABELS)]
    collected = {name: collectors[name] for name in order}
    return collected, replace(summary, label_names=names, notes=notes)


class _MemorySplit:
    """Collects the chunks of one split in memory."""

    def __init__(self, _: str) -> None:
        self._texts: list[str] | None = None
        self._labels: list[LabelRows] = []
        self._features: list[csr_matrix] = []

    def add(self, chunk: Chunk) -> None:
        if chunk.texts is not None:
            self._texts = [] if self._texts is None else self._texts
            self._texts += chunk.texts
        if chunk.labels is not None:
            self._labels.append(chunk.labels)
        if chunk.features is not None:
            self._features.append(chunk.features)

    def close(self) -> None:
        """Do nothing: no file is open."""

    def features(self) -> csr_matrix | None:
        """Return the feature matrix, or None without features."""
        return vstack(self._features, format="csr") if self._features else None

    def split(self, summary: Summary, filters: NDArray[np.int64] | None) -> Split:
        """Return the collected chunks as a split."""
        counts = np.concatenate([rows.counts for rows in self._labels])
        codes = np.concatenate([rows.codes for rows in self._labels])
        weights = [rows.weights for rows in self._labels if rows.weights is not None]
        labels = csr_from_lists(
            counts,
            codes if summary.ids is None else summary.ids[codes],
            len(summary.label_names),
            np.concatenate(weights) if weights else None,
        )
        labels.eliminate_zeros()
        features = self.features()
        return Split(labels=labels, texts=self._texts, features=features, filters=filters)


def _read_to_memory(path: Path, options: ReadOptions) -> tuple[Corpus, bool]:
    """Read a corpus into memory; also return whether its source names the splits."""
    reader = open_reader(path, options, in_memory=True)
    collected, summary = _collect(reader, path, _MemorySplit)
    label_features = collected.pop(LABELS).features() if LABELS in collected else None
    splits: dict[str, Any] = {
        name: split.split(summary, summary.filters.get(name)) for name, split in collected.items()
    }
    corpus = Corpus(
        label_names=summary.label_names,
        label_features=label_features,
        source=path,
        format=reader.format,
        notes=summary.notes,
        **splits,
    )
    return corpus, reader.has_splits


def _read_to_disk(path: Path, options: ReadOptions) -> tuple[Corpus, bool]:
    """Read a corpus into the cache folder, or find it there, and open it memory-mapped.

    A cached corpus is reused if the source files have the same names, sizes and times.
    """
    folder = cache_root() / "corpora" / _cache_key(path, options)
    with suppress(DataError):
        cached = open_corpus(folder, path)
        mark_in_use(folder)
        os.utime(folder)
        logger.info("%s: read from the cache", path)
        return cached
    try:
        with staged_folder(folder, overwrite=True) as staging:
            _store(path, options, staging)
        mark_in_use(folder)
        evict_oldest(folder.parent, _CACHE_BYTES)
    except OSError as error:
        raise DataError(
            f"{folder.parent}: the corpus cannot be stored there ({error.strerror}); free some "
            "space, or set XDG_CACHE_HOME to a folder on another disk"
        ) from error
    return open_corpus(folder, path)


def _store(path: Path, options: ReadOptions, folder: Path) -> None:
    """Read a corpus, and store it in an empty folder."""
    reader = open_reader(path, options, in_memory=False)
    writers, summary = _collect(reader, path, lambda name: SplitWriter(folder / name))
    description: dict[str, Any] = {"format": reader.format, "has_splits": reader.has_splits}
    if LABELS in writers:
        description["label_features"] = writers.pop(LABELS).finish_features()
    description["notes"] = summary.notes
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
        is_packed = size > ON_DISK_BYTES // _GZIP_FACTOR and is_gzip(file)
        total += size * (_GZIP_FACTOR if is_packed else 1)
    return total > ON_DISK_BYTES


def _cache_key(path: Path, options: ReadOptions) -> str:
    """Return a cache key for the options and the current state of the source files."""
    stats = [(str(file.resolve()), file.stat()) for file in _files(path)]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    content = json.dumps([_CACHE_VERSION, str(path.resolve()), asdict(options), files])
    return hashlib.sha256(content.encode()).hexdigest()[:40]


def check_corpus(corpus: Corpus) -> None:
    """Raise `DataError` if parts of the corpus have different sizes, or if it has no labels."""
    for name, split in corpus.splits.items():
        _check_split(corpus, name, split)
    if corpus.label_features is not None and corpus.label_features.shape[0] != corpus.n_labels:
        n_rows = corpus.label_features.shape[0]
        raise _mismatch(corpus, f"{n_rows} rows of label features for {corpus.n_labels} labels")
    _check_training_labels(corpus)


def _check_split(corpus: Corpus, name: str, split: Split) -> None:
    n_points, n_labels = split.labels.shape
    if n_points == 0:
        raise _mismatch(corpus, f"the {name} split has no points")
    if n_labels != corpus.n_labels:
        counts = f"{n_labels} labels, but there are {corpus.n_labels} label names"
        raise _mismatch(corpus, f"the {name} split is over {counts}")
    if split.texts is not None and len(split.texts) != n_points:
        raise _mismatch(corpus, f"{len(split.texts)} {name} texts for {n_points} points")
    if split.features is None:
        if split.texts is None:
            raise _mismatch(corpus, f"the {name} points have neither texts nor features")
        return
    n_rows, n_columns = split.features.shape
    if n_rows != n_points:
        raise _mismatch(corpus, f"{n_rows} rows of {name} features for {n_points} points")
    train = corpus.train.features
    if train is not None and n_columns != train.shape[1]:
        raise _mismatch(corpus, f"{name} features have {n_columns} columns, not {train.shape[1]}")


def _mismatch(corpus: Corpus, problem: str) -> DataError:
    return DataError(f"{corpus.source or 'corpus'}: {problem}; the files must belong together")


def _check_training_labels(corpus: Corpus) -> None:
    if corpus.train.labels.nnz == 0:
        raise DataError(
            f"{corpus.source or 'corpus'}: no training point has a label; "
            "is the labels column (labels=) the right one?"
        )


def reading_options(
    path: str | Path, settings: Mapping[str, Any], explicit: Mapping[str, str | None]
) -> dict[str, str]:
    """Return the options for reading a file or folder: explicit values, else recorded ones.

    Args:
        path: The file or folder to read.
        settings: The options with which the training data was read, see `Elias.data_settings`.
        explicit: Values of ``text``, ``labels`` and ``separator`` that take precedence. None uses
            the recorded value. Options that are not keys of this mapping are left out.

    Returns:
        Arguments of `load_corpus`. Recorded options are ignored for a format without named columns.
        If an option records one column and the file lacks it, the option is left out with a
        warning, and the reader looks for a column with a common name.

    Raises:
        DataError: If the file lacks one of several text columns.
    """
    path = Path(path).expanduser()
    options = {key: value for key, value in explicit.items() if value is not None}
    keys = [key for key in explicit if key not in options and settings.get(key) is not None]
    if not keys or not path.exists():  # the reader reports a missing file
        return options
    kind, names = named_columns(path)
    if kind == "lf":  # its labels are always in the same column
        keys = [key for key in keys if key == "text"]
    for key in keys if names else []:
        value: str = settings[key]
        parts = [value] if key != "text" or value in names else value.split(",")
        missing = [part.strip() for part in parts if part.strip() not in names]
        if key == "separator" or not missing:
            options[key] = value
        elif len(parts) > 1:
            raise DataError(
                f"{path}: no column {missing[0]!r}, and the model was trained on the columns "
                f"{value}; name those to read with {key}="
            )
        else:
            logger.warning(
                "%s: no column %r, which the model was trained on; looking for a %s column by name",
                *(path, value, key),
            )
    return options
