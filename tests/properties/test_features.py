"""The featurizer counts and weighs as an obvious program over dictionaries does."""

import math
from collections import Counter

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from elias.text import vectorizer
from elias.text.vectorizer import Featurizer, SplitTexts, ngrams_of, words_of

WORDS = st.sampled_from(
    ["cod", "Cod", "liver", "oil", "ab", "é", "東京都", "ไทย", "لغة", "🐟", "x1"]
)
TEXTS = st.lists(st.lists(WORDS, max_size=6).map(" ".join), min_size=1, max_size=6)
SPANS = st.sampled_from([(0, 0), (1, 2), (3, 5)])
RUNS = st.integers(0, 3)


def terms_of(text, span, longest):
    """(words and runs of them, n-grams) of a text, repeats included."""
    words = words_of(text)
    starts = range(len(words))
    runs = [tuple(words[i:j]) for i in starts for j in range(i + 1, len(words) + 1)]
    terms = [" ".join(run) for run in runs if len(run) <= longest]
    if span[1] == 0:
        return terms, []
    return terms, [ngram for word in words for ngram in ngrams_of(word, *span)]


def slow_row(text, featurizer):
    """{("word" or "ngram", term): weight}, words and n-grams each of length 1."""
    row = {}
    n_words = len(featurizer.words)
    vocabularies = (
        dict(zip(featurizer.words, featurizer.idf[:n_words], strict=True)),
        dict(zip(featurizer.ngrams, featurizer.idf[n_words:], strict=True)),
    )
    for kind, terms, idf in zip(
        (0, 1),
        terms_of(text, featurizer.char_ngrams, featurizer.word_ngrams),
        vocabularies,
        strict=True,
    ):
        counts = Counter(term for term in terms if term in idf)
        weights = {term: (1 + math.log(count)) * idf[term] for term, count in counts.items()}
        length = math.sqrt(sum(weight**2 for weight in weights.values()))
        row |= {(kind, term): weight / length for term, weight in weights.items()}
    return row


@given(texts=TEXTS, span=SPANS, longest=RUNS, min_count=st.integers(1, 3))
def test_the_vocabulary_holds_what_enough_texts_hold(texts, span, longest, min_count):
    featurizer = Featurizer.fit(texts, char_ngrams=span, word_ngrams=longest, min_count=min_count)

    for kind, actual in enumerate((featurizer.words, featurizer.ngrams)):
        frequency = Counter(
            term for text in texts for term in set(terms_of(text, span, longest)[kind])
        )
        expected = {term: n for term, n in frequency.items() if n >= min_count}
        assert sorted(actual) == sorted(expected)
        start = len(featurizer.words) * kind
        for term, idf in zip(actual, featurizer.idf[start:], strict=False):
            np.testing.assert_allclose(
                idf, math.log((1 + len(texts)) / (1 + expected[term])) + 1, rtol=1e-6
            )


@given(texts=TEXTS, span=SPANS, limit=st.integers(1, 12))
def test_a_limited_vocabulary_holds_the_most_frequent(texts, span, limit):
    everything = Featurizer.fit(texts, char_ngrams=span, min_count=1)

    limited = Featurizer.fit(texts, char_ngrams=span, min_count=1, max_features=limit)

    assert limited.n_features == min(limit, everything.n_features)
    rarest_kept = limited.idf.max(initial=0)
    remaining = {*limited.words}, {*limited.ngrams}
    for i, term in enumerate([*everything.words, *everything.ngrams]):
        if term not in remaining[i >= len(everything.words)]:
            assert everything.idf[i] >= rarest_kept - 1e-6


@given(texts=TEXTS, others=TEXTS, span=SPANS, longest=RUNS)
@example(texts=["cod"], others=["", "unknown words"], span=(3, 5), longest=2)
def test_features_are_those_of_a_program_over_dictionaries(texts, others, span, longest):
    featurizer = Featurizer.fit(texts, char_ngrams=span, word_ngrams=longest, min_count=1)

    actual = featurizer.transform([*texts, *others])

    columns = [(0, word) for word in featurizer.words] + [(1, term) for term in featurizer.ngrams]
    assert actual.shape == (len(texts) + len(others), featurizer.n_features)
    assert actual.dtype == np.float32
    for text, row in zip([*texts, *others], actual.toarray(), strict=True):
        expected = slow_row(text, featurizer)
        np.testing.assert_allclose(row, [expected.get(c, 0) for c in columns], rtol=1e-5)


@given(texts=TEXTS, chunk=st.integers(1, 3))
def test_the_size_of_a_chunk_changes_nothing(texts, chunk):
    whole = Featurizer.fit(texts, min_count=1)

    was, vectorizer._CHUNK = vectorizer._CHUNK, chunk
    try:
        pieces = Featurizer.fit(texts, min_count=1)
        rows = pieces.transform(texts)
    finally:
        vectorizer._CHUNK = was

    assert (pieces.words, pieces.ngrams) == (whole.words, whole.ngrams)
    np.testing.assert_array_equal(rows.toarray(), whole.transform(texts).toarray())


@given(texts=TEXTS, span=SPANS, longest=RUNS, chunk=st.integers(1, 3))
def test_texts_that_are_split_once_have_the_same_features(texts, span, longest, chunk):
    options = {"char_ngrams": span, "word_ngrams": longest, "min_count": 1}
    plain = Featurizer.fit(texts, **options)

    was, vectorizer._CHUNK = vectorizer._CHUNK, chunk
    try:
        featurizer = Featurizer.fit(split := SplitTexts(texts), **options)
        features = featurizer.transform(split)
    finally:
        vectorizer._CHUNK = was

    assert (featurizer.words, featurizer.ngrams) == (plain.words, plain.ngrams)
    np.testing.assert_array_equal(featurizer.idf, plain.idf)
    np.testing.assert_array_equal(features.toarray(), plain.transform(texts).toarray())


@given(text=st.text(max_size=20))
def test_the_words_of_any_text_are_folded_and_hold_no_space(text):
    words = words_of(text)

    assert all(word == word.casefold() for word in words)
    assert all(word and not any(character.isspace() for character in word) for word in words)


@given(st.text(st.characters(max_codepoint=127)), st.booleans())
def test_ascii_text_has_the_same_words_alone_and_beside_other_letters(text, symbols):
    words = words_of(text)  # by another regular expression than text with an accent

    beside = words_of(f"{text} é", symbols=symbols)

    assert beside[: len(words) + 1] == [*words, "é"]
    assert words_of(text, symbols=symbols) == words + beside[len(words) + 1 :]
