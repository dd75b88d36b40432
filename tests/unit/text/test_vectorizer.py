import numpy as np
import pytest
from scipy.sparse import csr_matrix
from scipy.sparse import random as random_sparse

from elias.errors import DataError
from elias.text import vectorizer
from elias.text.vectorizer import (
    Featurizer,
    SplitTexts,
    bag_of_words,
    ngrams_of,
    unit_rows,
    words_of,
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Straße STRASSE", ["strasse", "strasse"]),
        ("ﬁsh", ["fish"]),  # a ligature
        ("e\u0301te\u0301 ÉTÉ", ["été", "été"]),  # accents written apart
        ("１２３ ｃｏｄ", ["123", "cod"]),  # full width
        ("العربية لغة", ["العربية", "لغة"]),
        ("русский язык", ["русский", "язык"]),
        ("🐟 fish 🐟", ["fish"]),
        ("", []),
        (" \n\t ", []),
        ("—…!?", []),
    ],
)
def test_words_are_runs_of_letters_and_digits_folded(text, words):
    assert words_of(text) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("北京", ["北", "京", "北京"]),
        ("ไทย", ["ไ", "ท", "ย", "ไท", "ทย"]),
        ("カメラ", ["カ", "メ", "ラ", "カメ", "メラ"]),
        ("mp3プ", ["mp3", "プ"]),
    ],
)
def test_without_spaces_between_words_characters_and_pairs_are_words(text, words):
    assert words_of(text) == words


def test_ngrams_are_shorter_than_the_word_with_its_boundary_marks():
    assert list(ngrams_of("ab", 3, 5)) == ["<ab", "ab>"]
    assert list(ngrams_of("a", 3, 5)) == []


def test_a_text_of_no_known_word_is_a_row_of_zeros():
    featurizer = Featurizer.fit(["red cod", "red tape"], min_count=1)

    rows = featurizer.transform(["", "zzz", "🐟"])

    assert rows.shape == (3, featurizer.n_features)
    assert rows.nnz == 0


def test_no_texts_give_no_rows():
    featurizer = Featurizer.fit(["red cod"], min_count=1)

    assert featurizer.transform([]).shape == (0, featurizer.n_features)


@pytest.mark.parametrize("texts", [[], ["", ""], ["🐟"]])
def test_texts_without_words_give_an_empty_vocabulary(texts):
    featurizer = Featurizer.fit(texts, min_count=1)

    assert featurizer.n_features == 0
    assert featurizer.transform(["cod"]).shape == (1, 0)


def test_words_and_ngrams_have_length_one_apart():
    featurizer = Featurizer.fit(["red cod", "red tape", "cod"], min_count=1)

    row = featurizer.transform(["red cod cod"]).toarray()[0]

    n_words = len(featurizer.words)
    assert np.linalg.norm(row[:n_words]) == pytest.approx(1)
    assert np.linalg.norm(row[n_words:]) == pytest.approx(1)


def test_a_rare_word_weighs_more_than_a_frequent_one():
    featurizer = Featurizer.fit(["red cod", "red tape"], char_ngrams=(0, 0), min_count=1)

    red, cod = featurizer.transform(["red cod"]).toarray()[0, :2]

    assert featurizer.words[:2] == ("red", "cod")
    assert cod > red


def test_too_large_a_vocabulary_keeps_the_most_frequent():
    texts = ["a b", "a b", "a c"]

    featurizer = Featurizer.fit(texts, char_ngrams=(0, 0), min_count=1, max_features=2)

    assert featurizer.words == ("a", "b")


def test_unit_rows_are_the_dense_rows_divided_by_their_lengths():
    matrix = random_sparse(40, 30, density=0.2, format="csr", dtype=np.float32, rng=0)
    before = matrix.toarray()
    lengths = np.maximum(np.linalg.norm(before, axis=1, keepdims=True), 1e-9)

    rows = unit_rows(matrix)

    np.testing.assert_allclose(rows.toarray(), before / lengths, rtol=1e-6)
    np.testing.assert_array_equal(matrix.toarray(), before)


