"""Several processes predict what one does, into the same file."""

import csv
import gzip
import json
import signal

import pyarrow.parquet as pq
import pytest

from e2e.test_processes import made_by


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made_by("predict_worker.py", tmp_path_factory.mktemp("predicting"))


@pytest.fixture(scope="module")
def results(folder):
    return json.loads((folder / "results.json").read_text())


def assert_same_rows(ours, theirs):
    """The same texts, and the same labels in the same order, scores but for rounding."""
    assert len(ours) == len(theirs)
    for row, other in zip(ours, theirs, strict=True):
        assert row.keys() == other.keys()
        assert [name for name in row if name != "labels" and row[name] != other[name]] == []
        labels, others = (list(map(parts, one["labels"])) for one in (row, other))
        assert [names for names, _ in labels] == [names for names, _ in others]
        for (_, numbers), (_, twins) in zip(labels, others, strict=True):
            assert numbers == pytest.approx(twins, rel=1e-4, abs=1e-6)


def parts(label):
    """Return the fields that must be equal, and the numbers that may differ by rounding."""
    numbers = {name: value for name, value in label.items() if isinstance(value, float)}
    return {name: value for name, value in label.items() if name not in numbers}, numbers


def rows(result):
    return [json.loads(line) for line in result["out"].splitlines()]


def assert_same_told(alone, several):
    """The first process says what one alone does, the others nothing."""
    first, *others = several
    assert first["code"] == alone["code"] == 0, first["err"]
    assert_same_rows(rows(first), rows(alone))
    for result in others:
        assert result == {"code": 0, "out": "", "err": ""}


@pytest.mark.parametrize("index", [0, 1, 2], ids=["1", "2", "4"])
def test_the_number_of_processes_changes_no_prediction(results, index):
    alone, *several = results["sizes"]

    assert len(rows(alone)) == 11
    assert_same_told(alone, several[index])


@pytest.mark.parametrize(
    "asked",
    ["ensemble", "all", "only", "all only", "without", "component", "stdin", "few", "nothing"],
)
def test_all_models_options_and_inputs_work_with_several_processes(results, asked):
    alone, several = results[asked]

    assert_same_told(alone, several)


def test_only_some_labels_are_those_alone(results):
    _, several = results["only"]

    assert {label["id"] for row in rows(several[0]) for label in row["labels"]} == {4, 9}


def test_missing_texts_are_reported_once(results):
    _, (first, other) = results["nothing"]

    assert first["err"] == "no texts were given\n"
    assert other["err"] == ""


def read_back(path):
    """The rows of a file of predictions, in one shape for all forms."""
    name = path.name
    if name.endswith("jsonl"):
        return [json.loads(line) for line in path.read_text().splitlines()]
    if name.endswith("txt"):
        lines = [line.split() for line in path.read_text().splitlines()]
        pairs = [[pair.split(":") for pair in line] for line in lines]
        return [{"labels": [{"id": int(i), "score": float(s)} for i, s in row]} for row in pairs]
    if name.endswith("parquet"):
        table = pq.read_table(path).to_pylist()
    else:
        opened = gzip.open if name.endswith(".gz") else open
        with opened(path, "rt", newline="") as file:
            given = list(csv.DictReader(file, delimiter="\t" if ".tsv" in name else ","))
        lists = ("labels", "label_ids", "scores", "probabilities")
        table = [row | {key: json.loads(row[key]) for key in lists if key in row} for row in given]
    return [
        {
            "key": row["key"],
            "labels": [
                {"id": number, "label": label, "score": score}
                for number, label, score in zip(
                    row["label_ids"], row["labels"], row["scores"], strict=True
                )
            ],
        }
        for row in table
    ]


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv.gz", "parquet", "txt"])
def test_a_file_is_written_by_one_process_in_the_order_of_the_input(folder, results, form):
    alone, first, *others = results["files"][form]

    assert alone["code"] == first["code"] == 0, first["err"]
    assert "11 texts" in first["err"]
    assert all(result == {"code": 0, "out": "", "err": ""} for result in others)
    ours, theirs = (read_back(folder / f"{name}.{form}") for name in ("several", "alone"))
    assert len(ours) == 11
    assert_same_rows(ours, theirs)
    assert not list(folder.glob(".several*"))


@pytest.mark.parametrize(
    ("asked", "problem"), [("empty", "empty.txt: is empty"), ("taken", "already exists")]
)
def test_a_mistake_ends_all_with_code_2_and_the_others_name_the_first(results, asked, problem):
    first, other = results[asked]

    assert first["code"] == other["code"] == 2
    assert problem in first["err"].splitlines()[-1]
    assert other["err"].startswith("error: rank 0 (process ")
    assert problem in other["err"]


def test_a_mistake_of_another_process_is_named_by_the_first(results):
    first, other = results["missing"]

    assert first["code"] == other["code"] == 2
    assert "only-1" in other["err"]
    assert "error: rank 1 (process " in first["err"]
    assert "only-1" in first["err"]
    assert first["out"] == ""


def test_a_file_resumes_after_a_process_was_killed(folder, results):
    (first, killed, _), again = results["killed"]

    assert killed == {"killed": -signal.SIGKILL}
    assert first["code"] == 2
    assert "rank 1 (process " in first["err"]
    assert "died without an error message" in first["err"]
    assert again[0]["code"] == 0
    assert "8 of them before" in again[0]["err"]
    ours, theirs = (read_back(folder / f"{name}.jsonl") for name in ("killed", "alone"))
    assert_same_rows(
        [{"labels": row["labels"]} for row in ours], [{"labels": row["labels"]} for row in theirs]
    )


def test_each_process_searches_for_its_texts_with_its_rows_of_the_classifiers(results):
    seen = [result["seen"] for result in results["shares"]]

    assert seen == [[[3, 11]], [[3, 10]], [[3, 10]], [[2, 10]]]
