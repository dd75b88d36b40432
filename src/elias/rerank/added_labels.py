"""Score labels by their texts: labels without training points, and labels added after training.

These labels are not part of the index, the ranker or the calibration. They have two features:

- similarity: the cosine of the text embedding φ(x) and a label vector z, which combines the
  embeddings of label text and examples with the classifiers of similar labels (`label_vectors`). It
  is measured in standard deviations above the mean cosine of z and the texts of other labels.
- coverage: the share of the label's name, or of a synonym, that occurs in the text, counted in
  words and character n-grams weighted by idf².

A logistic function of both is the probability that the label is relevant. The similarity has more
weight for a label with more examples. The constants were chosen on labels hidden from training
(docs/explanation/new-labels.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.special import expit

from elias.kernels.device import limit_threads
from elias.labels import LabelTable
from elias.model.batch_inference import embed_all
from elias.model.elias import EliasModel
from elias.model.encoder import BagEncoder
from elias.rerank.reranker import Reranker
from elias.rerank.sparse_ranker import unit_embedding
from elias.text.vectorizer import Featurizer, sort_terms, words_of

NEIGHBOURS = 10
"""Number of similar trained labels whose classifiers are averaged into a label vector."""
NEIGHBOUR_WEIGHT = 0.5
"""Weight of the averaged classifiers in a label vector. The label text has weight 1."""
EXAMPLE_WEIGHT = 0.5
"""Weight of each example in a label vector."""
RULE = (-7.77, 0.884, 5.90, -0.681)
"""Logistic function: bias, and weights of the similarity, the coverage and their product."""
DENSE_RULE = (-7.65, 0.988)
"""Logistic function of the similarity alone: bias and weight."""
EXAMPLES_RULE = (-0.05, 0.07)
"""Terms added to the bias and to the weight of the similarity, times ln(1 + n_examples)."""
N_BACKGROUND = 1000
"""Number of other labels used to measure the mean and deviation of a label vector's cosines."""
CHAR_NGRAMS = (3, 5)
ARRAYS = ("labels", "vectors", "background", "n_examples", "offset")
"""Names of the arrays of `AddedLabels`, which have one row for each label."""
# prior mean and deviation of the cosines, and weight of the prior as a number of labels
_MEAN, _SPREAD, _PRIOR_WEIGHT = 0.04, 0.085, 50
_MAX_OFFSET = 30.0
_CELLS = 1 << 23  # scores computed at a time, to bound memory
_FEW_TEXTS = 64  # up to this number, one thread compares embeddings


