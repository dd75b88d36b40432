"""The XMC repository's LF folders: points and labels as JSON lines."""

from __future__ import annotations

import gzip
import json

import pytest

from elias.data import load_corpus
from elias.errors import DataError


def write_json(path, *rows):
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def point(title, ids, content="", rel=None):
    weights = [1.0] * len(ids) if rel is None else rel
    row = {"uid": title, "title": title, "content": content}
    return row | {"target_ind": ids, "target_rel": weights}


@pytest.fixture
def folder(tmp_path):
    write_json(tmp_path / "trn.json.gz", point("a", [1, 0], "more"), point("b", [], ""))
    write_json(tmp_path / "tst.json.gz", point("c", [2], rel=[0.5]))
    write_json(tmp_path / "lbl.json.gz", *({"uid": n, "title": n} for n in ("x", "y", "x")))
    (tmp_path / "filter_labels_test.txt").write_text("0 1\n")
    return tmp_path


def test_points_labels_and_filters_are_read(folder):
    corpus = load_corpus(folder)

    assert corpus.format == "lf"
    assert corpus.label_names == ["x", "y", "x"]
    assert corpus.train.texts == ["a more", "b"]
    assert corpus.train.labels.toarray().tolist() == [[1, 1, 0], [0, 0, 0]]
    assert corpus.test.labels.toarray().tolist() == [[0, 0, 0.5]]
    assert corpus.test.filters.tolist() == [[0, 1]]


def test_the_title_alone_can_be_asked_for(folder):
    assert load_corpus(folder, text="title").train.texts == ["a", "b"]


def test_features_beside_the_texts_are_read(folder):
    (folder / "trn_X_Xf.txt").write_text("2 3\n0:1\n2:0.5\n")

    assert load_corpus(folder).train.features.toarray().tolist() == [[1, 0, 0], [0, 0, 0.5]]


def test_without_label_titles_labels_are_named_by_number(folder):
    (folder / "lbl.json.gz").unlink()

    assert load_corpus(folder).label_names == ["0", "1", "2"]


def test_names_may_come_one_to_a_line(folder):
    (folder / "lbl.json.gz").unlink()
    (folder / "Yf.txt").write_text("p\nq\nr\n")

    assert load_corpus(folder).label_names == ["p", "q", "r"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (point("z", [3]), "trn.json.gz:2: target_ind 3 is out of range; there are 3 labels"),
        (point("z", [-1]), "trn.json.gz:2: target_ind -1 is out of range"),
        (point("z", ["1"]), "trn.json.gz:2: target_ind '1' is out of range"),
        (point("z", [1], rel=[float("nan")]), "trn.json.gz:2: [nan]: relevance must be finite"),
        (point("z", [1], rel=[-2.0]), "trn.json.gz:2: [-2.0]: relevance must be finite and not"),
        (point("z", [1], rel=[]), "trn.json.gz:2: 1 labels but 0 relevance values"),
        (
            point("z", [1], content=["p"]),
            "trn.json.gz:2: column 'content' holds ['p'], which is not a text",
        ),
        ({"uid": 1, "title": "z"}, "trn.json.gz:2: no 'target_ind' in this row"),
    ],
)
def test_broken_points_are_refused_with_their_line(folder, row, message):
    write_json(folder / "trn.json.gz", point("a", [0]), row)

    with pytest.raises(DataError) as caught:
        load_corpus(folder)

    assert message in str(caught.value)


def test_a_truncated_file_is_refused(folder):
    path = folder / "trn.json.gz"
    path.write_bytes(path.read_bytes()[:-12])

    with pytest.raises(DataError, match=r"trn\.json\.gz: the gzip data is cut short"):
        load_corpus(folder)


def test_an_unknown_text_column_names_the_nearest(folder):
    with pytest.raises(DataError, match=r"no column 'titel' among .*did you mean 'title'"):
        load_corpus(folder, text="titel")
