from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias.config import RerankConfig
from elias.errors import DataError
from elias.metrics import score
from elias.predictions import Predictions
from elias.rerank import Calibration, Reranker, SparseRanker, relevance, relevant_candidates
from elias.rerank.reranker import POWERS
from elias.rerank.sparse_ranker import NEVER_SEEN


def precision_at_1(scores, points, labels):
    best = np.take_along_axis(points.ids, scores.argmax(axis=1)[:, None], axis=1)
    return relevant_candidates(best, labels).mean()


def test_each_step_ranks_held_out_points_better_than_the_one_before(problem, reranker):
    points, labels = problem.validation
    known = points.ids < labels.shape[1]
    before = precision_at_1(np.where(known, points.scores, -1), points, labels)

    found = reranker.score(points)

    assert precision_at_1(found.product, points, labels) > before + 0.1
    assert precision_at_1(found.final, points, labels) > before + 0.1


def test_the_parts_fit_together(problem, reranker):
    points, labels = problem.validation
    known = points.ids < labels.shape[1]

    found = reranker.score(points)

    np.testing.assert_array_equal(
        found.relevance[known],
        (relevance(found.margin, "l3-hinge") ** np.float32(reranker.sharpness))[known],
    )
    np.testing.assert_array_equal(found.product[known], (points.scores * found.relevance)[known])
    np.testing.assert_allclose(
        found.final[known], (found.probability + found.product)[known], rtol=1e-6
    )
    frequencies = np.bincount(problem.labels.indices)
    np.testing.assert_allclose(
        found.probability[known],
        reranker.calibration.probability(
            points.scores[known], found.relevance[known], frequencies[points.ids[known]]
        ),
        rtol=1e-6,
    )


def test_padding_scores_minus_infinity_whatever_its_p(problem, reranker):
    points, labels = problem.validation
    padding = points.ids == labels.shape[1]
    endless = points._replace(scores=np.where(padding, -np.inf, points.scores).astype(np.float32))

    found, other = reranker.score(points), reranker.score(endless)

    assert padding.any()
    assert (found.final[padding] == -np.inf).all()
    assert np.isfinite(found.final[~padding]).all()
    np.testing.assert_array_equal(found.final, other.final)
    np.testing.assert_array_equal(found.product[padding], 0)


def test_a_point_alone_scores_as_it_does_among_others(problem, reranker):
    points, _ = problem.validation
    together = reranker.score(points).final

    for i in range(5):
        one = type(points)(*(part[i : i + 1] for part in points))
        np.testing.assert_array_equal(reranker.score(one).final, together[i : i + 1])


def test_the_calibration_sees_held_out_points_only(problem, reranker):
    points, labels = problem.validation
    known = points.ids < labels.shape[1]
    plain = replace(reranker, calibration=None)

    q = plain.score(points).relevance
    expected = Calibration.fit(
        points.scores[known],
        q[known],
        np.bincount(problem.labels.indices)[points.ids[known]],
        relevant_candidates(points.ids, labels)[known],
        depth=problem.config.tree_depth,
        leaf=problem.config.tree_leaf,
        n_trees=problem.config.trees,
        points=np.nonzero(known)[0],
    )

    for name, array in expected.to_arrays().items():
        np.testing.assert_array_equal(reranker.calibration.to_arrays()[name], array)


def ndcg_of_each(points, labels, scores):
    """nDCG@5 of each point by itself."""
    ranked = Predictions.from_scores(points.ids, scores, labels.shape[1])
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
    points, labels = problem.validation
    config = replace(problem.config, sharpness=1.0, calibrate=False)
    plain = Reranker.fit(problem.train, problem.labels, config)
    weights, biases = plain.ranker.weights * np.float32(scale), plain.ranker.biases * scale
    plain = replace(plain, ranker=replace(plain.ranker, weights=weights, biases=biases))
    qualities = {}
    for power in POWERS:
        said = replace(plain, sharpness=power).score(points)
        each = ndcg_of_each(points, labels, said.final)
        qualities[power] = np.array([found["nDCG@5"] for found in each])
    gains = {power: found - qualities[1] for power, found in qualities.items()}
    clear = [p for p, gain in gains.items() if gain.mean() > gain.std() / len(gain) ** 0.5]

    chosen = plain._judged(points, labels).best_power()

    assert len({found.mean() for found in qualities.values()}) > 1
    assert chosen == max(clear, key=lambda power: gains[power].mean(), default=1)


def test_held_out_points_choose_the_power_and_a_given_one_is_kept(problem, reranker):
    points, labels = problem.validation
    plain = replace(reranker, calibration=None, sharpness=1.0)

    given = Reranker.fit(
        problem.train,
        problem.labels,
        replace(problem.config, sharpness=0.3),
        validation=problem.validation,
    )

    assert reranker.sharpness == plain._judged(points, labels).best_power()
    assert given.sharpness == 0.3
    known = points.ids < labels.shape[1]
    np.testing.assert_allclose(
        given.score(points).relevance[known], plain.score(points).relevance[known] ** 0.3, rtol=1e-5
    )


