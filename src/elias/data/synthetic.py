"""Generate synthetic corpora of any size from a seed.

How it is made. There are topics, each with its own words. A label has one or more *modes*: it
belongs to that many unrelated topics, and in each it shows itself by other words. Frequent labels
have more modes. A point is about one topic; its labels are drawn among the topic's, following
the power law, and its text mixes words of the topic, words of its labels and noise. A tree that
files a label under one place cannot serve a label with several modes; a learned graph can.

Points come in chunks, each with a random generator of its own, and go straight to disk: memory
grows with the labels (some tens of bytes each), hardly with the points.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix

from elias.data.atomic import LabelMatrixWriter, staged_folder
from elias.data.corpus import Corpus, Split
from elias.data.readers.files import SHORT
from elias.errors import DataError
from elias.progress import progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


logger = logging.getLogger(__name__)

_SYLLABLES = np.array([c + v for c in "bcdfghjklmnprstvz" for v in "aeiou"], dtype="S2")
_SCATTER = 48_271
"""Coprime to the number of syllables: neighbouring numbers become unlike words."""


def pseudowords(start: int, stop: int, min_syllables: int = 2) -> list[str]:
    """Return the words of the numbers ``start`` … ``stop - 1``; low numbers give short words.

    >>> pseudowords(1, 4)
    ['vepi', 'sija', 'pobo']
    >>> len(set(pseudowords(0, 10_000)))
    10000
    """
    words: list[str] = []
    n_syllables, first = min_syllables, 0
    while start < stop:
        end = first + len(_SYLLABLES) ** n_syllables
        words += _words_of(np.arange(start, min(stop, end)) - first, n_syllables)
        start = max(start, min(stop, end))
        first, n_syllables = end, n_syllables + 1
    return words


def _words_of(numbers: np.ndarray, n_syllables: int) -> list[str]:
    """Write numbers as ``n_syllables`` digits to the base of the syllables, scattered first."""
    base = len(_SYLLABLES)
    numbers = numbers.astype(np.int64) * _SCATTER % base**n_syllables
    digits = numbers[:, None] // base ** np.arange(n_syllables) % base  # (n, n_syllables)
    joined = np.ascontiguousarray(_SYLLABLES[digits]).view(f"S{2 * n_syllables}")
    return joined.ravel().astype(str).tolist()


SPLIT_STREAMS = {"train": 1, "validation": 2, "test": 3}
"""Which random stream the points of a split come from; 0 makes the world."""

_POINTS_PER_CHUNK = 8192
_CELLS_PER_CHUNK = 1 << 20
_NO_LABEL = -1
_NEARLY_ZERO = 1e-9
_MAY_BE_ZERO = ("seed", "n_test", "n_validation", "tail", "noise_words", "label_signal")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSpec:
    """What to generate; the same values give the same corpus."""

    n_points: int
    """Training points."""
    n_labels: int
    """L."""
    seed: int = 0
    n_test: int | None = None
    """Test points; a quarter of the training points when None."""
    n_validation: int = 0
    """Validation points; none by default."""
    tail: float = 1.0
    """The r-th most frequent label is drawn in proportion to r^-tail; 0 draws all alike."""
    modes: int = 3
    """The most topics a label can belong to; 1 makes every label a single cluster."""
    points_per_mode: int = 8
    """A label has a mode for every so many training points it can expect, up to ``modes``."""
    labels_per_point: float = 3.0
    """Labels of a point on average, at least 1 (a little more where rare labels are spread)."""
    labels_per_topic: int = 32
    """Labels whose first mode lies in the same topic."""
    vocabulary: int = 50_000
    """Different words in all."""
    words_per_topic: int = 30
    """Words that a topic calls its own."""
    words_per_label: int = 3
    """Words that a label calls its own, in each of its modes."""
    topic_words: int = 4
    """Words of the topic in each text."""
    noise_words: int = 3
    """Words in each text that mean nothing, the vocabulary's first ones most often."""
    label_signal: float = 0.8
    """How likely a label of a point is to leave one of its words in the text."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name in _MAY_BE_ZERO else 1
            if value is not None and not value >= least:
                raise DataError(f"synthetic corpus: {name} must be at least {least}, not {value}")
        if self.label_signal > 1:
            raise DataError(f"synthetic corpus: label_signal is at most 1, not {self.label_signal}")

    @property
    def n_topics(self) -> int:
        """Return how many topics there are: enough for every label's modes to differ."""
        return min(self.n_labels, max(2 * self.modes, -(-self.n_labels // self.labels_per_topic)))

    @property
    def sizes(self) -> dict[str, int]:
        """Return how many points each split has, leaving out empty ones."""
        n_test = -(-self.n_points // 4) if self.n_test is None else self.n_test
        sizes = {"train": self.n_points, "validation": self.n_validation, "test": n_test}
        return {name: size for name, size in sizes.items() if size}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some points: their texts, how many labels each has, all their label ids, their topics."""

    texts: list[str]
    lengths: NDArray[np.int64]
    label_ids: NDArray[np.int32]
    topics: NDArray[np.int64]


class World:
    """The topics, labels and words that points are drawn from.

    Labels are handled by rank (0 is the most frequent) and get a shuffled id on their way out,
    so that ids say nothing.
    """

    def __init__(self, spec: SyntheticSpec) -> None:
        self.spec = spec
        rng = np.random.default_rng([spec.seed, 0])
        self.ids = rng.permutation(spec.n_labels).astype(np.int32)
        self.n_with_mode = self._count_modes()
        self._by_first_topic = rng.permutation(spec.n_labels).astype(np.int32)
        self._topic_of = self._draw_topics(rng)
        self._build_members()
        self._labels_per_cover, self._covers_per_topic = self._plan_cover()
        self._cover_order = self._order_covers(rng)
        self.words = pseudowords(0, spec.vocabulary)

    def chunks(self, split: str) -> Iterator[Chunk]:
        """Yield the points of a split; every label is tried for once among the training points."""
        n_points = self.spec.sizes[split]
        step = _CELLS_PER_CHUNK // (self._widest_topic * self._labels_per_cover)
        step = min(max(step, 1), _POINTS_PER_CHUNK)
        for number, start in enumerate(range(0, n_points, step)):
            rng = np.random.default_rng([self.spec.seed, SPLIT_STREAMS[split], number])
            rows = np.arange(start, min(start + step, n_points))
            topics, forced = self._draw_subjects(rng, len(rows))
            if split == "train":
                self._cover(rows, topics, forced)
            yield self._draw_chunk(rng, topics, forced)

    def _count_modes(self) -> list[int]:
        """Return how many labels, from the most frequent on, have a 1st, 2nd, … mode."""
        spec = self.spec
        edges = _power_law_cdf(np.arange(1.0, spec.n_labels + 2), spec.n_labels, spec.tail)
        expected = np.diff(edges) * (spec.n_points * spec.labels_per_point)
        n_modes = min(spec.modes, spec.n_topics)
        more = [int((expected >= spec.points_per_mode * m).sum()) for m in range(2, n_modes + 1)]
        return [spec.n_labels, *(n for n in more if n)]

    def _draw_topics(self, rng: np.random.Generator) -> list[NDArray[np.int32]]:
        """Return for each mode the topic of every label that has it; a label's all differ."""
        n_topics = self.spec.n_topics
        topic_of = [np.empty(self.spec.n_labels, dtype=np.int32)]
        spread = np.arange(self.spec.n_labels) * n_topics // self.spec.n_labels
        topic_of[0][self._by_first_topic] = spread
        for n in self.n_with_mode[1:]:
            topics = (rng.permutation(n) * n_topics // n).astype(np.int32)
            for _ in topic_of:  # each pass moves past one earlier mode at least
                for earlier in topic_of:
                    topics = np.where(topics == earlier[:n], (topics + 1) % n_topics, topics)
            topic_of.append(topics)
        return topic_of

    def _build_members(self) -> None:
        """List the labels of each topic with the mode that brings them there, CSR-like."""
        n_modes, n_labels = len(self.n_with_mode), self.spec.n_labels
        keys = np.concatenate(
            [
                (topics.astype(np.int64) * n_labels + np.arange(len(topics))) * n_modes + mode
                for mode, topics in enumerate(self._topic_of)
            ]
        )
        keys.sort()
        self._member_mode = (keys % n_modes).astype(np.int8)
        keys //= n_modes
        self._member_rank = (keys % n_labels).astype(np.int32)
        keys //= n_labels
        sizes = np.bincount(keys, minlength=self.spec.n_topics)
        self._member_start = np.concatenate([[0], np.cumsum(sizes)])
        self._widest_topic = int(sizes.max())

    def _plan_cover(self) -> tuple[int, int]:
        """Return how many labels a covering point takes on, and how many such points a topic needs.

        Covering every label once takes half of the training points at most, if the average
        number of labels per point allows it.
        """
        spec = self.spec
        widest = -(-spec.n_labels // spec.n_topics)
        most = int(spec.labels_per_point)
        for together in range(1, most):
            per_topic = -(-widest // together)
            if 2 * per_topic * spec.n_topics <= spec.n_points:
                return together, per_topic
        return most, -(-widest // most)

    def _order_covers(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return the covers in the order the training points take them, as many as there is room.

        Where they cannot all be had, half of the points are left to the power law.
        """
        n_covers, n_points = self._covers_per_topic * self.spec.n_topics, self.spec.n_points
        room = n_covers if n_covers <= n_points else n_points // 2
        return rng.permutation(n_covers)[:room]

    def _draw_subjects(
        self, rng: np.random.Generator, n: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw for each point a label by the power law, one of its modes, and so its topic."""
        spec = self.spec
        ranks = _draw_power_law(rng, n, spec.n_labels, spec.tail)
        modes = (rng.random(n) * self._count_modes_of(ranks)).astype(np.int64)
        topics = np.empty(n, dtype=np.int64)
        for mode, topic_of in enumerate(self._topic_of):
            topics[modes == mode] = topic_of[ranks[modes == mode]]
        forced = np.full((n, self._labels_per_cover), _NO_LABEL)
        forced[:, 0] = ranks
        return topics, forced

    def _count_modes_of(self, ranks: NDArray[np.integer]) -> NDArray[np.int64]:
        counts: NDArray[np.int64] = np.sum([ranks < n for n in self.n_with_mode], axis=0)
        return counts

    def _cover(
        self, rows: NDArray[np.int64], topics: NDArray[np.int64], forced: NDArray[np.int64]
    ) -> None:
        """Give the covering points among ``rows`` their topic and labels, in place."""
        spec = self.spec
        n_covers = len(self._cover_order)
        before = rows * n_covers // spec.n_points
        covering = np.flatnonzero((rows + 1) * n_covers // spec.n_points > before)
        covers = self._cover_order[before[covering]]
        topic, part = np.divmod(covers, self._covers_per_topic)
        first = -(-topic * spec.n_labels // spec.n_topics)
        end = -(-(topic + 1) * spec.n_labels // spec.n_topics)
        place = (first + part * self._labels_per_cover)[:, None] + np.arange(forced.shape[1])
        there = place < end[:, None]
        labels = self._by_first_topic[np.where(there, place, 0)]
        used = there.any(axis=1)
        topics[covering[used]] = topic[used]
        forced[covering[used]] = np.where(there, labels, _NO_LABEL)[used]

    def _draw_chunk(
        self, rng: np.random.Generator, topics: NDArray[np.int64], forced: NDArray[np.int64]
    ) -> Chunk:
        ranks, modes = self._draw_labels(rng, topics, forced)
        ids = np.where(ranks == _NO_LABEL, self.spec.n_labels, self.ids[ranks])
        ids.sort(axis=1)
        return Chunk(
            texts=self._draw_texts(rng, topics, ranks, modes),
            lengths=(ranks != _NO_LABEL).sum(axis=1),
            label_ids=ids[ids < self.spec.n_labels].astype(np.int32),
            topics=topics,
        )

    def _draw_labels(
        self, rng: np.random.Generator, topics: NDArray[np.int64], forced: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Fill up the forced labels with others of the topic, without repetition.

        Adding Gumbel noise to log-weights and keeping the largest draws without replacement.
        Returns ranks and modes, both (n, most labels of a point), padded with `_NO_LABEL`.
        """
        starts, ends = self._member_start[topics], self._member_start[topics + 1]
        place = starts[:, None] + np.arange(self._widest_topic)
        there = place < ends[:, None]
        place = np.where(there, place, 0)
        ranks = self._member_rank[place].astype(np.int64)
        weights = -self.spec.tail * np.log(ranks + 1) - np.log(self._count_modes_of(ranks))
        keys = np.where(there, weights + rng.gumbel(size=ranks.shape), -np.inf)
        must = (ranks[:, :, None] == forced[:, None, :]).any(axis=2) & there
        keys[must] = np.inf
        wanted = 1 + rng.poisson(self.spec.labels_per_point - 1, size=len(topics))
        wanted = np.clip(wanted, must.sum(axis=1), ends - starts)
        order = np.argsort(-keys, axis=1)[:, : wanted.max()]
        chosen = np.arange(order.shape[1]) < wanted[:, None]
        ranks = np.take_along_axis(ranks, order, axis=1)
        modes = self._member_mode[np.take_along_axis(place, order, axis=1)].astype(np.int64)
        return np.where(chosen, ranks, _NO_LABEL), np.where(chosen, modes, _NO_LABEL)

    def _draw_texts(
        self,
        rng: np.random.Generator,
        topics: NDArray[np.int64],
        ranks: NDArray[np.int64],
        modes: NDArray[np.int64],
    ) -> list[str]:
        spec, n = self.spec, len(topics)
        which = rng.integers(spec.words_per_topic, size=(n, spec.topic_words))
        of_topic = self._word(2 * (topics[:, None] * spec.words_per_topic + which))
        which = rng.integers(spec.words_per_label, size=ranks.shape)
        sense = ranks * len(self.n_with_mode) + modes
        of_labels = self._word(2 * (sense * spec.words_per_label + which) + 1)
        shown = (ranks != _NO_LABEL) & (rng.random(ranks.shape) < spec.label_signal)
        noise = _draw_power_law(rng, (n, spec.noise_words), spec.vocabulary, 1.0)
        words = np.hstack([of_topic, np.where(shown, of_labels, _NO_LABEL), noise])
        order = np.argsort(rng.random(words.shape), axis=1)
        words = np.take_along_axis(words, order, axis=1)
        table = self.words
        return [" ".join([table[word] for word in row if word >= 0]) for row in words.tolist()]

    def _word(self, number: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the word of a topic (even numbers) or label (odd) by hashing: no table."""
        return _scramble(number, self.spec.seed) % self.spec.vocabulary


def _power_law_cdf(x: NDArray[np.float64], n: int, exponent: float) -> NDArray[np.float64]:
    """Return the mass of x^-exponent from 1 to ``x``, as a share of that from 1 to n + 1."""
    power = 1 - exponent
    mass: NDArray[np.float64]
    if abs(power) < _NEARLY_ZERO:
        mass = np.log(x) / np.log(n + 1)
    else:
        mass = (x**power - 1) / ((n + 1) ** power - 1)
    return mass


def _draw_power_law(
    rng: np.random.Generator, size: int | tuple[int, int], n: int, exponent: float
) -> NDArray[np.int64]:
    """Draw ranks 0 … n - 1 by inverting `_power_law_cdf`, which needs no table."""
    mass = rng.random(size)
    power = 1 - exponent
    if abs(power) < _NEARLY_ZERO:
        x = (n + 1) ** mass
    else:
        x = (1 + mass * ((n + 1) ** power - 1)) ** (1 / power)
    return np.clip(x.astype(np.int64) - 1, 0, n - 1)


def _scramble(numbers: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Hash numbers to 63 bits (the finaliser of splitmix64)."""
    z = numbers.astype(np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


_NAMES_PER_WRITE = 1 << 17
_NAME_SYLLABLES = 3


def write_synthetic(
    directory: str | Path, *, n_points: int, n_labels: int, seed: int = 0, **options: Any
) -> Path:
    """Generate a corpus straight to disk, in the ``raw/trn_X.txt`` + ``Y.trn.npz`` format.

    Args:
        directory: The folder to make; nothing but an empty folder may be there.
        n_points: Training points.
        n_labels: L.
        seed: Decides everything that is drawn.
        **options: The other fields of `SyntheticSpec`.

    Returns:
        The folder, which appears only when it is complete.
    """
    spec = SyntheticSpec(n_points=n_points, n_labels=n_labels, seed=seed, **options)
    target = Path(directory)
    with staged_folder(target) as staging:
        (staging / "raw").mkdir()
        world = World(spec)
        _write_label_names(staging / "raw" / "Y.txt", n_labels)
        n_covered = {name: _write_split(staging, world, name) for name in spec.sizes}["train"]
        note = _describe(spec, n_labels - n_covered)
        (staging / "SOURCE.md").write_text(note, encoding="utf-8", newline="\n")
    return target


def synthetic_corpus(n_points: int, n_labels: int, seed: int = 0, **options: Any) -> Corpus:
    """Generate a corpus in memory, the same that `write_synthetic` writes.

    >>> corpus = synthetic_corpus(n_points=40, n_labels=20, modes=2)
    >>> len(corpus.train), corpus.n_labels, corpus.label_frequencies().min() > 0
    (40, 20, np.True_)
    """
    spec = SyntheticSpec(n_points=n_points, n_labels=n_labels, seed=seed, **options)
    world = World(spec)
    splits = {name: _collect(list(world.chunks(name)), n_labels) for name in spec.sizes}
    corpus = Corpus(
        train=splits["train"],
        validation=splits.get("validation"),
        test=splits.get("test"),
        label_names=pseudowords(0, n_labels, _NAME_SYLLABLES),
        format="synthetic",
    )
    coverage = _describe_coverage(n_labels, int((corpus.label_frequencies() == 0).sum()))
    return replace(corpus, notes={"coverage": coverage})


def _write_label_names(path: Path, n_labels: int) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for start in range(0, n_labels, _NAMES_PER_WRITE):
            names = pseudowords(start, min(start + _NAMES_PER_WRITE, n_labels), _NAME_SYLLABLES)
            out.writelines(f"{name}\n" for name in names)


def _write_split(folder: Path, world: World, split: str) -> int:
    """Write one split and return how many different labels it has."""
    spec, prefix = world.spec, SHORT[split]
    seen = np.zeros(spec.n_labels, dtype=bool)
    with (
        (folder / "raw" / f"{prefix}_X.txt").open("w", encoding="utf-8", newline="\n") as texts,
        LabelMatrixWriter(folder / f"Y.{prefix}.npz", spec.n_labels) as labels,
        progress(f"generating {split} points", spec.sizes[split]) as advance,
    ):
        for chunk in world.chunks(split):
            texts.writelines(f"{text}\n" for text in chunk.texts)
            labels.append(chunk.lengths, chunk.label_ids)
            seen[chunk.label_ids] = True
            advance(len(chunk.texts))
    return int(seen.sum())


def _collect(chunks: list[Chunk], n_labels: int) -> Split:
    indices = np.concatenate([chunk.label_ids for chunk in chunks])
    indptr = np.cumsum(np.concatenate([[0], *(chunk.lengths for chunk in chunks)]))
    data = np.ones(len(indices), dtype=np.float32)
    labels = csr_matrix((data, indices, indptr), shape=(len(indptr) - 1, n_labels))
    return Split(labels=labels, texts=[text for chunk in chunks for text in chunk.texts])


def _describe_coverage(n_labels: int, n_missing: int) -> str:
    if not n_missing:
        return f"Each of the {n_labels:,} labels has a training point."
    message = (
        f"{n_missing:,} of {n_labels:,} labels have no training point: "
        "more points, or more labels per point, would reach them."
    )
    logger.warning("synthetic corpus: %s", message)
    return message


def _describe(spec: SyntheticSpec, n_missing: int) -> str:
    fields = "\n".join(f"- {name} = {value}" for name, value in asdict(spec).items())
    coverage = _describe_coverage(spec.n_labels, n_missing)
    return f"# A generated corpus\n\n{coverage}\n\n{fields}\n"
