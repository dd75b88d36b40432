"""Counting a corpus."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias.data import Corpus, Split, corpus_stats, load_corpus
from elias.data.near_duplicates import cell_keys
from elias.data.stats import data_hints, example_labels, example_points

SHARED = Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture
def corpus():
    train = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=np.float32)
    test = np.array([[0, 1, 1, 0], [0, 0, 0, 0]], dtype=np.float32)
    return Corpus(
        train=Split(
            labels=csr_matrix(train),
            texts=["Cod, quotas!", "cod  quotas", ""],
            features=csr_matrix((3, 7)),
        ),
        test=Split(
            labels=csr_matrix(test),
            texts=["COD quotas", "one two three four"],
            filters=np.array([[0, 1]]),
        ),
        label_names=["a", "b", "a", "d"],
    )


def test_labels_are_counted_by_their_training_points(corpus):
    stats = corpus_stats(corpus)

    assert stats.labels == 4
    assert stats.labels_with_training_points == 2
    assert stats.labels_without_training_points == 2
    assert stats.labels_with_one_training_point == 1
    assert stats.labels_with_up_to_five_training_points == 4
    assert stats.points_per_label == 0.75
    assert stats.points_per_label_percentiles[-1] == 2
    assert stats.repeated_names == 1
    assert stats.features == 7


def test_each_split_is_counted(corpus):
    train, test = corpus_stats(corpus).splits.values()

    assert (train.points, train.pairs, train.points_without_labels) == (3, 3, 1)
    assert train.labels_per_point == 1.0
    assert train.labels_with_points == 2
    assert (train.words_mean, train.empty_texts) == (pytest.approx(4 / 3), 1)
    assert test.words_percentiles == (2, 3, 3, 3)
    assert (train.filter_pairs, test.filter_pairs) == (0, 1)


def test_duplicates_are_found_whatever_their_case_and_punctuation(corpus):
    train, test = corpus_stats(corpus).splits.values()

    assert train.duplicate_texts == 1
    assert train.texts_in_train is None
    assert (test.duplicate_texts, test.texts_in_train) == (0, 1)


def test_near_duplicates_are_counted_without_empty_texts(corpus):
    train = replace(corpus.train, texts=["cod 1", "Cod 2", ""])
    test = replace(corpus.test, texts=["(cod)", ""])

    stats = corpus_stats(corpus.with_splits(train=train, test=test)).splits

    assert (stats["train"].near_duplicate_groups, stats["train"].near_duplicates) == (1, 2)
    assert stats["train"].near_duplicates_in_train is None
    assert (stats["test"].near_duplicate_groups, stats["test"].near_duplicates_in_train) == (0, 1)


def test_empty_texts_are_no_duplicates(corpus):
    train = replace(corpus.train, texts=["cod", "", " "])
    test = replace(corpus.test, texts=["", "\t"])

    stats = corpus_stats(corpus.with_splits(train=train, test=test)).splits

    assert (stats["train"].empty_texts, stats["train"].duplicate_texts) == (2, 0)
    assert (stats["test"].duplicate_texts, stats["test"].texts_in_train) == (0, 0)


def test_groups_of_a_column_are_counted_without_empty_cells(corpus):
    train = replace(corpus.train, groups=cell_keys(["ann", "ann", ""]))
    test = replace(corpus.test, groups=cell_keys(["ann", "bo"]))
    grouped = corpus.with_splits(train=train, test=test)

    stats = corpus_stats(grouped)

    assert (stats.splits["train"].groups, stats.splits["train"].points_in_groups) == (1, 2)
    assert (stats.splits["test"].groups, stats.splits["test"].points_with_group_in_train) == (0, 1)
    assert corpus_stats(corpus).splits["train"].groups is None
    problem = "1 of 2 groups are in the training and the test split"
    assert any(hint.startswith(problem) for hint in data_hints(grouped, stats))


def test_a_corpus_of_features_has_no_text_counts(corpus):
    train = Split(labels=corpus.train.labels, features=corpus.train.features)

    stats = corpus_stats(Corpus(train=train, label_names=corpus.label_names)).splits["train"]

    assert stats.words_mean is None
    assert stats.words_percentiles is None
    assert stats.duplicate_texts is None


def test_a_dictionary_of_it_goes_through_json(corpus):
    tree = corpus_stats(corpus).to_dict()

    assert json.loads(json.dumps(tree))["splits"]["test"]["texts_in_train"] == 1


def test_the_wordnet_set_counts_as_its_source_says(tmp_path):
    archive = SHARED / "wordnet-related.tar.xz"
    if not archive.is_file():
        pytest.skip("the shared data sets are not here")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")

    stats = corpus_stats(load_corpus(tmp_path / "wordnet-related"))

    train, test = stats.splits["train"], stats.splits["test"]
    assert (train.points, test.points, stats.labels) == (99269, 17321, 101909)
    assert (train.labels_with_points, test.labels_with_points) == (101909, 26290)
    assert round(train.labels_per_point, 3) == 2.9
    assert round(test.labels_per_point, 3) == 2.443
    assert round(stats.points_per_label, 3) == 2.825
    assert stats.points_per_label_percentiles == (1, 2, 5, 19, 569)
    assert (round(train.words_mean, 1), train.words_percentiles) == (14.9, (7, 13, 25, 41))
    assert (round(test.words_mean, 1), test.words_percentiles) == (14.9, (7, 13, 25, 41))
    assert stats.labels_with_one_training_point == 47221
    assert stats.labels_with_up_to_five_training_points == 92567
    assert (train.duplicate_texts, test.texts_in_train) == (1, 0)


def test_labels_per_point_have_percentiles(corpus):
    assert corpus_stats(corpus).splits["train"].labels_percentiles == (0, 1, 1, 1)


def test_examples_show_texts_and_their_labels(corpus):
    assert example_points(corpus) == [
        ("Cod, quotas!", ["a", "b"]),
        ("cod  quotas", ["a"]),
        ("", []),
    ]
    assert example_points(corpus, 1) == [("Cod, quotas!", ["a", "b"])]
    assert example_points(replace(corpus, train=replace(corpus.train, texts=None))) == []


def test_examples_of_labels_are_the_most_frequent_and_the_rarest_that_occur():
    labels = csr_matrix(np.tri(6, 6, dtype=np.float32)[:, :5])
    points = Split(labels=labels, texts=[f"text {i}" for i in range(6)])
    corpus = Corpus(train=points, label_names=list("abcdef"[:5]))

    frequent, rare = example_labels(corpus, 2, 2)

    assert frequent == [("a", 6), ("b", 5)]
    assert rare == [("d", 3), ("e", 2)]


def hints_of(path, content, **options):
    path.write_text(content)
    corpus = load_corpus(path, test_size=0, **options)
    return data_hints(corpus, corpus_stats(corpus))


def test_hints_name_what_may_be_wrong(tmp_path):
    table = "text,labels\n" + ",x\n" * 12 + "".join(f"t {'z' * i},y\n" for i in range(88))
    tags = "text,labels\n" + "".join(f"{'b' * i},a{i} b{i}\n" for i in range(1, 40))
    no_header = "cod in the north sea,fish\nwine,drink\n"

    assert "12% of texts are empty" in hints_of(tmp_path / "a.csv", table)
    assert any("separator=" in hint for hint in hints_of(tmp_path / "b.csv", tags))
    columns = {"text": "cod in the north sea", "labels": "fish"}
    assert any("no header" in hint for hint in hints_of(tmp_path / "c.csv", no_header, **columns))


def test_data_that_nothing_can_be_learned_from_gets_a_hint(tmp_path):
    hints = hints_of(tmp_path / "a.csv", "text,labels\ncod,fish\ncod,fish\n")

    assert any("only one label" in hint for hint in hints)
    assert any("texts are the same" in hint for hint in hints)


def test_cells_of_several_words_in_a_tiny_file_get_a_hint(tmp_path):
    several = hints_of(tmp_path / "a.csv", "text,tags\na,python pandas\nb,sql\nc,numpy\n")
    one = hints_of(tmp_path / "b.csv", "text,tags\na,python\nb,sql\nc,numpy\n")

    problem = "each text has one label, and most labels occur once"
    assert several == [f"{problem}; if a cell has several labels, set separator="]
    assert one == []


def test_a_plain_corpus_gets_no_hint(tmp_path):
    assert hints_of(tmp_path / "a.csv", "text,labels\ncod,fish|law\nwine,law\n") == []
