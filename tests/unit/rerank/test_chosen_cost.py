"""With few labels, C and the weight of the encoder are chosen by what held-out points decide."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.sparse import csr_matrix

from elias import EliasConfig
from elias.config import ResolvedRerank
from elias.config.resolve import MAX_COST_POINTS
from elias.rerank.calibration import MIN_POINTS
from elias.rerank.reranker import COST_FACTORS, FEW_MIN_WEIGHT, Decisions, choose_sharpness
from elias.rerank.sparse_ranker import RankerFeatures, SparseRanker, relevance
from rerank_problem import fit_reranker, make_points


def f1(assigned, relevant, n_relevant):
    return 2 * (assigned & relevant).sum() / max(1, assigned.sum() + n_relevant.sum())


@st.composite
def predictions(draw):
    """Scores with many ties, relevant candidates, and relevant labels that are no candidates."""
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 4)))
    scores = draw(arrays(np.float32, shape, elements=st.sampled_from([0, 0.25, 0.5, 0.75, 1])))
    relevant = draw(arrays(bool, shape))
    missing = draw(arrays(np.int64, shape[0], elements=st.integers(0, 1)))
    return scores, relevant, relevant.sum(axis=1) + missing


@given(predictions())
def test_decisions_are_those_of_the_best_of_all_thresholds(given_predictions):
    scores, relevant, n_relevant = given_predictions
    first = np.arange(scores.shape[1]) == scores.argmax(axis=1)[:, None]
    rules = [first]
    for threshold in np.unique(scores):
        rules += [scores >= threshold, (scores >= threshold) | first]
    if (n_relevant == 1).all():
        rules = [first]

    decisions = Decisions.best(scores, relevant, n_relevant)

    assert decisions.f1 == pytest.approx(max(f1(rule, relevant, n_relevant) for rule in rules))
    counts = decisions.assigned.tolist(), decisions.hits.tolist()
    assert counts in [(r.sum(axis=1).tolist(), (r & relevant).sum(axis=1).tolist()) for r in rules]
    np.testing.assert_array_equal(decisions.is_first_right, (first & relevant).any(axis=1))


@given(predictions(), st.integers(0, 9))
def test_the_mean_gain_is_the_difference_in_quality_for_as_many_labels(given_predictions, seed):
    scores, relevant, n_relevant = given_predictions
    base = Decisions.best(scores, relevant, n_relevant)
    hits = np.minimum(np.random.default_rng(seed).integers(0, 3, len(scores)), base.assigned)
    other = replace(base, hits=hits, is_first_right=hits > 0)

    gains = other.gains(base)

    assert gains.mean() == pytest.approx(other.quality - base.quality)


def test_the_power_of_q_counts_how_scores_of_different_points_compare():
    """p ranks the labels of each point, but only q says which points have labels at all."""
    rng = np.random.default_rng(0)
    relevant = np.zeros((200, 2), dtype=bool)
    relevant[:100, 0] = True
    p = np.where(np.arange(2) == 0, 0.9, 0.5) * np.ones((200, 1))
    q = np.where(np.arange(200)[:, None] < 100, 0.9, 0.1) + 0.01 * rng.standard_normal((200, 2))
    n_relevant, powers = relevant.sum(axis=1), (16.0, 0.125)
    p, q = np.where(rng.random((200, 1)) < 0.5, p, p / 9), np.clip(q, 0.01, 1)

    by_ranking = choose_sharpness(p, q, relevant, n_relevant, powers)
    by_decisions = choose_sharpness(p, q, relevant, n_relevant, powers, by_decisions=True)

    assert (by_ranking, by_decisions) == (0.125, 16.0)


@pytest.fixture(scope="module")
def points():
    """Every label is a candidate of every point, as with few labels, and some labels are wrong."""
    rng = np.random.default_rng(0)

    def with_all(part):
        ids = np.tile(np.arange(part.labels.shape[1]), (len(part.candidates.ids), 1))
        scores = np.full(ids.shape, 0.5, dtype=np.float32)
        candidates = part.candidates
        candidates = replace(
            candidates, ids=ids, scores=scores, embedding=candidates.embedding[:, :0]
        )
        wrong = rng.random(part.labels.shape) < 0.15
        labels = csr_matrix((part.labels.toarray() > 0) ^ wrong, dtype=np.float32)
        return part._replace(candidates=candidates, labels=labels)

    return with_all(make_points(150, seed=0)), with_all(make_points(150, seed=1))


@pytest.mark.parametrize("cost", [0.05, 2.0, 100.0])
def test_the_cost_is_the_one_that_decides_best_on_held_out_points(points, cost):
    train, held_out = points
    config = ResolvedRerank(enabled=True, cost=cost, choose_cost=True)
    features = RankerFeatures.fit(train.inputs, config)
    psi, held_out_psi = map(features.transform, (train.inputs, held_out.inputs))
    relevant, solution, fitted, qualities = held_out.labels.toarray() > 0, None, {}, {}
    for factor in COST_FACTORS:
        fitted[factor * cost], solution = SparseRanker.fit(
            *(psi, None, train.candidates.ids, train.labels),
            replace(config, cost=factor * cost),
            min_weight=FEW_MIN_WEIGHT,
            solution=solution,
        )
        margins = fitted[factor * cost].score(held_out_psi, None, held_out.candidates.ids)
        q = relevance(margins, "l3-hinge")
        qualities[factor * cost] = Decisions.best(q, relevant, relevant.sum(axis=1)).quality

    reranker = fit_reranker(train, config, held_out, every_label=True)

    assert len(set(qualities.values())) > 1
    assert qualities[reranker.cost] == max(qualities.values())
    assert (reranker.ranker.weights != fitted[reranker.cost].weights).nnz == 0


def test_the_cost_is_not_chosen_without_enough_points_or_for_an_earlier_ranker(points):
    train, held_out = points
    config = ResolvedRerank(enabled=True, cost=0.05, choose_cost=True)
    chosen = fit_reranker(train, config, held_out, every_label=True)

    few = fit_reranker(train, config, held_out.take(slice(MIN_POINTS - 1)), every_label=True)
    continued = fit_reranker(train, config, held_out, every_label=True, earlier=chosen)

    assert chosen.cost != few.cost == continued.cost == 0.05


@pytest.mark.parametrize(
    ("changes", "n_points", "n_labels", "cost", "is_chosen"),
    [
        ({}, 1000, 50, 2.0, True),
        ({"rerank.cost": 0.5}, 1000, 50, 0.5, False),
        ({"rerank.cost": 0.5, "rerank.choose_cost": True}, 1000, 50, 0.5, True),
        ({"rerank.choose_cost": False}, 1000, 50, 2.0, False),
        ({}, MAX_COST_POINTS + 1, 50, 2.0, False),
        ({}, 1000, 5000, 1.0, False),
    ],
)
def test_the_cost_is_chosen_for_few_labels_if_it_is_not_given(
    changes, n_points, n_labels, cost, is_chosen
):
    resolved = EliasConfig().override(changes).resolve(n_points, n_labels).rerank

    assert (resolved.cost, resolved.choose_cost) == (cost, is_chosen)
    assert resolved.char_ngrams == ((2, 5) if n_labels <= 200 else (3, 5))
