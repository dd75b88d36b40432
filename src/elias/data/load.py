"""Load a corpus: detect its format, read it, check it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from elias.data.atomic import cache_root, evict_oldest, mark_in_use, staged_folder
from elias.data.corpus import Corpus, Split
from elias.data.readers import npz as npz_folder
from elias.data.readers.base import Reading, ReadOptions
from elias.data.readers.detect import named_columns, read_path, recognise, text_columns
from elias.data.readers.files import is_gzip, sanitize
from elias.data.readers.to_disk import (
    store_folder,
    store_lf,
    store_pecos,
    store_tables,
    store_xmc,
    store_xmc_folder,
)
from elias.data.splits import DEFAULT_TEST_SHARE, hold_out_test
from elias.data.storage import _FORMAT as STORE_FORMAT
from elias.data.storage import DESCRIPTION, FEATURES, LABELS, NAMES, DiskTexts, read_csr
from elias.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from scipy.sparse import csr_matrix


logger = logging.getLogger(__name__)

log = logging.getLogger(__name__)

OnDisk: TypeAlias = Literal["auto", "on", "off"]
LARGE = 1 << 30
"""Bytes of the files, gzipped ones counted four times, from which ``auto`` leaves them on disk. In
memory, a table takes about five times the size of its file while it is read."""
_GZIPPED = 4
_CACHE_LIMIT = 100 * 2**30  # bytes of corpora kept before the oldest goes
_FORMAT = 1


def belongs_on_disk(path: Path, on_disk: OnDisk) -> bool:
    """Say whether a corpus is to be left on disk."""
    if on_disk != "auto":
        return on_disk == "on"
    return sum(size * (_GZIPPED if packed else 1) for size, packed in _sizes(path)) > LARGE


def read_to_disk(path: Path, options: ReadOptions) -> Reading:
    """Read a corpus into the cache folder, or find it there.

    It is found again as long as its files have the same names, sizes and times.

    Raises:
        DataError: If it cannot be read, or there is no room for it.
    """
    kept = cache_root() / "corpora" / _key(path, options)
    with suppress(DataError):
        found = open_corpus(kept, path)
        mark_in_use(kept)
        os.utime(kept)
        log.info("%s: found on disk, as it was read before", path)
        return found
    try:
        with staged_folder(kept, overwrite=True) as staging:
            _store(path, options, staging)
        mark_in_use(kept)
        evict_oldest(kept.parent, _CACHE_LIMIT)
    except OSError as error:
        raise DataError(
            f"{kept.parent}: the corpus cannot be kept there ({error.strerror}); free some, or "
            "set XDG_CACHE_HOME to a folder on another disk"
        ) from error
    return open_corpus(kept, path)


def _store(path: Path, options: ReadOptions, folder: Path) -> None:
    """Write a corpus in whichever format into an empty folder."""
    kind, files = recognise(path)
    if files is None and kind == "npz":
        spelling = npz_folder.spelling_of(path)
        assert spelling is not None
        options.refuse(path, spelling.name)
        store_folder(path, spelling, folder)
    elif files is None:
        (store_lf if kind == "lf" else store_xmc_folder)(path, options, folder)
    elif kind == "xmc":
        store_xmc(files.by_split, options, files.source, folder)
    elif kind == "pecos":
        store_pecos(files.by_split, options, files.source, folder)
    else:
        store_tables(files, options, folder)


def _files(path: Path) -> Iterator[Path]:
    """Yield the file, or the files of a folder and of the folders in it."""
    if path.is_dir():
        for pattern in ("*", "*/*"):
            yield from sorted(file for file in path.glob(pattern) if file.is_file())
    elif path.is_file():
        yield path


def _sizes(path: Path) -> Iterator[tuple[int, bool]]:
    for file in _files(path):
        size = file.stat().st_size
        yield size, size > LARGE // _GZIPPED and is_gzip(file)


def _key(path: Path, options: ReadOptions) -> str:
    """Return a name for the files as they are now, and for how they are read."""
    stats = [(str(file.resolve()), file.stat()) for file in _files(path)]
    told = [
        _FORMAT,
        str(path.resolve()),
        asdict(options),
        [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:40]


log = logging.getLogger(__name__)


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
    r"""Read a corpus in any of the formats of `elias.data.formats`, recognised by content.

    Args:
        path: a file or folder.
        text: the text column of a table; several (``"title,abstract"``) are joined by a space.
            Without it, a column called text, title, content … is taken.
        labels: the labels column; without it one called labels, tags, categories … is taken.
        separator: what separates labels in one cell (``""``: each cell is one label); without
            it, ``|``, ``;``, tab or comma, whichever is found.
        seed: decides the test points, where a test split has to be made.
        test_size: how many points to test on: a number, or a share below 1; 0 for none. Without
            it, a source that names no splits gives a fifth of its points.
        on_disk: whether texts and labels are left on disk, in the cache folder, instead of in
            memory; ``auto``: where the files are large (see `elias.data.load`).

    Returns:
        The corpus; its ``notes`` say what the reader decided.

    Raises:
        DataError: on one line, naming the file, the line where there is one, and the remedy.

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
    place = Path(path).expanduser()
    _must_exist(place)
    options = ReadOptions(text=text, labels=labels, separator=separator)
    if belongs_on_disk(place, on_disk):
        reading = read_to_disk(place, options)
    else:
        reading = read_path(place, options)
        reading = reading._replace(corpus=_mended(reading.corpus))
    corpus = reading.corpus
    check_corpus(corpus)
    wanted = test_size if reading.has_splits or test_size is not None else DEFAULT_TEST_SHARE
    used = {**asdict(options), "text": text_columns(place, text), "test_size": wanted}
    used["seed"] = seed if wanted else None
    settings = {name: value for name, value in used.items() if value is not None}
    corpus = replace(corpus, reading=settings)
    if wanted is not None:
        corpus = hold_out_test(corpus, wanted, seed)
        _must_have_labels(corpus)
    log.info("%s: %s format, %d labels", place, corpus.format, corpus.n_labels)
    return corpus


