"""`load_corpus`: recognise what is there, read it, check that it fits together."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from elias.data.formats.options import ReadOptions
from elias.data.formats.recognise import read_path, text_columns
from elias.data.formats.sources import mend
from elias.data.large import OnDisk, belongs_on_disk, read_to_disk
from elias.data.splits import random_split
from elias.errors import DataError, nearest

if TYPE_CHECKING:
    from elias.data.corpus import Corpus, Split

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
            memory; ``auto``: where the files are large (see `elias.data.large`).

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
