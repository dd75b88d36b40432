"""Compute corpus statistics: Table 5 of the paper, duplicates and text lengths."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elias.data.corpus import Corpus, Split
from elias.data.near_duplicates import (
    count_groups,
    count_repeats,
    first_members,
    shared_groups,
    text_keys,
)

_Hashes = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]


PERCENTILES = (10, 50, 90, 99)
_WORD = re.compile(r"\w+")
_NOTICEABLE = 0.05  # minimum share of points for a hint
_SAMPLED_TEXTS = 1000  # number of training texts among which empty ones are counted
_FEW_LABELS = 20  # with fewer one-word labels, it is not unusual that most occur once
_LONG_NAME = 12  # mean number of words above which label names are too long


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStats:
    """Statistics of one split."""

    points: int
    pairs: int
    """Number of relevant (point, label) pairs."""
    labels_with_points: int
    labels_per_point: float
    labels_percentiles: tuple[int, ...]
    """The 10th, 50th, 90th and 99th percentile of the number of labels per point."""
    points_without_labels: int
    words_mean: float | None = None
    """Mean number of words per text, split at white space; None if there are no texts."""
    words_percentiles: tuple[int, ...] | None = None
    """The 10th, 50th, 90th and 99th percentile of the number of words per text."""
    empty_texts: int | None = None
    duplicate_texts: int | None = None
    """Number of texts that repeat an earlier text of this split, ignoring case and punctuation.
    Empty texts do not count."""
    texts_in_train: int | None = None
    """Number of texts, not counting empty ones, that also occur in the training split; None for the
    training split."""
    near_duplicate_groups: int | None = None
    """Number of groups of near-duplicates, see `elias.data.near_duplicates.normal_form`."""
    near_duplicates: int | None = None
    """Number of texts in groups of near-duplicates."""
    near_duplicates_in_train: int | None = None
    """Number of texts with a near-duplicate in the training split; None for the training split."""
    groups: int | None = None
    """Number of groups of at least two points with the same value in the group column; None if
    there is no such column."""
    points_in_groups: int | None = None
    """Number of points that share a value of the group column with another point."""
    points_with_group_in_train: int | None = None
    """Number of points whose group is also in the training split; None for the training split."""
    filter_pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusStats:
    """Statistics of a corpus."""

    splits: dict[str, SplitStats]
    labels: int
    """Number of labels L."""
    features: int | None
    """D_bow, the number of feature columns in the source; None if there are no features."""
    points_per_label: float
    """Mean number of training points per label: training pairs divided by L."""
    points_per_label_percentiles: tuple[int, ...]
    """The 10th, 50th, 90th and 99th percentile of points per label, and the maximum."""
    labels_with_training_points: int
    labels_without_training_points: int
    labels_with_one_training_point: int
    labels_with_up_to_five_training_points: int
    """Number of labels with 0 to 5 training points."""
    repeated_names: int
    """Number of labels that have the same name as an earlier label."""

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as plain values for JSON."""
        return asdict(self)


def corpus_stats(corpus: Corpus) -> CorpusStats:
    """Return the statistics of a corpus."""
    hashes = {name: _hashes(split) for name, split in corpus.splits.items()}
    frequencies = corpus.label_frequencies()
    features = corpus.train.features
    return CorpusStats(
        splits={
            name: _split_stats(split, hashes[name], None if name == "train" else hashes["train"])
            for name, split in corpus.splits.items()
        },
        labels=corpus.n_labels,
        features=None if features is None else int(features.shape[1]),
        points_per_label=float(frequencies.mean()),
        points_per_label_percentiles=_percentiles(frequencies, (*PERCENTILES, 100)),
        labels_with_training_points=int((frequencies > 0).sum()),
        labels_without_training_points=int((frequencies == 0).sum()),
        labels_with_one_training_point=int((frequencies == 1).sum()),
        labels_with_up_to_five_training_points=int((frequencies <= 5).sum()),
        repeated_names=corpus.n_labels - len(set(corpus.label_names)),
    )


def example_points(corpus: Corpus, count: int = 3) -> list[tuple[str, list[str]]]:
    """Return some training texts, as the encoder reads them, and the names of their labels."""
    texts, labels = corpus.train.texts, corpus.train.labels
    if texts is None:
        return []
    rows = sorted({round(row) for row in np.linspace(0, len(texts) - 1, count)})
    ids = {row: labels.indices[labels.indptr[row] : labels.indptr[row + 1]] for row in rows}
    return [(texts[row], [corpus.label_names[label] for label in ids[row]]) for row in rows]


