import json
import logging
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

from elias import metrics
from elias.data.corpus import Corpus, Split
from elias.errors import ConfigError, DataError
from elias.metrics import (
    evaluate,
    f1_metrics,
    inverse_propensities,
    metric_names,
    per_label,
    recall_by_decile,
    score,
)
from elias.predictions import Predictions

GOLDEN = Path(__file__).parents[1] / "golden" / "metrics.json"
GOLDEN_NAMES = {"P": "P", "nDCG": "nDCG", "PSP": "PSP", "PSnDCG": "PSnDCG", "recall": "R"}


def csr(rows, n_labels):
    dense = np.zeros((len(rows), n_labels), dtype=np.float32)
    for row, labels in enumerate(rows):
        dense[row, labels] = 1
    return sparse.csr_matrix(dense)


@pytest.fixture
def predictions():
    """Three labels in order for each of two points, of five labels."""
    ids, scores = [[0, 1, 2], [3, 4, 0]], [[0.9, 0.8, 0.7], [0.9, 0.8, 0.7]]
    return Predictions.from_scores(ids, scores, n_labels=5, label_names=list("abcde"))


TRUTH = csr([[0, 2], [4]], n_labels=5)


def test_every_metric_matches_a_case_worked_by_hand(predictions):
    weights = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    discount = [1.0, 1 / np.log2(3), 0.5]

    values = score(
        predictions, TRUTH, weights, ["P@1", "P@3", "nDCG@3", "PSP@3", "PSnDCG@3", "R@1", "R@3"]
    )

    first_ideal = discount[0] + discount[1]  # two true labels
    expected = {
        "P@1": 1 / 2,
        "P@3": (2 / 3 + 1 / 3) / 2,
        "nDCG@3": ((discount[0] + discount[2]) / first_ideal + discount[1]) / 2,
        "PSP@3": (1 + 3 + 5) / ((3 + 1) + 5),
        "PSnDCG@3": ((1 + 3 * discount[2]) / first_ideal + 5 * discount[1])
        / ((3 + 1 * discount[1]) / first_ideal + 5),
        "R@1": (1 / 2 + 0) / 2,
        "R@3": 1.0,
    }
    assert values == pytest.approx({name: 100 * value for name, value in expected.items()})


def golden_cases():
    golden = json.loads(GOLDEN.read_text(encoding="utf8"))
    return [
        pytest.param(case, setting, id=f"{case}-{setting}")
        for case, parts in golden["cases"].items()
        for setting in parts["expected"]
    ]


@pytest.mark.parametrize(("case", "setting"), golden_cases())
def test_the_fields_usual_library_gives_the_same_values(case, setting):
    golden = json.loads(GOLDEN.read_text(encoding="utf8"))
    constants = golden["propensity"][setting]
    dense = np.array(golden["scores_dense"])
    widths = golden["cases"][case].get("row_k", [dense.shape[1] if case == "dense" else 30] * 50)
    rank = (-dense).argsort(axis=1).argsort(axis=1)
    remaining = sparse.csr_matrix(np.where(rank < np.array(widths)[:, None], dense, 0))
    labels = [[] if "row7" in case and i == 7 else row for i, row in enumerate(golden["truth"])]
    weights = inverse_propensities(
        np.array(golden["train_label_freq"]),
        golden["meta"]["N_train"],
        constants["A"],
        constants["B"],
    )
    expected = {
        f"{GOLDEN_NAMES[kind]}@{k}": 100 * value
        for kind, values in golden["cases"][case]["expected"][setting].items()
        if kind in GOLDEN_NAMES
        for k, value in enumerate(values, start=1)
    }

    values = score(
        Predictions.from_csr(remaining),
        csr(labels, dense.shape[1]),
        weights,
        list(expected),
        empty="drop" if case.endswith("removed") else "zero",
    )

    np.testing.assert_allclose(weights, constants["inv_propensity"], rtol=0, atol=1e-6)
    assert values == pytest.approx(expected, abs=1e-4)  # 1e-6 of the fraction


def make_corpus(filters=None):
    train = csr([[0], [0], [0, 1], [2], [3], [4], [4], [1]], n_labels=5)
    return Corpus(
        train=Split(labels=train, texts=["x"] * 8),
        test=Split(labels=TRUTH, texts=["x"] * 2, filters=filters),
        label_names=list("abcde"),
    )


def test_evaluate_reports_the_default_set_in_percent(predictions):
    values = evaluate(predictions, make_corpus())

    assert list(values) == [
        *("P@1", "P@3", "P@5", "nDCG@1", "nDCG@3", "nDCG@5"),
        *("PSP@1", "PSP@3", "PSP@5", "PSnDCG@1", "PSnDCG@3", "PSnDCG@5"),
        *("R@10", "R@20", "R@100"),
    ]
    assert values["P@1"] == 50.0
    assert json.loads(json.dumps(values)) == values


