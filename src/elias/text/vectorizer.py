"""Compute tf-idf features of words, word n-grams and character n-grams.

Words are sequences of letters and digits, case-folded. In scripts written without spaces, every
character and every pair of neighbouring characters is a word. Word n-grams are joined by spaces.
Character n-grams are substrings of a word between boundary marks. The words and the character
n-grams of a text are scaled to L2 norm 1 separately, so that the many character n-grams do not
outweigh the few words.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elias.errors import DataError
from elias.progress import track

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

try:
    from numba import njit
except ImportError:  # elias-xmc-runtime has neither numba nor scipy; the loops run in Python

    def njit(**_: Any) -> Any:  # type: ignore[no-redef]
        """Return a decorator that leaves the function unchanged, as numba is not installed."""
        return lambda function: function


Ids: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int32]]
"""Ragged lists of ids as a pair (starts, ids). List i is ``ids[starts[i]:starts[i + 1]]``."""

Weights: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]
"""Weights of features in CSR layout (indptr, sorted indices, data)."""

_CHUNK = 10_000  # texts transformed at a time, to bound memory
_MAX_WORD_NGRAMS = 4_000_000  # word n-grams counted at a time, to bound memory
_MAX_CACHED_WORDS = 500_000  # words whose feature ids are cached, to bound memory
_GAP = "\0"  # stands for a rare word; no word contains it
# Scripts written without spaces: Thai and Lao, Myanmar, Khmer, kana, Han.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\U00020000-\U0003134f"
)
# Accents, points and vowel signs, which `\w` does not match in Python: combining accents,
# Hebrew, Arabic, the scripts of India and Sri Lanka (except their full stops), joiners.
_MARKS = (
    "\u0300-\u036f\u0591-\u05bd\u05bf\u05c1-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed"
    "\u0900-\u0963\u0966-\u0dff\u200c\u200d"
)
_WORD = re.compile(rf"[{_UNSPACED}]+|(?:[^\W_{_UNSPACED}]|[{_MARKS}])+")
_ASCII_WORD = re.compile(r"[a-z0-9]+")
_PIECE = re.compile(rf"[{_UNSPACED}]|(?:[^\W_{_UNSPACED}]|[{_MARKS}])+|[^\w\s]+|_+")
_UNSPACED_WORD = re.compile(rf"[{_UNSPACED}]")
_SYMBOL = re.compile(r"[^\w\s]")


def words_of(text: str, *, symbols: bool = False) -> list[str]:
    """Return the words of a text, in order and including repeats.

    With ``symbols``, the punctuation marks and symbols of the text follow the words.

    >>> words_of("Cod-liver OIL, 2nd ed.")
    ['cod', 'liver', 'oil', '2nd', 'ed']
    >>> words_of("Win £100!!", symbols=True)
    ['win', '100', '£', '!', '!']
    >>> words_of("東京都")
    ['東', '京', '都', '東京', '京都']
    """
    if text.isascii():  # the same words, three times as fast
        words = _ASCII_WORD.findall(text := text.lower())
    else:
        words, text = [], unicodedata.normalize("NFKC", text).casefold()
        for match in _WORD.findall(text):
            if _UNSPACED_WORD.match(match):
                words.extend(match)
                words.extend(match[i : i + 2] for i in range(len(match) - 1))
            else:
                words.append(match)
    if symbols:
        words.extend(filter(_is_symbol, _SYMBOL.findall(text)))
    return words


def _is_symbol(text: str) -> bool:
    """Return whether a text is a single punctuation mark or symbol."""
    return len(text) == 1 and unicodedata.category(text)[0] in "PS"


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return the start and end of each word, and of each sequence of symbols between words.

    In scripts written without spaces, every character is a word.

    >>> [("cod-oil 東京"[start:end]) for start, end in word_spans("cod-oil 東京")]
    ['cod', '-', 'oil', '東', '京']
    """
    return [match.span() for match in _PIECE.finditer(text)]


