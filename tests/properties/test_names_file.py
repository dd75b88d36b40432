import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elias.errors import ModelError
from elias.labels import LabelTable
from elias.persistence.manifest import (
    escape,
    read_labels,
    read_names,
    unescape,
    write_labels,
    write_names,
)

# every code point, lone surrogates and line breaks of all kinds included
ANY_TEXT = st.text(st.characters(exclude_categories=[]), max_size=20)
AWKWARD = st.text(st.sampled_from("\\nru02\n\r\v\f\x1c\x85\u2028\u2029\ufeff\ud800\udc00 a"))
NAMES = st.lists(ANY_TEXT | AWKWARD, max_size=10)


@given(NAMES)
@example([])
@example([""])
@example(["", ""])
@example(["\\", "\\n", "\n", "\\\\n", "\ud83d\udc1f", "\U0001f41f"])
def test_any_names_survive_the_file(names):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "labels.txt"
        write_names(path, names)

        again = read_names(path, len(names))

        text = path.read_bytes().decode("utf8")
    assert list(again) == names
    assert len(text.splitlines()) == len(names)


CELL = ANY_TEXT | AWKWARD | st.text(st.sampled_from("\t|a"))
CELLS = st.lists(CELL).map(tuple)


@given(rows=st.lists(st.tuples(CELL, CELL, CELLS, CELL, CELLS), min_size=1))
def test_any_label_table_survives_the_file(rows):
    table = LabelTable.from_rows(rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "labels.tsv"
        write_labels(path, table)

        again = read_labels(path, len(rows))

        text = path.read_bytes().decode("utf8")
    assert LabelTable.of(again) == table
    assert len(text.splitlines()) == 1 + len(rows)


@pytest.mark.parametrize(
    "content", ["id\nx\n", "name\tname\na\tb\n", "name\tsynonyms\na\t[1]\n", "name\tid\na\n"]
)
def test_an_invalid_label_table_is_refused(content, tmp_path):
    path = tmp_path / "labels.tsv"
    path.write_text(content)

    with pytest.raises(ModelError, match="column"):
        read_labels(path, 1)


@given(ANY_TEXT | AWKWARD)
def test_an_escaped_name_is_one_line_and_means_the_name(name):
    line = escape(name)

    assert len(f"{line}.".splitlines()) == 1
    assert unescape(line) == name


@given(st.text(st.characters(categories=["L", "N", "P", "Zs"], exclude_characters="\\")))
def test_ordinary_names_are_not_escaped(name):
    assert escape(name) == name