def test_evaluate_honours_the_filters_of_the_split(predictions):
    self_prediction = np.array([[1, 3]])

    values = evaluate(predictions, make_corpus(filters=self_prediction))

    assert values["P@1"] == 100.0


def test_evaluate_takes_other_cuts_splits_and_propensities(predictions):
    corpus = make_corpus()
    corpus = corpus.with_splits(validation=corpus.test, test=None)

    values = evaluate(
        predictions, corpus, split="validation", ks=(2,), recall_ks=(3,), a=0.6, b=2.6
    )

    weights = inverse_propensities(corpus.label_frequencies(), 8, 0.6, 2.6)
    names = ["P@2", "nDCG@2", "PSP@2", "PSnDCG@2", "R@3"]
    assert values == score(predictions, TRUTH, weights, names)


def test_a_missing_split_is_refused(predictions):
    with pytest.raises(DataError, match="no validation split"):
        evaluate(predictions, make_corpus(), split="validation")


@pytest.mark.parametrize(("empty", "expected"), [("zero", 100 / 3), ("drop", 50.0)])
def test_points_without_labels_count_as_zero_or_are_dropped(empty, expected):
    predictions = Predictions.from_scores([[0], [1], [2]], [[1.0]] * 3, n_labels=3)
    truth = csr([[0], [], [1]], n_labels=3)

    values = score(predictions, truth, None, ["P@1", "R@1"], empty=empty)

    assert values == pytest.approx({"P@1": expected, "R@1": 50.0})


def test_no_true_label_anywhere_scores_zero():
    predictions = Predictions.from_scores([[0]], [[1.0]], n_labels=3)
    truth = csr([[]], n_labels=3)

    values = score(predictions, truth, np.ones(3), ["P@1", "PSP@1", "PSnDCG@1", "R@1"])

    assert set(values.values()) == {0.0}


def test_a_stored_pair_counts_once_even_if_written_twice(predictions):
    twice = sparse.csr_matrix(([1.0, 1, 1, 1], [2, 0, 0, 4], [0, 3, 4]), shape=(2, 5))

    values = score(predictions, twice, None, ["R@3", "P@3"])

    assert values == score(predictions, TRUTH, None, ["R@3", "P@3"])


def test_chunks_do_not_change_the_result(predictions, monkeypatch):
    names = ["P@2", "nDCG@2", "PSP@2", "PSnDCG@2", "R@3"]
    weights = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    whole = score(predictions, TRUTH, weights, names)

    monkeypatch.setattr(metrics, "SLOTS_PER_CHUNK", 1)

    assert score(predictions, TRUTH, weights, names) == pytest.approx(whole)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ndcg@5", "unknown metric 'ndcg@5'; use one of P@k, nDCG@k,"),
        ("P@0", "unknown metric 'P@0'"),
        ("P", "unknown metric 'P'"),
        ("PSP@x", "use one of P@k, nDCG@k, PSP@k, PSnDCG@k, R@k"),
    ],
)
def test_an_unknown_metric_is_refused(predictions, name, message):
    with pytest.raises(ConfigError) as caught:
        score(predictions, TRUTH, None, [name])

    assert message in str(caught.value)


def test_names_can_be_checked_ahead():
    assert metric_names(["nDCG@5", "R@100"]) == ["nDCG@5", "R@100"]


def test_propensity_scored_metrics_need_propensities(predictions):
    with pytest.raises(AssertionError, match="PSP and PSnDCG need propensities"):
        score(predictions, TRUTH, None, ["PSP@1"])


def test_predictions_for_another_corpus_are_refused(predictions):
    with pytest.raises(DataError, match=r"2 points and 5 labels, but .* 1 points and 5"):
        score(predictions, TRUTH[:1], None, ["P@1"])


def test_no_points_at_all_are_refused():
    with pytest.raises(DataError, match="no points to evaluate"):
        score(Predictions.from_csr(sparse.csr_matrix((0, 3))), csr([], 3), None, ["P@1"])


def test_too_few_predictions_for_a_cut_are_reported(predictions, caplog):
    caplog.set_level(logging.WARNING)

    score(predictions, TRUTH, None, ["R@5"])

    assert "at most 3 predicted labels" in caplog.text


def test_rare_labels_weigh_more():
    weights = inverse_propensities(np.array([0, 1, 10, 100]), n_points=1000)

    assert (np.diff(weights) < 0).all()
    assert weights[-1] > 1


def test_a_handful_of_points_makes_all_labels_weigh_the_same():
    assert inverse_propensities(np.array([0, 1]), n_points=2).tolist() == [1.0, 1.0]


