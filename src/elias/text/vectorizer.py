"""tf-idf features: words, word n-grams and character n-grams.

Words are runs of letters and digits, case-folded. In scripts written without spaces every
character, and every pair of neighbours, counts as a word. Where asked for, so do a few words in a
row, with spaces between. Character n-grams are taken inside a word between boundary marks. Each
text is tf-idf weighted, and its words and its n-grams are scaled to length 1 apart, so that the
many n-grams do not drown the few words.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, vstack

from elias.errors import DataError
from elias.progress import track

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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


_CHUNK = 10_000  # texts turned into features at a time, to bound memory
_MOST_RUNS = 4_000_000  # runs of words counted at a time, likewise
_MOST_EXPANDED = 500_000  # words whose ids are kept for the next text, likewise
_GAP = "\0"  # stands for a word that is too rare; no word has it
# Scripts written without spaces: Thai and Lao, Myanmar, Khmer, kana, Han.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\U00020000-\U0003134f"
)
# Accents, points and vowel signs, which Python counts as no word characters: combining accents,
# Hebrew, Arabic, the scripts of India and Sri Lanka (but their full stops), joiners.
_MARKS = (
    "\u0300-\u036f\u0591-\u05bd\u05bf\u05c1-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed"
    "\u0900-\u0963\u0966-\u0dff\u200c\u200d"
)
_WORD = re.compile(rf"[{_UNSPACED}]+|(?:[^\W_{_UNSPACED}]|[{_MARKS}])+")
_UNSPACED_RUN = re.compile(rf"[{_UNSPACED}]")


def words_of(text: str) -> list[str]:
    """Return the words of a text, in order, repeats included.

    >>> words_of("Cod-liver OIL, 2nd ed.")
    ['cod', 'liver', 'oil', '2nd', 'ed']
    >>> words_of("東京都")
    ['東', '京', '都', '東京', '京都']
    """
    words: list[str] = []
    for run in _WORD.findall(unicodedata.normalize("NFKC", text).casefold()):
        if _UNSPACED_RUN.match(run):
            words.extend(run)
            words.extend(run[i : i + 2] for i in range(len(run) - 1))
        else:
            words.append(run)
    return words


def word_runs(words: Sequence[str], longest: int) -> list[str]:
    """Return the words, then all runs of two to ``longest`` of them, a space between.

    >>> word_runs(["cod", "liver", "oil"], 2)
    ['cod', 'liver', 'oil', 'cod liver', 'liver oil']
    """
    runs = list(words)
    for size in range(2, longest + 1):
        runs.extend(" ".join(words[i : i + size]) for i in range(len(words) - size + 1))
    return runs


def ngrams_of(word: str, shortest: int, longest: int) -> Iterator[str]:
    """Yield the character n-grams of ``<word>``, but for the whole of it.

    >>> list(ngrams_of("cod", 3, 4))
    ['<co', 'cod', 'od>', '<cod', 'cod>']
    """
    marked = f"<{word}>"
    for size in range(shortest, min(longest, len(marked) - 1) + 1):
        for start in range(len(marked) - size + 1):
            yield marked[start : start + size]


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
    ngrams: tuple[str, ...]
    idf: NDArray[np.float32]
    """(words + n-grams,) inverse document frequencies."""
    char_ngrams: tuple[int, int]
    word_ngrams: int = 1
    """How many words in a row may be one of ``words``."""

    @property
    def n_features(self) -> int:
        """Return how many words and n-grams the vocabulary holds."""
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
            texts: The training texts.
            char_ngrams: Shortest and longest character n-gram; (0, 0) for none.
            word_ngrams: Longest run of words that counts as one; 1 for words alone, 0 for none.
            min_count: Keep what stands in this many texts.
            max_features: Keep at most so many, the most frequent.
        """
        types, of_text = _number_words(texts)
        ngrams, of_word = _candidates(types, char_ngrams)
        in_texts = np.zeros(len(types), dtype=np.int64)
        ngram_in_texts = np.zeros(len(ngrams), dtype=np.int64)
        count_texts(of_text, of_word, in_texts, ngram_in_texts)
        frequent = {word for word, n in zip(types, in_texts, strict=True) if n >= min_count}
        runs = _count_runs(texts, word_ngrams, frequent) if word_ngrams > 1 else {}
        words = [*types, *runs]
        if word_ngrams == 0:
            in_texts[:] = 0
        frequency = np.concatenate([in_texts, list(runs.values()), ngram_in_texts]).astype(np.int64)
        keep = _most_frequent(frequency, max(1, min_count), max_features)
        idf = np.log((1 + len(texts)) / (1 + frequency[keep])) + 1
        names = [*words, *ngrams]
        return cls(
            words=tuple(names[i] for i in keep if i < len(words)),
            ngrams=tuple(names[i] for i in keep if i >= len(words)),
            idf=idf.astype(np.float32),
            char_ngrams=char_ngrams,
            word_ngrams=word_ngrams,
        )

    def transform(self, texts: Sequence[str]) -> csr_matrix:
        """Return the texts' features (N, words + n-grams), float32; unknown ones are left out."""
        starts = range(0, len(texts), _CHUNK)
        chunks = [
            self._weigh(*self._lookup.terms(texts[start : start + _CHUNK]))
            for start in (track(starts, "Reading words") if len(starts) > 1 else starts)
        ]
        if not chunks:
            return csr_matrix((0, self.n_features), dtype=np.float32)
        return chunks[0] if len(chunks) == 1 else vstack(chunks, format="csr", dtype=np.float32)

    @cached_property
    def _lookup(self) -> _Lookup:
        return _Lookup(self)

    def _weigh(self, starts: NDArray[np.int64], terms: NDArray[np.int32]) -> csr_matrix:
        indptr, indices, data = weigh_terms(starts, terms, self.idf, len(self.words))
        return csr_matrix((data, indices, indptr), shape=(len(starts) - 1, self.n_features))


