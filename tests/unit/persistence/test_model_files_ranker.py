import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scipy.sparse import csr_matrix, vstack
from scipy.sparse import random as random_csr

from elias.errors import ModelError
from elias.persistence.model_files import _load_sparse, _round_to_levels, _sparse_arrays
from rerank_problem import fit_reranker, scores_of
from saved_models import as_old_format, change_config, load_ranker, reseal, save_ranker

WEIGHTS, VOCABULARY = "ranker/ranker.safetensors", "ranker/vocabulary.txt"


@pytest.fixture
def saved(reranker, tmp_path):
    return save_ranker(tmp_path / "model", reranker)


def test_a_reranker_is_loaded_as_it_was_saved(problem, reranker, saved):
    again = load_ranker(saved)

    for component in reranker.components:
        actual, expected = (
            scores_of(one, problem.validation, component) for one in (again, reranker)
        )
        np.testing.assert_array_equal(actual, expected)
    assert again.features.featurizer.words == reranker.features.featurizer.words
    assert (again.transform, again.mixture) == (reranker.transform, reranker.mixture)


def test_a_reranker_of_features_without_calibration_is_loaded(problem, tmp_path):
    features = csr_matrix(np.eye(300, 7, dtype=np.float32))
    plain = replace(problem.train.candidates, embedding=None)
    train = problem.train._replace(inputs=features, candidates=plain)
    reranker = fit_reranker(train, problem.config)

    again = load_ranker(save_ranker(tmp_path / "model", reranker))

    assert again.calibration is None
    np.testing.assert_array_equal(scores_of(again, train), scores_of(reranker, train))


def test_nothing_is_pickled(saved):
    names = sorted(path.name for path in (saved / "ranker").iterdir())

    assert names == ["ranker.safetensors", "vocabulary.txt"]


def test_a_reranker_of_format_2_is_loaded(problem, reranker, saved):
    as_old_format(saved)

    again = load_ranker(saved)

    points = problem.validation
    np.testing.assert_array_equal(scores_of(again, points), scores_of(reranker, points))


def test_the_ranker_of_another_model_is_refused(saved):
    change_config(saved, n_labels=13)

    with pytest.raises(ModelError, match=r"ranker\.n_labels is 12, not 13"):
        load_ranker(saved)


@pytest.mark.parametrize("name", [WEIGHTS, VOCABULARY])
@pytest.mark.parametrize("is_resealed", [True, False])
@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign"])
def test_a_damaged_file_is_refused_in_one_line(saved, name, damage, is_resealed):
    path = saved / name
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.write_bytes(b"[1, 2]\n")
    if is_resealed:
        reseal(saved)

    with pytest.raises(ModelError, match=str(path)) as caught:
        load_ranker(saved)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"format_version": 99}'])
