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
from scipy.sparse import csr_matrix

from elias.data.atomic import cache_root, forget_oldest, in_use, staged_folder
from elias.data.readers import npz as npz_folder
from elias.data.readers.base import ReadOptions
from elias.data.readers.detect import read_path, recognise, text_columns
from elias.data.readers.files import is_gzip, mend
from elias.data.readers.to_disk import (
    store_folder,
    store_lf,
    store_pecos,
    store_tables,
    store_xmc,
    store_xmc_folder,
)
from elias.data.splits import random_split
from elias.data.stats import corpus_stats
from elias.data.storage import open_corpus
from elias.errors import DATA_SETTINGS, DataError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from elias.data.corpus import Corpus, Split
    from elias.data.readers.base import Reading


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
        in_use(kept)
        os.utime(kept)
        log.info("%s: found on disk, as it was read before", path)
        return found
    try:
        with staged_folder(kept, overwrite=True) as staging:
            _store(path, options, staging)
        in_use(kept)
        forget_oldest(kept.parent, _CACHE_LIMIT)
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

DEFAULT_TEST_SHARE = 0.2
"""How much of a source without splits is set aside for testing."""


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
        corpus = set_test_aside(corpus, wanted, seed)
        _must_have_labels(corpus)
    log.info("%s: %s format, %d labels", place, corpus.format, corpus.n_labels)
    return corpus


def _must_exist(path: Path) -> None:
    if path.exists():
        return
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    raise DataError(f"{path}: no such file or folder{nearest(path.name, siblings)}")


def _mended(corpus: Corpus) -> Corpus:
    names, n_names = mend(corpus.label_names)
    splits: dict[str, Split | None] = {}
    n_texts = 0
    for name, split in corpus.splits.items():
        if split.texts is not None:
            texts, changed = mend(split.texts)
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


def set_test_aside(corpus: Corpus, test_size: float, seed: int) -> Corpus:
    """Return the corpus with test points set aside; one of a single point keeps it for training.

    ``test_size`` is a number or a share below 1. The same number and seed give the same points.
    """
    if test_size == 0:
        return corpus
    if corpus.test is not None:
        raise DataError(f"{corpus.source}: brings its own test split; leave test_size out")
    n_points = len(corpus.train)
    count = _count(test_size, n_points)
    if n_points == 1 and test_size < 1:
        return corpus
    train, test = random_split(n_points, count, seed)
    note = f"{count} of {n_points} points set aside at random (seed {seed})"
    log.info("%s: %s", corpus.source, note)
    cut = corpus.with_splits(train=corpus.train.take(train), test=corpus.train.take(test))
    return replace(cut, notes={**corpus.notes, "test": note})


def _count(test_size: float, n_points: int) -> int:
    if 0 < test_size < 1:
        return min(max(1, round(test_size * n_points)), n_points - 1)
    if not 0 <= test_size < n_points or test_size != int(test_size):  # NaN is in no range
        allowed = f"a share below 1, or a whole number below the {n_points} points"
        raise DataError(f"test_size must be {allowed}, not {test_size:g}")
    return int(test_size)


_REMEDY = "evaluate on the corpus that the model was trained on"


def match_labels(corpus: Corpus, names: Sequence[str]) -> Corpus:
    """Return the corpus over the labels of a model, matched by name.

    Labels that the model does not know follow its own, so that they stay in the truth and count
    as missed. Where names repeat, the row is the id, and the labels must be the same.

    Raises:
        DataError: If the labels cannot be matched, or none is the model's.
    """
    theirs = list(corpus.label_names)
    if theirs == list(names):
        return corpus
    source = corpus.source or "corpus"
    if len(set(theirs)) < len(theirs) or len(set(names)) < len(names):
        difference = _first_difference(theirs, names)
        raise DataError(f"{source}: {difference}, and names that repeat match nothing; {_REMEDY}")
    known = set(names)
    unknown = [name for name in theirs if name not in known]
    if len(unknown) == len(theirs):
        raise DataError(
            f"{source}: none of its {len(theirs)} labels, such as {theirs[0]!r}, is one of the "
            f"model's {len(names)}, such as {names[0]!r}; {_REMEDY}"
        )
    if unknown:
        logger.warning(
            "%s: %d of its %d labels are not the model's, such as %r; they count as missed",
            *(source, len(unknown), len(theirs), unknown[0]),
        )
    together = [*names, *unknown]
    id_of = {name: position for position, name in enumerate(together)}
    new_ids = np.array([id_of[name] for name in theirs], dtype=np.int64)
    splits: dict[str, Split | None] = {
        name: _renumbered(split, new_ids, len(names), len(together))
        for name, split in corpus.splits.items()
    }
    return replace(corpus.with_splits(**splits), label_names=together, label_features=None)


def _first_difference(theirs: Sequence[str], ours: Sequence[str]) -> str:
    if len(theirs) != len(ours):
        return f"has {len(theirs)} labels, the model {len(ours)}"
    pairs = enumerate(zip(theirs, ours, strict=True))
    place, (their, our) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    return f"label {place} is {their!r}, in the model it is {our!r}"


def _renumbered(split: Split, new_ids: NDArray[np.int64], n_known: int, n_labels: int) -> Split:
    old = split.labels
    labels = csr_matrix((old.data, new_ids[old.indices], old.indptr), shape=(len(split), n_labels))
    labels.sort_indices()
    filters = split.filters
    if filters is not None:
        filters = np.stack([filters[:, 0], new_ids[filters[:, 1]]], axis=1)
        filters = filters[filters[:, 1] < n_known]  # others are never predicted
    return replace(split, labels=labels, filters=filters)


def n_points_of(facts: Mapping[str, Any]) -> int:
    """Return how many points the corpus of a run had, by what its model knows; 0 if nothing."""
    return sum(split["points"] for split in _recorded(facts).values())


def as_trained(corpus: Corpus, names: Sequence[str], facts: Mapping[str, Any]) -> Corpus | None:
    """Return a corpus without splits as the run that it was the data of had cut it.

    Args:
        corpus: All points, as training split.
        names: The model's labels.
        facts: What the model knows of its making.

    Returns:
        The corpus with the test points that the run set aside, if any; None where the run had other
        data, or data with splits.
    """
    recorded = _recorded(facts)
    splits = {"train", "test"} if "test" in recorded else {"train"}
    same = set(recorded) == splits and n_points_of(facts) == len(corpus.train)
    if not same or list(corpus.label_names) != list(names):
        return None
    n_test = recorded["test"]["points"] if "test" in recorded else 0
    settings = facts.get(DATA_SETTINGS, {})
    cut = set_test_aside(corpus, n_test, seed=settings.get("seed", 0))
    found = json.loads(json.dumps(corpus_stats(cut).to_dict()["splits"]))
    columns, trained_on = corpus.reading.get("text"), settings.get("text")
    if columns and trained_on and columns != trained_on:  # the texts differ, the points do not
        found, recorded = _without_texts(found), _without_texts(recorded)
    return cut if found == recorded else None


def _without_texts(splits: dict[str, Any]) -> dict[str, Any]:
    """Return the statistics of splits that do not depend on their texts."""
    return {
        name: {
            key: value for key, value in stats.items() if "text" not in key and "word" not in key
        }
        for name, stats in splits.items()
    }


def _recorded(facts: Mapping[str, Any]) -> dict[str, Any]:
    splits: dict[str, Any] = json.loads(json.dumps(facts.get("data", {}).get("splits", {})))
    return splits