def word_ngrams_of(words: Sequence[str], longest: int) -> list[str]:
    """Return the n-grams of two to ``longest`` words.

    >>> word_ngrams_of(["cod", "liver", "oil"], 2)
    ['cod liver', 'liver oil']
    """
    ngrams: list[str] = []
    shifted = [words]
    for size in range(2, longest + 1):
        shifted.append(words[size - 1 :])
        ngrams.extend(map(" ".join, zip(*shifted, strict=False)))
    return ngrams


def ngrams_of(word: str, shortest: int, longest: int) -> Iterator[str]:
    """Yield the character n-grams of ``<word>``, except ``<word>`` itself.

    >>> list(ngrams_of("cod", 3, 4))
    ['<co', 'cod', 'od>', '<cod', 'cod>']
    """
    marked = f"<{word}>"
    for size in range(shortest, min(longest, len(marked) - 1) + 1):
        for start in range(len(marked) - size + 1):
            yield marked[start : start + size]


class SplitTexts(Sequence[str]):
    """Texts that are split into words only once, even if a `Featurizer` reads them repeatedly.

    Use it in place of a list of texts when a vocabulary is fitted on the texts that it transforms,
    or when several vocabularies read the same texts. Each word of a text takes four bytes
    until this object is deleted.

    >>> texts = SplitTexts(["red cod", "red tape"])
    >>> Featurizer.fit(texts, char_ngrams=(0, 0), min_count=1).transform(texts).shape
    (2, 3)
    """

    def __init__(self, texts: Sequence[str], *, symbols: bool = False) -> None:
        """Store the texts. With ``symbols``, punctuation marks and symbols count as words."""
        self._texts, self._symbols = texts, symbols

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._texts)

    def __getitem__(self, key: Any) -> Any:
        """Return a text, or a list of texts."""
        return self._texts[key]

    @cached_property
    def words(self) -> tuple[list[str], Ids]:
        """Return the distinct words, and the word ids of each text, including repeats."""
        words = partial(words_of, symbols=self._symbols)
        return _assign_ids(map(words, track(self._texts, "Counting words")))

    def word_lists(self, start: int, stop: int) -> list[list[str]]:
        """Return the words of the texts ``start`` to ``stop - 1``."""
        words, (starts, ids) = self.words
        bounds = starts[start : stop + 1].tolist()
        first = bounds[0]
        names = [words[i] for i in ids[first : bounds[-1]].tolist()]
        return [names[a - first : b - first] for a, b in pairwise(bounds)]


