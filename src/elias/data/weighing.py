"""Counting and weighing the terms of texts, compiled: tf-idf rows whose two parts have length 1."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ids: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int32]]
"""Row starts and ids."""
Rows: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]
"""Row starts, ids and weights."""


@njit(cache=True, nogil=True)
def count_texts(
    of_text: Ids, of_word: Ids, in_texts: NDArray[np.int64], ngram_in_texts: NDArray[np.int64]
) -> None:
    """Count in how many texts each word and each n-gram stands.

    Args:
        of_text: The words of each text, repeats included.
        of_word: The n-grams of each word, likewise.
        in_texts: Of each word; added to.
        ngram_in_texts: Of each n-gram; added to.
    """
    starts, words = of_text
    ngram_starts, ngrams = of_word
    last_text = np.full(in_texts.shape[0], -1, np.int64)
    ngram_last_text = np.full(ngram_in_texts.shape[0], -1, np.int64)
    for text in range(starts.shape[0] - 1):
        for i in range(starts[text], starts[text + 1]):
            word = words[i]
            if last_text[word] == text:
                continue
            last_text[word] = text
            in_texts[word] += 1
            for j in range(ngram_starts[word], ngram_starts[word + 1]):
                if ngram_last_text[ngrams[j]] != text:
                    ngram_last_text[ngrams[j]] = text
                    ngram_in_texts[ngrams[j]] += 1


@njit(cache=True, nogil=True)
def weigh_terms(
    starts: NDArray[np.int64], terms: NDArray[np.int32], idf: NDArray[np.float32], n_words: int
) -> Rows:
    """Weigh each text's terms by (1 + log tf)·idf, and scale words and n-grams apart to length 1.

    Args:
        starts: (N + 1,) text i has ``terms[starts[i]:starts[i + 1]]``.
        terms: Ids in any order, repeats included.
        idf: Of every id.
        n_words: Ids below are words, the others n-grams.

    Returns:
        The same texts with every id once, ascending, and its weight.
    """
    n_texts = starts.shape[0] - 1
    out_starts = np.zeros(n_texts + 1, np.int64)
    ids = np.empty(terms.shape[0], np.int32)
    weights = np.empty(terms.shape[0], np.float32)
    end = 0
    for text in range(n_texts):
        own = np.sort(terms[starts[text] : starts[text + 1]])
        first, first_ngram = end, -1
        place = 0
        while place < own.shape[0]:
            term, count = own[place], 0
            while place < own.shape[0] and own[place] == term:
                count += 1
                place += 1
            if term >= n_words and first_ngram < 0:
                first_ngram = end
            ids[end] = term
            weights[end] = (np.float32(1) + np.log(np.float32(count))) * idf[term]
            end += 1
        border = end if first_ngram < 0 else first_ngram
        _to_unit_length(weights[first:border])
        _to_unit_length(weights[border:end])
        out_starts[text + 1] = end
    return out_starts, ids[:end].copy(), weights[:end].copy()


@njit(cache=True, nogil=True)
def _to_unit_length(weights: NDArray[Any]) -> None:
    total = 0.0
    for weight in weights:
        total += np.float64(weight) * np.float64(weight)
    if total > 0.0:
        scale = 1.0 / np.sqrt(total)
        for i in range(weights.shape[0]):
            weights[i] = np.float32(weights[i] * scale)