def test_unit_rows_leave_empty_rows_empty():
    rows = unit_rows(csr_matrix([[3, 4], [0, 0]]))

    np.testing.assert_allclose(rows.toarray(), [[0.6, 0.8], [0, 0]], rtol=1e-6)


def test_word_ngrams_are_made_of_words_that_are_frequent_enough():
    texts = ["red cod pie", "red cod soup", "soup"]

    featurizer = Featurizer.fit(texts, char_ngrams=(0, 0), word_ngrams=2, min_count=2)

    assert featurizer.words == ("red", "cod", "soup", "red cod")


def test_of_very_many_word_ngrams_the_rarest_are_dropped(monkeypatch):
    monkeypatch.setattr(vectorizer, "_MAX_WORD_NGRAMS", 6)
    texts = ["red cod"] * 3 + [f"a{i} b{i}" for i in range(20)] + ["red cod"] * 3

    featurizer = Featurizer.fit(texts, char_ngrams=(0, 0), word_ngrams=2, min_count=1)

    runs = [word for word in featurizer.words if " " in word]
    assert "red cod" in runs
    assert len(runs) <= 7
    (index,) = (i for i, word in enumerate(featurizer.words) if word == "red cod")
    assert featurizer.idf[index] == pytest.approx(np.log(27 / 7) + 1)


def test_words_that_left_the_cache_are_looked_up_again(monkeypatch):
    featurizer = Featurizer.fit(["red cod", "red tape"], min_count=1)
    before = featurizer.transform(["red cod", "red tape"])
    monkeypatch.setattr(vectorizer, "_MAX_CACHED_WORDS", 1)

    again = featurizer.transform(["red cod", "red tape"])

    assert len(featurizer._ids_of_word) == 3
    assert (again != before).nnz == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300, 1e30])
def test_unit_rows_refuse_a_value_that_float32_cannot_square(value):
    matrix = csr_matrix([[1.0, 0.0], [2.0, value]])

    with pytest.raises(DataError, match=r"features: point 9, column 1 holds (nan|inf|1e\+30)[;,]"):
        unit_rows(matrix, first_row=7)


def test_several_vocabularies_split_each_text_once(monkeypatch):
    seen = []
    monkeypatch.setattr(
        vectorizer, "words_of", lambda text, **_: seen.append(text) or words_of(text)
    )
    texts = SplitTexts(["red cod", "red tape", "cod liver oil"])

    Featurizer.fit(texts, min_count=1).transform(texts)
    Featurizer.fit(texts, word_ngrams=2, min_count=1).transform(texts)
    bag_of_words(texts, None)

    assert seen == list(texts)


def test_a_bag_of_words_splits_each_text_once(monkeypatch):
    seen = []
    monkeypatch.setattr(
        vectorizer, "words_of", lambda text, **_: seen.append(text) or words_of(text)
    )
    texts = ["red cod", "red tape"]

    features, featurizer = bag_of_words(texts, None)

    assert seen == texts
    assert featurizer.words == ("red", "cod", "tape")
    assert (features != featurizer.transform(texts)).nnz == 0


def test_symbols_are_words_if_the_vocabulary_has_them():
    texts = ["Win £100!!", "see you at 100"]
    featurizer = Featurizer.fit(SplitTexts(texts, symbols=True), char_ngrams=(0, 0), min_count=1)

    assert {"£", "!"} <= set(featurizer.words)
    (with_symbols,) = featurizer.transform(["£!"]).toarray()
    assert [featurizer.words[i] for i in with_symbols.nonzero()[0]] == ["£", "!"]
    plain = Featurizer.fit(texts, char_ngrams=(0, 0), min_count=1)
    assert plain.transform(["£!"]).nnz == 0
