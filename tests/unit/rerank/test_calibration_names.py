"""The names of labels beside texts: nearness, the T that is told of it, and saving it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from scipy.sparse import csr_matrix

from elias.config import ResolvedRerank
from elias.errors import ModelError
from elias.rerank.calibration import FOREST_LEAF, Calibration, LabelNames
from elias.rerank.reranker import CALIBRATE, NAMES, RERANK, relevant_candidates
from elias.rerank.sparse_ranker import RankerFeatures
from rerank_problem import fit_reranker, scores_of
from saved_models import as_old_format, change_config, load_ranker, reseal, save_ranker

LABEL_NAMES = [f"Label{i}" for i in range(12)]


def dense_nearness(texts, names, idf, candidates):
    """Cosine and covered share, pair by pair; ``names`` says which features stand in a name."""
    similarity, coverage = np.zeros(candidates.shape), np.zeros(candidates.shape)
    for row, column in np.ndindex(candidates.shape):
        label = candidates[row, column]
        if label >= len(names) or not names[label].any():
            continue
        name = names[label] * idf
        similarity[row, column] = texts[row] @ name / np.sqrt(name @ name)
        coverage[row, column] = (name**2)[texts[row] > 0].sum() / (name @ name)
    return similarity, coverage


@given(
    seed=st.integers(0, 2**31),
    n_points=st.sampled_from([0, 1, 3, 300]),
    width=st.integers(1, 8),
    density=st.sampled_from([0.0, 0.2, 0.9]),
)
def test_name_overlap_equals_that_of_dense_matrices(seed, n_points, width, density):
    rng = np.random.default_rng(seed)
    n_labels, n_features = 6, 100
    texts = rng.random((n_points, n_features)) * (rng.random((n_points, n_features)) < density)
    texts /= np.maximum(np.linalg.norm(texts, axis=1, keepdims=True), 1e-12)
    names = rng.random((n_labels, n_features)) < density
    idf = 1 + rng.random(n_features)
    candidates = rng.integers(0, n_labels + 1, (n_points, width))
    starts = np.concatenate([[0], np.cumsum(names.sum(axis=1))])

    label_names = LabelNames(starts, np.nonzero(names)[1].astype(np.uint32), idf.astype(np.float32))

    actual = label_names.overlap(csr_matrix(texts.astype(np.float32)), candidates)

    similarity, coverage = dense_nearness(texts, names, idf, candidates)
    np.testing.assert_allclose(actual.similarity, similarity, atol=1e-5)
    np.testing.assert_allclose(actual.coverage, coverage, atol=1e-5)


@pytest.fixture(scope="module")
def named(problem):
    """A ranker of texts that are told apart by names, some of whose words it has never seen."""
    return fit_reranker(problem.train, problem.config, problem.validation, label_names=LABEL_NAMES)


@given(
    seed=st.integers(0, 2**31),
    n_points=st.sampled_from([0, 1, 5]),
    width=st.integers(1, 8),
    density=st.sampled_from([0.0, 0.3, 0.9]),
)
def test_the_labels_of_the_most_similar_names_are_proposed(seed, n_points, width, density):
    rng = np.random.default_rng(seed)
    n_labels, n_features, count = 8, 9, 3
    texts = rng.random((n_points, n_features)) * (rng.random((n_points, n_features)) < density)
    names = rng.random((n_labels, n_features)) < density
    idf = 1 + rng.random(n_features)
    candidates = rng.integers(0, n_labels + 1, (n_points, width))
    allowed = rng.random(n_labels) < 0.8
    starts = np.concatenate([[0], np.cumsum(names.sum(axis=1))])
    label_names = LabelNames(starts, np.nonzero(names)[1].astype(np.uint32), idf.astype(np.float32))

    proposed = label_names.propose(csr_matrix(texts.astype(np.float32)), candidates, allowed, count)

    every_label = np.tile(np.arange(n_labels), (n_points, 1))
    similarity, _ = dense_nearness(texts, names, idf, every_label)
    similarity[:, ~allowed] = 0
    for row, labels in enumerate(candidates):
        similarity[row, labels[labels < n_labels]] = 0
        ids = proposed[row][proposed[row] < n_labels]
        assert len(set(ids)) == len(ids) == min(count, (similarity[row] > 0).sum())
        best = -np.sort(-similarity[row])[: len(ids)]
        np.testing.assert_allclose(similarity[row, ids], best, rtol=1e-5)  # names may be equal


def overlap(named, points):
    return named.names.overlap(named.features.transform(points.inputs), points.candidates.ids)


def test_a_text_that_holds_a_name_covers_it(problem, named):
    points, known = problem.validation, problem.validation.known
    relevant = relevant_candidates(points.candidates.ids, points.labels)

    near = overlap(named, points)

    np.testing.assert_allclose(near.coverage[relevant], 1, rtol=1e-6)
    assert (near.similarity[relevant] > 0.2).all()
    assert (near.similarity[~relevant & known] < near.similarity[relevant].mean()).all()
    assert (near.coverage[~known] == 0).all()


def test_the_calibration_uses_names_and_the_features_of_the_paper(problem, named):
    points, psi = problem.validation, named.features.transform(problem.validation.inputs)
    candidates = named._with_proposed(points.candidates, psi)
    known = candidates.ids < len(LABEL_NAMES)
    assert known.sum() > points.known.sum(), "no name is proposed"
    factors = named.factors(candidates, points.inputs)
    near = named.names.overlap(psi, candidates.ids)
    expected = Calibration.fit(
        candidates.scores[known],
        factors["ranker_score"][known],
        named.frequencies[candidates.ids[known]],
        relevant_candidates(candidates.ids, points.labels)[known],
        leaf=FOREST_LEAF,
        n_trees=problem.config.trees,
        extra=[near.similarity[known], near.coverage[known]],
        points=np.nonzero(known)[0],
    )

    for name, array in expected.to_arrays().items():
        np.testing.assert_array_equal(named.by_name.to_arrays()[name], array)
    assert set(named.by_name.feature.tolist()) & {4, 5}, "no tree reads a name"
    np.testing.assert_array_equal(factors["name_likeness"], near.similarity)
    np.testing.assert_array_equal(factors["name_coverage"], near.coverage)


def without_label(points, label):
    """Return the candidates without a label."""
    candidates = points.candidates
    return replace(candidates, ids=np.where(candidates.ids == label, 12, candidates.ids))


def test_a_label_that_the_search_misses_is_found_by_its_name(problem, named):
    points, psi = problem.validation, named.features.transform(problem.validation.inputs)
    has_label = points.labels[:, [3]].toarray()[:, 0] > 0
    missed = without_label(points, 3)

    ranked = named.rerank(missed, (), named.components, count=8, psi=psi)

    assert (ranked[NAMES].ids[has_label, :4] == 3).any(axis=1).mean() > 0.9
    for component in (RERANK, CALIBRATE):
        assert (ranked[component].ids != 3).all()
    first = named.rerank(missed, (), [NAMES], count=4, width=4, psi=psi)[NAMES].ids
    more = named.rerank(missed, (), [NAMES], count=4, psi=psi)[NAMES].ids
    np.testing.assert_array_equal(more[:, :4][first < 12], first[first < 12])
    blocked = np.arange(12) == 3
    ranked = named.rerank(missed, (), [NAMES], count=8, psi=psi, blocked=blocked)
    assert (ranked[NAMES].ids != 3).all()


def test_filtered_labels_that_names_propose_are_not_learned(problem):
    missed = problem.validation._replace(candidates=without_label(problem.validation, 3))
    filtered = csr_matrix(np.ones((len(missed.inputs), 1)) * (np.arange(12) == 3))

    def fit(filtered):
        names = {"label_names": LABEL_NAMES}
        fitted = fit_reranker(problem.train, problem.config, missed, filtered=filtered, **names)
        return fitted.by_name.value[fitted.by_name.roots].mean()

    assert fit(filtered) < fit(None), "the filtered pairs are those of the right label"


def test_a_model_of_an_earlier_version_proposes_nothing(problem, named, saved):
    ranker = json.loads((saved / "config.json").read_text(encoding="utf8"))["ranker"]
    assert load_ranker(saved).n_proposed == named.n_proposed > 0
    del ranker["n_proposed"]
    change_config(saved, ranker=ranker)

    again = load_ranker(saved)

    assert again.n_proposed == 0
    missed = without_label(problem.validation, 3)
    ranked = again.rerank(missed, problem.validation.inputs, [NAMES], count=8)
    assert (ranked[NAMES].ids != 3).all()


def test_without_names_the_paper_s_calibration_is_left(problem, named, reranker):
    points = problem.validation

    assert reranker.by_name is None
    assert (named.components, reranker.components) == (
        (RERANK, CALIBRATE, NAMES),
        (RERANK, CALIBRATE),
    )
    for component in reranker.components:
        np.testing.assert_array_equal(
            scores_of(named, points, component), scores_of(reranker, points, component)
        )
    assert (scores_of(named, points) != scores_of(reranker, points)).any()


def test_names_without_letters_are_ignored():
    features = RankerFeatures.fit(["channel 4 of 1984", "room 101"], ResolvedRerank(enabled=True))

    assert LabelNames.read(features, ["4", "1984", "101"]) is None
    assert np.diff(LabelNames.read(features, ["101", "Room 101"]).starts).tolist()[0] == 0


@pytest.mark.parametrize("why", ["not wanted", "unknown words", "features", "no calibration"])
def test_names_that_cannot_help_are_left_out(problem, why):
    config, names, train, validation = problem.config, LABEL_NAMES, *problem[:2]
    if why == "not wanted":
        config = replace(config, names=False)
    elif why == "unknown words":
        names = ["日本"] * 12
    elif why == "features":
        train = train._replace(inputs=csr_matrix(np.eye(300, 7, dtype=np.float32)))
        validation = validation._replace(inputs=csr_matrix(np.eye(100, 7, dtype=np.float32)))
    else:
        validation = None

    reranker = fit_reranker(train, config, validation, label_names=names)

    assert (reranker.names, reranker.by_name) == (None, None)
    assert (reranker.calibration is None) == (why == "no calibration")


def test_trees_refuse_another_number_of_features(named):
    one = np.ones(3, dtype=np.float32)

    with pytest.raises(AssertionError, match="extra features"):
        named.by_name.probability(one, one, one)


@pytest.fixture
def saved(named, tmp_path):
    return save_ranker(tmp_path / "model", named)


def test_names_are_loaded_as_they_were_saved(problem, named, saved):
    again = load_ranker(saved)

    points = problem.validation
    np.testing.assert_array_equal(scores_of(again, points), scores_of(named, points))
    np.testing.assert_array_equal(overlap(again, points), overlap(named, points))


def test_a_ranker_of_format_1_has_no_names_and_the_paper_s_power(reranker, problem, tmp_path):
    reranker = replace(reranker, sharpness=1.0)
    folder = save_ranker(tmp_path / "model", reranker)
    as_old_format(folder)
    path = folder / "ranker" / "ranker.json"
    tree = json.loads(path.read_text(encoding="utf8")) | {"format_version": 1}
    del tree["named"], tree["sharpness"]
    path.write_text(json.dumps(tree), encoding="utf8")

    again = load_ranker(folder)

    assert again.by_name is None
    points = problem.validation
    np.testing.assert_array_equal(scores_of(again, points), scores_of(reranker, points))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda a: {"names.starts": a["names.starts"][::-1].copy()},
            "names is not a sparse",
        ),
        (lambda a: {"names.columns": a["names.columns"] + 10**6}, "names is not a sparse"),
        (lambda a: {"names.columns": a["names.columns"].astype(np.int32)}, "is int32, not uint32"),
        (lambda a: {"by_name.feature": a["by_name.feature"] + 6}, "not valid decision trees"),
    ],
)
def test_damaged_names_are_refused(saved, change, message):
    path = saved / "ranker" / "ranker.safetensors"
    arrays = load_file(path)
    save_file(arrays | change(arrays), path)
    reseal(saved)

    with pytest.raises(ModelError, match=message):
        load_ranker(saved)


def test_names_without_a_calibration_are_refused(saved):
    ranker = json.loads((saved / "config.json").read_text(encoding="utf8"))["ranker"]
    change_config(saved, ranker=ranker | {"calibrated": False})

    with pytest.raises(ModelError, match=r"ranker\.named is True, not False"):
        load_ranker(saved)