class _Lookup:
    """Word and n-gram ids, expanded once per distinct word."""

    def __init__(self, featurizer: Featurizer) -> None:
        self._word_id = {word: i for i, word in enumerate(featurizer.words)}
        first = len(featurizer.words)
        self._ngram_id = {ngram: i for i, ngram in enumerate(featurizer.ngrams, start=first)}
        self._span = featurizer.char_ngrams
        self._longest_run = featurizer.word_ngrams
        self._ids_of_word: dict[str, array[int]] = {}

    def terms(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return where each text starts, and the ids of its words and n-grams in no order."""
        ids, ends = array("i"), [0]
        if len(self._ids_of_word) > _MOST_EXPANDED:
            self._ids_of_word.clear()
        known = self._ids_of_word
        for text in texts:
            words = words_of(text)
            for word in words:
                # one array after the other is a copy of memory, not a loop over numbers
                ids.extend(known[word] if word in known else self._expand(word))
            if self._longest_run > 1:
                runs = map(self._word_id.get, word_runs(words, self._longest_run)[len(words) :])
                ids.extend(i for i in runs if i is not None)
            ends.append(len(ids))
        return np.array(ends, dtype=np.int64), np.array(ids, dtype=np.int32)

    def _expand(self, word: str) -> array[int]:
        """Find the ids of a word and its n-grams, and keep them for the next time."""
        own = (self._word_id.get(word),) if self._longest_run else ()
        ngrams = map(self._ngram_id.get, ngrams_of(word, *self._span)) if self._ngram_id else ()
        found = array("i", [i for i in (*own, *ngrams) if i is not None])
        self._ids_of_word[word] = found
        return found


def _number_words(texts: Sequence[str]) -> tuple[list[str], Ids]:
    """Return the distinct words, and which of them each text has, repeats included."""
    ids: dict[str, int] = {}
    numbers, ends = array("i"), [0]
    for text in track(texts, "Counting words"):
        numbers.extend([ids.setdefault(word, len(ids)) for word in words_of(text)])
        ends.append(len(numbers))
    return list(ids), (np.array(ends, dtype=np.int64), np.array(numbers, dtype=np.int32))


def _count_runs(texts: Sequence[str], longest: int, words: set[str]) -> dict[str, int]:
    """Return in how many texts each run of two or more of these words stands.

    When there are very many, those seen least so far are forgotten, to bound memory.
    """
    counts: dict[str, int] = {}
    for text in track(texts, "Counting runs of words"):
        own = words_of(text)
        known = own if words.issuperset(own) else [w if w in words else _GAP for w in own]
        # a dict, not a set: its order is the same in every process
        for run in dict.fromkeys(word_runs(known, longest)[len(own) :]):
            if _GAP not in run:
                counts[run] = counts.get(run, 0) + 1
        if len(counts) > _MOST_RUNS:
            counts = _without_rare(counts)
    return counts


def _without_rare(counts: dict[str, int]) -> dict[str, int]:
    """Return the more frequent half at most, those of equal count together."""
    border = sorted(counts.values())[len(counts) // 2]
    return {run: count for run, count in counts.items() if count > border}


def _candidates(types: list[str], char_ngrams: tuple[int, int]) -> tuple[list[str], Ids]:
    """Return the n-grams, and which of them each word has."""
    ids: dict[str, int] = {}
    numbers, ends = array("i"), [0]
    shortest, longest = char_ngrams
    for word in types:
        if longest:
            ngrams = ngrams_of(word, shortest, longest)
            numbers.extend([ids.setdefault(ngram, len(ids)) for ngram in ngrams])
        ends.append(len(numbers))
    return list(ids), (np.array(ends, dtype=np.int64), np.array(numbers, dtype=np.int32))


def _most_frequent(
    frequency: NDArray[np.int64], min_count: int, max_features: int
) -> NDArray[np.int64]:
    """Return the ids to keep, ascending; of equally frequent ones the first."""
    enough = np.flatnonzero(frequency >= min_count)
    if len(enough) > max_features:
        order = np.argsort(-frequency[enough], kind="stable")
        enough = np.sort(enough[order[:max_features]])
    return enough.astype(np.int64)


def unit_rows(matrix: csr_matrix, first_row: int = 0) -> csr_matrix:
    """Return the matrix with every row that is not zero scaled to length 1.

    ``first_row`` is the number of its first row in the corpus, for errors.

    Raises:
        DataError: If a value is not finite, or its square is not in float32.
    """
    with np.errstate(over="ignore"):
        matrix = csr_matrix(matrix, dtype=np.float32, copy=True)
        length = np.sqrt(np.asarray(matrix.multiply(matrix).sum(axis=1)).ravel())
    if not np.isfinite(length).all():
        row = int(np.flatnonzero(~np.isfinite(length))[0])
        values = matrix[row]
        worst = int(np.argmax(np.nan_to_num(abs(values.data), nan=np.inf)))
        raise DataError(
            f"features: point {first_row + row + 1}, column {values.indices[worst]} holds "
            f"{values.data[worst]:g}; give finite values below 1e18"
        )
    scale = np.divide(1.0, length, out=np.zeros_like(length), where=length > 0)
    matrix.data *= np.repeat(scale, np.diff(matrix.indptr)).astype(np.float32)
    return matrix
