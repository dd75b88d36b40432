"""``elias explain``: for people and for programs, from the command line and from stdin."""

import json

import pytest

from e2e.commands import SMALL, elias
from elias import Elias


@pytest.fixture(scope="module")
def text(corpus_folder):
    return (corpus_folder / "raw" / "tst_X.txt").read_text(encoding="utf8").splitlines()[0]


def test_json_holds_what_python_gives(run, text):
    result = elias("explain", run, text, "-k", 3, "--json", "--device", "cpu")

    expected = Elias.from_pretrained(run, device="cpu").explain([text], top_k=3, words=True)
    assert result.code == 0, result.err
    assert json.loads(result.out) == json.loads(json.dumps(expected[0].to_dict()))


def test_the_labels_are_those_that_predict_finds(run, text):
    explained = elias("explain", run, text, "-k", 4, "--json")
    predicted = elias("predict", run, "-k", 4, stdin=text.encode())

    actual = [(label["id"], label["score"]) for label in json.loads(explained.out)["labels"]]
    assert actual == [(one["id"], one["score"]) for one in json.loads(predicted.out)["labels"]]


def test_every_line_of_stdin_is_explained(run, text):
    result = elias("explain", run, "-", "--json", stdin=f"{text}\n\nsomething else\n".encode())

    assert [json.loads(line)["text"] for line in result.out.splitlines()] == [
        text,
        "",
        "something else",
    ]


def test_people_get_a_table_on_stdout_and_its_meaning_on_stderr(run, text):
    result = elias("explain", run, text, "-k", 2)

    best = Elias.from_pretrained(run, device="cpu").explain([text], top_k=2)[0].labels[0]
    lines = result.out.splitlines()
    assert lines[0] == text
    row = next(line for line in lines if line.endswith(f" 1. {best.label}"))
    shown = (best.probability, best.ranker_score, best.name_likeness, best.calibrated_score)
    shown = (*shown, best.p, best.classifier_score, best.path_score)
    assert row.split()[:7] == [f"{value:.3f}" for value in shown]
    assert sum("▸" in line for line in lines) == 2
    assert "p = classifier · path" in result.err
    (header,) = (line.split() for line in lines if line.startswith((" prob", "prob")))
    assert header[:5] == ["prob", "ranker", "name", "calibrated", "p"]
    assert "Labels are ranked by calibrated + p · ranker" in result.err
    assert "score" not in result.err  # no such column
    assert "the similarity of the label's name and the text" in result.err


def test_words_for_and_against_each_label_are_listed_below_the_table(run, text):
    shown = elias("explain", run, text, "-k", 1).out
    without = elias("explain", run, text, "-k", 1, "--no-words").out

    best = Elias.from_pretrained(run, device="cpu").explain([text], top_k=1, words=True)[0]
    label = best.labels[0]
    strongest = max(label.words, key=lambda word: word.effect)
    word = text[strongest.start : strongest.end]
    assert f"  for: {word} ({strongest.probability:.0%} without it)" in shown
    assert f"  in the ranker: {label.terms[0].term} {label.terms[0].weight:+.2f}" in shown
    assert "without it" not in without


def test_nothing_is_explained_without_a_text(run):
    result = elias("explain", run)

    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: stdin: no texts; give a text")


def test_a_folder_without_a_model_is_one_line_with_exit_code_2(tmp_path):
    result = elias("explain", tmp_path, "a text")

    assert result.code == 2
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1


def test_a_model_of_features_says_what_takes_them(tmp_path):
    table = tmp_path / "train.txt"
    rows = "".join(f"{i % 3} {i % 5}:1.0 {5 + i % 4}:0.5\n" for i in range(40))
    table.write_text(f"40 9 3\n{rows}")
    trained = elias("train", table, "--out", tmp_path / "run", *SMALL)
    assert trained.code == 0, trained.err

    result = elias("explain", tmp_path / "run", "a text")

    assert result.code == 2
    assert "was trained on features" in result.err
