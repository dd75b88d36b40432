"""``elias explain``: for people and for programs, from the command line and from stdin."""

import json

import pytest

from e2e.commands import SMALL, elias
from elias import Elias


@pytest.fixture(scope="module")
def text(corpus_folder):
    return (corpus_folder / "raw" / "tst_X.txt").read_text(encoding="utf8").splitlines()[0]


def test_json_holds_what_python_gives(run, text):
    told = elias("explain", run, text, "-k", 3, "--paths", 2, "--json", "--device", "cpu")

    expected = Elias.from_pretrained(run, device="cpu").explain([text], top_k=3, paths=2)
    assert told.code == 0, told.err
    assert json.loads(told.out) == json.loads(json.dumps(expected[0].to_dict()))


def test_the_labels_are_those_that_predict_finds(run, text):
    explained = elias("explain", run, text, "-k", 4, "--json")
    predicted = elias("predict", run, "-k", 4, stdin=text.encode())

    found = [(label["id"], label["score"]) for label in json.loads(explained.out)["labels"]]
    assert found == [(one["id"], one["score"]) for one in json.loads(predicted.out)["labels"]]


def test_every_line_of_stdin_is_explained(run, text):
    told = elias("explain", run, "-", "--json", stdin=f"{text}\n\nsomething else\n".encode())

    assert [json.loads(line)["text"] for line in told.out.splitlines()] == [
        text,
        "",
        "something else",
    ]


def test_people_get_a_table_on_stdout_and_its_meaning_on_stderr(run, text):
    told = elias("explain", run, text, "-k", 2)

    best = Elias.from_pretrained(run, device="cpu").explain([text], top_k=2)[0].labels[0]
    lines = told.out.splitlines()
    assert lines[0] == text
    row = next(line for line in lines if line.endswith(f" 1. {best.label}"))
    shown = (best.score, best.ranker_score, best.name_likeness, best.calibrated_score)
    shown = (*shown, best.p, best.classifier_score, best.path_score)
    assert row.split()[:7] == [f"{value:.3f}" for value in shown]
    assert sum("▸" in line for line in lines) == 2
    assert "p = classifier · path" in told.err
    assert "score = T + p · ranker" in told.err
    assert "the similarity of the label's name and the text" in told.err


def test_nothing_is_explained_without_a_text(run):
    told = elias("explain", run)

    assert (told.code, told.out) == (0, "")
    assert "no texts were given" in told.err


def test_a_folder_without_a_model_is_one_line_with_exit_code_2(tmp_path):
    told = elias("explain", tmp_path, "a text")

    assert told.code == 2
    assert told.err.startswith("error: ")
    assert told.err.count("\n") == 1


def test_a_model_of_features_says_what_takes_them(tmp_path):
    table = tmp_path / "train.txt"
    rows = "".join(f"{i % 3} {i % 5}:1.0 {5 + i % 4}:0.5\n" for i in range(40))
    table.write_text(f"40 9 3\n{rows}")
    trained = elias("train", table, "--out", tmp_path / "run", *SMALL)
    assert trained.code == 0, trained.err

    told = elias("explain", tmp_path / "run", "a text")

    assert told.code == 2
    assert "was trained on features" in told.err
