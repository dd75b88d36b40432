import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from elias.data.near_duplicates import first_members
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
def test_no_remaining_point_could_still_be_held_out(labels, seed):
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


def slow_hold_out(labels, size, seed, covered, groups):
    """The rule of `hold_out`, step by step over sets of points."""
    order = np.random.default_rng(seed).permutation(labels.shape[0]).tolist()
    labels_of = [set(row.indices.tolist()) for row in labels]
    members = {first: [r for r, g in enumerate(groups) if g == first] for first in set(groups)}
    tried = [members[row] for row in order if row in members]
    taken = set()

    def may_go(group):
        rest = set(range(len(order))) - taken - set(group)
        left = set().union(*(labels_of[row] for row in rest)) if rest else set()
        all_covered = not covered or all(labels_of[row] and labels_of[row] <= left for row in group)
        return bool(rest) and all_covered

    def draw(tried, fits):
        for group in tried:
            missing = size - len(taken)
            if missing > 0 and taken.isdisjoint(group) and fits(len(group), missing):
                taken.update(group if may_go(group) else [])

    draw([g for g in tried if len(g) <= max(1, size / 2)], lambda n, missing: n <= missing)
    draw(tried, lambda n, missing: abs(n - missing) < missing)
    if not taken:
        draw(sorted(tried, key=len), lambda *_: True)
    return sorted(taken)


@st.composite
def grouped_points(draw):
    labels = draw(label_matrices())
    keys = draw(st.lists(st.integers(0, 6), min_size=labels.shape[0], max_size=labels.shape[0]))
    return labels, first_members(np.array(keys, dtype=np.int64))


@given(grouped_points(), st.floats(0, 0.6), seeds, st.booleans())
@example(points=(csr_matrix((2, 1)), np.arange(2)), share=0.5, seed=0, covered=False)
def test_groups_are_drawn_as_the_slow_rule_draws_them(points, share, seed, covered):
    labels, groups = points
    size = int(share * labels.shape[0])

    train, held_out = hold_out(labels, size, seed, covered=covered, groups=groups)

    assert held_out.tolist() == slow_hold_out(labels, size, seed, covered, groups.tolist())
    assert not set(groups[train]) & set(groups[held_out])
    assert len(train) > 0


@given(label_matrices(), st.floats(0, 1), seeds, st.booleans())
def test_groups_of_one_point_change_nothing(labels, share, seed, covered):
    size = int(share * (labels.shape[0] - 1))
    alone = np.arange(labels.shape[0])

    plain = hold_out(labels, size, seed, covered=covered)
    grouped = hold_out(labels, size, seed, covered=covered, groups=alone)

    np.testing.assert_array_equal(plain[1], grouped[1])
