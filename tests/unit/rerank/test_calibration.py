import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.tree import DecisionTreeClassifier

from elias.rerank.calibration import LEAF, Calibration


def pairs(seed, size=400):
    """(p, q, frequency, relevant) where relevance depends on all of them."""
    rng = np.random.default_rng(seed)
    p, q = rng.random((2, size)).astype(np.float32)
    frequency = rng.integers(1, 1000, size)
    relevant = p * q + 0.1 * (frequency > 300) + 0.2 * rng.standard_normal(size) > 0.5
    return p, q, frequency, relevant


def grow_slowly(all_rows, all_relevant, sample, order_of, depth, leaf, n_considered):
    """Return a function that gives the share of relevant pairs in the leaf of a row.

    A split may lie between any two values of all rows, also of those that are not in the sample.
    ``order_of(node)`` is the order in which a node, numbered level by level, tries the features.
    """
    rows, relevant = all_rows[sample], all_relevant[sample]

    def gini(part):
        return len(part) * 2 * part.mean() * (1 - part.mean()) if len(part) else 0.0

    def best_split(inside, order):
        best, split = gini(relevant[inside]) * (1 - 1e-9) - 1e-9, None
        for i, f in enumerate(order):
            if i >= n_considered and split is not None:
                break
            values = np.unique(all_rows[:, f]).astype(np.float64)
            for threshold in (values[:-1] + values[1:]) / 2:
                left = inside & (rows[:, f] <= threshold)
                right = inside & ~left
                if min(left.sum(), right.sum()) < leaf:
                    continue
                impurity = gini(relevant[left]) + gini(relevant[right])
                if impurity < best - 1e-9:
                    best, split = impurity, (f, threshold, left, right)
        return split

    nodes, splits = [np.ones(len(rows), dtype=bool)], {}
    level = [0]
    for _ in range(depth):
        following = []
        for node in level:
            split = best_split(nodes[node], order_of(node))
            if split is not None:
                splits[node] = (*split[:2], len(nodes))
                following += [len(nodes), len(nodes) + 1]
                nodes += split[2:]
        level = following

    def share(row):
        node = 0
        while node in splits:
            f, threshold, child = splits[node]
            node = child if row[f] <= threshold else child + 1
        return relevant[nodes[node]].mean()

    return share


@given(seed=st.integers(0, 2**31), leaf=st.sampled_from([1, 20]))
def test_the_first_split_is_as_good_as_that_of_scikit_learn(seed, leaf):
    p, q, frequency, relevant = pairs(seed)
    rows = np.stack([p, q, p * q, frequency.astype(np.float32)], axis=1)
    grown = DecisionTreeClassifier(max_depth=1, min_samples_leaf=leaf, random_state=0)
    expected = grown.fit(rows, relevant).predict_proba(rows)[:, 1]

    tree = Calibration.fit(p, q, frequency, relevant, depth=1, leaf=leaf)
    actual = tree.probability(p, q, frequency)

    # two features may have equally good splits, so their impurities are compared
    assert (actual * (1 - actual)).mean() == pytest.approx((expected * (1 - expected)).mean())


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), n_trees=st.integers(1, 3), known=st.booleans())
def test_trees_equal_those_grown_slowly_on_bootstrap_samples(seed, n_trees, known):
    p, q, frequency, relevant = pairs(seed, size=60)
    q = np.round(q, 1)  # equal values are never separated
    rows = np.stack([p, q, p * q, frequency.astype(np.float32)], axis=1)
    # points of several pairs, some numbers of points having none
    points = np.sort(np.random.default_rng(seed).integers(0, 20, len(p))) if known else None
    depth, leaf = 3, 2

    actual = Calibration.fit(
        p, q, frequency, relevant, depth=depth, leaf=leaf, n_trees=n_trees, points=points
    )

    of = np.arange(len(p)) if points is None else points
    present, expected = np.unique(of), np.zeros(len(p))
    for tree in range(n_trees):
        generator = np.random.default_rng(tree)
        sample, orders, n_considered = np.arange(len(p)), np.tile(np.arange(4), (7, 1)), 4
        if n_trees > 1:
            drawn = present[generator.integers(0, len(present), len(present))]
            sample = np.concatenate([np.flatnonzero(of == point) for point in drawn])
            orders, n_considered = generator.permuted(orders, axis=1), 2
        order_of = orders.__getitem__
        share = grow_slowly(rows, relevant, sample, order_of, depth, leaf, n_considered)
        expected += [share(row) for row in rows]
    np.testing.assert_allclose(actual.probability(p, q, frequency), expected / n_trees, rtol=1e-9)
    assert len(actual.roots) == n_trees
    again = Calibration.from_arrays(actual.to_arrays())
    np.testing.assert_array_equal(
        again.probability(p, q, frequency), actual.probability(p, q, frequency)
    )


