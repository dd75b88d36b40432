import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from elias.data.splits import hold_out

seeds = st.integers(0, 2**31)


@st.composite
def label_matrices(draw):
    n_labels = draw(st.integers(1, 12))
    row = st.lists(st.integers(0, n_labels - 1), unique=True, max_size=5).map(sorted)
    rows = draw(st.lists(row, min_size=1, max_size=30))
    indptr = np.cumsum([0, *map(len, rows)])
    indices = np.array([label for row in rows for label in row], dtype=np.int32)
    return csr_matrix((np.ones(len(indices)), indices, indptr), shape=(len(rows), n_labels))


@given(label_matrices(), st.floats(0, 1), seeds)
def test_every_label_with_a_training_point_keeps_one(labels, share, seed):
    train, _ = hold_out(labels, int(share * labels.shape[0]), seed)

    assert set(labels[train].indices) == set(labels.indices)


@given(label_matrices(), st.floats(0, 1), seeds)
def test_the_two_parts_are_sorted_disjoint_and_all_there_is(labels, share, seed):
    size = int(share * labels.shape[0])

    train, validation = hold_out(labels, size, seed)

    assert len(validation) <= size
    assert sorted([*train, *validation]) == list(range(labels.shape[0]))
    for rows in (train, validation):
        assert rows.dtype == np.int64
        assert (np.diff(rows) > 0).all()


@given(label_matrices(), seeds)
def test_no_point_left_behind_could_still_be_spared(labels, seed):
    train, _ = hold_out(labels, labels.shape[0], seed)

    counts = np.bincount(labels[train].indices, minlength=labels.shape[1])
    for row in train:
        ids = labels[row].indices
        assert len(ids) == 0 or counts[ids].min() == 1


@given(label_matrices(), st.floats(0, 1), seeds)
def test_a_seed_takes_the_same_points(labels, share, seed):
    size = int(share * labels.shape[0])

    first, again = (hold_out(labels, size, seed) for _ in range(2))

    np.testing.assert_array_equal(first[1], again[1])
