import pytest

from elias.data.synthetic import pseudowords


def test_every_number_is_a_different_word_across_lengths():
    words = pseudowords(7_000, 9_000)

    assert len(set(words)) == 2_000
    assert {len(word) for word in words} == {4, 6}


@pytest.mark.parametrize("cut", [1, 50, 7_225, 7_226])
def test_a_range_in_two_pieces_is_the_same_words(cut):
    assert pseudowords(0, cut) + pseudowords(cut, 7_300) == pseudowords(0, 7_300)


def test_an_empty_range_has_no_words():
    assert pseudowords(3, 3) == []
