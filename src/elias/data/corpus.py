"""A corpus: texts (or sparse features), their labels as CSR, and the labels' names."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix

from elias.data.mapped import DiskTexts, ease, is_mapped, take_rows
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


_HASHED = 1 << 20  # numbers hashed at a time
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Some points of a corpus, row by row.

    At least one of ``texts`` and ``features`` is there; both have as many rows as ``labels``.
    """

    labels: csr_matrix
    """(N, L) relevance, float32; a stored entry is a relevant label."""
    texts: Sequence[str] | None = None
    """N texts, or None for a corpus that came as features only."""
    features: csr_matrix | None = None
    """(N, D_bow) given sparse features, or None."""
    filters: NDArray[np.int64] | None = None
    """(M, 2) pairs (point, label) that must not be predicted, e.g. a product for itself."""

    def __len__(self) -> int:
        """Return N."""
        return int(self.labels.shape[0])

    @property
    def on_disk(self) -> bool:
        """Say whether texts, features and labels stay on disk."""
        return isinstance(self.texts, DiskTexts) or is_mapped(self.features)

    def take(self, rows: NDArray[np.int64]) -> Split:
        """Return the given rows as a split of their own, filters following their points."""
        filters = self.filters
        if filters is not None:
            new_row = np.full(len(self), -1, dtype=np.int64)
            new_row[rows] = np.arange(len(rows))
            kept = filters[new_row[filters[:, 0]] >= 0]
            filters = np.stack([new_row[kept[:, 0]], kept[:, 1]], axis=1)
        features = self.features
        if features is not None:
            features = take_rows(features, rows) if is_mapped(features) else features[rows]
        return Split(
            labels=take_rows(self.labels, rows) if self.on_disk else self.labels[rows],
            texts=_take_texts(self.texts, rows),
            features=features,
            filters=filters,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Training points and, where there are any, validation and test points over L labels."""

    train: Split
    label_names: Sequence[str]
    """L names; names may repeat, the position is the label's id."""
    validation: Split | None = None
    test: Split | None = None
    label_features: csr_matrix | None = None
    """(L, D_bow) given features of the labels ("LF" data sets), or None; not used by the model."""
    source: Path | None = None
    """Where it was read from."""
    format: str = ""
    """The name of the format it was read as."""
    reading: Mapping[str, Any] = field(default_factory=dict)
    """The arguments with which `load_corpus` reads the same corpus again."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What the reader did that a person should know, e.g. a split it had to make."""

    @property
    def n_labels(self) -> int:
        """Return L."""
        return len(self.label_names)

    @property
    def splits(self) -> dict[str, Split]:
        """Return the splits that are there, by name, in the order train, validation, test."""
        found = {name: getattr(self, name) for name in SPLITS}
        return {name: split for name, split in found.items() if split is not None}

    def split(self, name: str) -> Split:
        """Return the split called ``name``, or say which there are."""
        if name not in self.splits:
            there = ", ".join(self.splits)
            raise DataError(f"{self.source or 'corpus'}: no {name} split; it has: {there}")
        return self.splits[name]

    def fingerprint(self) -> str:
        """Return a name for the content: labels, texts or features, filters, names of labels.

        Two corpora that differ in any of these have different ones; reading the same data from
        elsewhere, or as another format, changes nothing.
        """
        digest = hashlib.sha256()
        for name in self.label_names:
            digest.update(name.encode("utf8", "surrogatepass") + b"\0")
        for name, split in self.splits.items():
            digest.update(f"{name} {split.labels.shape}".encode())
            _add_matrix(digest, split.labels)
            for encoded in _encoded(split.texts):
                digest.update(encoded + b"\0")
            if split.features is not None:
                _add_matrix(digest, split.features)
            if split.filters is not None:
                digest.update(np.ascontiguousarray(split.filters).data)
        return digest.hexdigest()

    def label_frequencies(self) -> NDArray[np.int64]:
        """Return n_ℓ, how many points of the full training split each label has (L,)."""
        counts = np.bincount(self.train.labels.indices, minlength=self.n_labels)
        return counts.astype(np.int64)

    def with_splits(self, **splits: Split | None) -> Corpus:
        """Return the same corpus with other splits."""
        return replace(self, **splits)  # type: ignore[arg-type]


def _add_matrix(digest: hashlib._Hash, matrix: csr_matrix) -> None:
    """Add what a matrix holds, in an order that does not depend on how it was made."""
    if not matrix.has_sorted_indices:
        matrix = matrix.sorted_indices()
    for part, kind in ((matrix.indptr, "<i8"), (matrix.indices, "<i8"), (matrix.data, "<f4")):
        for start in range(0, len(part), _HASHED):
            digest.update(np.ascontiguousarray(part[start : start + _HASHED], dtype=kind).data)
            ease()


def _take_texts(texts: Sequence[str] | None, rows: NDArray[np.int64]) -> Sequence[str] | None:
    if isinstance(texts, DiskTexts):
        return texts.take(rows)
    return None if texts is None else [texts[i] for i in rows]


def _encoded(texts: Sequence[str] | None) -> Iterator[bytes]:
    """Yield the UTF-8 of each text."""
    if isinstance(texts, DiskTexts):
        return texts.encoded()
    return (text.encode("utf8", "surrogatepass") for text in texts or ())
