"""Folders of npz matrices and text lines, ours and PECOS's."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from scipy.sparse import coo_matrix, csc_matrix, csr_matrix, save_npz

from elias.data import load_corpus
from elias.errors import DataError

Y_TRAIN = [[1, 0, 1], [0, 1, 0]]
SPELLINGS = {
    "folder": ("raw/{}_X.txt", "raw/Y.txt"),
    "pecos": ("X.{}.txt", "output-items.txt"),
}


def build(folder, spelling="folder", train=Y_TRAIN, **texts):
    text_name, names = SPELLINGS[spelling]
    (folder / "raw").mkdir()
    save_npz(folder / "Y.trn.npz", csr_matrix(np.array(train, dtype=np.float32)))
    (folder / text_name.format("trn")).write_text(texts.get("trn", "cod\nwine\n"))
    (folder / names).write_text(texts.get("names", "fish\nlaw\nfish\n"))
    return folder


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_texts_labels_and_names_are_read(tmp_path, spelling):
    build(tmp_path, spelling)

    corpus = load_corpus(tmp_path)

    assert corpus.format == spelling
    assert corpus.train.texts == ["cod", "wine"]
    assert corpus.train.labels.toarray().tolist() == Y_TRAIN
    assert corpus.label_names == ["fish", "law", "fish"]
    assert corpus.test is None


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_split_and_the_features_are_read(tmp_path, spelling):
    build(tmp_path, spelling)
    for short in ("val", "tst"):
        save_npz(tmp_path / f"Y.{short}.npz", csr_matrix(np.eye(3, dtype=bool)))
        (tmp_path / SPELLINGS[spelling][0].format(short)).write_text("a\nb\nc\n")
        save_npz(tmp_path / f"X.{short}.npz", csc_matrix(np.ones((3, 4))))
    save_npz(tmp_path / "X.trn.npz", coo_matrix(np.ones((2, 4))))
    (tmp_path / "filter_labels_test.txt").write_text("2 0\n")

    corpus = load_corpus(tmp_path)

    assert {name: len(split) for name, split in corpus.splits.items()} == {
        "train": 2,
        "validation": 3,
        "test": 3,
    }
    assert corpus.test.features.shape == (3, 4)
    assert corpus.test.filters.tolist() == [[2, 0]]
    assert corpus.validation.labels.dtype == np.float32


def test_pecos_features_may_lie_in_their_own_folder_and_suffice(tmp_path):
    save_npz(tmp_path / "Y.trn.npz", csr_matrix(np.eye(2)))
    (tmp_path / "tfidf-attnxml").mkdir()
    save_npz(tmp_path / "tfidf-attnxml" / "X.trn.npz", csr_matrix(np.eye(2)))

    corpus = load_corpus(tmp_path)

    assert corpus.format == "pecos"
    assert corpus.train.texts is None
    assert corpus.train.features.shape == (2, 2)
    assert corpus.label_names == ["0", "1"]


def test_unsorted_and_doubled_entries_are_put_in_order_and_zeros_dropped(tmp_path):
    build(tmp_path)
    data, columns = np.array([1, 0, 0.25, 0.25]), np.array([2, 1, 0, 0])
    save_npz(tmp_path / "Y.trn.npz", csr_matrix((data, columns, [0, 2, 4]), shape=(2, 3)))

    labels = load_corpus(tmp_path).train.labels

    assert labels.toarray().tolist() == [[0, 0, 1], [0.5, 0, 0]]
    assert labels.nnz == 2
    assert labels.has_sorted_indices


def test_windows_line_ends_and_unusual_line_separators_do_not_split_lines(tmp_path):
    build(tmp_path, trn="cod\r\nwi\x85n\u2028e\r\n")

    assert load_corpus(tmp_path).train.texts == ["cod", "wi\x85n\u2028e"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trn": "cod\n"}, "trn_X.txt: holds 1 texts for 2 points"),
        ({"names": "a\nb\n"}, "Y.txt: holds 2 names for 3 labels"),
        ({"names": ""}, "Y.txt: is empty"),
        ({"train": [[np.nan, 0, 0], [0, 0, 1]]}, "Y.trn.npz: point 1, column 0 holds nan"),
        ({"train": [[1, 0, 0], [0, 0, -2]]}, "Y.trn.npz: point 2, column 2 holds -2.0"),
        ({"train": [[0, 0, 0], [0, 0, 0]]}, "no training point has a label"),
    ],
)
def test_folders_that_do_not_fit_are_refused(tmp_path, change, message):
    build(tmp_path, **change)

    with pytest.raises(DataError) as caught:
        load_corpus(tmp_path)

    assert message in str(caught.value)


def test_invalid_utf8_is_refused_with_its_line(tmp_path):
    build(tmp_path)
    (tmp_path / "raw" / "trn_X.txt").write_bytes(b"cod\nw\xefne\n")

    with pytest.raises(DataError, match=r"trn_X\.txt:2: not UTF-8 \(byte 0xef\)"):
        load_corpus(tmp_path)


def broken_npz(path):
    whole = path.read_bytes()
    outside = csr_matrix(([1.0], [0], [0, 1, 1]), shape=(2, 3))
    outside.indices[0] = 7
    yield whole[: len(whole) // 2]
    yield b""
    yield b"not an archive"
    yield pickle.dumps({"shape": (2, 3)})
    np.savez(path, a=np.eye(2))
    yield path.read_bytes()
    np.savez(path, a=np.array([{}], dtype=object))
    yield path.read_bytes()
    save_npz(path, outside)
    yield path.read_bytes()


@pytest.mark.parametrize("case", range(7))
def test_a_broken_or_foreign_npz_file_is_refused_and_never_unpickled(tmp_path, case):
    build(tmp_path)
    path = tmp_path / "Y.trn.npz"
    path.write_bytes(list(broken_npz(path))[case])

    with pytest.raises(DataError, match=r"Y\.trn\.npz: not a complete sparse npz file") as caught:
        load_corpus(tmp_path)

    assert "\n" not in str(caught.value)


def test_points_without_texts_or_features_are_refused(tmp_path):
    save_npz(tmp_path / "Y.trn.npz", csr_matrix(np.eye(2)))

    with pytest.raises(DataError, match=r"neither texts nor features; add X\.trn\.txt"):
        load_corpus(tmp_path)


def test_a_matrix_of_another_kind_of_number_is_refused(tmp_path):
    build(tmp_path)
    save_npz(tmp_path / "Y.trn.npz", csr_matrix(np.eye(2, 3, dtype=complex)))

    with pytest.raises(DataError, match="complex128 data; expected"):
        load_corpus(tmp_path)
