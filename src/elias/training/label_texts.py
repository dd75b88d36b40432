"""Train on label texts: one extra point per label, whose target labels are sampled in each epoch.

See docs/explanation/label-text.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix, diags, vstack

from elias.inference.predict import tokenize
from elias.rerank.calibration import is_word
from elias.text.vectorizer import SplitTexts, words_of
from elias.training.stage import Points

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from elias.data.corpus import Corpus
    from elias.model.encoder import TextEncoder
    from elias.text.tokens import Tokens

NEIGHBOURS = 15
"""Maximum number of other labels among the targets of a label text."""
MIN_TARGET = 0.1
"""Minimum probability of a target. Less probable targets are left out."""
SMOOTHING = 2.0
"""Weight of the mean when shares are smoothed, as a number of points."""
_MIN_COVERED = 0.5  # minimum share of points with a label text, for stage 0 to be trained
_MAX_TEXTS = 1 << 17  # number of texts in which names are searched, enough to measure a share
_PAIRS = 1 << 22  # number of (label, text) pairs that are compared at a time


@dataclass(frozen=True)
class LabelPoints:
    """Label texts to train on, with the probability of each of their target labels.

    In each epoch, targets are sampled as 0 or 1. The cross-entropy is linear in the target, so the
    expected gradient is the same as with the probabilities as targets.
    """

    tokens: Tokens
    """The tokenized label texts."""
    targets: csr_matrix
    """(texts, L) probability that a label is sampled as a target of the text."""
    copies: NDArray[np.float64]
    """(texts,) expected number of times that each text is sampled in an epoch."""

    @property
    def n_drawn(self) -> int:
        """Return the number of texts sampled in each epoch."""
        return max(1, round(float(self.copies.sum())))

    def draw(self, seed: Sequence[int]) -> Points:
        """Sample the label texts of one epoch and their targets, determined by the seed."""
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(self.tokens))
        ends = np.cumsum(self.copies[order])  # each text has an interval as long as its ``copies``
        marks = (rng.random() + np.arange(self.n_drawn)) * (ends[-1] / self.n_drawn)
        rows = order[np.searchsorted(ends, marks, side="right").clip(max=len(order) - 1)]
        targets = self.targets[rows]
        positive = rng.random(targets.nnz) < targets.data
        n_before = np.append(0, np.cumsum(positive))
        entries = (
            np.ones(n_before[-1], dtype=np.float32),
            targets.indices[positive],
            n_before[targets.indptr],
        )
        return Points(self.tokens.take(rows), csr_matrix(entries, shape=targets.shape))


def text_points(corpus: Corpus, labels: NDArray[np.int64], encoder: TextEncoder) -> Points:
    """Return one point for each of the labels: its text, with the label as the only target."""
    tokens = tokenize(corpus.label_table.take(labels.tolist()).texts(), encoder)
    ones, starts = np.ones(len(labels), dtype=np.float32), np.arange(len(labels) + 1)
    return Points(tokens, csr_matrix((ones, labels, starts), shape=(len(labels), corpus.n_labels)))


def labels_with_words(label_texts: Sequence[str], texts: SplitTexts) -> NDArray[np.int64]:
    """Return the ids of the labels whose text shares a word with the training texts.

    Labels that are named by codes or identifiers are left out.

    >>> labels_with_words(["cod fishing", "E11.9", "oil"], SplitTexts(["cod liver oil"])).tolist()
    [0, 2]
    """
    known = {word for word in texts.words[0] if is_word(word)}
    shares = [not known.isdisjoint(words_of(text)) for text in label_texts]
    return np.flatnonzero(shares)


def enough_covered(labels: csr_matrix, is_paired: NDArray[np.bool_]) -> bool:
    """Return whether at least half of the points have one of the labels ``is_paired``.

    Otherwise stage 0 is not trained: the encoder would learn to tell apart only these few labels.
    """
    return labels.shape[0] > 0 and bool(np.mean(labels @ is_paired > 0) >= _MIN_COVERED)


def label_targets(names: Sequence[str], texts: SplitTexts, labels: csr_matrix) -> csr_matrix:
    """Return the target probabilities of the label texts (L, L).

    A diagonal entry belongs to one label. It is the share of texts with this label among the texts
    that contain its name, or 0 if the share is below `MIN_TARGET` or the name has no letter. All
    other entries are the result of `co_occurrence`.

    Args:
        names: The name of each label.
        texts: The training texts.
        labels: (N, L) labels of the training texts.
    """
    words, (starts, ids) = texts.words
    starts = starts[: _MAX_TEXTS + 1]
    column = {word: i for i, word in enumerate(words)}
    of_label = [
        sorted({column.get(word, len(words)) for word in words_of(name) if is_word(word)})
        for name in names  # the last column stands for words that occur in no text
    ]
    ends = np.cumsum([0, *map(len, of_label)])
    name_words = np.fromiter(chain.from_iterable(of_label), np.int32, ends[-1])
    in_names = _ones(name_words, ends, len(column))
    in_texts = _ones(ids[: starts[-1]], starts, len(column))
    in_texts.sum_duplicates()
    shares = naming_shares(in_names, in_texts, labels[: len(starts) - 1])
    shares[(ends[1:] == ends[:-1]) | (shares < MIN_TARGET)] = 0
    targets = csr_matrix(diags(shares.astype(np.float32)) + co_occurrence(labels))
    targets.eliminate_zeros()
    targets.sort_indices()
    return targets


def naming_shares(names: csr_matrix, texts: csr_matrix, labels: csr_matrix) -> NDArray[np.float64]:
    """Estimate, for each label, how often a text that contains its name has the label (L,).

    A text contains a name if it contains every word of the name. Shares are smoothed towards
    their mean.

    Args:
        names: (L, words) words of the label names, as nonzero entries.
        texts: (N, words) words of the texts, as nonzero entries.
        labels: (N, L) labels of the texts.
    """
    n_labels = names.shape[0]
    names, texts = (_ones(m.indices, m.indptr, m.shape[1] - 1) for m in (names, texts))
    n_words = np.diff(names.indptr)
    with_word = texts.T.tocsr()
    # only texts with the rarest word of a name can have all of its words
    n_texts = np.diff(with_word.indptr)
    order = np.lexsort((n_texts[names.indices], np.repeat(np.arange(n_labels), n_words)))
    named = np.flatnonzero(n_words)
    rarest = names.indices[order[names.indptr[named]]]
    ends = np.cumsum(n_texts[rarest])
    points = np.repeat(np.arange(labels.shape[0]), np.diff(labels.indptr))
    positives = points * np.int64(n_labels) + labels.indices  # pairs of a text and a label
    n_naming, n_right = np.zeros(n_labels), np.zeros(n_labels)
    borders = np.searchsorted(ends, np.arange(_PAIRS, ends[-1] if len(ends) else 0, _PAIRS))
    for chunk in np.split(np.arange(len(named)), np.unique(borders)):
        candidates = with_word[rarest[chunk]]
        label = np.repeat(named[chunk], np.diff(candidates.indptr))
        shared = np.asarray(names[label].multiply(texts[candidates.indices]).sum(axis=1)).ravel()
        naming = shared == n_words[label]
        label, text = label[naming], candidates.indices[naming]
        n_naming += np.bincount(label, minlength=n_labels)
        right = np.isin(text * np.int64(n_labels) + label, positives)
        n_right += np.bincount(label[right], minlength=n_labels)
    occurs = n_naming > 0
    mean = (n_right[occurs] / n_naming[occurs]).mean() if occurs.any() else 0.0
    shares: NDArray[np.float64] = (n_right + SMOOTHING * mean) / (n_naming + SMOOTHING)
    return shares


def co_occurrence(labels: csr_matrix, n_neighbours: int = NEIGHBOURS) -> csr_matrix:
    """Return the smoothed probabilities P(j | ℓ) of the labels j that most often occur with ℓ."""
    ones = _ones(labels.indices, labels.indptr, labels.shape[1] - 1)
    of_label = ones.T.tocsr()
    counts = np.diff(of_label.indptr)
    n_labels = len(counts)
    n_pairs = np.cumsum(of_label @ np.diff(ones.indptr))
    borders = np.searchsorted(n_pairs, np.arange(_PAIRS, n_pairs[-1], _PAIRS))
    parts = []
    for chunk in np.split(np.arange(n_labels), np.unique(borders)):
        together = (of_label[chunk] @ ones).tocoo()
        row, other = together.row, together.col
        share = together.data / (counts[chunk[row]] + np.float32(SMOOTHING))
        keep = (share >= MIN_TARGET) & (other != chunk[row])
        row, other, share = row[keep], other[keep], share[keep]
        order = np.lexsort((other, -share, row))
        row, other, share = row[order], other[order], share[order]
        best = np.arange(len(row)) - np.searchsorted(row, row) < n_neighbours
        entries = (share[best], (row[best], other[best]))
        parts.append(csr_matrix(entries, shape=(len(chunk), n_labels), dtype=np.float32))
    return vstack(parts, format="csr")


def _ones(indices: NDArray[Any], indptr: NDArray[Any], last_column: int) -> csr_matrix:
    """Return a CSR matrix with ones at the given indices."""
    shape = (len(indptr) - 1, last_column + 1)
    return csr_matrix((np.ones(len(indices), dtype=np.float32), indices, indptr), shape=shape)
