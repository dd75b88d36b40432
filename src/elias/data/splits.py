"""Split points into training, validation and test sets, without dividing groups of points."""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from elias.config import ResolvedConfig
from elias.data.corpus import Corpus, Split
from elias.data.near_duplicates import NEAR_DUPLICATES, NO_GROUPS, training_groups
from elias.data.stats import corpus_stats
from elias.errors import ConfigError, DataError
from elias.labels import LabelTable

Rows = NDArray[np.int64]


logger = logging.getLogger(__name__)

DATA_SETTINGS = "data_settings"
"""Metadata key of the options that the training data was read with. Older models do not have it."""

TRAINING_SKETCH = "training_sketch"
"""Metadata key of the `text_sketch` of the training texts. Older models do not have it."""
_REDEFINED = ("duplicate_texts", "texts_in_train")  # older versions counted empty texts
_SKETCHED = 2048  # maximum number of hashes in a sketch

DEFAULT_TEST_SHARE = 0.2
"""Share of the points used for testing if the source has no splits."""
SETUP_POINTS = 1_000_000
"""Default of ``data.setup_points`` for a corpus on disk."""
_CHUNK = 1 << 16
_SAMPLE_CHUNK = 1 << 20


def hold_out(
    labels: csr_matrix,
    size: int,
    seed: int,
    *,
    covered: bool = True,
    groups: Rows | None = None,
) -> tuple[Rows, Rows]:
    """Choose validation points. If ``covered``, every label keeps a training point.

    Points, or whole groups of points, are tried in a seeded random order, see `_draw`.
    If ``covered``, a point or group is taken only if each of its labels also belongs to a point
    that remains in training. A point without labels, or a group with such a point, is then never
    taken.

    Args:
        labels: (N, L) relevance values. Each stored entry is a relevant label.
        size: Number of points to take. Fewer are taken if ``covered`` excludes too many points.
            With groups, the number is approximate.
        seed: Seed of the random order. The same seed gives the same points.
        covered: Whether every label must keep a training point.
        groups: (N,) the first row of each point's group. By default, each point is its own group.

    Returns:
        The training rows and the validation rows, each sorted.
    """
    n_points = int(labels.shape[0])
    if not labels.has_canonical_format:
        labels = labels.copy()
        labels.sum_duplicates()
    order = np.random.default_rng(seed).permutation(n_points)
    if not covered:
        return _draw(order, size, groups)
    refused = np.diff(labels.indptr) == 0
    remaining = np.bincount(labels.indices, minlength=labels.shape[1])
    for start in range(0, n_points, _CHUNK):  # refuse points with a label that no other point has
        indptr = labels.indptr[start : start + _CHUNK + 1].astype(np.int64)
        on_last_point = remaining[labels.indices[indptr[0] : indptr[-1]]] < 2
        before = np.concatenate([[0], np.cumsum(on_last_point)])[indptr - indptr[0]]
        refused[start : start + _CHUNK] |= np.diff(before) > 0

    def claim(rows: Rows) -> bool:
        """Hold out rows and return True, unless a label would lose its last training point."""
        spans = [labels.indices[labels.indptr[row] : labels.indptr[row + 1]] for row in rows]
        ids = np.concatenate(spans)
        np.subtract.at(remaining, ids, 1)
        if remaining[ids].min() >= 1:
            return True
        np.add.at(remaining, ids, 1)
        return False

    return _draw(order, size, groups, refused, claim)


