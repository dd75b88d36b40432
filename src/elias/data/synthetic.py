"""Generate synthetic corpora of any size from a seed.

Each topic has its own words. A label has one or more *modes*. Each mode assigns the label to a
different topic, with different label words. Frequent labels have more modes. A point has one topic.
Its labels are drawn from the labels of the topic by a power law, and its text mixes words of the
topic, words of its labels and noise. A tree that assigns each label to one cluster cannot represent
a label with several modes; a learned graph can.

Points are drawn in chunks, each with its own random generator. The texts of a chunk are written
immediately. Memory therefore grows only with the labels (some tens of bytes each) and with the
point-label pairs.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.sparse import csr_matrix, save_npz

from elias.data.atomic import staged_folder
from elias.data.corpus import SPLITS, Corpus, Split
from elias.data.readers.base import SHORT
from elias.data.writers import write_lines
from elias.errors import DataError
from elias.progress import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


logger = logging.getLogger(__name__)

_SYLLABLES = np.array([c + v for c in "bcdfghjklmnprstvz" for v in "aeiou"], dtype="S2")
_SCATTER = 48_271  # coprime to the number of syllables; makes consecutive words dissimilar
_NAME_SYLLABLES = 3
_POINTS_PER_CHUNK = 8192
_CELLS_PER_CHUNK = 1 << 20
_NO_LABEL = -1
_NEARLY_ZERO = 1e-9
_MAY_BE_ZERO = ("seed", "n_test", "n_validation", "tail", "noise_words", "label_signal")


def pseudowords(start: int, stop: int, min_syllables: int = 2) -> list[str]:
    """Return artificial words numbered ``start`` to ``stop - 1``. Low numbers give short words.

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
        numbers = np.arange(start, min(stop, first + n_words), dtype=np.int64) - first
        numbers = numbers * _SCATTER % n_words
        digits = numbers[:, None] // base ** np.arange(n_syllables) % base  # (n, n_syllables)
        joined = np.ascontiguousarray(_SYLLABLES[digits]).view(f"S{2 * n_syllables}")
        words += joined.ravel().astype(str).tolist()
        first += n_words
        start, n_syllables = max(start, first), n_syllables + 1
    return words


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSpec:
    """The parameters of a synthetic corpus. The same values give the same corpus."""

    n_points: int
    """Number of training points."""
    n_labels: int
    """Number of labels L."""
    seed: int = 0
    n_test: int | None = None
    """Number of test points. None means a quarter of the training points."""
    n_validation: int = 0
    """Number of validation points."""
    tail: float = 1.0
    """The r-th most frequent label has probability ∝ r^-tail. 0 makes all labels equally likely."""
    modes: int = 3
    """Maximum number of modes of a label. With 1, each label belongs to a single topic."""
    points_per_mode: int = 8
    """A label gets one mode per this many expected training points, up to ``modes``."""
    labels_per_point: float = 3.0
    """Mean number of labels per point, at least 1. Covering rare labels may increase it."""
    labels_per_topic: int = 32
    """Number of labels that have their first mode in the same topic."""
    vocabulary: int = 50_000
    """Number of different words."""
    words_per_topic: int = 30
    """Number of different words of each topic."""
    words_per_label: int = 3
    """Number of different words of each label in each of its modes."""
    topic_words: int = 4
    """Number of topic words in each text."""
    noise_words: int = 3
    """Number of noise words in each text. The first words of the vocabulary are most frequent."""
    label_signal: float = 0.8
    """Probability that a label of a point adds one of its words to the text."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name in _MAY_BE_ZERO else 1
            if value is not None and not value >= least:
                raise DataError(f"synthetic corpus: {name} must be at least {least}, not {value}")
        if self.label_signal > 1:
            raise DataError(f"synthetic corpus: label_signal is at most 1, not {self.label_signal}")

    @property
    def n_topics(self) -> int:
        """Return the number of topics. If possible, all modes of a label have different topics."""
        return min(self.n_labels, max(2 * self.modes, -(-self.n_labels // self.labels_per_topic)))

    @property
    def sizes(self) -> dict[str, int]:
        """Return the number of points of each split that is not empty."""
        n_test = -(-self.n_points // 4) if self.n_test is None else self.n_test
        sizes = zip(SPLITS, (self.n_points, self.n_validation, n_test), strict=True)
        return {name: size for name, size in sizes if size}


class Points(NamedTuple):
    """A chunk of points of a synthetic corpus."""

    texts: list[str]
    lengths: Ints
    """The number of labels of each point."""
    label_ids: NDArray[np.int32]
    """The label ids of all points, concatenated. The ids of each point are sorted."""
    topics: Ints


class CorpusGenerator:
    """Draws points from topics, labels and words.

    Labels are handled by rank (0 is the most frequent). Their ids are shuffled, so that an id
    carries no information.
    """

    def __init__(self, spec: SyntheticSpec) -> None:
        self.spec = spec
        rng = np.random.default_rng([spec.seed, 0])
        self.ids = rng.permutation(spec.n_labels).astype(np.int32)
        self.n_with_mode = self._count_modes()
        """Number of labels that have a 1st, 2nd, … mode. They are always the most frequent ones."""
        self._by_first_topic = rng.permutation(spec.n_labels).astype(np.int32)
        self._topic_of = self._draw_topics(rng)
        self._build_members()
        self._plan_covers(rng)
        self.words = pseudowords(0, spec.vocabulary)

    def draw(self, split: str, add_texts: Callable[[list[str]], object]) -> csr_matrix:
        """Pass the texts of a split to ``add_texts``, chunk by chunk, and return its labels."""
        ids, lengths = [], [np.zeros(1, dtype=np.int64)]
        with progress(f"generating {split} points", self.spec.sizes[split]) as advance:
            for points in self.chunks(split):
                add_texts(points.texts)
                ids.append(points.label_ids)
                lengths.append(points.lengths)
                advance(len(points.texts))
        indices, indptr = np.concatenate(ids), np.cumsum(np.concatenate(lengths))
        data = np.ones(len(indices), dtype=np.float32)
        return csr_matrix((data, indices, indptr), shape=(len(indptr) - 1, self.spec.n_labels))

    def chunks(self, split: str) -> Iterator[Points]:
        """Yield the points of a split. If possible, every label has at least one training point."""
        n_points = self.spec.sizes[split]
        step = _CELLS_PER_CHUNK // (self._widest_topic * self._labels_per_cover)
        step = min(max(step, 1), _POINTS_PER_CHUNK)
        stream = 1 + SPLITS.index(split)  # 0 is used in __init__
        for number, start in enumerate(range(0, n_points, step)):
            rng = np.random.default_rng([self.spec.seed, stream, number])
            rows = np.arange(start, min(start + step, n_points))
            topics, forced = self._draw_topics_of_points(rng, len(rows))
            if split == "train":
                self._cover(rows, topics, forced)
            ranks, modes = self._draw_labels(rng, topics, forced)
            ids = np.where(ranks == _NO_LABEL, self.spec.n_labels, self.ids[ranks])
            ids.sort(axis=1)
            yield Points(
                texts=self._draw_texts(rng, topics, ranks, modes),
                lengths=(ranks != _NO_LABEL).sum(axis=1),
                label_ids=ids[ids < self.spec.n_labels].astype(np.int32),
                topics=topics,
            )

    def _count_modes(self) -> list[int]:
        spec = self.spec
        edges = _power_law_cdf(np.arange(1.0, spec.n_labels + 2), spec.n_labels, spec.tail)
        expected = np.diff(edges) * (spec.n_points * spec.labels_per_point)
        n_modes = min(spec.modes, spec.n_topics)
        more = [int((expected >= spec.points_per_mode * m).sum()) for m in range(2, n_modes + 1)]
        return [spec.n_labels, *(n for n in more if n)]

    def _draw_topics(self, rng: np.random.Generator) -> list[NDArray[np.int32]]:
        """Return, for each mode, the topics of the labels with it. A label's topics differ."""
        n_topics, n_labels = self.spec.n_topics, self.spec.n_labels
        topic_of = [np.empty(n_labels, dtype=np.int32)]
        topic_of[0][self._by_first_topic] = np.arange(n_labels) * n_topics // n_labels
        for n in self.n_with_mode[1:]:
            topics = (rng.permutation(n) * n_topics // n).astype(np.int32)
            for _ in topic_of:  # each pass moves past at least one earlier mode
                for earlier in topic_of:
                    topics = np.where(topics == earlier[:n], (topics + 1) % n_topics, topics)
            topic_of.append(topics)
        return topic_of

    def _build_members(self) -> None:
        """Store the labels of each topic, and the modes that assign them to it, in CSR layout."""
        n_modes, n_labels = len(self.n_with_mode), self.spec.n_labels
        keys = np.concatenate(
            [
                (topics.astype(np.int64) * n_labels + np.arange(len(topics))) * n_modes + mode
                for mode, topics in enumerate(self._topic_of)
            ]
        )
        keys.sort()
        self._member_mode = (keys % n_modes).astype(np.int8)
        self._member_rank = (keys // n_modes % n_labels).astype(np.int32)
        sizes = np.bincount(keys // (n_modes * n_labels), minlength=self.spec.n_topics)
        self._member_start = np.concatenate([[0], np.cumsum(sizes)])
        self._widest_topic = int(sizes.max())

    def _plan_covers(self, rng: np.random.Generator) -> None:
        """Plan the covers: training points with prescribed labels that together cover every label.

        Each cover has the smallest number of labels for which all covers together take at most
        half of the training points, but at most the mean number of labels per point. If there are
        more covers than points, only half of the points are covers, and the labels of the other
        points are drawn only by the power law.
        """
        spec = self.spec
        widest = -(-spec.n_labels // spec.n_topics)
        most = int(spec.labels_per_point)
        for per_cover in range(1, most + 1):
            per_topic = -(-widest // per_cover)
            if 2 * per_topic * spec.n_topics <= spec.n_points:
                break
        self._labels_per_cover, self._covers_per_topic = per_cover, per_topic
        n_covers = per_topic * spec.n_topics
        room = n_covers if n_covers <= spec.n_points else spec.n_points // 2
        self._cover_order = rng.permutation(n_covers)[:room]

    def _draw_topics_of_points(self, rng: np.random.Generator, n: int) -> tuple[Ints, Ints]:
        """Draw a label for each point by the power law, and then one of that label's topics.

        Return the topics (n,) and the labels that each point must have (n, labels per cover),
        padded with `_NO_LABEL`.
        """
        ranks = _draw_power_law(rng, n, self.spec.n_labels, self.spec.tail)
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
        """Set the topic and the prescribed labels of those ``rows`` that are covers, in place."""
        spec = self.spec
        n_covers = len(self._cover_order)
        before = rows * n_covers // spec.n_points
        covering = np.flatnonzero((rows + 1) * n_covers // spec.n_points > before)
        covers = self._cover_order[before[covering]]
        topic, part = np.divmod(covers, self._covers_per_topic)
        first = -(-topic * spec.n_labels // spec.n_topics)
        end = -(-(topic + 1) * spec.n_labels // spec.n_topics)
        position = (first + part * self._labels_per_cover)[:, None] + np.arange(forced.shape[1])
        exists = position < end[:, None]
        labels = self._by_first_topic[np.where(exists, position, 0)]
        used = exists.any(axis=1)
        topics[covering[used]] = topic[used]
        forced[covering[used]] = np.where(exists, labels, _NO_LABEL)[used]

    def _draw_labels(
        self, rng: np.random.Generator, topics: Ints, forced: Ints
    ) -> tuple[Ints, Ints]:
        """Add labels of the topic to the forced ones, without replacement (Gumbel top-k).

        Return ranks and modes, both (n, maximum labels of a point), padded with `_NO_LABEL`.
        """
        starts, ends = self._member_start[topics], self._member_start[topics + 1]
        position = starts[:, None] + np.arange(self._widest_topic)
        exists = position < ends[:, None]
        position = np.where(exists, position, 0)
        ranks = self._member_rank[position].astype(np.int64)
        weights = -self.spec.tail * np.log(ranks + 1) - np.log(self._count_modes_of(ranks))
        keys = np.where(exists, weights + rng.gumbel(size=ranks.shape), -np.inf)
        must = (ranks[:, :, None] == forced[:, None, :]).any(axis=2) & exists
        keys[must] = np.inf
        wanted = 1 + rng.poisson(self.spec.labels_per_point - 1, size=len(topics))
        wanted = np.clip(wanted, must.sum(axis=1), ends - starts)
        order = np.argsort(-keys, axis=1)[:, : wanted.max()]
        chosen = np.arange(order.shape[1]) < wanted[:, None]
        ranks = np.take_along_axis(ranks, order, axis=1)
        modes = self._member_mode[np.take_along_axis(position, order, axis=1)].astype(np.int64)
        return np.where(chosen, ranks, _NO_LABEL), np.where(chosen, modes, _NO_LABEL)

    def _draw_texts(
        self, rng: np.random.Generator, topics: Ints, ranks: Ints, modes: Ints
    ) -> list[str]:
        """Draw the words of each text. Topic words hash even numbers, label words odd numbers."""
        spec, n = self.spec, len(topics)
        which = rng.integers(spec.words_per_topic, size=(n, spec.topic_words))
        of_topic = _hash(2 * (topics[:, None] * spec.words_per_topic + which), spec.seed)
        which = rng.integers(spec.words_per_label, size=ranks.shape)
        sense = ranks * len(self.n_with_mode) + modes
        of_labels = _hash(2 * (sense * spec.words_per_label + which) + 1, spec.seed)
        visible = (ranks != _NO_LABEL) & (rng.random(ranks.shape) < spec.label_signal)
        of_labels = np.where(visible, of_labels % spec.vocabulary, _NO_LABEL)
        noise = _draw_power_law(rng, (n, spec.noise_words), spec.vocabulary, 1.0)
        words = np.hstack([of_topic % spec.vocabulary, of_labels, noise])
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
    """Draw ranks 0 … n - 1 by inverting `_power_law_cdf`, without a table."""
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


def write_synthetic(
    directory: str | Path, *, n_points: int, n_labels: int, seed: int = 0, **options: Any
) -> Path:
    """Generate a corpus on disk, in the ``raw/trn_X.txt`` + ``Y.trn.npz`` format.

    Args:
        directory: The folder to create. If it exists, it must be empty.
        n_points: Number of training points.
        n_labels: Number of labels L.
        seed: Seed of all random choices.
        **options: Other fields of `SyntheticSpec`.

    Returns:
        The folder, which appears only when it is complete.
    """
    spec = SyntheticSpec(n_points=n_points, n_labels=n_labels, seed=seed, **options)
    generator = CorpusGenerator(spec)
    with staged_folder(Path(directory)) as staging:
        write_lines(staging / "raw" / "Y.txt", pseudowords(0, n_labels, _NAME_SYLLABLES))
        coverage = ""
        for split in spec.sizes:
            path = staging / "raw" / f"{SHORT[split]}_X.txt"
            with path.open("w", encoding="utf-8", newline="\n") as out:
                labels = generator.draw(split, lambda texts: out.write("\n".join([*texts, ""])))
            save_npz(staging / f"Y.{SHORT[split]}.npz", labels)
            coverage = coverage or _describe_coverage(labels)  # of the training split
        fields = "\n".join(f"- {name} = {value}" for name, value in asdict(spec).items())
        note = f"# A generated corpus\n\n{coverage}\n\n{fields}\n"
        (staging / "SOURCE.md").write_text(note, encoding="utf-8", newline="\n")
    return Path(directory)


def synthetic_corpus(n_points: int, n_labels: int, seed: int = 0, **options: Any) -> Corpus:
    """Generate the same corpus as `write_synthetic`, in memory.

    >>> corpus = synthetic_corpus(n_points=40, n_labels=20, modes=2)
    >>> len(corpus.train), corpus.n_labels, corpus.label_frequencies().min() > 0
    (40, 20, np.True_)
    """
    spec = SyntheticSpec(n_points=n_points, n_labels=n_labels, seed=seed, **options)
    generator = CorpusGenerator(spec)
    splits: dict[str, Any] = {}
    for name in spec.sizes:
        texts: list[str] = []
        splits[name] = Split(labels=generator.draw(name, texts.extend), texts=texts)
    return Corpus(
        label_names=pseudowords(0, n_labels, _NAME_SYLLABLES),
        format="synthetic",
        notes={"coverage": _describe_coverage(splits["train"].labels)},
        **splits,
    )


def _describe_coverage(labels: csr_matrix) -> str:
    n_labels = labels.shape[1]
    n_missing = n_labels - len(np.unique(labels.indices))
    if not n_missing:
        return f"Each of the {n_labels:,} labels has a training point."
    message = (
        f"{n_missing:,} of {n_labels:,} labels have no training point; "
        "generate more points, or more labels per point, to cover them."
    )
    logger.warning("synthetic corpus: %s", message)
    return message