def example_labels(
    corpus: Corpus, n_frequent: int = 10, n_rare: int = 5
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return the most frequent and some of the rarest labels, with counts of training points."""
    frequencies = corpus.label_frequencies().astype(np.int64)
    order = np.argsort(-frequencies, kind="stable")
    order = order[frequencies[order] > 0]

    def counts(labels: NDArray[np.int64]) -> list[tuple[str, int]]:
        return [(corpus.label_names[label], int(frequencies[label])) for label in labels]

    return counts(order[:n_frequent]), counts(order[n_frequent:][-n_rare:])


def data_hints(corpus: Corpus, stats: CorpusStats) -> list[str]:
    """Return hints that the data may have been read in the wrong way, or needs attention."""
    train, hints = stats.splits["train"], []

    def share(count: int | None, problem: str, n_points: int = train.points) -> None:
        if count and count >= _NOTICEABLE * n_points:
            hints.append(f"{count / n_points:.0%} of {problem}")

    share(train.empty_texts, "texts are empty")
    share(train.points_without_labels, "texts have no label")
    share(train.duplicate_texts, "texts repeat an earlier text")
    if test := stats.splits.get("test"):
        share(test.texts_in_train, "test texts are also in the training split", test.points)
    if shared := shared_groups(corpus):
        hints.append(f"{shared}, so test points are easier than points of new groups")
    column = str(corpus.reading.get("text", ""))
    if corpus.format in ("csv", "tsv") and len(column.split()) > 3:
        name = repr(column[:40])
        hints.append(f"the text column is called {name}; if there is no header, set header=False")
    n_once = stats.labels_with_one_training_point
    is_single = train.pairs + train.points_without_labels == train.points
    is_unusual = stats.labels >= _FEW_LABELS or any(" " in name for name in corpus.label_names)
    if is_unusual and is_single and n_once > stats.labels / 2:
        problem = "each text has one label, and most labels occur once"
        hints.append(f"{problem}; if a cell has several labels, set separator=")
    if corpus.format in ("csv", "tsv") and all(name.isdecimal() for name in corpus.label_names):
        hints.append("labels are numbers; to see names, give a label table of ids and names")
    if np.mean([len(name.split()) for name in corpus.label_names[:1000]]) > _LONG_NAME:
        hints.append("labels are long texts; check that labels= is the right column")
    return hints + training_hints(corpus.train, stats.labels)


def training_hints(train: Split, n_labels: int) -> list[str]:
    """Return reasons why a model cannot learn from these training points."""
    hints, texts = [], train.texts
    if n_labels == 1:
        hints.append("there is only one label, so it is predicted for every text")
    if len(train) == 1:
        hints.append("there is only one training point; a useful model needs thousands")
    elif texts is not None and all(text == texts[0] for text in texts):
        hints.append("all training texts are the same; check the text column")
    elif texts is not None:
        sample = [texts[i] for i in range(0, len(texts), -(-len(texts) // _SAMPLED_TEXTS))]
        empty = sum(not text.strip() for text in sample) / len(sample)
        if empty >= _NOTICEABLE:
            hints.append(f"{empty:.0%} of the training texts are empty; check the text column")
    return hints


def _split_stats(split: Split, hashes: _Hashes | None, in_train: _Hashes | None) -> SplitStats:
    label_counts = np.diff(split.labels.indptr)
    about_texts: dict[str, Any] = {}
    if split.texts is not None and hashes is not None:
        words = np.fromiter((len(text.split()) for text in split.texts), np.int64, len(split))
        texts, keys, groups = hashes
        n_groups, n_near = count_groups(keys)
        about_texts = {
            "words_mean": float(words.mean()),
            "words_percentiles": _percentiles(words, PERCENTILES),
            "empty_texts": int((words == 0).sum()),
            "duplicate_texts": len(texts) - len(np.unique(first_members(texts))),
            "near_duplicate_groups": n_groups,
            "near_duplicates": n_near,
        }
        if in_train is not None:
            about_texts["texts_in_train"] = count_repeats(texts, in_train[0])
            about_texts["near_duplicates_in_train"] = count_repeats(keys, in_train[1])
        if groups is not None:
            about_texts["groups"], about_texts["points_in_groups"] = count_groups(groups)
            if in_train is not None and in_train[2] is not None:
                about_texts["points_with_group_in_train"] = count_repeats(groups, in_train[2])
    return SplitStats(
        points=len(split),
        pairs=int(split.labels.nnz),
        labels_with_points=len(np.unique(split.labels.indices)),
        labels_per_point=split.labels.nnz / max(len(split), 1),
        labels_percentiles=_percentiles(label_counts, PERCENTILES),
        points_without_labels=int((label_counts == 0).sum()),
        **about_texts,
        filter_pairs=0 if split.filters is None else len(split.filters),
    )


def _hashes(split: Split) -> _Hashes | None:
    """Return the hashes, `text_keys` and groups of all texts, or None if there are no texts.

    A hash ignores case and punctuation. Hashes have 64 bits, and are kept instead of texts to save
    memory. The probability that any two of ten million different texts collide is one in 370,000. A
    text that consists only of punctuation is hashed as it is. The hash and the key of an empty text
    are `ALONE`.
    """
    texts = split.texts
    if texts is None:
        return None
    plain = (" ".join(_WORD.findall(text.lower())) or text.strip() for text in texts)
    return np.fromiter(map(hash, plain), np.int64, len(texts)), text_keys(texts), split.groups


def _percentiles(values: NDArray[np.int64], at: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(value) for value in np.percentile(values, at))
