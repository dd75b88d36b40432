"""Tests of `elias.labels`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elias import LabelTable
from elias.errors import DataError

TABLE = LabelTable(
    ("fish", "law", "fish"),
    ids=("u:1", "", "u:3"),
    synonyms=(("cod",), (), ()),
    descriptions=("", "Rules.", ""),
)


def test_a_table_is_the_sequence_of_its_names():
    assert list(TABLE) == ["fish", "law", "fish"]
    assert TABLE[:2] == ("fish", "law")
    assert TABLE.id(0) == "u:1"
    assert TABLE.id(1) is None


def test_the_text_of_a_label_has_its_synonyms_and_description():
    assert TABLE.texts() == ["fish. cod", "law. Rules.", "fish"]


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(DataError, match="1 ids for 2 names"):
        LabelTable(("a", "b"), ids=("x",))


def test_labels_are_matched_by_id_then_by_name():
    assert TABLE.match(["u:3", "law", "fish", "cod"]) == [2, 1, 0, None]


def test_labels_with_different_ids_do_not_match_by_name():
    others = LabelTable(("fish", "law"), ids=("u:9", "u:8"))

    assert TABLE.match(others) == [None, 1]


def test_a_sum_keeps_the_details_of_both_tables():
    both = TABLE.take([1]) + LabelTable(("new",), ids=("u:4",), broader=(("u:5",),))

    expected = [("law", "", (), "Rules.", ()), ("new", "u:4", (), "", ("u:5",))]
    assert list(both.rows()) == expected
    assert both.synonyms is None


@given(st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), max_size=5))
def test_taking_rows_of_a_sum_equals_the_sum_of_the_parts(first, second):
    rows = [*TABLE.take(first).rows(), *TABLE.take(second).rows()]

    assert list((TABLE.take(first) + TABLE.take(second)).rows()) == rows
