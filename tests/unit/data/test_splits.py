from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias import EliasConfig
from elias.data.near_duplicates import text_keys
from elias.data.splits import (
    hold_out,
    hold_out_test,
    recorded_size,
    restore_splits,
    share_in_sketch,
    text_sketch,
    validation_split,
)
from elias.data.stats import corpus_stats
from elias.data.synthetic import synthetic_corpus
from elias.errors import DataError


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


def test_random_points_include_those_without_labels():
    labels = csr_matrix(np.array([[0], [1]] * 50))

    _, validation = hold_out(labels, size=40, seed=0, covered=False)

    assert 10 < (validation % 2 == 0).sum() < 30


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


def recorded(corpus, **settings):
    """The metadata of a model that was trained on a corpus."""
    return {"data": corpus_stats(corpus).to_dict(), "data_settings": settings}


def test_the_test_points_of_a_run_are_restored():
    whole = synthetic_corpus(n_points=60, n_labels=12, n_test=0)
    cut = hold_out_test(whole, 0.2, seed=3)

    restored = restore_splits(whole, whole.label_names, recorded(cut, seed=3))

    assert restored.fingerprint() == cut.fingerprint()
    assert recorded_size(recorded(cut)) == 60


def test_a_run_that_tested_on_nothing_gives_all_points():
    whole = synthetic_corpus(n_points=60, n_labels=12, n_test=0)

    restored = restore_splits(whole, whole.label_names, recorded(whole))

    assert restored.test is None
    assert restored.fingerprint() == whole.fingerprint()


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


def test_a_large_group_is_not_held_out_while_others_are_left():
    labels = csr_matrix(np.ones((40, 1)))
    groups = np.array([0] * 11 + list(range(11, 40)))

    for seed in range(20):
        assert hold_out(labels, 20, seed, groups=groups)[1].min() >= 11


def test_if_nothing_else_is_left_the_smallest_group_is_held_out():
    labels = csr_matrix(np.ones((30, 1)))
    groups = np.array([0] * 16 + [16] * 14)

    _, held_out = hold_out(labels, 3, 0, covered=False, groups=groups)

    assert held_out.tolist() == list(range(16, 30))


def test_each_point_is_held_out_equally_often_whatever_the_size_of_its_group():
    labels = csr_matrix(np.ones((600, 1)))
    groups = np.array([row - row % 5 if row < 300 else row for row in range(600)])

    n_times = np.zeros(600)
    for seed in range(100):
        n_times[hold_out(labels, 150, seed, covered=False, groups=groups)[1]] += 1

    assert n_times.sum() == 100 * 150
    assert n_times[:300].mean() == pytest.approx(25, rel=0.05)


def with_duplicates(n_points=80, copies=20):
    """A corpus in which the last points repeat the texts of the first ones, with a number."""
    corpus = synthetic_corpus(n_points=n_points, n_labels=8, n_test=0)
    texts = list(corpus.train.texts)
    texts[-copies:] = [f"{text.upper()} 2!" for text in texts[:copies]]
    return replace(corpus, train=replace(corpus.train, texts=texts))


def assert_apart(*splits):
    keys = [set(text_keys(split.texts)) for split in splits]
    assert len(set.union(*keys)) == sum(map(len, keys))


def test_near_duplicates_stay_on_one_side_in_both_splits():
    whole = with_duplicates()

    cut = hold_out_test(whole, 0.25, seed=1)
    config = EliasConfig().override({"eval.validation_size": 10, "eval.hold_out": "random"})
    train, validation = validation_split(cut, config.resolve(len(cut.train), cut.n_labels))

    assert (len(cut.test), len(validation)) == (20, 10)
    assert_apart(train, validation, cut.test)


def test_a_run_with_groups_is_split_again_as_it_was():
    whole = with_duplicates()
    for seed in range(10):
        cut = hold_out_test(whole, 0.2, seed=seed)

        restored = restore_splits(
            replace(whole, reading={}), whole.label_names, recorded(cut, **cut.reading)
        )

        assert restored.fingerprint() == cut.fingerprint()
        assert restored.reading["group"] == "near-duplicates"


def test_a_run_of_an_older_version_had_no_groups():
    whole = with_duplicates()
    cut = hold_out_test(replace(whole, reading={}), 0.2, seed=3)
    metadata = recorded(cut, seed=3, test_size=0.2)
    for split in metadata["data"]["splits"].values():
        del split["near_duplicates"]  # older versions did not count them

    restored = restore_splits(whole, whole.label_names, metadata)

    assert restored.fingerprint() == cut.fingerprint()
    assert restored.reading["group"] == "none"


def test_other_texts_with_other_near_duplicates_are_refused():
    whole = with_duplicates()
    cut = hold_out_test(replace(whole, reading={"group": "near-duplicates"}), 0.2, seed=3)
    train = replace(whole.train, texts=[f"a{'b' * (row // 2)}" for row in range(80)])
    other = replace(whole, train=train, reading={"text": "title"})

    with pytest.raises(DataError, match="near-duplicates in the text column body, but title"):
        restore_splits(other, whole.label_names, recorded(cut, **cut.reading, text="body"))


@pytest.mark.parametrize("n_texts", [100, 20_000])
def test_the_share_of_training_texts_is_estimated_from_a_sketch(n_texts):
    texts = [f"text {i}" for i in range(n_texts)]
    sketch = text_sketch(reversed(texts))

    assert len(sketch) <= 16_384
    assert share_in_sketch(texts, sketch) == 1
    assert share_in_sketch([f"new {i}" for i in range(n_texts)], sketch) == 0
    half = [text if i % 2 else f"new {i}" for i, text in enumerate(texts)]
    assert abs(share_in_sketch(half, sketch) - 0.5) < 0.05
    assert share_in_sketch([], sketch) == share_in_sketch(texts, "") == 0


def test_empty_texts_are_not_compared_with_a_sketch():
    of_older_version = "00000000" + text_sketch(["cod"])  # with the hash of an empty text

    assert text_sketch(["cod", "", " "]) == text_sketch(["cod"])
    assert share_in_sketch(["", "cod", "\t"], of_older_version) == 1
    assert share_in_sketch([""], of_older_version) == 0


def test_an_older_run_that_counted_empty_texts_as_duplicates_is_recognised():
    whole = with_duplicates()
    cut = hold_out_test(replace(whole, reading={}), 0.2, seed=3)
    metadata = recorded(cut, seed=3, test_size=0.2)
    for split in metadata["data"]["splits"].values():
        split["duplicate_texts"] += 1

    restored = restore_splits(whole, whole.label_names, metadata)

    assert restored.fingerprint() == cut.fingerprint()
