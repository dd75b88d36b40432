"""The XMC repository's sparse text files."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from elias.data import load_corpus
from elias.errors import DataError

TRAIN = "3 4 5\n0,2 1:0.5 3:1\n 0:2\n4,4 \n"


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_one_file_holds_labels_and_features(tmp_path):
    path = write(tmp_path / "data.txt", TRAIN)

    corpus = load_corpus(path, test_size=0)

    assert corpus.format == "xmc"
    assert corpus.train.texts is None
    assert corpus.label_names == ["0", "1", "2", "3", "4"]
    assert corpus.train.labels.toarray().tolist() == [
        [1, 0, 1, 0, 0],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1],
    ]
    assert corpus.train.features.toarray().tolist() == [[0, 0.5, 0, 1], [2, 0, 0, 0], [0, 0, 0, 0]]


def test_a_line_without_labels_may_lack_the_space(tmp_path):
    path = write(tmp_path / "data.txt", "2 2 2\n0:1 1:1\n1 0:1\n")

    assert load_corpus(path, test_size=0).train.labels.toarray().tolist() == [[0, 0], [0, 1]]


def test_white_space_between_pairs_may_be_of_any_kind(tmp_path):
    path = write(tmp_path / "data.txt", "2 3 2\n0  0:1\t1:2   2:1e-1 \r\n1 2:+3\n")

    features = load_corpus(path, test_size=0).train.features

    np.testing.assert_allclose(features.toarray(), [[1, 2, 0.1], [0, 0, 3]])


@pytest.mark.parametrize("stem", ["", "eurlex_"])
def test_a_folder_has_train_and_test_files(tmp_path, stem):
    write(tmp_path / f"{stem}train.txt", TRAIN)
    write(tmp_path / f"{stem}test.txt", "1 4 5\n1 2:1\n")
    write(tmp_path / "trn_X.txt", "a\nb\nc\n")
    write(tmp_path / "Yf.txt", "p\nq\nr\ns\nt\n")
    write(tmp_path / "filter_labels_test.txt", "0 3\n\n0 4\n")

    corpus = load_corpus(tmp_path)

    assert corpus.train.texts == ["a", "b", "c"]
    assert corpus.test.labels.toarray().tolist() == [[0, 1, 0, 0, 0]]
    assert corpus.test.filters.tolist() == [[0, 3], [0, 4]]
    assert corpus.train.filters is None
    assert corpus.label_names == ["p", "q", "r", "s", "t"]


def test_a_folder_may_have_one_matrix_per_file(tmp_path):
    (tmp_path / "trn_X_Y.txt.gz").write_bytes(gzip.compress(b"2 3\n0:1 2:0.5\n1:0\n", mtime=0))
    write(tmp_path / "trn_X_Xf.txt", "2 2\n0:1\n1:-1\n")
    write(tmp_path / "tst_X_Y.txt", "1 3\n2:1\n")
    write(tmp_path / "tst_X.txt", "some text\n")

    corpus = load_corpus(tmp_path)

    assert corpus.train.labels.toarray().tolist() == [[1, 0, 0.5], [0, 0, 0]]
    assert corpus.train.labels.nnz == 2
    assert corpus.train.features.toarray().tolist() == [[1, 0], [0, -1]]
    assert corpus.test.texts == ["some text"]


def test_many_lines_are_read_in_blocks(tmp_path):
    n_points = 20_000
    lines = "".join(f"{i % 7} {i % 11}:{i}\n" for i in range(n_points))
    path = write(tmp_path / "data.txt", f"{n_points} 11 7\n{lines}\n\n")

    corpus = load_corpus(path, test_size=0)

    np.testing.assert_array_equal(corpus.train.labels.indices, np.arange(n_points) % 7)
    assert corpus.train.features.sum() == pytest.approx(n_points * (n_points - 1) / 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("3 4 5\n0 1:1\n1 1:1\n", "data.txt: the first line says 3 points, but 2 follow"),
        ("1 4 5\n0 1:1\n1 1:1\n", "data.txt: the first line says 1 points, but 2 follow"),
        ("2 4 5\n0 1:1\n0,5 1:1\n", "data.txt:3: label id 5 is out of range; the first line all"),
        ("1 4 5\n-1 1:1\n", "data.txt:2: label id -1 is out of range"),
        ("2 4 5\n0 1:1\n0 4:1\n", "data.txt:3: feature id 4 is out of range"),
        ("2 4 5\n0 1:1\n0 1:2:3 5\n", "data.txt:3: '1:2:3' is not an index:value pair"),
        ("2 4 5\n0 1:1\n0 1:x\n", "data.txt:3: '1:x' is not an index:value pair"),
        ("2 4 5\n0 1:1\n0 1.5:1\n", "data.txt:3: '1.5:1' is not an index:value pair"),
        ("2 4 5\n0 1:1\n0 :1\n", "data.txt:3: ':1' is not an index:value pair"),
        ("2 4 5\n0 1:1\n0 nan:1\n", "data.txt:3: 'nan:1' is not an index:value pair"),
        ("2 4 5\n0 1:1\n0,,1 1:1\n", "data.txt:3: '0,,1' is not a list of label ids"),
        ("2 4 5\n0 1:1\n0 1:nan\n", "data.txt:3: nan: a feature value must be finite"),
        ("2 4 5\n0 1:1\n 1:2 2:-inf\n", "data.txt:3: -inf: a feature value must be finite"),
        ("1 4 5\n0 1:1e99\n", "data.txt:2: inf: a feature value must be finite"),
        (f"{'9' * 5000} 4 5\n0 1:1\n", "data.txt:1: the first line is '999"),
        ("3 4 5\n", "data.txt: has no points after its first line"),
        ("1 4 999999999999\n0 1:1\n", "implausibly large"),
    ],
)
def test_broken_files_are_refused_in_one_line_with_file_and_line(tmp_path, content, message):
    path = write(tmp_path / "data.txt", content)

    with pytest.raises(DataError) as caught:
        load_corpus(path)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("test.txt", "1 3 5\n0 1:1\n", "test features have 3 columns, not 4"),
        ("test.txt", "1 4 6\n0 1:1\n", "the test split has 6 labels, but there are 5"),
        ("Y.txt", "a\nb\n", "Y.txt: holds 2 names for 5 labels"),
        ("trn_X.txt", "a\n", "trn_X.txt: holds 1 texts for 3 points"),
        ("filter_labels_train.txt", "0 1\n3 1\n", "filter_labels_train.txt:2: the pair 3 1 is out"),
        ("filter_labels_train.txt", "0 -1\n", "filter_labels_train.txt:1: the pair 0 -1 is out"),
        ("filter_labels_train.txt", "0 1 2\n", "filter_labels_train.txt:1: '0 1 2' is not"),
        ("trn_X_Y.txt", "4\n", "the train points have neither texts nor features; add trn_X.txt"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(tmp_path, name, content, message):
    write(tmp_path / "train.txt", TRAIN)
    write(tmp_path / name, content)

    with pytest.raises(DataError) as caught:
        load_corpus(tmp_path)

    assert message in str(caught.value)


def test_negative_relevance_is_refused(tmp_path):
    write(tmp_path / "trn_X_Y.txt", "2 3\n0:1\n2:-0.5\n")
    write(tmp_path / "trn_X.txt", "a\nb\n")

    with pytest.raises(DataError, match=r"point 2, column 2 holds -0\.5: .* not be negative"):
        load_corpus(tmp_path)


def test_columns_have_no_meaning_here(tmp_path):
    path = write(tmp_path / "data.txt", TRAIN)

    with pytest.raises(DataError, match="is in XMC format, where text= has no meaning"):
        load_corpus(path, text="title")


def test_a_label_matrix_without_its_sizes_is_refused(tmp_path):
    write(tmp_path / "trn_X.txt", "a\n")
    write(tmp_path / "trn_X_Y.txt", "4\n")

    message = r"trn_X_Y\.txt:1: the first line is '4', not `rows columns`"
    with pytest.raises(DataError, match=message):
        load_corpus(tmp_path)
