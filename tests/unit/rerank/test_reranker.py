from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias.config import ResolvedRerank
from elias.metrics import score
from elias.predictions import Predictions
from elias.rerank.calibration import FOREST_LEAF, Calibration
from elias.rerank.reranker import CALIBRATE, POWERS, RERANK, choose_sharpness, relevant_candidates
from elias.rerank.sparse_ranker import UNSEEN_MARGIN, SparseRanker, relevance
from rerank_problem import N_LABELS, fit_reranker, scores_of


def precision_at_1(scores, points):
    best = np.take_along_axis(points.candidates.ids, scores.argmax(axis=1)[:, None], axis=1)
    return relevant_candidates(best, points.labels).mean()


def test_each_component_improves_the_ranking_of_held_out_points(problem, reranker):
    points = problem.validation
    before = precision_at_1(np.where(points.known, points.candidates.scores, -1), points)

    for component in reranker.components:
        assert precision_at_1(scores_of(reranker, points, component), points) > before + 0.1


def test_the_components_agree_with_their_formulas(problem, reranker):
    points, known = problem.validation, problem.validation.known
    candidates = points.candidates

    factors = reranker.factors(candidates, points.inputs)

    margin = reranker.ranker.score(
        reranker.features.transform(points.inputs), candidates.embedding, candidates.ids
    )
    q, probability = factors["ranker_score"], factors["calibrated_score"]
    expected = relevance(margin, "l3-hinge") ** np.float32(reranker.sharpness)
    product = scores_of(reranker, points, RERANK)
    np.testing.assert_array_equal(q[known], expected[known])
    np.testing.assert_array_equal(product[known], (candidates.scores * q)[known])
    np.testing.assert_allclose(
        scores_of(reranker, points)[known], (probability + product)[known], rtol=1e-6
    )
    blend = scores_of(replace(reranker, mixture="blend"), points)
    np.testing.assert_allclose(blend[known], (0.3 * probability + 0.7 * product)[known], rtol=1e-6)
    frequencies = np.bincount(problem.train.labels.indices)
    np.testing.assert_allclose(
        probability[known],
        reranker.calibration.probability(
            candidates.scores[known], q[known], frequencies[candidates.ids[known]]
        ),
        rtol=1e-6,
    )


def test_padding_scores_minus_infinity_whatever_its_p(problem, reranker):
    points, known = problem.validation, problem.validation.known
    scores = np.where(known, points.candidates.scores, -np.inf).astype(np.float32)
    endless = points._replace(candidates=replace(points.candidates, scores=scores))

    actual, other = scores_of(reranker, points), scores_of(reranker, endless)

    assert (~known).any()
    assert (actual[~known] == -np.inf).all()
    assert np.isfinite(actual[known]).all()
    np.testing.assert_array_equal(actual, other)
    assert (scores_of(reranker, points, RERANK)[~known] == -np.inf).all()


def test_a_point_alone_scores_as_it_does_among_others(problem, reranker):
    points = problem.validation
    together = scores_of(reranker, points)

    for i in range(5):
        row = slice(i, i + 1)
        np.testing.assert_array_equal(scores_of(reranker, points.take(row)), together[row])


def test_several_components_are_ranked_as_each_is_alone(problem, reranker):
    candidates, inputs, _ = problem.validation
    psi = reranker.features.transform(inputs)

    together = reranker.rerank(candidates, inputs, reranker.components, count=5)

    assert list(together) == [RERANK, CALIBRATE]
    for name, actual in together.items():
        for options in ({}, {"psi": psi}):
            alone = reranker.rerank(candidates, inputs, [name], count=5, **options)[name]
            np.testing.assert_array_equal(actual.ids, alone.ids)
            np.testing.assert_array_equal(actual.scores, alone.scores)


