"""Test `load_corpus` independently of the format: finding files, splits, checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias.data import Corpus, Split, load_corpus
from elias.data.load import check_corpus
from elias.errors import DataError


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "points.csv"
    rows = "".join(f"text {i},label {i % 3}\n" for i in range(50))
    path.write_text("text,labels\n" + rows)
    return path


def test_one_file_without_splits_gives_a_fifth_for_testing(table):
    corpus = load_corpus(str(table))

    assert (len(corpus.train), len(corpus.test)) == (40, 10)
    assert set(corpus.train.texts).isdisjoint(corpus.test.texts)
    assert corpus.notes["test"] == "10 of 50 points set aside at random (seed 0)"


def test_the_seed_decides_the_test_points(table):
    first, again, other = (load_corpus(table, seed=seed).test.texts for seed in (1, 1, 2))

    assert first == again
    assert first != other


@pytest.mark.parametrize(("test_size", "expected"), [(0, None), (7, 7), (0.5, 25), (0.001, 1)])
def test_the_test_size_is_a_number_or_a_share(table, test_size, expected):
    corpus = load_corpus(table, test_size=test_size)

    assert (None if corpus.test is None else len(corpus.test)) == expected


@pytest.mark.parametrize("test_size", [-1, -0.1, 50, 1.5, 1000, float("nan"), float("inf")])
def test_an_impossible_test_size_is_refused(table, test_size):
    with pytest.raises(DataError, match="test_size must be"):
        load_corpus(table, test_size=test_size)


def test_given_splits_are_left_as_they_are(tmp_path):
    (tmp_path / "train.csv").write_text("text,labels\na,x\nb,y\n")

    assert load_corpus(tmp_path).test is None
    assert len(load_corpus(tmp_path, test_size=1).test) == 1


def test_a_test_split_is_not_made_twice(tmp_path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text("text,labels\na,x\n")

    with pytest.raises(DataError, match="has its own test split; do not set test_size"):
        load_corpus(tmp_path, test_size=0.1)


def test_a_single_point_stays_for_training(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,labels\na,x\n")

    assert load_corpus(path).test is None


def test_a_missing_path_names_the_nearest(table):
    with pytest.raises(DataError, match=r"no such file or folder; did you mean 'points\.csv'"):
        load_corpus(table.with_name("point.csv"))


def test_a_folder_of_something_else_says_what_is_accepted(tmp_path):
    (tmp_path / "a.md").write_text("x")
    (tmp_path / "b.md").write_text("x")

    with pytest.raises(DataError, match=r"no corpus recognised in: a\.md, b\.md; expected a table"):
        load_corpus(tmp_path)


def test_a_folder_without_training_points_is_refused(tmp_path):
    (tmp_path / "test.csv").write_text("text,labels\na,x\n")

    with pytest.raises(DataError, match=r"no training file, only test\.csv; add train"):
        load_corpus(tmp_path)


def corpus_of(**parts):
    labels = csr_matrix(np.eye(2, dtype=np.float32))
    given = {"labels": labels, "texts": ["a", "b"]} | parts
    return Corpus(train=Split(**given), label_names=["x", "y"])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"features": csr_matrix((3, 4))}, "3 rows of train features for 2 points"),
        ({"labels": csr_matrix((0, 2)), "texts": []}, "the train split has no points"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts, message):
    with pytest.raises(DataError) as caught:
        check_corpus(corpus_of(**parts))

    assert message in str(caught.value)


def test_importing_the_package_imports_neither_numpy_nor_scipy():
    code = "import sys, elias.data; sys.exit('numpy' in sys.modules or 'scipy' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": _src()})

    assert done.returncode == 0


def _src():
    return str(Path(__file__).parents[3] / "src")


def test_a_corpus_knows_how_it_can_be_read_again(tmp_path):
    path = tmp_path / "points.csv"
    path.write_text("body,tags\n" + "".join(f"text {i},a/b\n" for i in range(10)))

    corpus = load_corpus(path, text="body", separator="/")

    assert corpus.reading == {
        "text": "body",
        "separator": "/",
        "group": "near-duplicates",
        "test_size": 0.2,
        "seed": 0,
    }
    assert load_corpus(corpus.source, **corpus.reading).train.texts == corpus.train.texts
