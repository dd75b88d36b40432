from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elias.report.html import element, seconds, text


@given(content=st.text(), attribute=st.text())
def test_any_text_stays_text(content, attribute):
    tree = ElementTree.fromstring(element("p", content, title=attribute))

    assert list(tree) == []
    assert set(tree.attrib) <= {"title"}


@pytest.mark.parametrize("nasty", ["<script>alert(1)</script>", '" onload="x', "a & b", "'"])
def test_what_looks_like_markup_comes_back_as_it_was(nasty):
    tree = ElementTree.fromstring(element("p", nasty, title=nasty))

    assert (tree.text, tree.get("title"), list(tree)) == (nasty, nasty, [])


def test_characters_that_no_document_may_hold_are_replaced():
    assert text("a\x00b\ud800c\x1bd") == "a\ufffdb\ufffdc\ufffdd"


def test_lists_are_flattened_and_none_is_skipped():
    assert element("ul", [element("li", "a"), None, ["b"]]) == "<ul><li>a</li>b</ul>"


def test_attributes_that_are_none_are_left_out():
    assert element("p", id=None, stroke_width=2.0) == '<p stroke-width="2"></p>'


def test_text_joined_to_markup_is_escaped():
    assert element("b") + "<i>" == "<b></b>&lt;i&gt;"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (60, "1 min 0 s"), (150.6, "2 min 31 s")],
)
def test_durations_are_formatted(value, shown):
    assert seconds(value) == shown
