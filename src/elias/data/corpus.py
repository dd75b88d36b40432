"""Data model of a corpus: texts or sparse features, a CSR matrix of labels, and label names."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix

from elias.data.groups import NEAR_DUPLICATES, first_members
from elias.data.storage import DiskTexts, is_mapped, release_pages, take_rows
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
_HASH_ITEMS = 1 << 20  # numbers hashed at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Points of a corpus, one per row.

    At least one of ``texts`` and ``features`` is set. Both have as many rows as ``labels``.
    """

    labels: csr_matrix
    """(N, L) relevance values in float32. Each stored entry is a relevant label."""
    texts: Sequence[str] | None = None
    """N texts, or None for a corpus of features only."""
    features: csr_matrix | None = None
    """(N, D_bow) sparse features from the source, or None."""
    filters: NDArray[np.int64] | None = None
    """(M, 2) pairs (point, label) that must not be predicted, e.g. a product for itself."""
    groups: NDArray[np.int64] | None = None
    """(N,) keys from the group column. Points of one group have the same key; 0 means no group."""

    def __len__(self) -> int:
        """Return N."""
        return int(self.labels.shape[0])

    @property
    def on_disk(self) -> bool:
        """Return True if texts, features and labels are memory-mapped."""
        return isinstance(self.texts, DiskTexts) or is_mapped(self.features)

    def take(self, rows: NDArray[np.int64]) -> Split:
        """Return a new split with the given rows, and renumber the filter pairs accordingly."""
        filters = self.filters
        if filters is not None:
            new_row = np.full(len(self), -1, dtype=np.int64)
            new_row[rows] = np.arange(len(rows))
            pairs = filters[new_row[filters[:, 0]] >= 0]
            filters = np.stack([new_row[pairs[:, 0]], pairs[:, 1]], axis=1)
        features = self.features
        if features is not None:
            features = take_rows(features, rows) if is_mapped(features) else features[rows]
        texts = self.texts
        if isinstance(texts, DiskTexts):
            texts = texts.take(rows)
        elif texts is not None:
            texts = [texts[row] for row in rows]
        labels = take_rows(self.labels, rows) if self.on_disk else self.labels[rows]
        groups = None if self.groups is None else self.groups[rows]
        return Split(labels=labels, texts=texts, features=features, filters=filters, groups=groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Training points, and optionally validation and test points, over L labels."""

    train: Split
    label_names: Sequence[str]
    """Names of the L labels. The position is the label id; names may repeat."""
    validation: Split | None = None
    test: Split | None = None
    label_features: csr_matrix | None = None
    """(L, D_bow) features of the labels ("LF" data sets), or None. The model does not use them."""
    source: Path | None = None
    """The file or folder that the corpus was read from."""
    format: str = ""
    """The name of the format that the corpus was read as."""
    reading: Mapping[str, Any] = field(default_factory=lambda: {"group": NEAR_DUPLICATES})
    """Arguments with which `load_corpus` reads the same corpus again. The value of ``group``
    determines which points stay together when points are held out."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Decisions of the reader that a user should know, e.g. a test split drawn at random."""

    @property
    def n_labels(self) -> int:
        """Return L."""
        return len(self.label_names)

    @property
    def splits(self) -> dict[str, Split]:
        """Return the existing splits by name, in the order train, validation, test."""
        splits = {name: getattr(self, name) for name in SPLITS}
        return {name: split for name, split in splits.items() if split is not None}

    def split(self, name: str) -> Split:
        """Return one split by name.

        Raises:
            DataError: If the corpus has no such split.
        """
        if name not in self.splits:
            names = ", ".join(self.splits)
            raise DataError(f"{self.source or 'corpus'}: no {name} split; it has: {names}")
        return self.splits[name]

    def with_splits(self, **splits: Split | None) -> Corpus:
        """Return a copy of the corpus in which the given splits are replaced."""
        return replace(self, **splits)  # type: ignore[arg-type]

    def label_frequencies(self) -> NDArray[np.int64]:
        """Return n_ℓ, the number of training points of each label (L,)."""
        counts = np.bincount(self.train.labels.indices, minlength=self.n_labels)
        return counts.astype(np.int64)

    def fingerprint(self) -> str:
        """Return a hash of the content: labels, texts or features, filters, groups, label names.

        The hash does not depend on the source, the format or the storage of the corpus.
        """
        digest = hashlib.sha256()
        for name in self.label_names:
            digest.update(name.encode("utf8", "surrogatepass") + b"\0")
        for name, split in self.splits.items():
            digest.update(f"{name} {split.labels.shape}".encode())
            _hash_matrix(digest, split.labels)
            for text in split.texts or ():
                digest.update(text.encode("utf8", "surrogatepass") + b"\0")
            if split.features is not None:
                _hash_matrix(digest, split.features)
            if split.filters is not None:
                digest.update(np.ascontiguousarray(split.filters).data)
            if split.groups is not None:
                digest.update(first_members(np.asarray(split.groups)).data)
        return digest.hexdigest()

    def align_labels(self, names: Sequence[str]) -> Corpus:
        """Return the corpus over the labels of a model, matched by name.

        Labels that the model does not know are appended after the model's labels, so that they
        remain relevant labels and count as missed. Repeated names cannot be matched: if names
        repeat, both lists of names must be equal.

        Raises:
            DataError: If the labels cannot be matched, or if the model knows none of them.
        """
        own_names = list(self.label_names)
        if own_names == list(names):
            return self
        source = self.source or "corpus"
        remedy = "evaluate on the corpus that the model was trained on"
        if len(set(own_names)) < len(own_names) or len(set(names)) < len(names):
            difference = _first_difference(own_names, names)
            raise DataError(
                f"{source}: {difference}; repeated label names cannot be matched; {remedy}"
            )
        known = set(names)
        unknown = [name for name in own_names if name not in known]
        if len(unknown) == len(own_names):
            raise DataError(
                f"{source}: none of its {len(own_names)} labels, such as {own_names[0]!r}, is "
                f"one of the model's {len(names)} labels, such as {names[0]!r}; {remedy}"
            )
        if unknown:
            logger.warning(
                "%s: the model does not know %d of the %d labels, such as %r; they count as missed",
                *(source, len(unknown), len(own_names), unknown[0]),
            )
        all_names = [*names, *unknown]
        id_of = {name: label for label, name in enumerate(all_names)}
        new_ids = np.array([id_of[name] for name in own_names], dtype=np.int64)
        splits: dict[str, Split | None] = {
            name: _renumber(split, new_ids, len(names), len(all_names))
            for name, split in self.splits.items()
        }
        return replace(self.with_splits(**splits), label_names=all_names, label_features=None)


def _hash_matrix(digest: hashlib._Hash, matrix: csr_matrix) -> None:
    """Update the digest with a matrix. Index types and the order within rows do not matter."""
    if not matrix.has_sorted_indices:
        matrix = matrix.sorted_indices()
    for array, dtype in ((matrix.indptr, "<i8"), (matrix.indices, "<i8"), (matrix.data, "<f4")):
        for start in range(0, len(array), _HASH_ITEMS):
            chunk = array[start : start + _HASH_ITEMS]
            digest.update(np.ascontiguousarray(chunk, dtype=dtype).data)
            release_pages()


def _first_difference(own_names: Sequence[str], model_names: Sequence[str]) -> str:
    if len(own_names) != len(model_names):
        return f"has {len(own_names)} labels, but the model has {len(model_names)}"
    pairs = enumerate(zip(own_names, model_names, strict=True))
    label, (own, other) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    return f"label {label} is {own!r}, but in the model it is {other!r}"


def _renumber(split: Split, new_ids: NDArray[np.int64], n_known: int, n_labels: int) -> Split:
    old = split.labels
    # copy the values, because sorting permutes them in place
    entries = (old.data.copy(), new_ids[old.indices], old.indptr)
    labels = csr_matrix(entries, shape=(len(split), n_labels))
    labels.sort_indices()
    filters = split.filters
    if filters is not None:
        filters = np.stack([filters[:, 0], new_ids[filters[:, 1]]], axis=1)
        filters = filters[filters[:, 1] < n_known]  # the model never predicts the others
    return replace(split, labels=labels, filters=filters)
