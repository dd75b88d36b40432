import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.tree import DecisionTreeClassifier

from elias.errors import ModelError
from elias.rerank.calibration import LEAF, Calibration


def pairs(seed, size=400):
    """(p, q, frequency, relevant) where relevance depends on all of them."""
    rng = np.random.default_rng(seed)
    p, q = rng.random((2, size)).astype(np.float32)
    frequency = rng.integers(1, 1000, size)
    relevant = p * q + 0.1 * (frequency > 300) + 0.2 * rng.standard_normal(size) > 0.5
    return p, q, frequency, relevant


@given(seed=st.integers(0, 2**31), depth=st.integers(1, 7), leaf=st.sampled_from([1, 20]))
def test_the_tree_equals_that_of_scikit_learn(seed, depth, leaf):
    p, q, frequency, relevant = pairs(seed)
    other_p, other_q, other_frequency, _ = pairs(seed + 1)
    grown = DecisionTreeClassifier(max_depth=depth, min_samples_leaf=leaf, random_state=0)
    grown.fit(np.stack([p, q, p * q, frequency.astype(np.float32)], axis=1), relevant)

    tree = Calibration.fit(p, q, frequency, relevant, depth=depth, leaf=leaf)
    actual = tree.probability(other_p, other_q, other_frequency)

    asked = np.stack([other_p, other_q, other_p * other_q, other_frequency], axis=1)
    np.testing.assert_array_equal(actual, grown.predict_proba(asked.astype(np.float32))[:, 1])


@given(seed=st.integers(0, 2**31), n_trees=st.integers(2, 5), known=st.booleans())
def test_several_trees_are_averaged_over_bootstrap_samples(seed, n_trees, known):
    p, q, frequency, relevant = pairs(seed)
    asked = np.stack([p, q, p * q, frequency], axis=1).astype(np.float32)
    # points of one to a dozen pairs, some numbers of points having none
    points = np.sort(np.random.default_rng(seed).integers(0, 80, len(p))) if known else None

    actual = Calibration.fit(
        p, q, frequency, relevant, depth=4, leaf=5, n_trees=n_trees, points=points
    )

    of = np.arange(len(p)) if points is None else points
    present = np.unique(of)
    expected = np.zeros(len(p))
    for tree in range(n_trees):
        drawn = np.random.default_rng(tree).integers(0, len(present), len(present))
        rows = np.concatenate([np.flatnonzero(of == point) for point in present[drawn]])
        grown = DecisionTreeClassifier(
            max_depth=4, min_samples_leaf=5, max_features=2, random_state=tree
        )
        grown.fit(asked[rows], relevant[rows])
        expected += grown.predict_proba(asked)[:, 1]
    np.testing.assert_allclose(actual.probability(p, q, frequency), expected / n_trees, rtol=1e-12)
    assert len(actual.roots) == n_trees
    again = Calibration.from_arrays(actual.to_arrays())
    np.testing.assert_array_equal(
        again.probability(p, q, frequency), actual.probability(p, q, frequency)
    )


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

    with pytest.raises(ModelError, match="calibration"):
        Calibration.from_arrays(arrays)
