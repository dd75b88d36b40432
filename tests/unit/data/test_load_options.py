"""Applying the recorded settings of training data to another file."""

import logging

import pytest

from elias import load_corpus
from elias.data.load import reading_options
from elias.errors import DataError

NONE = {"text": None, "labels": None, "separator": None}
SETTINGS = {"text": "title,body", "labels": "genre", "separator": ";", "test_size": 0.2, "seed": 0}


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "films.csv"
    path.write_text("title,body,genre\na,b,x;y\nc,d,x\n")
    return path


def test_recorded_columns_and_separator_apply_to_a_table(table):
    options = reading_options(table, SETTINGS, NONE)

    assert options == {"text": "title,body", "labels": "genre", "separator": ";"}


def test_a_given_option_wins(table):
    options = reading_options(table, SETTINGS, {**NONE, "text": "title", "separator": "|"})

    assert options == {"text": "title", "labels": "genre", "separator": "|"}


def test_only_the_keys_that_are_asked_for_are_looked_up(table):
    assert reading_options(table, SETTINGS, {"text": None}) == {"text": "title,body"}


def test_one_missing_column_is_left_to_recognition_with_a_warning(table, caplog):
    with caplog.at_level(logging.WARNING, "elias"):
        options = reading_options(table, {"text": "headline", "labels": "tags"}, NONE)

    assert options == {}
    assert [record.getMessage() for record in caplog.records] == [
        f"{table}: no column {name!r}, which the model was trained on; "
        f"looking for a {kind} column by name"
        for kind, name in (("text", "headline"), ("labels", "tags"))
    ]


def test_one_of_several_missing_columns_is_refused(table):
    with pytest.raises(DataError, match=r"films\.csv: no column 'plot', and the model was trained"):
        reading_options(table, {"text": "title, plot"}, NONE)


def test_a_column_with_a_comma_in_its_name_is_one_column(tmp_path):
    path = tmp_path / "films.csv"
    path.write_text('"title, long",genre\na,x\n')

    assert reading_options(path, {"text": "title, long"}, NONE) == {"text": "title, long"}


def test_a_format_without_columns_takes_no_recorded_option(tmp_path):
    path = tmp_path / "points.txt"
    path.write_text("1 2 2\n0 0:1.0 1:0.5\n")

    assert reading_options(path, SETTINGS, NONE) == {}


def test_only_the_text_of_an_lf_folder_is_recorded(tmp_path):
    row = '{"uid": "1", "title": "a", "content": "b", "target_ind": [0]}\n'
    (tmp_path / "trn.json").write_text(row)
    (tmp_path / "lbl.json").write_text('{"uid": "1", "title": "x"}\n')

    corpus = load_corpus(tmp_path)

    assert corpus.reading == {"text": "title,content", "group": "near-duplicates"}
    settings = {**corpus.reading, "labels": "genre"}
    assert reading_options(tmp_path, settings, NONE) == {"text": "title,content"}


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [("near-duplicates", {}), ("none", {"group": "none"}), ("body", {"group": "body"}), ("x", {})],
)
def test_groups_are_those_of_training_if_the_table_has_them(table, recorded, expected):
    assert reading_options(table, {"group": recorded}, {"group": None}) == expected
    assert reading_options(table, {"group": recorded}, {"group": "title"}) == {"group": "title"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"text": "title,body", "separator": ";", "test_size": 0.2, "seed": 0}),
        ({"test_size": 0}, {"text": "title,body", "separator": ";", "test_size": 0}),
        (
            {"text": "title,body", "labels": "genre", "separator": ";", "seed": 3},
            {
                "text": "title,body",
                "labels": "genre",
                "separator": ";",
                "test_size": 0.2,
                "seed": 3,
            },
        ),
    ],
)
def test_a_corpus_keeps_the_arguments_that_read_it_again(table, arguments, expected):
    corpus = load_corpus(table, **arguments)

    assert corpus.reading == {**expected, "group": "near-duplicates"}
    assert load_corpus(table, **corpus.reading).fingerprint() == corpus.fingerprint()


def test_a_source_with_splits_records_no_test_size(tmp_path):
    path = tmp_path / "films.csv"
    path.write_text("title,genre,split\na,x,train\nb,x,test\n")

    assert load_corpus(path).reading == {"text": "title", "group": "near-duplicates"}
