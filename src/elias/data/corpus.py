"""Data model of a corpus: texts or sparse features, a CSR matrix of labels, and label names."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from elias.config import EliasConfig, ResolvedConfig
from elias.config.pretrained import count_tokens
from elias.data.near_duplicates import NEAR_DUPLICATES, first_members
from elias.data.storage import DiskTexts, is_mapped, take_rows, widen
from elias.errors import DataError
from elias.labels import LabelTable
from elias.predictions import Predictions

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
_HASH_ITEMS = 1 << 20  # array entries hashed at a time
_SAMPLED_TEXTS = 10_000  # maximum number of texts whose lengths are measured
_TOKENIZED = 1000  # maximum number of texts that are tokenized to count their tokens


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
    """(M, 2) pairs (point, label) that must not be predicted, for example that a product is
    similar to itself. `load_corpus` removes them from ``labels``."""
    groups: NDArray[np.int64] | None = None
    """(N,) keys from the group column. Points of one group have the same key; 0 means no group."""
    rows: NDArray[np.int64] | None = None
    """(N,) the row of each point in the training split of the source, if this split was drawn from
    it. None if the source defines this split."""

    def __len__(self) -> int:
        """Return the number of points."""
        return int(self.labels.shape[0])

    def __repr__(self) -> str:
        """Return the sizes, not the texts."""
        return f"Split({len(self)} points, {self.labels.shape[1]} labels)"

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
        texts = self.texts
        if isinstance(texts, DiskTexts):
            texts = texts.take(rows)
        elif texts is not None:
            texts = [texts[row] for row in rows]
        return Split(
            labels=take_rows(self.labels, rows),
            texts=texts,
            features=None if self.features is None else take_rows(self.features, rows),
            filters=filters,
            groups=None if self.groups is None else self.groups[rows],
            rows=rows if self.rows is None else self.rows[rows],
        )

    def without_filtered_labels(self) -> Split:
        """Return the split without the (point, label) pairs that its filters exclude.

        >>> labels = csr_matrix(np.float32([[1, 1]]))
        >>> split = Split(labels=labels, texts=["cod"], filters=np.array([[0, 1]]))
        >>> split.without_filtered_labels().labels.toarray().tolist()
        [[1.0, 0.0]]
        """
        filtered = self.filtered_labels()
        if filtered is None:
            return self
        removed = self.labels.multiply(filtered > 0)
        return self if removed.nnz == 0 else replace(self, labels=csr_matrix(self.labels - removed))

    def filtered_labels(self) -> csr_matrix | None:
        """Return the labels that the filters exclude for each point (N, L), or None."""
        if self.filters is None:
            return None
        ones = np.ones(len(self.filters), dtype=np.float32)
        return csr_matrix((ones, tuple(self.filters.T)), shape=self.labels.shape)

    @property
    def max_filtered(self) -> int:
        """Return the maximum number of labels that the filters exclude for a point."""
        if self.filters is None:
            return 0
        return int(np.bincount(self.filters[:, 0], minlength=1).max())

    def drop_filtered(self, predictions: Predictions, top_k: int) -> Predictions:
        """Remove the pairs that the filters exclude, and return the best ``top_k`` labels."""
        if self.filters is not None and len(self.filters):
            predictions = predictions.drop(self.filters)
        return predictions.top(top_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Training points, and optionally validation and test points, over L labels."""

    train: Split
    label_names: Sequence[str]
    """Names of the L labels. The position is the label id; names may repeat. If ids, synonyms or
    descriptions are known, it is a `LabelTable`."""
    validation: Split | None = None
    test: Split | None = None
    source: Path | None = None
    """The file or folder that the corpus was read from."""
    format: str = ""
    """The name of the format of the source."""
    reading: Mapping[str, Any] = field(default_factory=lambda: {"group": NEAR_DUPLICATES})
    """Arguments with which `load_corpus` reads the same corpus again. The value of ``group``
    determines which points stay together when points are held out."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Decisions of the reader that a user should know, e.g. that it drew test points at random."""

    def __repr__(self) -> str:
        """Return the sizes and the source, not the texts."""
        sizes = ", ".join(f"{name}={len(split)}" for name, split in self.splits.items())
        source = "" if self.source is None else f", source={str(self.source)!r}"
        return f"Corpus({sizes}, n_labels={self.n_labels}{source})"

    @property
    def n_labels(self) -> int:
        """Return L, the number of labels."""
        return len(self.label_names)

    @property
    def label_table(self) -> LabelTable:
        """Return the names of the labels, and their ids, synonyms and descriptions if known."""
        return LabelTable.of(self.label_names)

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
            raise DataError(f"{self.source or 'corpus'}: no {name} split; use one of: {names}")
        return self.splits[name]

    def with_splits(self, **splits: Split | None) -> Corpus:
        """Return a copy of the corpus in which the given splits are replaced."""
        return replace(self, **splits)  # type: ignore[arg-type]

    def with_label_table(self, table: LabelTable) -> Corpus:
        """Return the corpus with the names, ids, synonyms and descriptions of a label table.

        The labels of the corpus are matched with the table (`LabelTable.match`) and keep their
        positions. Rows that no label matches are appended as labels without points.
        """
        labels, taken = self.label_table, set[int]()
        rows = list(labels.rows())
        details = list(table.rows())
        for label, match in enumerate(table.match(labels)):
            if match is not None and match not in taken:
                taken.add(match)
                rows[label] = details[match]
        if not taken:
            name, key, *_ = details[0]
            raise DataError(
                f"{self.source or 'corpus'}: no label matches the label table by id or name "
                f"(corpus: {labels[0]!r}, …; table: name {name!r} with id {key!r}, …); use the "
                "label table of this corpus"
            )
        unknown = len(labels) - len(taken)
        rows += (row for i, row in enumerate(details) if i not in taken)
        note = f"{len(table):,} rows, {len(rows) - len(labels):,} of them without points"
        if unknown:
            note += f"; {unknown:,} labels of the points are not in the table"
        splits: dict[str, Any] = {
            name: replace(split, labels=widen(split.labels, len(rows)))
            for name, split in self.splits.items()
        }
        return replace(
            self,
            **splits,
            label_names=LabelTable.from_rows(rows),
            notes={**self.notes, "label table": note},
        )

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
        if self.label_table.has_details:
            digest.update(repr(list(self.label_table.rows())).encode("utf8", "surrogatepass"))
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
        """Return the corpus with the label ids of a model. Labels are matched by id or name.

        Labels that the model does not know get the next free ids, so that they count as relevant
        labels that were not predicted. If names repeat, they cannot be matched, and both lists of
        names must be equal.

        Args:
            names: The names of the model's labels. If it is a `LabelTable` with ids, the corpus may
                have these ids in place of names.

        Raises:
            DataError: If the labels cannot be matched, or if the model knows none of them.
        """
        aligned, source = self.join_labels(names), self.source or "corpus"
        new = aligned.label_names[len(names) :]
        if len(new) == self.n_labels:
            raise DataError(
                f"{source}: the model knows none of the {len(new)} labels (corpus: {new[0]!r}, …; "
                f"model: {names[0]!r}, …); evaluate on the corpus that the model was trained on"
            )
        if new:
            logger.warning(
                "%s: the model does not know %d of the %d labels, such as %r; they count as missed",
                *(source, len(new), self.n_labels, new[0]),
            )
        splits: dict[str, Split | None] = {
            name: replace(split, filters=split.filters[split.filters[:, 1] < len(names)])
            for name, split in aligned.splits.items()
            if split.filters is not None  # the model cannot predict labels that it does not know
        }
        return aligned.with_splits(**splits) if new else aligned

    def join_labels(self, names: Sequence[str]) -> Corpus:
        """Return the corpus with the labels of a model, followed by labels that the model lacks.

        Labels are matched by id or name, see `align_labels`.

        Raises:
            DataError: If the labels cannot be matched.
        """
        corpus_names = list(self.label_names)
        if corpus_names == list(names):
            return self
        table = LabelTable.of(names)
        matches = table.match(self.label_names)
        if len({*matches} - {None}) < len(matches) - matches.count(None) or (
            table.ids is None and len(set(names)) < len(names)
        ):
            difference = _first_difference(corpus_names, names)
            raise DataError(
                f"{self.source or 'corpus'}: {difference}; repeated label names cannot be matched; "
                "give the labels ids, or use the corpus that the model was trained on"
            )
        unknown = [label for label, match in enumerate(matches) if match is None]
        new_ids = np.array([-1 if match is None else match for match in matches], dtype=np.int64)
        new_ids[unknown] = np.arange(len(names), len(names) + len(unknown))
        n_labels = len(names) + len(unknown)
        splits: dict[str, Split | None] = {
            name: _renumber(split, new_ids, n_labels) for name, split in self.splits.items()
        }
        all_names: Sequence[str] = [*names, *(corpus_names[label] for label in unknown)]
        if isinstance(names, LabelTable):
            all_names = names + self.label_table.take(unknown)
        return replace(self.with_splits(**splits), label_names=all_names)


