"""Evaluating on data without splits, or with labels of its own."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from e2e.commands import SMALL, elias
from elias import Elias, load_corpus
from elias.data.synthetic import synthetic_corpus
from elias.errors import DataError

LEFT_OUT = ("PSP@1", "PSnDCG@5")


def write_table(path, corpus, rows=None, *, rename=lambda name: name):
    """Write texts and labels of the training split as a CSV that names no splits."""
    points = corpus.train if rows is None else corpus.train.take(np.array(rows))
    with path.open("w", encoding="utf8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "labels"])
        for text, row in zip(points.texts, points.labels, strict=True):
            names = [rename(corpus.label_names[i]) for i in row.indices]
            writer.writerow([text, "|".join(names)])
    return path


@pytest.fixture(scope="module")
def corpus():
    return synthetic_corpus(n_points=300, n_labels=40)


@pytest.fixture(scope="module")
def table(corpus, tmp_path_factory):
    return write_table(tmp_path_factory.mktemp("tables") / "all.csv", corpus)


@pytest.fixture(scope="module")
def table_run(table, tmp_path_factory):
    """A run on the table, with 50 of its 300 points set aside."""
    run = tmp_path_factory.mktemp("runs") / "table"
    result = elias("train", table, "--out", run, *SMALL, "--test-size", 50)
    assert result.code == 0, result.err
    return run


def measured(*args):
    result = elias("evaluate", *args, "--json", "--device", "cpu")
    assert result.code == 0, result.err
    return json.loads(result.out), result.err


# the size of the test split


def recorded(run):
    lines = (run / "metrics.jsonl").read_text(encoding="utf8").splitlines()
    return [json.loads(line) for line in lines]


def test_training_holds_out_test_size_points(table_run):
    (data,) = (line for line in recorded(table_run) if line["event"] == "data")

    assert data["points"]["test"] == 50
    assert data["points"]["train"] + data["points"]["validation"] == 250


@pytest.mark.parametrize(("size", "expected"), [("0.1", 30), ("40", 40), ("0", None)])
def test_converting_holds_out_test_size_points(table, tmp_path, size, expected):
    result = elias("data", "convert", table, tmp_path / "cut.jsonl", "--test-size", size)

    test = load_corpus(tmp_path / "cut.jsonl").test
    assert result.code == 0
    assert (None if test is None else len(test)) == expected


@pytest.mark.parametrize(
    ("size", "problem"),
    [("300", "--test-size must be a share below 1, or a whole"), ("2.5", "not 2.5")],
)
def test_an_impossible_test_size_is_refused_by_commands(table, size, problem):
    result = elias("-q", "train", table, "--dry-run", "--test-size", size)

    assert result.code == 2
    assert problem in result.err
    assert len(result.err.splitlines()) == 1


def test_a_test_size_is_refused_where_a_test_split_is_given(corpus_folder):
    result = elias("-q", "train", corpus_folder, "--dry-run", "--test-size", "0.1")

    assert result.code == 2
    assert "has its own test split; do not set --test-size" in result.err


# data without splits


def test_the_data_of_a_run_is_evaluated_on_what_the_run_set_aside(table, table_run):
    actual, message = measured(table_run, table)

    last = [line for line in recorded(table_run) if line["event"] == "stage"][-1]["test"]
    assert {name: actual[name] for name in last} == pytest.approx(last, abs=1e-3)
    assert "points are evaluated" not in message


def test_the_validation_points_of_a_run_are_found_in_its_data(table, table_run):
    actual, _ = measured(table_run, table, "--split", "validation", "--component", "stage2")

    stages = {line["stage"]: line for line in recorded(table_run) if line["event"] == "stage"}
    expected = stages["stage2"]["validation"]  # later components are recorded cross-fitted
    assert {name: actual[name] for name in expected} == pytest.approx(expected, abs=1e-3)


def test_a_note_says_that_parts_were_fitted_on_validation_points(table, table_run):
    _, message = measured(table_run, table, "--split", "validation")
    _, of_stage = measured(table_run, table, "--split", "validation", "--component", "stage2")
    _, of_test = measured(table_run, table)

    assert "was fitted on these points, so the metrics are too high: " in message
    assert "too high" not in of_stage  # it has seen training points only
    assert "too high" not in of_test


def test_all_points_of_other_data_are_evaluated_with_a_note(corpus, table_run, tmp_path):
    path = write_table(tmp_path / "new.csv", corpus, range(60))
    given = load_corpus(path, test_size=0)

    actual, message = measured(table_run, path)

    model = Elias.from_pretrained(table_run, device="cpu")
    in_python = model.evaluate(given, split="train")
    assert (
        f"{path}: has no test split, so all 60 points are evaluated, without PSP and PSnDCG"
        in message
    )
    assert not set(LEFT_OUT) & set(actual)
    ranked = {name: value for name, value in actual.items() if name in in_python}
    assert {"P@1", "micro-F1", "macro-F1"} <= set(ranked)
    assert ranked == pytest.approx({name: in_python[name] for name in ranked}, abs=1e-4)


def test_other_data_has_no_deciles_and_no_training_counts(corpus, table_run, tmp_path):
    path = write_table(tmp_path / "new.csv", corpus, range(60))

    result = elias("evaluate", table_run, path, "--per-label", tmp_path / "labels.csv")

    with (tmp_path / "labels.csv").open(encoding="utf8", newline="") as stream:
        counts = {row["train_count"] for row in csv.DictReader(stream)}
    assert result.code == 0
    assert "tenth of the labels" not in result.out
    assert "on the 60 test points" in result.err
    assert "the model was trained on about" in result.err
    assert counts == {""}


def test_other_data_of_the_same_size_is_distinguished_from_the_training_data(
    corpus, table_run, tmp_path
):
    path = write_table(tmp_path / "reversed.csv", corpus, range(299, -1, -1))

    actual, message = measured(table_run, path)

    assert not set(LEFT_OUT) & set(actual)
    assert "all 300 points are evaluated" in message
    assert "% of these texts, so its metrics on new texts may be lower" in message


def test_points_that_were_all_trained_on_are_scored_only_on_request(table, tmp_path):
    elias("train", table, "--out", tmp_path / "run", *SMALL, "--test-size", 0)

    result = elias("-q", "evaluate", tmp_path / "run", table)
    actual, _ = measured(tmp_path / "run", table, "--split", "train")

    (line,) = result.err.splitlines()
    assert result.code == 2
    assert "the model was trained on all 300 points" in line
    assert "--split train" in line
    assert set(LEFT_OUT) < set(actual)


def test_calibration_refuses_training_points(table, table_run, tmp_path):
    result = elias(
        "-q", "calibrate", table_run, table, "--split", "train", "--out", tmp_path / "new"
    )

    assert result.code == 2
    assert "--split train" in result.err
    assert not (tmp_path / "new").exists()


def test_other_data_has_no_validation_points(corpus, table_run, tmp_path):
    path = write_table(tmp_path / "new.csv", corpus, range(60))

    result = elias("-q", "evaluate", table_run, path, "--split", "validation")

    assert result.code == 2
    assert "new.csv: has no validation split and is not the training data" in result.err


# labels


def renamed(names):
    """Return a way to rename some labels, which the order of names follows."""
    return lambda name: f"new {name}" if name in names else name


def test_labels_are_matched_by_name_and_unknown_ones_count_as_missed(corpus, table_run, tmp_path):
    new = set(corpus.label_names[:3])
    path = write_table(tmp_path / "new.csv", corpus, range(60), rename=renamed(new))
    given = load_corpus(path, test_size=0)

    actual, message = measured(table_run, path)

    ranked = Elias.from_pretrained(table_run, device="cpu").predict(given.train.texts, top_k=10)
    true = [{given.label_names[i] for i in row.indices} for row in given.train.labels]
    recalls = [
        len(set(r.labels) & names) / len(names) for r, names in zip(ranked, true, strict=True)
    ]
    n_new = len({name for names in true for name in names if name.startswith("new ")})
    assert n_new
    assert f"warning: {path}: the model does not know {n_new} of the {given.n_labels}" in message
    assert actual["R@10"] == pytest.approx(100 * np.mean(recalls), abs=1e-3)


def test_a_perfect_prediction_of_the_known_labels_misses_the_unknown(corpus, table_run, tmp_path):
    names = corpus.label_names
    path = tmp_path / "new.csv"
    path.write_text(f"text,labels\na,{names[0]}|unheard of\nb,{names[1]}\n")
    ids = Elias.from_pretrained(table_run, device="cpu").label_ids(names[:2])
    lines = [{"labels": [{"id": i, "score": 1.0}]} for i in ids]
    file = tmp_path / "predictions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    actual, _ = measured(table_run, path, "--predictions", file)

    assert actual["P@1"] == 100
    assert actual["R@10"] == pytest.approx(100 * (1 / 2 + 1) / 2)


def test_a_corpus_whose_labels_are_all_others_is_refused(corpus, table_run, tmp_path):
    path = write_table(tmp_path / "new.csv", corpus, range(9), rename=renamed(corpus.label_names))

    result = elias("-q", "evaluate", table_run, path)

    (line,) = result.err.splitlines()
    assert result.code == 2
    assert "new.csv: the model knows none of the " in line
    assert "labels (corpus: " in line


def test_python_matches_labels_by_name_too(corpus, table_run):
    model = Elias.from_pretrained(table_run, device="cpu")
    turned = replace(
        corpus.with_splits(
            train=replace(corpus.train, labels=corpus.train.labels[:, ::-1].tocsr()),
            test=replace(corpus.test, labels=corpus.test.labels[:, ::-1].tocsr()),
        ),
        label_names=corpus.label_names[::-1],
    )

    assert model.evaluate(turned) == pytest.approx(model.evaluate(corpus))


def test_names_that_repeat_are_matched_by_row_or_not_at_all(corpus, table_run):
    model = Elias.from_pretrained(table_run, device="cpu")
    twins = ["twin", "twin", *model.label_names[2:]]
    twice = Elias(model.model, model.config, twins)
    same = replace(corpus, label_names=twins)

    assert twice.evaluate(same)["R@100"] > 0
    with pytest.raises(DataError, match=r"label 0 is .*, but in the model it is 'twin'; repeated"):
        twice.evaluate(corpus)


# groups


@pytest.fixture(scope="module")
def grouped(corpus, tmp_path_factory):
    """A table with a column of sources and a vocabulary with broader labels, and a run on it."""
    folder = tmp_path_factory.mktemp("grouped")
    path = folder / "all.csv"
    with path.open("w", encoding="utf8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "labels", "source"])
        for i, (text, row) in enumerate(zip(corpus.train.texts, corpus.train.labels, strict=True)):
            names = [corpus.label_names[label] for label in row.indices]
            writer.writerow([text, "|".join(names), f"source {i % 3}"])
    labels = [
        {"id": f"u:{name}", "name": name, "broader": ["u:all"]} for name in corpus.label_names
    ]
    labels.append({"id": "u:all", "name": "all labels", "broader": []})
    lines = "".join(json.dumps(row) + "\n" for row in labels)
    (folder / "vocabulary.jsonl").write_text(lines)
    run = folder / "run"
    options = ("--label-table", folder / "vocabulary.jsonl", "--test-size", 50)
    result = elias("train", path, "--out", run, *SMALL, *options)
    assert result.code == 0, result.err
    return path, run


def test_groups_of_points_are_those_of_a_column(grouped, corpus):
    path, run = grouped

    metrics, _ = measured(run, path, "--by", "source")

    groups = metrics["groups"]["source"]
    assert {row["group"] for row in groups} == {"source 0", "source 1", "source 2"}
    assert sum(row["points"] for row in groups) == 50
    mean = sum(row["P@1"] * row["points"] for row in groups) / 50
    assert mean == pytest.approx(metrics["P@1"], abs=1e-3)
    # the column belongs to the points that were held out at random
    model = Elias.from_pretrained(run, device="cpu")
    test = load_corpus(path, **model.data_settings).test
    row_of = {text: i for i, text in enumerate(corpus.train.texts)}
    counts = np.bincount([row_of[text] % 3 for text in test.texts])
    assert {row["group"]: row["points"] for row in groups} == {
        f"source {i}": count for i, count in enumerate(counts.tolist())
    }


@pytest.mark.parametrize("header", ["label,set\n", ""])
def test_groups_of_labels_are_by_frequency_broader_label_or_file(grouped, corpus, tmp_path, header):
    path, run = grouped
    sets = tmp_path / "sets.csv"
    rows = [
        f"{name},{'even' if i % 2 == 0 else 'odd'}" for i, name in enumerate(corpus.label_names)
    ]
    sets.write_text(header + "\n".join([*rows, "unknown,odd"]) + "\n")

    metrics, err = measured(
        run, path, "--by", "frequency", "--by", "broader", "--by", sets, "--hierarchy"
    )

    groups = metrics["groups"]
    n_pairs = groups["broader"][0]["pairs"]
    assert [row["group"] for row in groups["broader"]] == ["all labels"]
    for name in ("frequency", str(sets)):
        assert sum(row["pairs"] for row in groups[name]) == n_pairs
    assert {row["group"] for row in groups[str(sets)]} == {"even", "odd"}
    assert "the model does not have 1 of these labels" in err
    assert metrics["hP@1"] >= metrics["P@1"]


def test_the_weakest_groups_are_shown_first(grouped):
    path, run = grouped

    result = elias("evaluate", run, path, "--by", "source", "--device", "cpu")

    assert "weakest groups by source (3 of 3)" in result.out
    assert result.code == 0


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--by", "sourse"), "no column 'sourse' among 'text', 'labels'"),
        (("--by", "sets.csv"), "sets.csv: no such file"),
        (("--by", "broader"), "does not know which labels are broader"),
        (("--hierarchy",), "does not know which labels are broader"),
    ],
)
def test_groups_that_do_not_exist_are_refused(table_run, table, option, message):
    result = elias("evaluate", table_run, table, *option, "--device", "cpu")

    assert result.code == 2
    assert message in result.err