def test_labels_past_the_candidates_come_after_them_in_their_old_order(problem, reranker):
    candidates, inputs, _ = problem.validation
    order = np.argsort(-np.where(problem.validation.known, candidates.scores, -np.inf), axis=1)
    candidates = replace(
        candidates,
        ids=np.take_along_axis(candidates.ids, order, axis=1),
        scores=np.take_along_axis(candidates.scores, order, axis=1),
    )

    actual = reranker.rerank(candidates, inputs, [CALIBRATE], count=2)[CALIBRATE]

    for row, ranking in enumerate(actual):
        known = candidates.ids[row][candidates.ids[row] < N_LABELS].tolist()
        assert sorted(ranking.ids[:2].tolist()) == sorted(known[:2])
        assert ranking.ids[2:].tolist() == known[2:]


def test_the_calibration_sees_held_out_points_only(problem, reranker):
    (candidates, inputs, labels), known = problem.validation, problem.validation.known

    q = replace(reranker, calibration=None).factors(candidates, inputs)["ranker_score"]
    expected = Calibration.fit(
        candidates.scores[known],
        q[known],
        np.bincount(problem.train.labels.indices)[candidates.ids[known]],
        relevant_candidates(candidates.ids, labels)[known],
        leaf=FOREST_LEAF,
        n_trees=problem.config.trees,
        points=np.nonzero(known)[0],
    )

    for name, array in expected.to_arrays().items():
        np.testing.assert_array_equal(reranker.calibration.to_arrays()[name], array)


def ndcg_of_each(points, scores):
    """nDCG@5 of each point by itself."""
    labels = points.labels
    ranked = Predictions.from_scores(points.candidates.ids, scores, labels.shape[1])
    weights = np.ones(labels.shape[1])
    return np.array(
        [
            score(replace(ranked, ids=ids[None], scores=own[None]), labels[i], weights, ["nDCG@5"])
            for i, (ids, own) in enumerate(zip(ranked.ids, ranked.scores, strict=True))
        ],
    )


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_the_power_of_q_is_the_one_that_ranks_held_out_points_best(problem, scale):
    """A ranker whose margins say too much or too little is weighed by what held-out points say."""
    points, known = problem.validation, problem.validation.known
    config = replace(problem.config, calibrate=False)
    plain = fit_reranker(problem.train, config)
    weights, biases = plain.ranker.weights * np.float32(scale), plain.ranker.biases * scale
    plain = replace(plain, ranker=replace(plain.ranker, weights=weights, biases=biases))
    qualities = {}
    for power in POWERS:
        each = ndcg_of_each(points, scores_of(replace(plain, sharpness=power), points))
        qualities[power] = np.array([actual["nDCG@5"] for actual in each])
    gains = {power: actual - qualities[1] for power, actual in qualities.items()}
    clear = [p for p, gain in gains.items() if gain.mean() > gain.std() / len(gain) ** 0.5]

    chosen = choose_sharpness(
        np.where(known, points.candidates.scores, 0),
        plain.factors(points.candidates, points.inputs)["ranker_score"],
        relevant_candidates(points.candidates.ids, points.labels),
        np.diff(points.labels.indptr),
    )

    assert len({actual.mean() for actual in qualities.values()}) > 1
    assert chosen == max(clear, key=lambda power: gains[power].mean(), default=1)


def test_held_out_points_choose_the_power(problem, reranker):
    points, known = problem.validation, problem.validation.known
    plain = replace(reranker, calibration=None, sharpness=1.0)
    q = plain.factors(points.candidates, points.inputs)["ranker_score"]

    assert reranker.sharpness == choose_sharpness(
        np.where(known, points.candidates.scores, 0),
        q,
        relevant_candidates(points.candidates.ids, points.labels),
        np.diff(points.labels.indptr),
    )
    powered = replace(plain, sharpness=0.3).factors(points.candidates, points.inputs)
    np.testing.assert_allclose(powered["ranker_score"][known], q[known] ** 0.3, rtol=1e-5)


def test_a_handful_of_points_gives_no_calibration(problem, caplog):
    few = problem.validation.take(slice(19))

    with caplog.at_level("INFO"):
        reranker = fit_reranker(
            problem.train, problem.config, few, label_names=[f"label{i}" for i in range(12)]
        )

    assert (reranker.sharpness, reranker.calibration, reranker.by_name) == (1.0, None, None)
    assert "only 19 points are held out, but 20 are needed" in caplog.text


