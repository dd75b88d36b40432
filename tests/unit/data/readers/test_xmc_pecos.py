"""PECOS's one-file text format."""

from __future__ import annotations

import pytest

from elias.data import load_corpus
from elias.errors import DataError

LINES = "1,0\tcod quotas\n\tno labels\n2\ta tab\there\n"


def test_ids_come_before_the_tab(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text(LINES)

    corpus = load_corpus(path, test_size=0)

    assert corpus.format == "pecos"
    assert corpus.train.texts == ["cod quotas", "no labels", "a tab\there"]
    assert corpus.train.labels.toarray().tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert corpus.label_names == ["0", "1", "2"]


def test_label_names_are_read_from_a_file_in_the_same_folder(tmp_path):
    (tmp_path / "train.txt").write_text(LINES)
    (tmp_path / "test.txt").write_text("3\twine\n")
    (tmp_path / "output-labels.txt").write_text("a\nb\nc\nd\n")

    corpus = load_corpus(tmp_path)

    assert corpus.label_names == ["a", "b", "c", "d"]
    assert corpus.test.texts == ["wine"]
    assert corpus.test.labels.indices.tolist() == [3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0\ta\n7\tb\n", "train.txt:2: label id 7 is out of range; there are 2 label names"),
        ("0\ta\n" * 9000 + "x\tb\n", "train.txt:9001: 'x\\tb' is not `id,id,…<tab>text`"),
        ("0\ta\n" * 20_000 + "prose\n", "train.txt:20001: 'prose' is not"),
    ],
)
def test_broken_lines_are_refused_with_their_number(tmp_path, content, message):
    (tmp_path / "train.txt").write_text(content)
    (tmp_path / "labels.txt").write_text("a\nb\n")

    with pytest.raises(DataError) as caught:
        load_corpus(tmp_path)

    assert message in str(caught.value)


def test_implausibly_large_ids_are_refused(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("999999999999\ta\n")

    with pytest.raises(DataError, match="implausibly large"):
        load_corpus(path)