def test_deciles_run_from_head_to_tail_and_sum_to_recall():
    frequencies = np.arange(20)[::-1].copy()  # label 0 is the most frequent
    predictions = Predictions.from_scores([[0, 19], [1, 5]], [[0.9, 0.8]] * 2, n_labels=20)
    truth = csr([[0, 19], [1, 2]], n_labels=20)

    contribution = recall_by_decile(predictions, truth, frequencies, k=2)

    assert contribution.tolist() == [50.0, 0, 0, 0, 0, 0, 0, 0, 0, 25.0]
    assert contribution.sum() == score(predictions, truth, None, ["R@2"])["R@2"]


def test_the_table_of_labels_counts_predictions_and_hits(predictions):
    frequencies = np.array([3, 2, 1, 1, 2])

    rows = list(per_label(predictions, TRUTH, frequencies, k=2))

    assert rows[0] == {
        "id": 0,
        "label": "a",
        "train_count": 3,
        "test_count": 1,
        "predicted@2": 1,
        "hits@2": 1,
        "precision@2": 1.0,
        "recall@2": 1.0,
    }
    assert [row["hits@2"] for row in rows] == [1, 0, 0, 0, 1]
    assert [row["precision@2"] for row in rows] == [1.0, 0.0, None, 0.0, 1.0]
    assert [row["recall@2"] for row in rows] == [1.0, None, 0.0, None, 1.0]


def test_the_table_of_labels_has_precision_recall_and_f1_at_a_threshold(predictions):
    rows = list(per_label(predictions, TRUTH, None, assigned=predictions.threshold(0.75)))

    assert [row["assigned"] for row in rows] == [1, 1, 0, 1, 1]
    assert [row["precision"] for row in rows] == [1.0, 0.0, None, 0.0, 1.0]
    assert [row["recall"] for row in rows] == [1.0, None, 0.0, None, 1.0]
    assert [row["f1"] for row in rows] == [1.0, 0.0, 0.0, 0.0, 1.0]


def slow_f1_metrics(assigned, truth):
    """Count every point and label in turn."""
    n_labels, ratios = truth.shape[1], {"precision": [], "recall": [], "F1": []}
    pairs = [
        (label in row.ids, truth[i, label] > 0, label)
        for i, row in enumerate(assigned)
        for label in range(n_labels)
    ]

    def add(of):
        hits = sum(given and true for given, true, _ in of)
        n_given, n_true = sum(given for given, _, _ in of), sum(true for _, true, _ in of)
        ratios["precision"].append(hits / n_given if n_given else 0)
        ratios["recall"].append(hits / n_true if n_true else 0)
        ratios["F1"].append(2 * hits / (n_given + n_true) if n_given + n_true else 0)

    add(pairs)
    for label in range(n_labels):
        of = [pair for pair in pairs if pair[2] == label]
        if any(given or true for given, true, _ in of):
            add(of)
    micro = {f"micro-{name}": 100 * values[0] for name, values in ratios.items()}
    macro = {f"macro-{name}": 100 * np.mean(values[1:] or 0) for name, values in ratios.items()}
    return micro | macro


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lowest", [0.0, 0.3, 0.8, 2.0])
def test_f1_metrics_match_a_slow_count(seed, lowest, monkeypatch):
    rng = np.random.default_rng(seed)
    truth = sparse.csr_matrix(rng.random((13, 9)) < 0.2)
    scores = rng.random((13, 9)).astype(np.float32)
    ids = np.tile(np.arange(9), (13, 1))
    assigned = Predictions.from_scores(ids, scores, n_labels=9).top(5).threshold(lowest)
    monkeypatch.setattr(metrics, "SLOTS_PER_CHUNK", 12)

    assert f1_metrics(assigned, truth) == pytest.approx(slow_f1_metrics(assigned, truth))


def test_f1_metrics_match_scikit_learn_on_labels_that_occur():
    from sklearn.metrics import precision_recall_fscore_support

    rng = np.random.default_rng(0)
    truth, scores = rng.random((40, 6)) < 0.3, rng.random((40, 6)).astype(np.float32)
    ids = np.tile(np.arange(6), (40, 1))

    assigned = Predictions.from_scores(ids, scores, n_labels=6).threshold(0.6)

    for average in ("micro", "macro"):
        expected = precision_recall_fscore_support(
            truth, scores >= 0.6, average=average, zero_division=0
        )
        ours = f1_metrics(assigned, sparse.csr_matrix(truth))
        names = [f"{average}-{name}" for name in ("precision", "recall", "F1")]
        assert [ours[name] for name in names] == pytest.approx([100 * v for v in expected[:3]])