@pytest.mark.parametrize("why", ["no points", "not wanted"])
def test_without_calibration_the_product_is_the_score(problem, why):
    validation = None if why == "no points" else problem.validation
    config = replace(problem.config, calibrate=why == "no points")

    reranker = fit_reranker(problem.train, config, validation)
    factors = reranker.factors(problem.validation.candidates, problem.validation.inputs)

    assert reranker.calibration is None
    assert reranker.components == (RERANK,)
    assert list(factors) == ["ranker_score"]
    known = problem.validation.known
    product = problem.validation.candidates.scores * factors["ranker_score"]
    np.testing.assert_array_equal(scores_of(reranker, problem.validation)[known], product[known])


def test_held_out_points_without_any_candidate_give_no_calibration(problem, caplog):
    candidates = problem.validation.candidates
    nothing = replace(candidates, ids=np.full_like(candidates.ids, N_LABELS))

    reranker = fit_reranker(
        problem.train, problem.config, problem.validation._replace(candidates=nothing)
    )

    assert reranker.calibration is None
    assert "not calibrated" in caplog.text


def test_an_embedding_that_is_given_is_learned_from(problem):
    plain = replace(problem.train.candidates, embedding=None)

    with_embedding = fit_reranker(problem.train, problem.config)
    without = fit_reranker(problem.train._replace(candidates=plain), problem.config)

    assert (with_embedding.ranker.n_dense, without.ranker.n_dense) == (5, 0)
    assert with_embedding.ranker.dense_weights.nnz > 0


def fit_ranker():
    """A ranker on one feature per point."""
    features = csr_matrix(np.eye(3, dtype=np.float32))
    labels = csr_matrix(np.float32([[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]))
    candidates = np.array([[0, 1], [0, 1], [1, 4]])
    return SparseRanker.fit(features, None, candidates, labels, ResolvedRerank(enabled=True))[0]


def test_a_label_without_training_pairs_gets_the_margin_of_a_negative():
    ranker = fit_ranker()

    margins = ranker.score(csr_matrix(np.eye(3, dtype=np.float32)), None, np.array([[3]] * 3))

    assert (margins == UNSEEN_MARGIN).all()


def test_a_missing_positive_is_added_to_the_candidates():
    ranker = fit_ranker()

    margins = ranker.score(csr_matrix(np.eye(3, dtype=np.float32)), None, np.array([[0]] * 3))

    assert margins[2] > 0.5 > margins[1]


def test_small_weights_are_pruned(problem):
    assert np.abs(fit_reranker(problem.train, problem.config).ranker.weights.data).min() >= 0.1


def test_features_of_another_width_are_refused():
    ranker = fit_ranker()

    with pytest.raises(AssertionError, match=r"features and embedding are \(2, 0\) wide"):
        ranker.score(csr_matrix((1, 2), dtype=np.float32), None, np.array([[0]]))


def test_a_ranker_without_embedding_ignores_it():
    ranker, features, candidates = fit_ranker(), csr_matrix(np.eye(3)), np.array([[0, 1]] * 3)

    margins = ranker.score(features, np.ones((3, 7)), candidates)

    assert np.array_equal(margins, ranker.score(features, None, candidates))


def test_margins_become_relevances_between_zero_and_one():
    margins = np.float32([-np.inf, -200, -1, 0, 1, 3, 200])

    hinge, sigmoid = relevance(margins, "l3-hinge"), relevance(margins, "sigmoid")

    np.testing.assert_allclose(hinge, [0, 0, np.exp(-8), np.exp(-1), 1, 1, 1], rtol=1e-6)
    expected = [0, 0, 0.26894143, 0.5, 0.7310586, 0.95257413, 1]
    np.testing.assert_allclose(sigmoid, expected, rtol=1e-6, atol=1e-12)


def test_relevant_candidates_are_those_of_a_dense_lookup(problem):
    candidates, _, labels = problem.validation

    actual = relevant_candidates(candidates.ids, labels)

    table = np.hstack([labels.toarray() > 0, np.zeros((labels.shape[0], 1), dtype=bool)])
    np.testing.assert_array_equal(actual, np.take_along_axis(table, candidates.ids, axis=1))
