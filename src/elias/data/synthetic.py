"""Generate synthetic corpora of any size from a seed.

Each topic has its own words. A label has one or more *modes*. Each mode assigns the label to a
different topic, with different label words. Frequent labels have more modes. A point has one topic.
Its labels are drawn from the labels of the topic by a power law, and its text mixes words of the
topic, words of its labels and noise. A tree that assigns each label to one cluster cannot represent
a label with several modes; a learned graph can.

Points are drawn in chunks, each with its own random generator.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from elias.data.atomic import staged_folder
from elias.data.corpus import SPLITS, Corpus, Split
from elias.data.readers.xmc import RAW
from elias.data.writers import write_npz_folder
from elias.errors import DataError
from elias.progress import progress

Ints = NDArray[np.int64]


logger = logging.getLogger(__name__)

VOCABULARY = 50_000
"""Number of different words."""
WORDS_PER_TOPIC, WORDS_PER_LABEL = 30, 3
"""Number of different words of each topic, and of each label in each of its modes."""
TOPIC_WORDS, NOISE_WORDS = 4, 3
"""Number of topic words and of noise words in each text. Noise follows a power law."""
LABEL_SIGNAL = 0.8
"""Probability that a label of a point adds one of its words to the text."""
LABELS_PER_TOPIC = 32
"""Number of labels that have their first mode in the same topic."""
POINTS_PER_MODE = 8
"""Expected number of training points for each mode of a label, up to ``modes`` modes."""
_SYLLABLES = np.array([c + v for c in "bcdfghjklmnprstvz" for v in "aeiou"], dtype="S2")
_SCATTER = 48_271  # coprime to the number of syllables, so that consecutive words differ
_NAME_SYLLABLES = 3
_POINTS_PER_CHUNK = 8192
_CELLS_PER_CHUNK = 1 << 20
_NO_LABEL = -1
_NEARLY_ZERO = 1e-9


def pseudowords(start: int, stop: int, min_syllables: int = 2) -> list[str]:
    """Return the artificial words ``start`` to ``stop - 1``. Words with low indices are short.

    >>> pseudowords(1, 4)
    ['vepi', 'sija', 'pobo']
    >>> len(set(pseudowords(0, 10_000)))
    10000
    """
    base = len(_SYLLABLES)
    words: list[str] = []
    n_syllables, first = min_syllables, 0
    while start < stop:
        n_words = base**n_syllables
        indices = np.arange(start, min(stop, first + n_words), dtype=np.int64) - first
        indices = indices * _SCATTER % n_words
        digits = indices[:, None] // base ** np.arange(n_syllables) % base  # (n, n_syllables)
        joined = np.ascontiguousarray(_SYLLABLES[digits]).view(f"S{2 * n_syllables}")
        words += joined.ravel().astype(str).tolist()
        first += n_words
        start, n_syllables = max(start, first), n_syllables + 1
    return words


class CorpusGenerator:
    """Generator of random points with topics, labels and texts.

    Methods identify a label by its rank (0 is the most frequent label). The label ids of the corpus
    are a random permutation of the ranks.
    """

    def __init__(
        self,
        n_points: int,
        n_labels: int,
        seed: int = 0,
        *,
        n_test: int | None = None,
        n_validation: int = 0,
        tail: float = 1.0,
        modes: int = 3,
        labels_per_point: float = 3.0,
    ) -> None:
        """Choose the topics of all labels.

        Args:
            n_points: Number of training points.
            n_labels: Number of labels L.
            seed: Seed of all random choices.
            n_test: Number of test points. None means a quarter of the training points.
            n_validation: Number of validation points.
            tail: The r-th most frequent label has probability ∝ r^-tail. With 0, all labels are
                equally likely.
            modes: Maximum number of modes of a label. With 1, each label belongs to one topic.
            labels_per_point: Mean number of labels per point, at least 1. Covering rare labels may
                increase it.
        """
        at_least_1: dict[str, float] = {"n_points": n_points, "n_labels": n_labels, "modes": modes}
        at_least_1["labels_per_point"] = labels_per_point
        for least, values in ((1, at_least_1), (0, {"seed": seed, "tail": tail})):
            for name, value in values.items():
                if not value >= least:
                    problem = f"{name} must be at least {least}, not {value}"
                    raise DataError(f"synthetic corpus: {problem}")
        self.n_points, self.n_labels, self.seed = n_points, n_labels, seed
        self.tail, self.labels_per_point = tail, labels_per_point
        # if possible, all modes of a label have different topics
        self.n_topics = min(n_labels, max(2 * modes, -(-n_labels // LABELS_PER_TOPIC)))
        n_test = -(-n_points // 4) if n_test is None else n_test
        sizes = zip(SPLITS, (n_points, n_validation, n_test), strict=True)
        self.sizes = {name: size for name, size in sizes if size}
        rng = np.random.default_rng([seed, 0])
        self.ids = rng.permutation(n_labels).astype(np.int32)
        edges = _power_law_cdf(np.arange(1.0, n_labels + 2), n_labels, tail)
        expected = np.diff(edges) * (n_points * labels_per_point)
        n_modes = range(2, min(modes, self.n_topics) + 1)
        more = [int((expected >= POINTS_PER_MODE * mode).sum()) for mode in n_modes]
        self.n_with_mode = [n_labels, *(n for n in more if n)]
        """Number of labels with a 1st, 2nd, … mode. These are always the most frequent labels."""
        self._by_first_topic = rng.permutation(n_labels).astype(np.int32)
        self._topic_of = self._draw_topics(rng)
        self._build_members()
        self._plan_covers(rng)
        self.words = pseudowords(0, VOCABULARY)

    def corpus(self) -> Corpus:
        """Draw all points, and return the corpus."""
        splits: dict[str, Any] = {name: self._draw(name) for name in self.sizes}
        n_missing = self.n_labels - len(np.unique(splits["train"].labels.indices))
        coverage = f"Each of the {self.n_labels:,} labels has a training point."
        if n_missing:
            coverage = (
                f"{n_missing:,} of {self.n_labels:,} labels have no training point; "
                "generate more points, or more labels per point, to cover them."
            )
            logger.warning("synthetic corpus: %s", coverage)
        names = pseudowords(0, self.n_labels, _NAME_SYLLABLES)
        notes = {"coverage": coverage}
        return Corpus(label_names=names, format="synthetic", notes=notes, **splits)

    def _draw(self, split: str) -> Split:
        texts: list[str] = []
        ids, lengths = [], [np.zeros(1, dtype=np.int64)]
        with progress(f"generating {split} points", self.sizes[split]) as advance:
            for chunk_texts, chunk_lengths, label_ids, _ in self.chunks(split):
                texts += chunk_texts
                ids.append(label_ids)
                lengths.append(chunk_lengths)
                advance(len(chunk_texts))
        indices, indptr = np.concatenate(ids), np.cumsum(np.concatenate(lengths))
        data = np.ones(len(indices), dtype=np.float32)
        labels = csr_matrix((data, indices, indptr), shape=(len(texts), self.n_labels))
        return Split(labels=labels, texts=texts)

    def chunks(self, split: str) -> Iterator[tuple[list[str], Ints, NDArray[np.int32], Ints]]:
        """Yield the texts, label counts, label ids and topics of each chunk of points.

        The label ids of all points are concatenated, and sorted within a point. If possible, every
        label has at least one training point.
        """
        n_points = self.sizes[split]
        step = _CELLS_PER_CHUNK // (self._widest_topic * self._labels_per_cover)
        step = min(max(step, 1), _POINTS_PER_CHUNK)
        stream = 1 + SPLITS.index(split)  # 0 is used in __init__
        for index, start in enumerate(range(0, n_points, step)):
            rng = np.random.default_rng([self.seed, stream, index])
            rows = np.arange(start, min(start + step, n_points))
            topics, forced = self._draw_topics_of_points(rng, len(rows))
            if split == "train":
                self._cover(rows, topics, forced)
            ranks, modes = self._draw_labels(rng, topics, forced)
            ids = np.where(ranks == _NO_LABEL, self.n_labels, self.ids[ranks])
            ids.sort(axis=1)
            label_ids = ids[ids < self.n_labels].astype(np.int32)
            texts = self._draw_texts(rng, topics, ranks, modes)
            yield texts, (ranks != _NO_LABEL).sum(axis=1), label_ids, topics

    def _draw_topics(self, rng: np.random.Generator) -> list[NDArray[np.int32]]:
        """Return, for each mode, the topic of every label that has the mode.

        The modes of a label have different topics.
        """
        n_topics, n_labels = self.n_topics, self.n_labels
        topic_of = [np.empty(n_labels, dtype=np.int32)]
        topic_of[0][self._by_first_topic] = np.arange(n_labels) * n_topics // n_labels
        for n in self.n_with_mode[1:]:
            topics = (rng.permutation(n) * n_topics // n).astype(np.int32)
            for _ in topic_of:  # each pass resolves a conflict with at least one earlier mode
                for earlier in topic_of:
                    topics = np.where(topics == earlier[:n], (topics + 1) % n_topics, topics)
            topic_of.append(topics)
        return topic_of

    def _build_members(self) -> None:
        """Store the labels of each topic, and the modes that assign them to it, in CSR layout."""
        ranks = np.concatenate([np.arange(n) for n in self.n_with_mode])
        modes = np.repeat(np.arange(len(self.n_with_mode)), self.n_with_mode)
        topics = np.concatenate(self._topic_of)
        order = np.lexsort((modes, ranks, topics))
        self._member_mode, self._member_rank = modes[order], ranks[order]
        sizes = np.bincount(topics, minlength=self.n_topics)
        self._member_start = np.concatenate([[0], np.cumsum(sizes)])
        self._widest_topic = int(sizes.max())

    def _plan_covers(self, rng: np.random.Generator) -> None:
        """Prescribe the labels of some training points (covers), so that every label has a point.

        Each cover gets the same number of prescribed labels. This is the smallest number for which
        at most half of the training points are covers, but at most the mean number of labels per
        point. If this maximum is too small, half of the points are covers, and some labels may have
        no point. The labels of all other points are drawn by the power law alone.
        """
        widest = -(-self.n_labels // self.n_topics)
        for per_cover in range(1, int(self.labels_per_point) + 1):
            per_topic = -(-widest // per_cover)
            if 2 * per_topic * self.n_topics <= self.n_points:
                break
        self._labels_per_cover, self._covers_per_topic = per_cover, per_topic
        n_covers = per_topic * self.n_topics
        room = n_covers if n_covers <= self.n_points else self.n_points // 2
        self._cover_order = rng.permutation(n_covers)[:room]

    def _draw_topics_of_points(self, rng: np.random.Generator, n: int) -> tuple[Ints, Ints]:
        """Draw a label for each point by the power law, and then one of that label's topics.

        Return the topics (n,) and the labels that each point must have (n, labels per cover),
        padded with `_NO_LABEL`.
        """
        ranks = _draw_power_law(rng, n, self.n_labels, self.tail)
        modes = (rng.random(n) * self._count_modes_of(ranks)).astype(np.int64)
        topics = np.empty(n, dtype=np.int64)
        for mode, topic_of in enumerate(self._topic_of):
            topics[modes == mode] = topic_of[ranks[modes == mode]]
        forced = np.full((n, self._labels_per_cover), _NO_LABEL)
        forced[:, 0] = ranks
        return topics, forced

    def _count_modes_of(self, ranks: Ints) -> Any:
        return np.sum([ranks < n for n in self.n_with_mode], axis=0)

    def _cover(self, rows: Ints, topics: Ints, forced: Ints) -> None:
        """Give every label a point: set the topics and labels (``forced``) of reserved points.

        `_plan_covers` has reserved them. Both arrays are changed in place. ``rows``
        are the training points of the current chunk.
        """
        n_covers = len(self._cover_order)
        before = rows * n_covers // self.n_points
        covering = np.flatnonzero((rows + 1) * n_covers // self.n_points > before)
        covers = self._cover_order[before[covering]]
        topic, part = np.divmod(covers, self._covers_per_topic)
        first = -(-topic * self.n_labels // self.n_topics)
        end = -(-(topic + 1) * self.n_labels // self.n_topics)
        position = (first + part * self._labels_per_cover)[:, None] + np.arange(forced.shape[1])
        exists = position < end[:, None]
        labels = self._by_first_topic[np.where(exists, position, 0)]
        used = exists.any(axis=1)
        topics[covering[used]] = topic[used]
        forced[covering[used]] = np.where(exists, labels, _NO_LABEL)[used]

    def _draw_labels(
        self, rng: np.random.Generator, topics: Ints, forced: Ints
    ) -> tuple[Ints, Ints]:
        """Add random labels of the topic to the prescribed labels of each point (Gumbel top-k).

        Return ranks and modes, both (n, maximum labels of a point), padded with `_NO_LABEL`.
        """
        starts, ends = self._member_start[topics], self._member_start[topics + 1]
        position = starts[:, None] + np.arange(self._widest_topic)
        exists = position < ends[:, None]
        position = np.where(exists, position, 0)
        ranks = self._member_rank[position]
        weights = -self.tail * np.log(ranks + 1) - np.log(self._count_modes_of(ranks))
        keys = np.where(exists, weights + rng.gumbel(size=ranks.shape), -np.inf)
        must = (ranks[:, :, None] == forced[:, None, :]).any(axis=2) & exists
        keys[must] = np.inf
        wanted = 1 + rng.poisson(self.labels_per_point - 1, size=len(topics))
        wanted = np.clip(wanted, must.sum(axis=1), ends - starts)
        order = np.argsort(-keys, axis=1)[:, : wanted.max()]
        chosen = np.arange(order.shape[1]) < wanted[:, None]
        ranks = np.take_along_axis(ranks, order, axis=1)
        modes = self._member_mode[np.take_along_axis(position, order, axis=1)]
        return np.where(chosen, ranks, _NO_LABEL), np.where(chosen, modes, _NO_LABEL)

    def _draw_texts(
        self, rng: np.random.Generator, topics: Ints, ranks: Ints, modes: Ints
    ) -> list[str]:
        """Draw the words of each text.

        The ids of topic words are hashes of even numbers. The ids of label words are hashes of odd
        numbers.
        """
        n = len(topics)
        which = rng.integers(WORDS_PER_TOPIC, size=(n, TOPIC_WORDS))
        of_topic = _hash(2 * (topics[:, None] * WORDS_PER_TOPIC + which), self.seed)
        which = rng.integers(WORDS_PER_LABEL, size=ranks.shape)
        sense = ranks * len(self.n_with_mode) + modes
        of_labels = _hash(2 * (sense * WORDS_PER_LABEL + which) + 1, self.seed)
        visible = (ranks != _NO_LABEL) & (rng.random(ranks.shape) < LABEL_SIGNAL)
        of_labels = np.where(visible, of_labels % VOCABULARY, _NO_LABEL)
        noise = _draw_power_law(rng, (n, NOISE_WORDS), VOCABULARY, 1.0)
        words = np.hstack([of_topic % VOCABULARY, of_labels, noise])
        order = np.argsort(rng.random(words.shape), axis=1)
        words = np.take_along_axis(words, order, axis=1)
        table = self.words
        return [" ".join([table[word] for word in row if word >= 0]) for row in words.tolist()]


def _power_law_cdf(x: NDArray[np.float64], n: int, exponent: float) -> Any:
    """Return the integral of t^-exponent from 1 to ``x``, divided by that from 1 to n + 1."""
    power = 1 - exponent
    if abs(power) < _NEARLY_ZERO:
        return np.log(x) / np.log(n + 1)
    return (x**power - 1) / ((n + 1) ** power - 1)


def _draw_power_law(
    rng: np.random.Generator, size: int | tuple[int, int], n: int, exponent: float
) -> Ints:
    """Draw ranks 0 … n - 1 from a power law, by inverting `_power_law_cdf`."""
    mass = rng.random(size)
    power = 1 - exponent
    if abs(power) < _NEARLY_ZERO:
        x = (n + 1) ** mass
    else:
        x = (1 + mass * ((n + 1) ** power - 1)) ** (1 / power)
    return np.clip(x.astype(np.int64) - 1, 0, n - 1)


def _hash(numbers: Ints, seed: int) -> Ints:
    """Hash numbers to 63 bits (the finaliser of splitmix64)."""
    z = numbers.astype(np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def synthetic_corpus(n_points: int, n_labels: int, seed: int = 0, **options: Any) -> Corpus:
    """Generate a corpus. The options are those of `CorpusGenerator`.

    >>> corpus = synthetic_corpus(n_points=40, n_labels=20, modes=2)
    >>> len(corpus.train), corpus.n_labels, corpus.label_frequencies().min() > 0
    (40, 20, np.True_)
    """
    return CorpusGenerator(n_points, n_labels, seed, **options).corpus()


def write_synthetic(
    directory: str | Path, *, n_points: int, n_labels: int, seed: int = 0, **options: Any
) -> Path:
    """Generate the same corpus as `synthetic_corpus`, and write it to a new or empty folder.

    The format is ``raw/trn_X.txt`` + ``Y.trn.npz``. The folder appears only when it is complete.
    """
    with staged_folder(Path(directory)) as staging:
        corpus = synthetic_corpus(n_points, n_labels, seed, **options)
        write_npz_folder(corpus, staging, RAW)
        settings = {"n_points": n_points, "n_labels": n_labels, "seed": seed, **options}
        fields = "\n".join(f"- {name} = {value}" for name, value in settings.items())
        note = f"# A generated corpus\n\n{corpus.notes['coverage']}\n\n{fields}\n"
        (staging / "SOURCE.md").write_text(note, encoding="utf-8", newline="\n")
    return Path(directory)
