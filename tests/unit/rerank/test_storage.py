import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scipy.sparse import csr_matrix

from elias.errors import VOCABULARY_FILE, ModelError
from elias.persistence.reranker_files import (
    ARRAYS_FILE,
    DESCRIPTION_FILE,
    load_reranker,
    save_reranker,
)
from elias.rerank import Reranker


@pytest.fixture
def saved(reranker, tmp_path):
    save_reranker(reranker, tmp_path / "ranker")
    return tmp_path / "ranker"


def test_a_reranker_comes_back_as_it_was(problem, reranker, saved):
    again = load_reranker(saved, n_labels=reranker.ranker.n_labels)

    found, expected = again.score(problem.validation[0]), reranker.score(problem.validation[0])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert again.features.featurizer.words == reranker.features.featurizer.words
    assert (again.transform, again.mixture) == (reranker.transform, reranker.mixture)


def test_a_reranker_of_features_without_calibration_comes_back(problem, tmp_path):
    features = csr_matrix(np.eye(300, 7, dtype=np.float32))
    train = problem.train._replace(given=features, embedding=None)
    reranker = Reranker.fit(train, problem.labels, problem.config)
    save_reranker(reranker, tmp_path / "ranker")

    again = load_reranker(tmp_path / "ranker")

    assert again.calibration is None
    np.testing.assert_array_equal(again.score(train).final, reranker.score(train).final)


def test_nothing_is_pickled(saved):
    names = sorted(path.name for path in saved.iterdir())

    assert names == sorted([ARRAYS_FILE, DESCRIPTION_FILE, VOCABULARY_FILE])


def test_a_folder_that_is_taken_is_left_alone(reranker, saved):
    with pytest.raises(ModelError, match="already exists"):
        save_reranker(reranker, saved)

    load_reranker(saved)


def test_the_ranker_of_another_model_is_refused(saved):
    with pytest.raises(ModelError, match="ranks 12 labels where the model has 13"):
        load_reranker(saved, n_labels=13)


@pytest.mark.parametrize("name", [ARRAYS_FILE, DESCRIPTION_FILE, VOCABULARY_FILE])
@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign"])
def test_a_damaged_file_is_refused_in_one_line(saved, name, damage):
    path = saved / name
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.write_bytes(b"[1, 2]\n")

    with pytest.raises(ModelError, match=str(saved)) as caught:
        load_reranker(saved)

    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_said_to_have_no_ranker(tmp_path):
    with pytest.raises(ModelError, match=r"has no ranker\.json; give the folder"):
        load_reranker(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format_version", 99, "format 99, written by elias-xmc .* is newer .*; upgrade"),
        ("format_version", "1", "not of a ranker that ELIAS saved"),
        ("n_labels", -1, "n_labels is -1"),
        ("n_labels", 11, "weights.starts has shape"),
        ("n_features", 5, "n_words is more than n_features"),
        ("calibrated", 1, "calibrated is 1"),
        ("calibrated", False, "is not a part of this ranker"),
        ("transform", "cube", "transform is 'cube', which is not known"),
        ("mixture", None, "mixture is None"),
        ("sharpness", 0.0, "sharpness is 0.0"),
        ("sharpness", 1, "sharpness is 1"),
        ("char_ngrams", [3], r"char_ngrams is \[3\]"),
        ("char_ngrams", [5, 3], r"char_ngrams is \[5, 3\]"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(saved, key, value, message):
    path = saved / DESCRIPTION_FILE
    tree = json.loads(path.read_text(encoding="utf8"))
    path.write_text(json.dumps(tree | {key: value}), encoding="utf8")

    with pytest.raises(ModelError, match=message):
        load_reranker(saved)


def without(arrays, name):
    return {key: array for key, array in arrays.items() if key != name}


def swapped(columns):
    return columns[[1, 0, *range(2, len(columns))]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: without(a, "biases"), "biases is missing"),
        (lambda a: a | {"more": a["biases"]}, "more is not a part of this ranker"),
        (lambda a: a | {"biases": a["biases"][:-1]}, "biases has shape"),
        (lambda a: a | {"biases": a["biases"] * np.float32("nan")}, "biases has a number that"),
        (lambda a: a | {"idf": a["idf"].astype(np.float64)}, "idf is float64, not float32"),
        (lambda a: a | {"weights.columns": a["weights.columns"] + 10**6}, "feature outside"),
        (lambda a: a | {"weights.columns": swapped(a["weights.columns"])}, "not ascending"),
        (lambda a: a | {"weights.values": a["weights.values"][1:]}, "weights.values are not"),
        (lambda a: a | {"weights.starts": a["weights.starts"][::-1]}, "does not divide"),
        (lambda a: a | {"frequencies": a["frequencies"] - 10**6}, "negative count"),
        (lambda a: a | {"calibration.left": 0 * a["calibration.left"]}, "is not made of trees"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(saved, change, message):
    path = saved / ARRAYS_FILE
    arrays = change(load_file(path))
    path.unlink()
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)

    with pytest.raises(ModelError, match=message):
        load_reranker(saved)


def test_a_save_that_fails_leaves_nothing(reranker, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "copymode", lambda *_: (_ for _ in ()).throw(OSError("disk full")))

    with pytest.raises(ModelError, match="cannot be written"):
        save_reranker(reranker, tmp_path / "ranker")

    assert list(tmp_path.iterdir()) == []


def test_a_ranker_that_could_not_be_loaded_is_not_saved(reranker, tmp_path):
    reranker.ranker.biases[3] = float("nan")

    with pytest.raises(ModelError, match="biases has a number that is not finite"):
        save_reranker(reranker, tmp_path / "ranker")

    assert list(tmp_path.iterdir()) == []