def test_many_values_are_split_at_quantiles_nearly_as_well():
    p, q, frequency, relevant = pairs(5, size=20_000)
    rows = np.stack([p, q, p * q, frequency.astype(np.float32)], axis=1)
    grown = DecisionTreeClassifier(max_depth=5, min_samples_leaf=20, random_state=0)
    exact = grown.fit(rows, relevant).predict_proba(rows)[:, 1]

    tree = Calibration.fit(p, q, frequency, relevant, depth=5, leaf=20)
    actual = tree.probability(p, q, frequency)

    errors = [((shares - relevant) ** 2).mean() for shares in (actual, exact)]
    assert errors[0] == pytest.approx(errors[1], rel=0.01)


def test_a_value_on_the_threshold_goes_left_as_in_scikit_learn():
    p = np.array([0.25, 0.25, 0.75, 0.75], dtype=np.float32)
    tree = Calibration.fit(p, p, np.ones(4), p > 0.5, depth=1, leaf=1)
    asked = int(tree.feature[0])
    border = np.float32(tree.threshold[0])

    on, over = border, np.nextafter(border, np.float32(1))
    root = {0: (on, over), 1: (on, over)}.get(asked, (np.sqrt(on), 1.0))

    actual = tree.probability(np.float32(root), np.float32(root), np.ones(2))
    assert actual.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("answer", "expected"), [(False, 0.0), (True, 1.0)])
def test_pairs_that_are_all_alike_give_a_constant(answer, expected):
    p, q, frequency, _ = pairs(0)

    tree = Calibration.fit(p, q, frequency, np.full(len(p), answer), depth=5, leaf=1)

    assert tree.feature.tolist() == [LEAF]
    assert (tree.probability(p, q, frequency) == expected).all()


def test_probabilities_come_in_the_shape_of_the_scores():
    p, q, frequency, relevant = pairs(1)
    tree = Calibration.fit(p, q, frequency, relevant, depth=3, leaf=1)

    actual = tree.probability(p.reshape(40, 10), q.reshape(40, 10), frequency.reshape(40, 10))

    np.testing.assert_array_equal(actual.ravel(), tree.probability(p, q, frequency))
    assert actual.shape == (40, 10)
    assert tree.probability(p[:0], q[:0], frequency[:0]).shape == (0,)


def test_a_tree_is_restored_from_its_arrays():
    p, q, frequency, relevant = pairs(2)
    tree = Calibration.fit(p, q, frequency, relevant, depth=4, leaf=1)

    again = Calibration.from_arrays(tree.to_arrays())

    np.testing.assert_array_equal(
        again.probability(p, q, frequency), tree.probability(p, q, frequency)
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("feature", lambda a: a + 4),
        ("feature", lambda a: a[:0]),
        ("left", np.zeros_like),  # the root would be its own child: a walk without end
        ("right", lambda a: a + 1000),
        ("value", lambda a: a + 2),
        ("value", lambda a: a[:-1]),
    ],
)
def test_arrays_that_are_not_a_tree_are_refused(name, change):
    p, q, frequency, relevant = pairs(3)
    arrays = Calibration.fit(p, q, frequency, relevant, depth=3, leaf=1).to_arrays()
    arrays[name] = change(arrays[name])

    assert Calibration.from_arrays(arrays) is None