def _hash_matrix(digest: hashlib._Hash, matrix: csr_matrix) -> None:
    """Update the digest with a matrix. Index types and the order within rows do not matter."""
    if not matrix.has_sorted_indices:
        matrix = matrix.sorted_indices()
    for array, dtype in ((matrix.indptr, "<i8"), (matrix.indices, "<i8"), (matrix.data, "<f4")):
        for start in range(0, len(array), _HASH_ITEMS):
            chunk = array[start : start + _HASH_ITEMS]
            digest.update(np.ascontiguousarray(chunk, dtype=dtype).data)


def _first_difference(corpus_names: Sequence[str], model_names: Sequence[str]) -> str:
    if len(corpus_names) != len(model_names):
        return f"has {len(corpus_names)} labels, but the model has {len(model_names)}"
    pairs = enumerate(zip(corpus_names, model_names, strict=True))
    label, (name, model_name) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    return f"label {label} is {name!r}, but in the model it is {model_name!r}"


def _renumber(split: Split, new_ids: NDArray[np.int64], n_labels: int) -> Split:
    old = split.labels
    # copy the values, because sorting permutes them in place
    entries = (old.data.copy(), new_ids[old.indices], old.indptr)
    labels = csr_matrix(entries, shape=(len(split), n_labels))
    labels.sort_indices()
    filters = split.filters
    if filters is not None:
        filters = np.stack([filters[:, 0], new_ids[filters[:, 1]]], axis=1)
    return replace(split, labels=labels, filters=filters)


def resolve_config(config: EliasConfig, corpus: Corpus) -> ResolvedConfig:
    """Return the configuration with all unset settings derived from the training points."""
    texts, n_bytes, n_tokens = corpus.train.texts, None, None
    if texts is not None and len(texts):
        step = -(-len(texts) // _SAMPLED_TEXTS)
        sample = [texts[i] for i in range(0, len(texts), step)]
        n_bytes = int(np.percentile([len(text.encode()) for text in sample], 95))
        if config.encoder.kind == "transformer" and config.encoder.max_length is None:
            counts = count_tokens(config.encoder.model, sample[:: -(-len(sample) // _TOKENIZED)])
            if counts is not None:
                n_tokens = math.ceil(np.percentile(counts, 95))
    return config.resolve(len(corpus.train), corpus.n_labels, n_bytes, n_tokens)
