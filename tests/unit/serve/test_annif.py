"""The suggestions that Annif gets."""

import pytest

from elias.serve.annif import _Options, _suggestions


def label(name, score, **more):
    return {"id": 0, "label": name, "score": score, **more}


def suggest(ranking, **options):
    return [(one.uri, one.score) for one in _suggestions(ranking, _Options(**options))]


def test_the_uri_is_that_of_the_vocabulary_and_labels_without_one_are_left_out():
    ranking = [label("a", 0.9, uri="u:a"), label("b", 0.8, uri=None), label("c", 0.7, uri="u:c")]

    assert [uri for uri, _ in suggest(ranking)] == ["u:a", "u:c"]


def test_without_a_vocabulary_the_name_is_the_uri():
    assert [uri for uri, _ in suggest([label("http://a/1", 0.9)])] == ["http://a/1"]


def test_equal_probabilities_keep_their_order_by_score():
    ranking = [label(name, 0.0, probability=0.5) for name in "abc"]

    scores = [score for _, score in suggest(ranking)]

    assert scores == sorted(set(scores), reverse=True)
    assert scores == pytest.approx([0.5] * 3, rel=1e-5)


def test_scores_are_above_0_up_to_1_and_at_least_the_threshold():
    ranking = [label("a", 1.7), label("b", 0.4), label("c", -0.2)]

    assert [score for _, score in suggest(ranking)] == pytest.approx([1, 0.4], rel=1e-5)
    assert len(suggest(ranking, threshold=0.5)) == 1
    assert suggest(ranking, limit=0) == []