def _must_exist(path: Path) -> None:
    if path.exists():
        return
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    raise DataError(f"{path}: no such file or folder{did_you_mean(path.name, siblings)}")


def _mended(corpus: Corpus) -> Corpus:
    names, n_names = sanitize(corpus.label_names)
    splits: dict[str, Split | None] = {}
    n_texts = 0
    for name, split in corpus.splits.items():
        if split.texts is not None:
            texts, changed = sanitize(split.texts)
            n_texts += changed
            splits[name] = replace(split, texts=texts)
    notes = dict(corpus.notes)
    if n_texts + n_names:
        notes["mended"] = f"NULs or lone surrogates replaced in {n_texts + n_names} texts or names"
        log.warning("%s: %s", corpus.source, notes["mended"])
    return replace(corpus.with_splits(**splits), label_names=names, notes=notes)


def check_corpus(corpus: Corpus) -> None:
    """Refuse a corpus whose parts do not fit together, or without a single label."""
    for name, split in corpus.splits.items():
        _check_split(corpus, name, split)
    if corpus.label_features is not None and corpus.label_features.shape[0] != corpus.n_labels:
        rows = corpus.label_features.shape[0]
        raise _misfit(corpus, f"{rows} rows of label features for {corpus.n_labels} labels")
    _must_have_labels(corpus)


def _check_split(corpus: Corpus, name: str, split: Split) -> None:
    n_points, n_labels = split.labels.shape
    if n_points == 0:
        raise _misfit(corpus, f"the {name} split has no points")
    if n_labels != corpus.n_labels:
        counts = f"{n_labels} labels, but there are {corpus.n_labels} label names"
        raise _misfit(corpus, f"the {name} split is over {counts}")
    if split.texts is not None and len(split.texts) != n_points:
        raise _misfit(corpus, f"{len(split.texts)} {name} texts for {n_points} points")
    if split.features is None:
        if split.texts is None:
            raise _misfit(corpus, f"the {name} points have neither texts nor features")
        return
    if split.features.shape[0] != n_points:
        rows = split.features.shape[0]
        raise _misfit(corpus, f"{rows} rows of {name} features for {n_points} points")
    width = corpus.train.features.shape[1] if corpus.train.features is not None else None
    if width is not None and split.features.shape[1] != width:
        raise _misfit(
            corpus, f"{name} features have {split.features.shape[1]} columns, not {width}"
        )


