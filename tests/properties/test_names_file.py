import tempfile
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from elias.persistence.manifest import LABEL_COLUMNS, escape, read_names, unescape, write_names

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


@given(
    rows=st.lists(st.tuples(CELL, CELL, CELL, CELL), min_size=1),
    columns=st.permutations(LABEL_COLUMNS),
)
def test_the_names_of_any_label_table_are_read(rows, columns):
    lines = [columns, *(tuple(map(escape, row)) for row in rows)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "labels.tsv"
        path.write_bytes("".join("\t".join(line) + "\n" for line in lines).encode("utf8"))

        names = read_names(path, len(rows), is_table=True)

        text = path.read_bytes().decode("utf8")
    assert names == tuple(row[columns.index("name")] for row in rows)
    assert len(text.splitlines()) == 1 + len(rows)


@given(ANY_TEXT | AWKWARD)
def test_an_escaped_name_is_one_line_and_means_the_name(name):
    line = escape(name)

    assert len(f"{line}.".splitlines()) == 1
    assert unescape(line) == name


@given(st.text(st.characters(categories=["L", "N", "P", "Zs"], exclude_characters="\\")))
def test_ordinary_names_are_not_escaped(name):
    assert escape(name) == name