def _draw(
    order: Rows,
    size: int,
    groups: Rows | None,
    refused: NDArray[np.bool_] | None = None,
    claim: Callable[[Rows], bool] | None = None,
) -> tuple[Rows, Rows]:
    """Draw whole groups in a random order until about ``size`` points are taken.

    A group is tried when its first row comes up in ``order``, so large groups are as likely as
    small ones. Groups of at most ``size / 2`` points are tried first, and taken if all of their
    points fit. If points are still missing, all other groups are tried, and taken if they bring the
    number of points closer to ``size``. If nothing can be taken in this way, the smallest group is
    taken. At least one point is never taken. Without groups, each point is its own group, and there
    is no second attempt.

    Args:
        order: All rows in random order.
        size: Number of points to take.
        groups: (N,) the first row of each point's group, or None if there are no groups.
        refused: (N,) True for points that must not be taken. Their groups are not taken either.
        claim: Function that gets the rows of a group before it is taken. It returns False to
            refuse the group.

    Returns:
        The rows that remain and the rows that are taken, each sorted.
    """
    firsts = np.arange(len(order)) if groups is None else groups
    sizes = np.bincount(firsts, minlength=len(order))
    members, ends = np.argsort(firsts, kind="stable"), np.cumsum(sizes)
    is_refused, is_taken = np.zeros((2, len(order)), dtype=bool)
    if refused is not None:
        is_refused[firsts[refused]] = True
    tried = order[(firsts[order] == order) & ~is_refused[order]]
    missing = size

    def draw(tried: Rows, limit: Callable[[int], float]) -> None:
        """Take groups in order until ``size`` points are taken.

        Skip groups larger than ``limit(missing)``, where ``missing`` is the number still needed.
        """
        nonlocal missing
        for start in range(0, len(tried), _CHUNK):
            chunk = tried[start : start + _CHUNK]
            for first, count in zip(chunk.tolist(), sizes[chunk].tolist(), strict=True):
                if missing <= 0:
                    return
                if count > limit(missing) or size - missing + count >= len(order):
                    continue
                if claim is None or claim(members[ends[first] - count : ends[first]]):
                    is_taken[first] = True
                    missing -= count

    draw(tried[sizes[tried] <= max(1, size // 2)], lambda missing: missing)
    if groups is not None:
        draw(tried[~is_taken[tried]], lambda missing: 2 * missing - 1)
        if missing == size:
            draw(tried[np.argsort(sizes[tried], kind="stable")], lambda _: np.inf)
    taken = is_taken[firsts]
    return np.flatnonzero(~taken), np.flatnonzero(taken)


def sample_setup_points(split: Split, config: ResolvedConfig) -> Rows | None:
    """Sample points for vocabulary, clusters and initialisation, or return None to use all."""
    size = config.data.setup_points or (SETUP_POINTS if split.on_disk else len(split))
    return None if size >= len(split) else sample_points(split.labels, size, config.seed)


def sample_points(labels: csr_matrix, size: int, seed: int) -> Rows:
    """Return ``size`` random rows, sorted, with at least one point of each label that has points.

    The sample is larger than ``size`` if covering the labels requires more rows. The same seed
    gives the same rows.
    """
    n_points, n_labels = labels.shape
    if size >= n_points:
        return np.arange(n_points, dtype=np.int64)
    order = np.random.default_rng(seed).permutation(n_points)
    rank = np.empty(n_points, dtype=np.int64)
    rank[order] = np.arange(n_points)
    first = np.full(n_labels, n_points, dtype=np.int64)  # the rank of each label's first point
    for start in range(0, n_points, _SAMPLE_CHUNK):
        stop = min(start + _SAMPLE_CHUNK, n_points)
        indptr = labels.indptr[start : stop + 1].astype(np.int64)
        ranks = np.repeat(rank[start:stop], np.diff(indptr))
        np.minimum.at(first, labels.indices[indptr[0] : indptr[-1]], ranks)
    needed = np.unique(first[first < n_points])
    taken = np.zeros(n_points, dtype=bool)
    taken[needed] = True
    spare = np.flatnonzero(~taken)[: max(0, size - len(needed))]
    taken[spare] = True
    return np.sort(order[taken])


def validation_split(corpus: Corpus, config: ResolvedConfig) -> tuple[Split, Split | None]:
    """Return the training and validation splits that `train` uses.

    If the corpus has a validation split, return its own splits. Otherwise hold out points of the
    training split, without dividing groups of points (see `training_groups`). The same resolved
    configuration gives the same points. The validation split is None if no point is held out.
    """
    if corpus.validation is not None:
        return corpus.train, corpus.validation
    size = config.eval.validation_size
    if size == 0:
        return corpus.train, None
    train = corpus.train
    if 2 * size > len(train):
        raise ConfigError(
            f"eval.validation_size is {size}, more than half of the {len(train)} training "
            "points; lower it, or set it to none to choose it automatically"
        )
    covered = config.eval.hold_out == "covered"
    groups = training_groups(corpus)
    train_rows, held_rows = hold_out(
        train.labels, size, config.seed, covered=covered, groups=groups
    )
    or_group = "" if groups is None else ", or is in a group that cannot be taken as a whole"
    if len(held_rows) == 0:
        logger.warning(
            "no point can be held out: each point has no labels or is the only point of a label%s",
            or_group,
        )
        return train, None
    if len(held_rows) < size:
        logger.warning(
            "%d points held out for validation instead of %d: each point that remains has no "
            "labels or is the only training point of a label%s",
            *(len(held_rows), size, or_group),
        )
    return train.take(train_rows), train.take(held_rows)


def hold_out_test(corpus: Corpus, test_size: float, seed: int) -> Corpus:
    """Return the corpus with test points drawn from its training split.

    Groups of points (see `training_groups`) are not divided. Whole groups are drawn until about
    ``test_size`` points are taken. Groups with more than half of this number are tried last.

    Args:
        corpus: A corpus without a test split, unless ``test_size`` is 0.
        test_size: A number of points, or a share below 1. If it is a share, a corpus with a single
            point is not split.
        seed: Seed of the random order. The same seed and size give the same points.

    Raises:
        DataError: If the corpus has a test split, or ``test_size`` is out of range.
    """
    if test_size == 0:
        return corpus
    if corpus.test is not None:
        raise DataError(f"{corpus.source}: has its own test split; do not set test_size")
    n_points = len(corpus.train)
    if 0 < test_size < 1:
        if n_points == 1:
            return corpus
        count = min(max(1, round(test_size * n_points)), n_points - 1)
    elif 0 <= test_size < n_points and test_size == int(test_size):  # False for NaN
        count = int(test_size)
    else:
        allowed = f"a share below 1, or a whole number below {n_points} (the number of points)"
        raise DataError(f"test_size must be {allowed}, not {test_size:g}")
    order = np.random.default_rng(seed).permutation(n_points)
    groups = training_groups(corpus)
    train, test = _draw(order, count, groups)
    note = f"{len(test):,} of {n_points:,} points set aside at random (seed {seed})"
    if groups is not None:
        n_groups = int((np.bincount(groups) > 1).sum())
        note += f", groups kept together: {n_groups}"
    logger.info("%s: %s", corpus.source, note)
    divided = corpus.with_splits(train=corpus.train.take(train), test=corpus.train.take(test))
    reading = {**corpus.reading, "test_size": test_size, "seed": seed}
    return replace(divided, notes={**corpus.notes, "test": note}, reading=reading)


def recorded_size(metadata: Mapping[str, Any]) -> int:
    """Return the number of points in a model's training data, or 0 if it is not recorded."""
    return sum(split["points"] for split in _recorded_splits(metadata).values())


def restore_splits(
    corpus: Corpus, label_names: Sequence[str], metadata: Mapping[str, Any]
) -> Corpus | None:
    """Split a corpus in the same way as the training run of a model.

    Args:
        corpus: A corpus with all points in its training split.
        label_names: The labels of the model.
        metadata: The training metadata of the model.

    Returns:
        The corpus, with the same test split as in the run if the run had one. None if the run used
        different data, or data with splits of its own.

    Raises:
        DataError: If the test points depend on near-duplicates in text columns that were not read.
    """
    recorded = _recorded_splits(metadata)
    expected = {"train", "test"} if "test" in recorded else {"train"}
    if set(recorded) != expected or recorded_size(metadata) != len(corpus.train):
        return None
    if None in LabelTable.of(label_names).match(corpus.label_names):
        return None  # the model may have more labels, or another order of labels, but not fewer
    settings = metadata.get(DATA_SETTINGS, {})
    divided = repeat_hold_out(corpus, metadata)
    stats = json.loads(json.dumps(corpus_stats(divided).to_dict()["splits"]))
    columns, trained_on = corpus.reading.get("text"), settings.get("text")
    # The points are the same, but other columns were read as texts.
    if columns and trained_on and columns != trained_on:
        stats, recorded = _without_texts(stats), _without_texts(recorded)
        if settings.get("group") == NEAR_DUPLICATES and not same_statistics(stats, recorded):
            raise DataError(
                f"{corpus.source}: the test points of the run depend on near-duplicates in the "
                f"text column {trained_on}, but {columns} was read; read {trained_on} instead"
            )
    return divided if same_statistics(stats, recorded) else None


def text_sketch(texts: Iterable[str]) -> str:
    """Return the smallest hashes of the texts that are not empty, in hexadecimal.

    The result identifies the texts, whatever their order.
    """
    return np.unique(_hashes(texts))[:_SKETCHED].tobytes().hex()


def share_in_sketch(texts: Iterable[str], sketch: str) -> float:
    """Estimate the share of ``texts`` that are among the texts of a `text_sketch`.

    Empty texts are left out.

    >>> share_in_sketch(["cod", "wine"], text_sketch(["cod", "oil", "tape"]))
    0.5
    """
    sampled, hashes = np.frombuffer(bytes.fromhex(sketch), dtype="<u4"), _hashes(texts)
    if len(sampled) == _SKETCHED:
        hashes = hashes[hashes <= sampled[-1]]
    return float(np.isin(hashes, sampled).mean()) if len(hashes) else 0.0


def _hashes(texts: Iterable[str]) -> NDArray[np.uint32]:
    plain = (text.encode("utf8", "replace") for text in texts if text.strip())
    return np.fromiter(map(zlib.crc32, plain), "<u4")


def repeat_hold_out(corpus: Corpus, metadata: Mapping[str, Any]) -> Corpus:
    """Hold out the same test points as a model's training run. ``corpus`` has no test split."""
    settings = metadata.get(DATA_SETTINGS, {})
    test_size = _recorded_splits(metadata).get("test", {}).get("points", 0)
    if test_size and "group" in settings:  # the number of points depends on the groups
        test_size = settings.get("test_size", test_size)
    reading = {**corpus.reading, "group": settings.get("group", NO_GROUPS)}
    return hold_out_test(replace(corpus, reading=reading), test_size, settings.get("seed", 0))


def same_statistics(splits: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    """Return True if the statistics of all splits equal the recorded ones.

    Statistics that an older model did not record, or counted in another way, are ignored.
    """
    return splits.keys() == recorded.keys() and all(
        all(splits[name].get(key) == stats[key] for key in stats if key not in _REDEFINED)
        for name, stats in recorded.items()
    )


def _without_texts(splits: dict[str, Any]) -> dict[str, Any]:
    """Return the statistics of the splits that do not depend on the texts."""
    return {
        name: {key: stats[key] for key in stats if not re.search("text|word|duplicate", key)}
        for name, stats in splits.items()
    }


def _recorded_splits(metadata: Mapping[str, Any]) -> dict[str, Any]:
    splits: dict[str, Any] = json.loads(json.dumps(metadata.get("data", {}).get("splits", {})))
    return splits