def _misfit(corpus: Corpus, problem: str) -> DataError:
    return DataError(f"{corpus.source or 'corpus'}: {problem}; the files must belong together")


def _must_have_labels(corpus: Corpus) -> None:
    if corpus.train.labels.nnz == 0:
        raise DataError(
            f"{corpus.source or 'corpus'}: no training point has a label; "
            "is the labels column (labels=) the right one?"
        )


def open_corpus(folder: Path, source: Path) -> Reading:
    """Return the corpus that was stored in a folder, memory-mapped.

    Raises:
        DataError: If it is not there, or not whole.
    """
    try:
        described = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        names = json.loads((folder / NAMES).read_text(encoding="utf-8"))
        if described["format_version"] != STORE_FORMAT:
            raise DataError(f"{folder}: is of another version")
        splits = {
            name: _open_split(folder / name, about, len(names))
            for name, about in described["splits"].items()
        }
        corpus = Corpus(
            label_names=names,
            label_features=_open_matrix(folder / LABELS, described.get("label_features"), FEATURES),
            source=source,
            format=described["format"],
            notes=described["notes"],
            **splits,  # type: ignore[arg-type]  # its keys are the names of splits
        )
        return Reading(corpus, has_splits=bool(described["has_splits"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder}: is not a whole stored corpus ({error})") from error


def _open_split(folder: Path, about: dict[str, Any], n_labels: int) -> Split:
    texts = DiskTexts(folder, about["digest"]) if about.get("texts", True) else None
    if texts is not None and len(texts) != about["points"]:
        raise DataError(f"{folder}: has {len(texts)} texts where {about['points']} are told of")
    filters = None
    if (folder / "filters.npy").exists():
        filters = np.load(folder / "filters.npy", allow_pickle=False)
    return Split(
        labels=read_csr(folder, (about["points"], n_labels), about["entries"]),
        texts=texts,
        features=_open_matrix(folder, about.get("features"), FEATURES),
        filters=filters,
    )


def _open_matrix(folder: Path, about: dict[str, int] | None, prefix: str) -> csr_matrix | None:
    if about is None:
        return None
    return read_csr(folder, (about["rows"], about["columns"]), about["entries"], prefix)


def reading_options(
    path: str | Path, settings: Mapping[str, Any], given: Mapping[str, str | None]
) -> dict[str, str]:
    """Return the options to read a file or folder with: those given, else those recorded.

    Args:
        path: The file or folder to read.
        settings: How the training data was read, see `Elias.data_settings`.
        given: Values for ``text``, ``labels`` and ``separator`` that win; None: use the recorded
            one. Keys that are missing here are not looked up.

    Returns:
        Arguments of `load_corpus`. Nothing recorded applies to a format without named columns.
        A single recorded column that the file lacks is left out, with a warning, so that the
        reader looks for a column by its common names.

    Raises:
        DataError: If the file lacks one of several text columns.
    """
    place = Path(path).expanduser()
    options = {key: value for key, value in given.items() if value is not None}
    keys = [key for key in given if key not in options and settings.get(key) is not None]
    if not keys or not place.exists():  # the reader reports a missing file
        return options
    kind, names = named_columns(place)
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
                f"{place}: no column {missing[0]!r}, and the model was trained on the columns "
                f"{value}; name those to read with {key}="
            )
        else:
            log.warning(
                "%s: no column %r, which the model was trained on; looking for a %s column by name",
                *(place, value, key),
            )
    return options
