from pathlib import Path

import pytest

from elias.cli.predict import _print_table, open_texts, parse_labels
from elias.errors import DataError
from elias.labels import LabelTable


def test_a_label_with_a_number_for_its_name_is_meant_by_name():
    assert parse_labels(["1984", "7"], ["fish", "1984"]) == ["1984", 7]


def test_a_label_with_a_number_for_its_id_is_meant_by_id():
    table = LabelTable(("fish", "law"), ids=("1086", "1"))

    assert parse_labels(["1086", "1", "0"], table) == ["1086", "1", 0]


def test_a_column_of_scores_is_headed_and_probabilities_are_not(capsys):
    fish, law = {"label": "fish", "score": 0.441}, {"label": "law", "score": 0.2}

    _print_table({"text": "cod"}, [fish, law])
    _print_table({"text": "cod"}, [fish | {"probability": 0.86}])

    assert capsys.readouterr().out.splitlines() == [
        *("cod", " score  label", " 0.441  fish", " 0.200  law", ""),
        *("cod", "   86%  fish", ""),
    ]


@pytest.mark.parametrize("text", ["cod quotas in the north sea", "cod quotas " * 40])
def test_a_text_given_for_a_file_is_told_to_be_piped(text):
    with pytest.raises(DataError, match=r"no such file; to predict a text, .* \| elias predict"):
        open_texts(Path("model"), Path(text), None, [], None)