def test_a_damaged_description_of_format_2_is_refused(saved, content):
    as_old_format(saved)
    (saved / "ranker" / "ranker.json").write_bytes(content)

    with pytest.raises(ModelError, match=r"ranker\.json: (not|format)"):
        load_ranker(saved)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("n_labels", -1, "ranker.n_labels is -1"),
        ("n_features", 5, "weights.starts has shape"),
        ("calibrated", 1, "ranker.calibrated is 1"),
        ("calibrated", False, "is not expected"),
        ("transform", "cube", "ranker.transform is 'cube', not 'l3-hinge' or 'sigmoid'"),
        ("mixture", None, "ranker.mixture is None"),
        ("sharpness", 0.0, "ranker.sharpness is 0"),
        ("sharpness", "1", "ranker.sharpness is '1'"),
        ("char_ngrams", [3], r"char_ngrams is \[3\]"),
        ("char_ngrams", [5, 3], r"char_ngrams is \[5, 3\]"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused(saved, key, value, message):
    ranker = json.loads((saved / "config.json").read_text(encoding="utf8"))["ranker"]
    change_config(saved, ranker=ranker | {key: value})

    with pytest.raises(ModelError, match=message):
        load_ranker(saved)


def without(arrays, name):
    return {key: array for key, array in arrays.items() if key != name}


def swapped(columns):
    return columns[[1, 0, *range(2, len(columns))]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: without(a, "biases"), "biases is missing"),
        (lambda a: a | {"more": a["biases"]}, "more is not expected"),
        (lambda a: a | {"biases": a["biases"][:-1]}, "biases has shape"),
        (lambda a: a | {"biases": a["biases"] * np.float32("nan")}, "biases has a number that"),
        (lambda a: a | {"idf": a["idf"].astype(np.float64)}, "idf is float64, not float32"),
        (
            lambda a: a | {"weights.columns": a["weights.columns"] + 10**6},
            "weights is not a sparse",
        ),
        (lambda a: a | {"weights.columns": swapped(a["weights.columns"])}, "not ascending"),
        (
            lambda a: a | {"weights.values": a["weights.values"][1:]},
            "weights is not a sparse",
        ),
        (
            lambda a: a | {"weights.starts": a["weights.starts"][::-1]},
            "weights is not a sparse",
        ),
        (lambda a: a | {"frequencies": a["frequencies"] - 10**6}, "negative count"),
        (
            lambda a: a | {"calibration.left": 0 * a["calibration.left"]},
            "are not valid decision trees",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(saved, change, message):
    path = saved / WEIGHTS
    arrays = change(load_file(path))
    path.unlink()
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    reseal(saved)

    with pytest.raises(ModelError, match=message):
        load_ranker(saved)


def test_a_ranker_that_could_not_be_loaded_is_not_saved(reranker, tmp_path):
    biases = reranker.ranker.biases.copy()
    biases[3] = float("nan")
    broken = replace(reranker, ranker=replace(reranker.ranker, biases=biases))

    with pytest.raises(ModelError, match="biases has a number that is not finite; check"):
        save_ranker(tmp_path / "model", broken)


def test_a_compact_ranker_scores_nearly_the_same(problem, reranker, tmp_path):
    again = load_ranker(save_ranker(tmp_path / "model", reranker, compact=True))

    weights = reranker.ranker.weights
    np.testing.assert_allclose(again.ranker.weights.data, weights.data, rtol=0.03)
    np.testing.assert_array_equal(again.ranker.weights.indices, weights.indices)
    np.testing.assert_array_equal(again.ranker.weights.indptr, weights.indptr)
    actual, expected = (scores_of(one, problem.validation, "rerank") for one in (again, reranker))
    np.testing.assert_allclose(actual, expected, atol=0.02)


@pytest.mark.parametrize(
    "weights",
    [[], [0.0], [0.5], [-0.5, 0.5], [1e-9, 3.0], [0.1, -0.15, 2.5, 0.0], [1e-40], [1e30, -1e27]],
)
def test_weights_in_8_bits_are_rounded_to_the_nearest_level(weights):
    weights = np.float32(weights)

    numbers, levels = _round_to_levels(weights)

    assert numbers.dtype == np.int8
    assert (np.diff(levels) >= 0).all()
    assert np.isfinite(levels).all()
    for weight, number in zip(weights, numbers.astype(int), strict=True):
        nearest = np.abs(np.abs(weight) - levels).min()
        assert abs(abs(weight) - levels[abs(number)]) == nearest
        assert number * weight >= 0
        if abs(weight) * 1000 >= np.abs(weights).max() > 1e-35:
            assert nearest <= 0.03 * abs(weight)


@pytest.mark.parametrize("n_columns", [0, 1, 65_536, 65_537, 200_000])
def test_columns_in_16_bits_are_the_same_columns(n_columns, tmp_path):
    some = random_csr(5, n_columns, density=0.001, format="csr", dtype=np.float32, rng=0)
    ends = np.zeros((2, n_columns), dtype=np.float32)
    ends[0, [0, -1][: 2 * n_columns]] = 0.5  # the second row is empty
    weights = csr_matrix(vstack([some, ends]))

    arrays = _sparse_arrays("weights", weights, compact=True)
    again = _load_sparse(tmp_path, "weights", arrays, weights.shape, compact=True)

    assert arrays["weights.columns"].dtype == np.uint16
    assert again.has_canonical_format
    assert again.indices.dtype == np.int32
    np.testing.assert_allclose(again.toarray(), weights.toarray(), rtol=0.03, atol=1e-3)
    np.testing.assert_array_equal(again.indices, weights.indices)


def test_a_compact_ranker_with_wrong_columns_is_refused(reranker, tmp_path):
    saved = save_ranker(tmp_path / "model", reranker, compact=True)
    arrays = load_file(saved / WEIGHTS)
    arrays["weights.columns"][-1] = 65_535
    save_file(arrays, saved / WEIGHTS)
    reseal(saved)

    with pytest.raises(ModelError, match=r"weights\.columns has a column outside 0\.\."):
        load_ranker(saved)
