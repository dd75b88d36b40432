"""Groups of points that stay on one side of a split."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias.data import Corpus, Split, load_corpus
from elias.data.near_duplicates import (
    ALONE,
    cell_keys,
    count_groups,
    first_members,
    normal_form,
    text_keys,
    training_groups,
)
from elias.errors import DataError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Cod quotas, 2019!", "cod quotas"),
        ("  STRASSE\tstraße ", "strasse strasse"),
        ("COVID-19_b", "covid b"),
        ("की", "की"),  # a letter and a vowel sign
        ("1984", "1984"),  # no letters: unchanged
        (" \n ", ""),
        ("", ""),
    ],
)
def test_the_normal_form_has_only_words(text, expected):
    assert normal_form(text) == expected


def test_texts_that_differ_by_numbers_and_punctuation_have_one_key():
    keys = text_keys(["Cod, 1", "cod 2.", "wine", "", " "])

    assert keys[0] == keys[1] != keys[2]
    assert keys[3:].tolist() == [ALONE, ALONE]


def test_chunks_do_not_change_the_keys(monkeypatch):
    texts = [f"text {letter}" for letter in "abcaab"]
    whole = text_keys(texts)
    monkeypatch.setattr("elias.data.near_duplicates._CHUNK", 4)

    np.testing.assert_array_equal(text_keys(texts), whole)


def test_empty_cells_are_in_no_group():
    keys = cell_keys([" a", "a", None, float("nan"), "", 7, "7"])

    assert first_members(keys).tolist() == [0, 0, 2, 3, 4, 5, 5]
    assert count_groups(keys) == (2, 4)


def corpus_of(texts, **options):
    labels = csr_matrix(np.ones((len(texts), 1), dtype=np.float32))
    return Corpus(train=Split(labels=labels, texts=texts), label_names=["a"], **options)


TESTS = {"at random": ["aa 2", "new", "newer"], "apart": ["new", "newer", ""]}
WORDS = [chr(ord("a") + i) + chr(ord("a") + j) for i in range(10) for j in range(10)]


def test_the_training_points_are_grouped_by_near_duplicates():
    texts = [*WORDS, "AA 7"]

    assert training_groups(corpus_of(texts)).tolist() == [*range(100), 0]
    assert training_groups(corpus_of(texts, reading={"group": "none"})) is None
    assert training_groups(corpus_of(WORDS)) is None


def test_points_are_grouped_only_if_the_test_texts_are_apart_from_the_training_texts():
    corpus = corpus_of([*WORDS, *(word.upper() for word in WORDS[:20])])
    tests = {name: corpus_of(texts).train for name, texts in TESTS.items()}

    groups = {name: training_groups(corpus.with_splits(test=test)) for name, test in tests.items()}

    assert groups["at random"] is None
    assert groups["apart"].tolist() == [*range(100), *range(20)]


def test_many_texts_that_differ_by_their_numbers_are_no_duplicates():
    texts = [*WORDS, *(f"item {i}" for i in range(10)), "item 3", "AA"]

    groups = training_groups(corpus_of(texts))

    assert groups.tolist() == [*range(110), 103, 0]


def test_test_texts_that_differ_by_their_numbers_from_training_texts_are_no_duplicates(caplog):
    texts = [*(f"item {i}" for i in range(20)), *WORDS, "AA"]
    test = corpus_of([f"item {i}" for i in range(20, 30)]).train

    with caplog.at_level(logging.INFO):
        groups = training_groups(corpus_of(texts).with_splits(test=test))

    assert groups.tolist() == [*range(120), 20]
    assert not caplog.records


def test_one_group_of_all_points_is_split_at_random(caplog):
    with caplog.at_level(logging.WARNING):
        assert training_groups(corpus_of(["same"] * 5)) is None

    assert "all 5 points are one group" in caplog.text


@pytest.mark.parametrize("on_disk", ["on", "off"])
def test_a_column_gives_the_groups(tmp_path, monkeypatch, on_disk):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "articles.csv"
    rows = [f"text {chr(97 + i % 26)}{i},x,author {i // 4}" for i in range(100)]
    path.write_text("\n".join(["text,labels,author", *rows]))

    corpus = load_corpus(path, group="author", on_disk=on_disk)

    assert corpus.reading["group"] == "author"
    assert corpus.notes["groups"] == "column 'author'"
    assert len(corpus.test) == 20
    assert not set(corpus.train.groups) & set(corpus.test.groups)
    again = load_corpus(path, on_disk=on_disk, **corpus.reading)
    assert again.fingerprint() == corpus.fingerprint()


def test_a_column_whose_groups_are_also_in_the_test_split_gets_a_warning(caplog):
    train = replace(corpus_of(WORDS[:6]).train, groups=cell_keys(["a", "a", "b", "b", "c", ""]))
    tests = {name: replace(train, groups=cell_keys([*name, ""] * 2)) for name in ("ad", "de")}

    for name, n_warnings in (("ad", 1), ("de", 0)):
        caplog.clear()
        groups = training_groups(corpus_of(WORDS).with_splits(train=train, test=tests[name]))

        assert groups.tolist() == [0, 0, 2, 2, 4, 5]  # an explicit column is kept
        assert len(caplog.records) == n_warnings
        if n_warnings:
            assert "1 of 4 groups are in the training and the test split: held-out" in caplog.text


def test_near_duplicates_on_disk_stay_together(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "articles.csv"
    rows = [f"about {WORDS[i // 2]} no. {i % 2},x" for i in range(200)]
    path.write_text("\n".join(["text,labels", *rows]))

    memory, disk = (load_corpus(path, on_disk=value) for value in ("off", "on"))

    assert disk.train.on_disk
    assert disk.test.texts == memory.test.texts
    assert len(disk.test) == 40
    assert not {text[:8] for text in disk.train.texts} & {text[:8] for text in disk.test.texts}
    assert disk.notes["test"].endswith("(seed 0), groups kept together: 100")


def test_a_group_column_that_does_not_exist_is_named(tmp_path):
    path = tmp_path / "articles.csv"
    path.write_text("text,labels,author\na,x,b\n")

    with pytest.raises(DataError, match=r"no column 'autor' among .*did you mean 'author'"):
        load_corpus(path, group="autor")