@dataclass(frozen=True)
class Featurizer:
    """A fixed vocabulary of words and character n-grams with their inverse document frequencies.

    >>> featurizer = Featurizer.fit(["red cod", "red tape"], char_ngrams=(0, 0), min_count=1)
    >>> featurizer.words
    ('red', 'cod', 'tape')
    >>> featurizer.transform(["red red herring"]).toarray().round(2).tolist()
    [[1.0, 0.0, 0.0]]
    """

    words: tuple[str, ...]
    """Words and word n-grams."""
    ngrams: tuple[str, ...]
    """Character n-grams."""
    idf: NDArray[np.float32]
    """Inverse document frequency of each feature (words + n-grams,)."""
    char_ngrams: tuple[int, int]
    """Lengths of the shortest and the longest character n-gram."""
    word_ngrams: int = 1
    """Number of words in the longest word n-gram."""

    @cached_property
    def reads_symbols(self) -> bool:
        """Return whether the vocabulary was fitted on `SplitTexts` with symbols."""
        return any(map(_is_symbol, self.words))

    @property
    def n_features(self) -> int:
        """Return the size of the vocabulary."""
        return len(self.words) + len(self.ngrams)

    @classmethod
    def fit(
        cls,
        texts: Sequence[str],
        *,
        char_ngrams: tuple[int, int] = (3, 5),
        word_ngrams: int = 1,
        min_count: int = 2,
        max_features: int = 400_000,
    ) -> Featurizer:
        """Learn the vocabulary and its document frequencies from training texts.

        Args:
            texts: The training texts. Pass `SplitTexts` if they will be transformed as well.
            char_ngrams: Lengths of the shortest and the longest character n-gram, or (0, 0) for
                no character n-grams.
            word_ngrams: Number of words in the longest word n-gram. 1 means single words only, and
                0 means no words at all.
            min_count: Minimum number of texts that must contain a feature.
            max_features: Maximum number of features. The most frequent ones are kept.
        """
        split = texts if isinstance(texts, SplitTexts) else SplitTexts(texts)
        words, of_text = split.words
        shortest, longest = char_ngrams
        ngrams, of_word = _assign_ids(
            ngrams_of(word, shortest, longest) if longest else () for word in words
        )
        counts = np.zeros(len(words), dtype=np.int64)
        ngram_counts = np.zeros(len(ngrams), dtype=np.int64)
        count_texts(of_text, of_word, counts, ngram_counts)
        joined: dict[str, int] = {}
        if word_ngrams > 1:
            frequent = {word for word, n in zip(words, counts, strict=True) if n >= min_count}
            joined = _count_word_ngrams(split, word_ngrams, frequent)
        if word_ngrams == 0:
            counts[:] = 0
        frequency = np.concatenate([counts, list(joined.values()), ngram_counts]).astype(np.int64)
        keep = np.flatnonzero(frequency >= max(1, min_count))
        if len(keep) > max_features:  # keep the most frequent; ties go to the lower id
            keep = np.sort(keep[np.argsort(-frequency[keep], kind="stable")[:max_features]])
        names, n_words = [*words, *joined, *ngrams], len(words) + len(joined)
        idf = np.log((1 + len(texts)) / (1 + frequency[keep])) + 1
        return cls(
            words=tuple(names[i] for i in keep if i < n_words),
            ngrams=tuple(names[i] for i in keep if i >= n_words),
            idf=idf.astype(np.float32),
            char_ngrams=char_ngrams,
            word_ngrams=word_ngrams,
        )

    def transform(self, texts: Sequence[str], *, unit: bool = False) -> csr_matrix:
        """Return the features (N, words + n-grams) in float32. Unknown words are ignored.

        The words and the n-grams of a text are scaled to L2 norm 1 separately. If ``unit``, each
        row is then scaled to L2 norm 1 as a whole.
        """
        from scipy.sparse import csr_matrix

        starts, ids, weights = self.weigh(texts, unit=unit)
        if len(ids) <= np.iinfo(np.int32).max:
            starts = starts.astype(np.int32)  # scipy would do the same, but slowly
        return csr_matrix((weights, ids, starts), shape=(len(starts) - 1, len(self.idf)))

    def weigh(self, texts: Sequence[str], *, unit: bool = False) -> Weights:
        """Return the tf-idf features of texts as CSR arrays, weighted by `weigh_terms`."""
        firsts = range(0, max(1, len(texts)), _CHUNK)
        chunks: list[Weights] = []
        for first in track(firsts, "Reading words") if len(firsts) > 1 else firsts:
            if isinstance(texts, SplitTexts):
                terms = self.feature_ids(texts.word_lists(first, first + _CHUNK))
            else:
                words = map(
                    partial(words_of, symbols=self.reads_symbols), texts[first : first + _CHUNK]
                )
                terms = self.feature_ids(words)
            chunks.append(weigh_terms(*terms, self.idf, len(self.words), unit))
        if len(chunks) == 1:
            return chunks[0]
        starts, ids, weights = zip(*chunks, strict=True)
        lengths = np.concatenate([np.diff(part) for part in starts])
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return offsets, np.concatenate(ids), np.concatenate(weights)

    @cached_property
    def _word_ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}

    @cached_property
    def _ngram_ids(self) -> dict[str, int]:
        return {ngram: i for i, ngram in enumerate(self.ngrams, start=len(self.words))}

    @cached_property
    def _ids_of_word(self) -> dict[str, array[int]]:
        """Return the cache of `_look_up`, a dictionary from words to feature ids."""
        return {}

    def feature_ids(self, word_lists: Iterable[list[str]]) -> Ids:
        """Return the feature ids of lists of words, in no particular order, including repeats."""
        ids, ends = array("i"), [0]
        known = self._ids_of_word
        if len(known) > _MAX_CACHED_WORDS:
            known.clear()
        for words in word_lists:
            for word in words:
                # extending an array by an array copies memory at once, without a Python loop
                cached = known.get(word)  # once, because another thread may clear the cache
                ids.extend(self._look_up(word) if cached is None else cached)
            if self.word_ngrams > 1:
                known_ids = self._word_ids
                joined = word_ngrams_of(words, self.word_ngrams)
                ids.extend(map(known_ids.__getitem__, filter(known_ids.__contains__, joined)))
            ends.append(len(ids))
        return np.array(ends, dtype=np.int64), np.array(ids, dtype=np.int32)

    def _look_up(self, word: str) -> array[int]:
        """Return the feature ids of a word and its character n-grams, and cache them."""
        word_id = (self._word_ids.get(word),) if self.word_ngrams else ()
        ngrams = ngrams_of(word, *self.char_ngrams) if self.ngrams else ()
        looked_up = (*word_id, *map(self._ngram_ids.get, ngrams))
        ids = array("i", [i for i in looked_up if i is not None])
        self._ids_of_word[word] = ids
        return ids


