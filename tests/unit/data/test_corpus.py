"""What tells one corpus from another."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias import load_corpus
from elias.data import Corpus, Split, convert
from elias.data.synthetic import synthetic_corpus


def small(**changes):
    split = Split(
        labels=csr_matrix(np.float32([[1, 0], [0, 1]])),
        texts=["red cod", "blue cod"],
        filters=np.array([[0, 1]]),
    )
    return Corpus(train=replace(split, **changes), label_names=["fish", "law"])


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


def test_the_same_data_in_another_place_is_the_same_corpus(tmp_path):
    corpus = synthetic_corpus(n_points=60, n_labels=12, seed=2)
    convert(corpus, tmp_path / "one")

    assert load_corpus(tmp_path / "one").fingerprint() == corpus.fingerprint()
