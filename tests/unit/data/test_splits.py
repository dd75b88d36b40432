from dataclasses import replace

import numpy as np
from scipy.sparse import csr_matrix

from elias.data.splits import hold_out, hold_out_test, recorded_size, restore_splits
from elias.data.stats import corpus_stats
from elias.data.synthetic import synthetic_corpus


def test_the_only_point_of_a_label_stays_in_training():
    labels = csr_matrix(np.array([[1, 1, 0], [1, 0, 0], [1, 0, 1], [1, 0, 0]]))

    train, validation = hold_out(labels, size=4, seed=0)

    assert train.tolist() == [0, 2]
    assert validation.tolist() == [1, 3]


def test_of_points_sharing_their_one_label_all_but_one_can_go():
    labels = csr_matrix(np.ones((5, 1)))

    train, validation = hold_out(labels, size=5, seed=0)

    assert (len(train), len(validation)) == (1, 4)


def test_points_without_labels_stay_in_training():
    labels = csr_matrix(np.array([[0], [1], [1], [0]]))

    train, _ = hold_out(labels, size=4, seed=0)

    assert {0, 3} <= set(train.tolist())


def test_a_label_listed_twice_on_one_point_is_still_its_only_point():
    labels = csr_matrix((np.ones(3), np.array([0, 0, 1]), np.array([0, 2, 3])), shape=(2, 2))

    _, validation = hold_out(labels, size=1, seed=0)

    assert validation.tolist() == []
    assert labels.nnz == 3


def test_no_more_points_are_taken_than_asked_for():
    labels = csr_matrix(np.ones((100, 3)))

    _, validation = hold_out(labels, size=7, seed=0)

    assert len(validation) == 7


def test_hold_out_chunks_do_not_change_the_choice(monkeypatch):
    rng = np.random.default_rng(0)
    labels = csr_matrix(rng.random((200, 40)) < 0.05)
    _, whole = hold_out(labels, size=50, seed=1)
    monkeypatch.setattr("elias.data.splits._CHUNK", 7)

    _, in_pieces = hold_out(labels, size=50, seed=1)

    np.testing.assert_array_equal(whole, in_pieces)


def test_points_held_out_at_random_may_have_the_only_point_of_a_label():
    labels = csr_matrix(np.eye(6)[[0, 1, 2, 3, 4, 5]])

    train, validation = hold_out(labels, size=2, seed=0, covered=False)

    assert len(validation) == 2
    assert sorted([*train, *validation]) == list(range(6))


def test_points_without_labels_are_not_held_out_at_random_either():
    labels = csr_matrix(np.array([[0, 0], [1, 0], [0, 0], [0, 1]]))

    _, validation = hold_out(labels, size=4, seed=0, covered=False)

    assert validation.tolist() == [1, 3]


def recorded(corpus, **settings):
    """The metadata of a model that was trained on a corpus."""
    return {"data": corpus_stats(corpus).to_dict(), "data_settings": settings}


def test_the_test_points_of_a_run_are_found_again():
    whole = synthetic_corpus(n_points=60, n_labels=12, n_test=0)
    cut = hold_out_test(whole, 0.2, seed=3)

    restored = restore_splits(whole, whole.label_names, recorded(cut, seed=3))

    assert restored.fingerprint() == cut.fingerprint()
    assert recorded_size(recorded(cut)) == 60


def test_a_run_that_tested_on_nothing_gives_all_points():
    whole = synthetic_corpus(n_points=60, n_labels=12, n_test=0)

    assert restore_splits(whole, whole.label_names, recorded(whole)) is whole


def test_data_of_another_run_is_not_split():
    whole = synthetic_corpus(n_points=60, n_labels=12, n_test=0)
    cut = hold_out_test(whole, 0.2, seed=3)
    other = synthetic_corpus(n_points=60, n_labels=12, n_test=0, seed=1)

    assert restore_splits(other, whole.label_names, recorded(cut, seed=3)) is None
    assert restore_splits(whole, ["other", *whole.label_names[1:]], recorded(cut)) is None
    assert restore_splits(whole, whole.label_names, recorded(cut, seed=4)) is None
    assert restore_splits(whole, whole.label_names, {}) is None


def test_texts_of_other_columns_do_not_hide_the_points_of_a_run():
    whole = synthetic_corpus(n_points=60, n_labels=12, n_test=0)
    cut = hold_out_test(whole, 0.2, seed=3)
    train = replace(whole.train, texts=["short"] * 60)
    other = replace(whole, train=train, reading={"text": "title"})

    restored = restore_splits(other, whole.label_names, recorded(cut, seed=3, text="body"))

    assert restored.test.labels.nnz == cut.test.labels.nnz