def _assign_ids(lists: Iterable[Iterable[str]]) -> tuple[list[str], Ids]:
    """Assign an id to each distinct name. Return the names, and the ids of each list."""
    ids: dict[str, int] = {}
    all_ids, ends = array("i"), [0]
    for names in lists:
        all_ids.extend([ids.setdefault(name, len(ids)) for name in names])
        ends.append(len(all_ids))
    return list(ids), (np.array(ends, dtype=np.int64), np.array(all_ids, dtype=np.int32))


def _count_word_ngrams(texts: SplitTexts, longest: int, frequent: set[str]) -> dict[str, int]:
    """Return the number of texts that contain each word n-gram made of frequent words.

    To bound memory, the rarest n-grams are dropped whenever there are too many.
    """
    counts: Counter[str] = Counter()
    for start in track(range(0, len(texts), _CHUNK), "Counting word n-grams"):
        for words in texts.word_lists(start, start + _CHUNK):
            if not frequent.issuperset(words):
                words = [word if word in frequent else _GAP for word in words]
            # a dict, because the order of a set differs between processes
            ngrams = dict.fromkeys(word_ngrams_of(words, longest))
            counts.update(ngram for ngram in ngrams if _GAP not in ngram)
            if len(counts) > _MAX_WORD_NGRAMS:  # keep at most the more frequent half
                median = sorted(counts.values())[len(counts) // 2]
                counts = Counter({ngram: n for ngram, n in counts.items() if n > median})
    return counts


@njit(cache=True, nogil=True)
def count_texts(
    of_text: Ids, of_word: Ids, counts: NDArray[np.int64], ngram_counts: NDArray[np.int64]
) -> None:
    """Count the texts that contain each word and each character n-gram.

    Args:
        of_text: The word ids of each text, including repeats.
        of_word: The n-gram ids of each word, including repeats.
        counts: Array to which the count of each word is added.
        ngram_counts: Array to which the count of each n-gram is added.
    """
    starts, words = of_text
    ngram_starts, ngrams = of_word
    last_text = np.zeros(counts.shape[0], np.int64)  # counted from 1; 0 for none
    ngram_last_text = np.zeros(ngram_counts.shape[0], np.int64)
    for text in range(1, starts.shape[0]):
        for i in range(starts[text - 1], starts[text]):
            word = words[i]
            if last_text[word] == text:
                continue
            last_text[word] = text
            counts[word] += 1
            for j in range(ngram_starts[word], ngram_starts[word + 1]):
                if ngram_last_text[ngrams[j]] != text:
                    ngram_last_text[ngrams[j]] = text
                    ngram_counts[ngrams[j]] += 1


def weigh_terms(
    starts: NDArray[np.int64],
    terms: NDArray[np.int32],
    idf: NDArray[np.float32],
    n_words: int,
    unit: bool,
) -> Weights:
    """Weight terms by (1 + log tf)·idf and L2-normalise words and n-grams separately.

    Args:
        starts: (N + 1,) offsets. The terms of text i are ``terms[starts[i]:starts[i + 1]]``.
        terms: Term ids in any order, including repeats. They are sorted in place.
        idf: Inverse document frequency of every id.
        n_words: Number of words. Ids below it are words; the rest are character n-grams.
        unit: Also L2-normalise the whole vector of each text.

    Returns:
        The weights in CSR layout (indptr, sorted indices, data).
    """
    sort_terms(starts, terms)
    return _weigh_sorted(starts, terms, idf, n_words, unit)


def sort_terms(starts: NDArray[np.int64], terms: NDArray[np.int32]) -> None:
    """Sort the terms of each text in place.

    Compiled loops do not sort, because numba takes more than a second to compile `np.sort`.
    """
    for begin, end in pairwise(starts.tolist()):
        terms[begin:end].sort()


@njit(cache=True, nogil=True)
def _weigh_sorted(
    starts: NDArray[np.int64],
    terms: NDArray[np.int32],
    idf: NDArray[np.float32],
    n_words: int,
    unit: bool,
) -> Weights:
    """Compute `weigh_terms` for terms that are sorted within each text."""
    n_texts = starts.shape[0] - 1
    out_starts = np.zeros(n_texts + 1, np.int64)
    ids = np.empty(terms.shape[0], np.int32)
    weights = np.empty(terms.shape[0], np.float32)
    end = 0
    for text in range(n_texts):
        first, border, i = end, end, starts[text]
        while i < starts[text + 1]:
            term, count = terms[i], 0
            while i < starts[text + 1] and terms[i] == term:
                count += 1
                i += 1
            ids[end] = term
            weights[end] = (np.float32(1) + np.log(np.float32(count))) * idf[term]
            end += 1
            if term < n_words:
                border = end
        _to_unit_length(weights[first:border])
        _to_unit_length(weights[border:end])
        out_starts[text + 1] = end
    if unit:
        scale_rows(out_starts, weights)
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


@njit(cache=True, nogil=True)
def scale_rows(starts: NDArray[Any], data: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale each row of a CSR matrix to L2 norm 1 in place, and return the previous norms."""
    lengths = np.empty(starts.shape[0] - 1, np.float32)
    for row in range(lengths.shape[0]):
        total = np.float32(0)
        for i in range(starts[row], starts[row + 1]):
            total += data[i] * data[i]
        lengths[row] = np.sqrt(total)
        if lengths[row] > 0:
            scale = np.float32(1) / lengths[row]
            for i in range(starts[row], starts[row + 1]):
                data[i] *= scale
    return lengths


def unit_rows(matrix: csr_matrix, first_row: int = 0) -> csr_matrix:
    """Return the matrix with every row scaled to L2 norm 1. Zero rows stay zero.

    Args:
        matrix: Features of points.
        first_row: Row of the corpus at which the matrix starts, for the error message.

    Raises:
        DataError: If a value is not finite, or its square is not finite in float32.
    """
    from scipy.sparse import csr_matrix

    with np.errstate(over="ignore"):
        scaled = csr_matrix(matrix, dtype=np.float32, copy=True)
        length = scale_rows(scaled.indptr, scaled.data)
        finite = np.isfinite(length)
        if finite.all():
            return scaled
        row = int(np.argmin(finite))
        values = csr_matrix(matrix[[row]], dtype=np.float32)
        worst = int(np.argmax(np.nan_to_num(abs(values.data), nan=np.inf)))
        raise DataError(
            f"features: point {first_row + row + 1}, column {values.indices[worst]} holds "
            f"{values.data[worst]:g}; give finite values below 1e18"
        )


def bag_of_words(
    texts: Sequence[str] | None, features: csr_matrix | None
) -> tuple[csr_matrix, Featurizer | None]:
    """Return features scaled to length 1, or the tf-idf of words if there are none (Eq. 14).

    Also return the featurizer that counted the words.
    """
    if features is not None:
        return unit_rows(features), None
    assert texts is not None
    split = texts if isinstance(texts, SplitTexts) else SplitTexts(texts)  # split only once
    featurizer = Featurizer.fit(split, char_ngrams=(0, 0), min_count=1)
    return featurizer.transform(split), featurizer
