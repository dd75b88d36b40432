"""Probabilities never change a ranking, mean what they say, and choose thresholds that keep it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from elias.errors import ConfigError, ModelError
from elias.metrics import f1_metrics
from elias.predictions import Predictions
from elias.rerank.probabilities import (
    Probabilities,
    calibration_error,
    measure_probabilities,
    parse_target,
    reliability,
)


def drawn(seed=0, n_points=400, n_labels=30, k=10):
    """Predictions whose labels are relevant with probability score squared, and the truth."""
    random = np.random.default_rng(seed)
    ids = np.array([random.choice(n_labels, k, replace=False) for _ in range(n_points)])
    scores = random.random((n_points, k)).astype(np.float32)
    relevant = random.random((n_points, k)) < scores**2
    rows = np.repeat(np.arange(n_points), k)[relevant.ravel()]
    truth = csr_matrix(
        (np.ones(len(rows)), (rows, ids[relevant])), shape=(n_points, n_labels), dtype=np.float32
    )
    return Predictions.from_scores(ids, scores, n_labels), truth


def with_probabilities(actual, probabilities):
    return Predictions(
        actual.ids,
        actual.scores,
        actual.n_labels,
        probabilities=probabilities.of(actual.scores),
    )


@pytest.fixture(scope="module")
def fitted():
    return Probabilities.fit(*drawn())


def test_probabilities_are_close_to_the_true_ones_on_other_points(fitted):
    assert np.abs(fitted.of(np.linspace(0.1, 0.9, 9)) - np.linspace(0.1, 0.9, 9) ** 2).max() < 0.1


def test_the_calibration_error_falls_on_other_points(fitted):
    actual, truth = drawn(seed=1)
    actual = with_probabilities(actual, fitted)

    before = calibration_error(actual, truth, 5, calibrated=False)

    assert calibration_error(actual, truth, 5) < before / 3


def test_the_calibration_error_by_hand():
    actual = Predictions.from_scores([[0, 1], [0, 1]], [[0.9, 0.1], [0.9, 0.1]], n_labels=2)
    truth = csr_matrix([[1, 0], [0, 0]])

    # two pairs of 0.9 with one hit, two of 0.1 with none: (|1.8 - 1| + |0.2 - 0|) / 4
    assert calibration_error(actual, truth, 2) == pytest.approx(25.0)
    assert calibration_error(actual, truth, 1) == pytest.approx(40.0)


@given(seed=st.integers(0, 2**31), k=st.integers(1, 10), calibrated=st.booleans())
def test_reliability_is_what_counting_pair_by_pair_gives(fitted, seed, k, calibrated):
    actual, truth = drawn(seed, n_points=12)
    actual, dense = with_probabilities(actual, fitted), truth.toarray()
    pairs = {number: [] for number in range(15)}
    for point, ranking in enumerate(actual.top(k)):
        numbers = ranking.probabilities if calibrated else ranking.scores
        for label, probability in zip(ranking.ids, numbers, strict=True):
            index = min(int(float(probability) * 15), 14)
            pairs[index].append((float(probability), dense[point, label]))

    measured = reliability(actual, truth, k, calibrated=calibrated)

    assert measured.counts.tolist() == [len(own) for own in pairs.values()]
    for index, own in pairs.items():
        if own:
            means = np.mean(own, axis=0)
            assert (measured.predicted[index], measured.true[index]) == pytest.approx(tuple(means))
    apart = [len(own) * abs(np.subtract(*np.mean(own, axis=0))) for own in pairs.values() if own]
    assert measured.error == pytest.approx(100 * sum(apart) / (12 * k))


def test_without_predictions_there_is_no_calibration_error():
    actual = Predictions.from_scores(np.zeros((0, 3), int), np.zeros((0, 3)), n_labels=4)

    assert calibration_error(actual, csr_matrix((0, 4)), 3) == 0


@given(seed=st.integers(0, 2**31), n_points=st.integers(3, 40))
def test_probabilities_never_fall_as_scores_rise_and_lie_between_0_and_1(seed, n_points):
    actual, truth = drawn(seed, n_points)
    fitted = Probabilities.fit(actual, truth)
    if fitted is None:
        return

    values = fitted.of(np.linspace(-2, 3, 500, dtype=np.float32))

    assert (np.diff(values) >= 0).all()
    assert values.min() >= 0
    assert values.max() < 1  # nothing is certain


@given(seed=st.integers(0, 2**31), threshold=st.floats(0, 1))
def test_precision_and_recall_of_a_threshold_are_those_of_the_decisions(seed, threshold):
    actual, truth = drawn(seed, 30)
    fitted = Probabilities.fit(actual, truth)
    threshold = round(threshold * 200) / 200

    remaining = with_probabilities(actual, fitted).threshold(threshold).to_csr()

    right = remaining.astype(bool).multiply(truth.astype(bool)).nnz
    index = round(threshold * 200)
    assert fitted.recall[index] == pytest.approx(right / truth.nnz)
    assert fitted.precision[index] == pytest.approx(right / remaining.nnz if remaining.nnz else 1.0)


@pytest.mark.parametrize("least", [0.3, 0.6, 0.8])
def test_a_target_gives_the_least_strict_threshold(fitted, least):
    index = round(200 * fitted.threshold(f"precision={least}"))
    assert fitted.precision[index] >= least
    assert index == 0 or fitted.precision[index - 1] < least

    index = round(200 * fitted.threshold(f"recall={least}"))
    assert fitted.recall[index] >= least > fitted.recall[index + 1]

    best = round(200 * fitted.threshold("f1"))
    assert fitted.f1[best] == fitted.f1.max()


def test_a_number_is_its_own_threshold(fitted):
    assert fitted.threshold(0.25) == fitted.threshold("0.25") == 0.25


@pytest.mark.parametrize("target", [50, "50", "1.01", "inf"])
def test_a_number_that_no_probability_reaches_is_refused(target, fitted):
    with pytest.raises(ConfigError, match=rf"threshold '?{target}'?: a probability is at most 1;"):
        fitted.threshold(target)


@pytest.mark.parametrize("target", ["f2", "precision", "precision=2", "recall=.", "nan", ""])
def test_an_unknown_target_is_refused_with_the_known_ones(target):
    with pytest.raises(ConfigError, match=r"per-label, precision=0.8 or recall=0.6"):
        parse_target(target)


def test_an_unreachable_target_is_refused_with_the_best_value(fitted):
    with pytest.raises(ConfigError, match=r"the highest recall was 1\.000|no threshold reached"):
        Probabilities(
            fitted.scores, fitted.values, 0 * fitted.precision + 0.5, fitted.recall
        ).threshold("precision=0.9")


def test_without_a_relevant_label_there_is_nothing_to_learn():
    actual, truth = drawn(n_points=5)

    assert Probabilities.fit(actual, csr_matrix(truth.shape)) is None


def test_what_is_saved_is_read_again(fitted):
    tree = json.loads(json.dumps(fitted.to_dict()))

    read = Probabilities.from_dict(tree, Path("p.json"))

    scores = np.linspace(0, 1, 100)
    np.testing.assert_array_equal(read.of(scores), fitted.of(scores))
    assert read.threshold("f1") == fitted.threshold("f1")


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree: tree.pop("values"),
        lambda tree: tree["values"].reverse(),
        lambda tree: tree["precision"].append(0.5),
        lambda tree: tree.update(scores="none"),
    ],
)
def test_a_damaged_file_is_refused(fitted, damage):
    tree = fitted.to_dict()
    damage(tree)

    with pytest.raises(ModelError, match=r"p\.json"):
        Probabilities.from_dict(tree, Path("p.json"))


def test_f1_keeps_the_best_label_of_points_that_have_one_each():
    rng = np.random.default_rng(0)
    scores = rng.random((40, 3))
    truth = csr_matrix(np.eye(3)[(scores + 0.3 * rng.random((40, 3))).argmax(axis=1)])
    predictions = Predictions.from_scores(np.tile(np.arange(3), (40, 1)), scores, n_labels=3)

    learned = Probabilities.fit(predictions, truth)

    assert (learned.threshold("f1"), learned.keeps_best("f1")) == (1.0, True)
    known = replace(predictions, probabilities=learned.of(predictions.scores))
    assigned = known.threshold(1.0, keep_best=True)
    assert (assigned.ids[:, 0] == predictions.ids[:, 0]).all()
    assert (assigned.ids[:, 1:] == 3).all()
    assert not learned.keeps_best("precision=0.5")
    assert not learned.keeps_best(0.3)


def test_the_rules_have_the_best_micro_and_macro_f1():
    rng = np.random.default_rng(1)
    scores = rng.random((60, 4)).astype(np.float32)
    truth = (scores + 0.5 * rng.random((60, 4)) > [1.0, 1.1, 1.2, 1.3]).astype(float)
    predictions = Predictions.from_scores(np.tile(np.arange(4), (60, 1)), scores, n_labels=4)
    learned = Probabilities.fit(predictions, csr_matrix(truth))
    known = replace(predictions, probabilities=learned.of(predictions.scores))

    def f1(threshold, keep_best):
        assigned = known.threshold(threshold, keep_best=keep_best).to_csr()
        assigned.data[:] = 1
        hits, totals = assigned.toarray() * truth, assigned.toarray() + truth
        macro = np.mean(2 * hits.sum(axis=0) / np.maximum(totals.sum(axis=0), 1))
        return 2 * hits.sum() / totals.sum(), macro

    values = np.array([f1(t, keep) for t in learned.thresholds for keep in (False, True)])
    for column, target in enumerate(("f1", "macro-f1")):
        chosen = f1(learned.threshold(target), learned.keeps_best(target))
        assert chosen[column] == pytest.approx(values[:, column].max())


def test_labels_with_enough_points_get_thresholds_of_their_own_if_these_are_better():
    """Label 0 is true at low probabilities, label 1 only at high ones, label 2 has few points."""
    rng = np.random.default_rng(0)
    n_points = 600
    scores = rng.random((n_points, 3))
    chance = np.stack([scores[:, 0] > 0.15, scores[:, 1] > 0.85, scores[:, 2] > 0.98], axis=1)
    chance[20:, 2] = False
    truth = csr_matrix(chance.astype(np.float32))
    ids = np.tile(np.arange(3), (n_points, 1))
    predictions = Predictions.from_scores(ids, scores, n_labels=3)

    learned = Probabilities.fit(predictions, truth)

    assert set(learned.by_label) == {0, 1}
    assert learned.by_label[0] < learned.threshold("f1") < learned.by_label[1]
    ranked = replace(predictions, probabilities=learned.of(predictions.scores))
    lowest, keep_best = learned.threshold("f1"), learned.keeps_best("f1")
    before, after = (
        f1_metrics(ranked.threshold(lowest, keep_best=keep_best, by_label=by_label), truth)
        for by_label in (None, learned.label_thresholds("per-label"))
    )
    assert after["macro-F1"] > before["macro-F1"]
    assert learned.label_thresholds("f1") == {}


def one_label_per_point(n_points):
    """Return scores of labels with 80%, 15% and 5% of the points, comparable within a point."""
    rng, shares, means = np.random.default_rng(0), np.array([0.8, 0.15, 0.05]), np.arange(3) * 1.5
    label = rng.choice(3, n_points, p=shares)
    near = shares * np.exp(-((rng.normal(means[label], 1)[:, None] - means) ** 2) / 2)
    near /= near.sum(axis=1, keepdims=True) / rng.random((n_points, 1))
    ids = np.tile(np.arange(3), (n_points, 1))
    predictions = Predictions.from_scores(ids, near, n_labels=3)
    return predictions, csr_matrix(np.eye(3, dtype=np.float32)[label])


def test_rare_labels_have_larger_weights_if_every_point_has_one_label(tmp_path):
    predictions, labels = one_label_per_point(1000)

    learned = Probabilities.fit(predictions, labels)

    weights = learned.label_weights("macro-f1")
    assert weights[0] < weights[1] < weights[2]
    assigned = predictions.best_by(weights)
    assert (assigned.ids < 3).sum(axis=1).tolist() == [1] * 1000
    best = f1_metrics(predictions.top(1), labels)["macro-F1"]
    assert f1_metrics(assigned, labels)["macro-F1"] > best
    assert learned.label_weights("f1") == {}
    again = Probabilities.from_dict(json.loads(json.dumps(learned.to_dict())), tmp_path)
    assert again.weights == weights


def test_labels_have_no_weights_if_points_have_several():
    predictions, labels = one_label_per_point(1000)
    labels = csr_matrix(np.vstack([labels.toarray()[:-1], [[1, 1, 0]]]))

    assert Probabilities.fit(predictions, labels).weights == {}


def test_chance_alone_gives_no_label_a_threshold_of_its_own_often():
    rng = np.random.default_rng(1)
    scores = rng.random((2000, 10))
    truth = csr_matrix((rng.random((2000, 10)) < scores).astype(np.float32))
    ids = np.tile(np.arange(10), (2000, 1))

    learned = Probabilities.fit(Predictions.from_scores(ids, scores, n_labels=10), truth)

    assert all(abs(own - learned.threshold("f1")) < 0.15 for own in learned.by_label.values())


def test_the_quality_on_the_points_of_the_fit_is_cross_fitted_and_as_on_new_points():
    judged, own, new = [], [], []
    for seed in range(20):
        held_out, others = drawn(seed, n_points=60), drawn(100 + seed, n_points=60)
        probabilities = Probabilities.fit(*held_out)

        quality = measure_probabilities(
            probabilities, {"validation": held_out, "test": others}, name="validation"
        )
        as_test = measure_probabilities(probabilities, {"": others, "own": held_out}, name="")

        judged.append(quality["errors"]["validation"]["after"])
        new.append(quality["errors"]["test"]["after"])
        own.append(as_test["errors"]["own"]["after"])
        assert quality["f1"]["threshold"] == probabilities.threshold("f1")
        assert quality["errors"]["validation"]["before"] == as_test["errors"]["own"]["before"]

    assert np.mean(own) < 0.6 * np.mean(new)
    assert abs(np.mean(judged) - np.mean(new)) < 0.2 * np.mean(new)
