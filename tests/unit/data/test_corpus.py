"""Test the fingerprint of a corpus."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias import load_corpus
from elias.data import Corpus, Split, convert
from elias.data.synthetic import synthetic_corpus
from elias.errors import DataError


def small(**changes):
    split = Split(
        labels=csr_matrix(np.float32([[1, 0], [0, 1]])),
        texts=["red cod", "blue cod"],
        filters=np.array([[0, 1]]),
    )
    return Corpus(train=replace(split, **changes), label_names=["fish", "law"])


def test_a_corpus_is_printed_in_one_line():
    corpus = replace(small(), test=small().train)

    assert repr(corpus) == "Corpus(train=2, test=2, n_labels=2)"
    assert repr(corpus.train) == "Split(2 points, 2 labels)"


CHANGES = {
    "labels of other points": {"labels": csr_matrix(np.float32([[0, 1], [1, 0]]))},
    "another weight": {"labels": csr_matrix(np.float32([[1, 0], [0, 2]]))},
    "another text": {"texts": ["red cod", "blue code"]},
    "texts joined otherwise": {"texts": ["red codblue cod", ""]},
    "another filter": {"filters": np.array([[0, 0]])},
    "no filter": {"filters": None},
    "features": {"features": csr_matrix(np.eye(2, dtype=np.float32))},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_content_changes_the_fingerprint(change):
    assert small(**CHANGES[change]).fingerprint() != small().fingerprint()


def test_other_names_and_other_splits_change_the_fingerprint():
    corpus = small()
    renamed = replace(corpus, label_names=["fish", "laws"])
    tested = corpus.with_splits(test=corpus.train)

    assert len({corpus.fingerprint(), renamed.fingerprint(), tested.fingerprint()}) == 3


def test_the_order_in_which_entries_are_stored_does_not_matter():
    labels = csr_matrix((np.float32([1, 1]), np.array([1, 0]), np.array([0, 2, 2])), shape=(2, 2))
    ordered = csr_matrix(np.float32([[1, 1], [0, 0]]))

    assert small(labels=labels).fingerprint() == small(labels=ordered).fingerprint()


def test_the_same_data_at_another_path_is_the_same_corpus(tmp_path):
    corpus = synthetic_corpus(n_points=60, n_labels=12, seed=2)
    convert(corpus, tmp_path / "one")

    assert load_corpus(tmp_path / "one").fingerprint() == corpus.fingerprint()


def test_labels_are_aligned_by_name_and_unknown_ones_come_last(caplog):
    labels = csr_matrix(np.float32([[1, 2, 0], [0, 0, 3]]))
    split = Split(labels=labels, texts=["a", "b"], filters=np.array([[0, 0], [1, 1]]))
    corpus = Corpus(train=split, test=split, label_names=["new", "law", "fish"])

    aligned = corpus.align_labels(["fish", "law", "tax"])

    assert aligned.label_names == ["fish", "law", "tax", "new"]
    expected = [[0, 2, 0, 1], [3, 0, 0, 0]]
    for name in ("train", "test"):
        assert aligned.split(name).labels.toarray().tolist() == expected
        assert aligned.split(name).filters.tolist() == [[1, 1]]  # "new" is never predicted
    assert "the model does not know 1 of the 3 labels, such as 'new'" in caplog.text
    assert split.labels.toarray().tolist() == [[1, 2, 0], [0, 0, 3]]  # the original is unchanged


def test_equal_labels_need_no_alignment():
    corpus = small()

    assert corpus.align_labels(["fish", "law"]) is corpus


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["wine", "tax"], "the model knows none of the 2 labels"),
        (["law", "law"], "label 0 is 'fish', but in the model it is 'law'; repeated label names"),
        (["law", "law", "fish"], "has 2 labels, but the model has 3; repeated label names"),
    ],
)
def test_labels_that_cannot_be_aligned_are_refused(names, problem):
    with pytest.raises(DataError, match=problem):
        small().align_labels(names)


def test_filters_move_with_the_points_that_are_taken():
    taken = small(filters=np.array([[0, 1], [1, 0]])).train.take(np.array([1]))

    assert taken.texts == ["blue cod"]
    assert taken.filters.tolist() == [[0, 0]]


def test_a_split_that_is_missing_is_refused_with_those_that_exist():
    with pytest.raises(DataError, match="corpus: no test split; use one of: train"):
        small().split("test")


@pytest.mark.parametrize("on_disk", ["on", "off"])
def test_a_filtered_label_of_a_point_is_not_relevant(tmp_path, on_disk):
    split = Split(labels=csr_matrix(np.float32([[1, 1], [0, 1]])), texts=["red cod", "blue cod"])
    corpus = Corpus(train=split, test=split, label_names=["fish", "law"])
    convert(corpus, tmp_path / "data", "folder")
    (tmp_path / "data" / "filter_labels_test.txt").write_text("0 0\n1 0\n")

    read = load_corpus(tmp_path / "data", on_disk=on_disk)

    assert read.train.labels.toarray().tolist() == [[1, 1], [0, 1]]
    assert read.test.labels.toarray().tolist() == [[0, 1], [0, 1]]
    assert read.test.labels.nnz == 2