def test_nothing_is_learned_from_a_handful_of_points(problem, caplog):
    points, labels = problem.validation
    few = type(points)(*(part[:19] for part in points))

    with caplog.at_level("INFO"):
        reranker = Reranker.fit(
            problem.train,
            problem.labels,
            problem.config,
            validation=(few, labels[:19]),
            label_names=[f"label{i}" for i in range(12)],
        )

    assert (reranker.sharpness, reranker.calibration, reranker.by_name) == (1.0, None, None)
    assert "19 points are held out, fewer than 20" in caplog.text


@pytest.mark.parametrize("why", ["no points", "not wanted"])
def test_without_calibration_the_product_is_the_score(problem, why):
    validation = None if why == "no points" else problem.validation
    config = replace(problem.config, calibrate=why == "no points")

    reranker = Reranker.fit(problem.train, problem.labels, config, validation=validation)
    found = reranker.score(problem.validation[0])

    assert reranker.calibration is None
    assert found.probability is None
    known = problem.validation[0].ids < problem.labels.shape[1]
    np.testing.assert_array_equal(found.final[known], found.product[known])


def test_held_out_points_without_any_candidate_give_no_calibration(problem, caplog):
    points, labels = problem.validation
    nothing = points._replace(ids=np.full_like(points.ids, labels.shape[1]))

    reranker = Reranker.fit(
        problem.train, problem.labels, problem.config, validation=(nothing, labels)
    )

    assert reranker.calibration is None
    assert "not calibrated" in caplog.text


def test_an_embedding_that_is_given_is_learned_from(problem):
    with_embedding = Reranker.fit(problem.train, problem.labels, problem.config)
    without = Reranker.fit(problem.train._replace(embedding=None), problem.labels, problem.config)

    assert (with_embedding.ranker.n_dense, without.ranker.n_dense) == (5, 0)
    assert with_embedding.ranker.weights[:, -5:].nnz > 0


def fit_ranker(**changes):
    """A ranker on one feature per point."""
    features = csr_matrix(np.eye(3, dtype=np.float32))
    labels = csr_matrix(np.float32([[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]))
    candidates = np.array([[0, 1], [0, 1], [1, 4]])
    return SparseRanker.fit(features, None, candidates, labels, RerankConfig(**changes))


def test_a_label_never_seen_is_a_sure_negative():
    ranker = fit_ranker()

    margins = ranker.score(csr_matrix(np.eye(3, dtype=np.float32)), None, np.array([[3]] * 3))

    assert (margins == NEVER_SEEN).all()


def test_a_missing_positive_is_added_to_the_candidates():
    ranker = fit_ranker()

    margins = ranker.score(csr_matrix(np.eye(3, dtype=np.float32)), None, np.array([[0]] * 3))

    assert margins[2] > 0.5 > margins[1]


def test_pruned_weights_are_gone():
    whole, pruned = fit_ranker(prune=0.0), fit_ranker(prune=0.5)

    assert pruned.weights.nnz < whole.weights.nnz
    assert np.abs(pruned.weights.data).min() >= 0.5


def test_features_of_another_width_are_refused():
    ranker = fit_ranker()

    with pytest.raises(DataError, match="features have width 2, the ranker was trained on 3"):
        ranker.score(csr_matrix((1, 2), dtype=np.float32), None, np.array([[0]]))
    with pytest.raises(DataError, match="embedding have width 7, the ranker was trained on 0"):
        ranker.score(csr_matrix((1, 3), dtype=np.float32), np.ones((1, 7)), np.array([[0]]))


def test_margins_become_relevances_between_zero_and_one():
    margins = np.float32([-np.inf, -200, -1, 0, 1, 3, 200])

    hinge, sigmoid = relevance(margins, "l3-hinge"), relevance(margins, "sigmoid")

    np.testing.assert_allclose(hinge, [0, 0, np.exp(-8), np.exp(-1), 1, 1, 1], rtol=1e-6)
    expected = [0, 0, 0.26894143, 0.5, 0.7310586, 0.95257413, 1]
    np.testing.assert_allclose(sigmoid, expected, rtol=1e-6, atol=1e-12)


def test_relevant_candidates_are_those_of_a_dense_lookup(problem):
    points, labels = problem.validation

    found = relevant_candidates(points.ids, labels)

    table = np.hstack([labels.toarray() > 0, np.zeros((labels.shape[0], 1), dtype=bool)])
    np.testing.assert_array_equal(found, np.take_along_axis(table, points.ids, axis=1))