def label_vectors(
    model: EliasModel,
    labels: LabelTable,
    new: LabelTable,
    examples: Sequence[str],
    example_labels: csr_matrix,
    *,
    seen: NDArray[np.bool_] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """Return `AddedLabels.vectors`, ``background``, ``n_examples`` and an ``offset`` of 0.

    A label vector z is a weighted sum of three unit vectors: the embedding of the label text, the
    mean classifier of the `NEIGHBOURS` most similar trained labels, and the mean embedding of the
    examples. The weight of the examples grows with their number.

    Args:
        model: The trained model.
        labels: The labels of the model's index.
        new: The labels to add.
        examples: Texts that have some of the new labels.
        example_labels: (N, A) new labels of each example.
        seen: (L,) mask of the labels that have training points. None means all.
    """
    encoder = model.encoder

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        return unit_embedding(embed_all(encoder, encoder.tokenize(texts)))

    vectors = embed(new.texts())
    classifiers = unit_embedding(model.labels.weight.detach().float().cpu().numpy())
    known = np.arange(len(classifiers)) if seen is None else np.flatnonzero(seen)
    classifiers = classifiers[known]
    count = min(NEIGHBOURS, len(classifiers))
    for start in range(0, len(vectors), chunk := max(1, _CELLS // max(1, len(classifiers)))):
        rows = slice(start, start + chunk)
        similarity = torch.from_numpy(vectors[rows]) @ torch.from_numpy(classifiers).T
        nearest = similarity.topk(count, dim=1).indices.numpy()
        vectors[rows] += NEIGHBOUR_WEIGHT * unit_embedding(classifiers[nearest].mean(axis=1))
    counts = np.zeros(len(new), dtype=np.int64)
    if len(examples):
        counts += np.bincount(example_labels.indices, minlength=len(new))
        weights = (EXAMPLE_WEIGHT * counts[:, None]).astype(np.float32)
        vectors += weights * unit_embedding(example_labels.T @ embed(examples))
    vectors = unit_embedding(vectors)
    sample = np.random.default_rng(0).permutation(known)[:N_BACKGROUND]
    cosines = vectors @ embed(labels.take(sample.tolist()).texts()).T
    share = len(sample) / (len(sample) + _PRIOR_WEIGHT)
    mean, variance = (
        share * measured + (1 - share) * prior
        for measured, prior in ((cosines.mean(axis=1), _MEAN), (cosines.var(axis=1), _SPREAD**2))
    )
    background = np.stack([mean, np.sqrt(variance)], axis=1).astype(np.float32)
    return vectors, background, counts, np.zeros(len(new), dtype=np.float32)


@dataclass(frozen=True)
class AddedLabels:
    """Labels that are scored by their texts instead of the index.

    >>> vector, background = np.float32([[1, 0]]), np.float32([[0.0, 0.1]])
    >>> zero = np.zeros(1, dtype=np.float32)
    >>> added = AddedLabels(np.array([7]), vector, background, np.array([0]), zero, (("red cod",),))
    >>> near, far = added.probabilities(np.float32([[2, 0], [0, 1]]), ["red cod", "tape"])[:, 0]
    >>> bool(near > 0.5 > far)
    True
    """

    labels: NDArray[np.int64]
    """(A,) label id of each row. If a label has several rows, its best one counts."""
    vectors: NDArray[np.float32]
    """(A, D) label vectors z, of length 1."""
    background: NDArray[np.float32]
    """(A, 2) mean and standard deviation of the cosine of z and the texts of other labels."""
    n_examples: NDArray[np.int64]
    """(A,) number of examples of each row."""
    offset: NDArray[np.float32]
    """(A,) added to the log-odds of each row, see `expecting`."""
    names: tuple[tuple[str, ...], ...] = ()
    """Name and synonyms of each row."""
    reference: Featurizer | None = None
    """A vocabulary whose inverse document frequencies weight the words of names."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.labels)

    def __add__(self, other: AddedLabels) -> AddedLabels:
        """Return the rows of both objects, without names."""
        pairs = zip(self.arrays, other.arrays, strict=True)
        return AddedLabels.of(map(np.concatenate, pairs))

    @classmethod
    def of(cls, arrays: Iterable[Any]) -> AddedLabels:
        """Return labels without names from their `ARRAYS`."""
        return cls(*arrays)

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """Return the `ARRAYS`, which a saved model stores."""
        return [getattr(self, name) for name in ARRAYS]

    @cached_property
    def examples_of(self) -> dict[int, int]:
        """Return the number of examples of each label."""
        counts = np.bincount(self.labels, weights=self.n_examples).astype(np.int64)
        return {label: int(counts[label]) for label in self.labels.tolist()}

    def relabel(self, new_ids: NDArray[np.int64]) -> AddedLabels | None:
        """Return the rows with new label ids. Rows whose new id is -1 are removed."""
        keep = new_ids[self.labels] >= 0
        if not keep.any():
            return None
        labels, *others = (array[keep] for array in self.arrays)
        return AddedLabels.of([new_ids[labels], *others])

    def named(self, table: LabelTable, model: EliasModel, reranker: Reranker | None) -> AddedLabels:
        """Return a copy with the names and synonyms of a label table, which `coverage` needs.

        The words of names are weighted by the vocabulary of the ranker or of the encoder.
        """
        reference = None if reranker is None else reranker.features.featurizer
        if reference is None and isinstance(model.encoder, BagEncoder):
            reference = model.encoder.featurizer
        rows = [(name, *synonyms) for name, _, synonyms, *_ in table.take(self.labels).rows()]
        return replace(self, names=tuple(rows), reference=reference)

    def expecting(
        self,
        n_relevant: float,
        embedding: NDArray[np.float32],
        texts: Sequence[str],
        trust: float = 0.5,
    ) -> AddedLabels:
        """Return a copy with shifted log-odds, given the mean number of relevant labels per text.

        The constants of this module already imply an estimate of this mean, and ``n_relevant`` is a
        second estimate. The shift goes the share ``trust`` of the way from the first to the second.
        Embeddings and texts are the arguments of `probabilities`.
        """
        n_texts = min(len(texts), max(1, _CELLS // max(1, len(self))))
        log_odds = self.log_odds(embedding[:n_texts], texts[:n_texts])
        offset = offset_for_mean(log_odds, n_relevant / len(self))
        return replace(self, offset=self.offset + np.float32(trust * offset))

    def bias_and_weight(
        self, bias: float, weight: float
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the bias and the weight of the similarity for each row (A,).

        The arguments are those of a label without examples.
        """
        growth, (of_bias, of_weight) = np.log1p(self.n_examples), EXAMPLES_RULE
        biases, weights = bias + of_bias * growth, weight + of_weight * growth
        return biases.astype(np.float32), weights.astype(np.float32)

    @cached_property
    def _terms(self) -> tuple[Featurizer, csr_matrix, NDArray[np.int64]]:
        """Return the vocabulary of names, their idf² weights, and the first name of each row."""
        terms = [name for names in self.names for name in names]
        starts = np.cumsum([0] + [len(names) for names in self.names[:-1]])
        featurizer = Featurizer.fit(
            terms, char_ngrams=CHAR_NGRAMS, min_count=1, max_features=np.iinfo(np.int32).max
        )
        if self.reference is not None:
            featurizer = replace(featurizer, idf=_known_idf(featurizer, self.reference))
        # other names beside it reorder the terms of a name, whose rounding errors float64 hides
        weights = featurizer.transform(terms).astype(np.float64)
        weights.data = featurizer.idf[weights.indices].astype(np.float64) ** 2
        total = np.asarray(weights.sum(axis=1)).ravel()
        weights.data /= np.repeat(np.maximum(total, 1e-9), np.diff(weights.indptr))
        return featurizer, csr_matrix(weights.T), starts

    def coverage(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the share of a label's best matching name that occurs in each text (n, A)."""
        featurizer, shares, starts = self._terms
        covered = np.zeros((len(texts), shares.shape[1]))
        arrays = (shares.data, shares.indices, shares.indptr)
        first_terms, terms = featurizer.feature_ids(map(words_of, texts))
        sort_terms(first_terms, terms)
        _add_shares(first_terms, terms, arrays, covered)
        return np.maximum.reduceat(covered, starts, axis=1).astype(np.float32)

    def probabilities(
        self, embedding: NDArray[np.float32], texts: Sequence[str] | None
    ) -> NDArray[np.float32]:
        """Return the probability of each label for each text (n, A).

        Args:
            embedding: (n, D) embeddings φ(x) of the texts.
            texts: The texts, or None to use only the similarity.
        """
        return np.asarray(expit(self.log_odds(embedding, texts)))

    def log_odds(
        self, embedding: NDArray[np.float32], texts: Sequence[str] | None
    ) -> NDArray[np.float32]:
        """Return the logit of each of the `probabilities` (n, A)."""
        mean, spread = self.background.T
        # with other labels beside it, a product has another rounding error, which float64 hides
        vectors = torch.from_numpy(self.vectors.astype(np.float64))
        units = torch.from_numpy(unit_embedding(embedding).astype(np.float64))
        # by torch, because the threads of numpy wait for each other on a busy CPU
        with limit_threads(1 if len(units) <= _FEW_TEXTS else None):
            cosine = (units @ vectors.T).numpy().astype(np.float32)
        similarity = (cosine - mean) / spread
        bias, dense = self.bias_and_weight(*(DENSE_RULE if texts is None else RULE[:2]))
        if texts is None:
            by_coverage = np.zeros_like(similarity)
        else:
            _, _, lexical, both = RULE
            # the coverage matters less for similar texts, but never lowers the probability
            by_coverage = np.maximum(lexical + both * similarity, 0) * self.coverage(texts)
        log_odds: NDArray[np.float32] = bias + dense * similarity + by_coverage + self.offset
        return log_odds

    def best(
        self,
        embedding: NDArray[np.float32],
        texts: Sequence[str] | None,
        top_k: int,
        blocked: NDArray[np.bool_] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the ``top_k`` most probable labels of each text, and their probabilities.

        ``blocked`` is an (L,) mask of labels to leave out. Slots without a label have label -1 and
        probability 0. The other arguments are as in `probabilities`.
        """
        width = min(top_k, len(self))
        ids = np.empty((len(embedding), width), dtype=np.int64)
        probabilities = np.empty(ids.shape, dtype=np.float32)
        step = max(1, _CELLS // max(1, sum(map(len, self.names))))
        for start in range(0, len(embedding), step):
            rows = slice(start, start + step)
            values = self.probabilities(embedding[rows], None if texts is None else texts[rows])
            if blocked is not None:
                values[:, blocked[self.labels]] = 0
            top = np.argpartition(-values, width - 1, axis=1)[:, :width]
            ids[rows] = self.labels[top]
            probabilities[rows] = np.take_along_axis(values, top, axis=1)
        return np.where(probabilities > 0, ids, -1), probabilities


def offset_for_mean(log_odds: NDArray[np.float32], mean: float) -> float:
    """Return the offset of log-odds with which the mean probability is ``mean``."""
    low, high = -_MAX_OFFSET, _MAX_OFFSET
    for _ in range(20):
        offset = (low + high) / 2
        low, high = (low, offset) if expit(log_odds + offset).mean() > mean else (offset, high)
    return low


@njit(cache=True, nogil=True)
def _add_shares(
    starts: NDArray[np.int64],
    terms: NDArray[np.int32],
    shares: tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.int32]],
    out: NDArray[np.float64],
) -> None:
    """Write to ``out`` (n, names) the share of each name that occurs in each text.

    The terms of each text are ascending.
    """
    values, names, name_starts = shares
    for text in range(out.shape[0]):
        last = -1
        for term in terms[starts[text] : starts[text + 1]]:
            if term != last:
                for j in range(name_starts[term], name_starts[term + 1]):
                    out[text, names[j]] += values[j]
            last = term


def _known_idf(featurizer: Featurizer, reference: Featurizer) -> NDArray[np.float32]:
    """Look up the idf of each feature in ``reference``; unknown features get its highest idf."""
    of_word = dict(zip(reference.words, reference.idf, strict=False))
    of_ngram = dict(zip(reference.ngrams, reference.idf[len(reference.words) :], strict=True))
    highest = reference.idf.max(initial=1)
    idf = [of_word.get(word, highest) for word in featurizer.words]
    idf += [of_ngram.get(ngram, highest) for ngram in featurizer.ngrams]
    return np.array(idf, dtype=np.float32)
