"""``elias labels``, models with added labels on the server, and training with unused labels."""

import json

import numpy as np
import pytest

from e2e.commands import SMALL, elias
from e2e.servers import live
from elias import Elias, EliasClassifier
from elias.errors import DataError

TABLE = "id,name,synonyms,description\nu:1,red herring,kipper,A smoked fish\nu:2,tin opener,,\n"


@pytest.fixture(scope="module")
def larger(run, tmp_path_factory):
    """A model with two added labels, made by the command line."""
    folder = tmp_path_factory.mktemp("labels")
    (folder / "new.csv").write_text(TABLE)
    (folder / "examples.csv").write_text("text,labels\nsmoked fish,u:1\nopen the can,tin opener\n")
    result = elias(
        *("labels", "add", run, folder / "new.csv", "--examples", folder / "examples.csv"),
        *("--out", folder / "larger"),
    )
    assert result.code == 0, result.err
    assert "added 2 labels with 2 examples" in result.err
    return folder / "larger"


def test_an_added_label_is_predicted(larger, tmp_path):
    (tmp_path / "texts.txt").write_text("a kipper for tea\n")

    result = elias("predict", larger, tmp_path / "texts.txt", "-k", "9", "--json")

    predictions = {label["id"]: label for label in json.loads(result.out)["labels"]}
    assert (predictions[120]["label"], predictions[120]["uri"]) == ("red herring", "u:1")


def test_labels_are_added_in_the_language_and_encoding_that_are_chosen(run, tmp_path):
    table = "uri,label_en,label_fr\nu:1,red herring,hareng fumé\n"
    (tmp_path / "new.csv").write_text(table, encoding="cp1252")

    result = elias(
        *("labels", "add", run, tmp_path / "new.csv", "--out", tmp_path / "larger"),
        *("--language", "fr", "--encoding", "cp1252"),
    )

    assert result.code == 0, result.err
    assert "hareng fumé" in elias("labels", "list", tmp_path / "larger").out


def test_known_labels_of_a_whole_vocabulary_are_skipped(larger, tmp_path):
    (tmp_path / "all.csv").write_text(TABLE + "u:3,eel,,\n")

    result = elias(
        *("labels", "add", larger, tmp_path / "all.csv", "--out", tmp_path / "out", "--skip-known")
    )

    assert result.code == 0, result.err
    assert "added 1 label in" in result.err


def test_labels_are_listed_with_their_examples(larger):
    result = elias("labels", "list", larger, "--search", "herring", "--json")

    assert json.loads(result.out) == {
        "number": 120,
        "name": "red herring",
        "id": "u:1",
        "points": 1,
        "added": True,
    }
    assert "tin opener" in elias("labels", "list", larger).out
    assert "red herring" in elias("labels", "list", larger, "--search", "kipper").out


def test_labels_are_renamed_merged_and_removed(larger, tmp_path):
    steps = (
        ("rename", "u:2", "bottle opener"),
        ("merge", "121", "red herring"),
        ("remove", "red herring", "3"),
    )
    model = larger
    for command, *labels in steps:
        result = elias("labels", command, model, *labels, "--out", tmp_path / command)
        assert result.code == 0, result.err
        model = tmp_path / command

    sizes = [Elias.from_pretrained(tmp_path / step[0], device="cpu").n_labels for step in steps]

    assert sizes == [122, 121, 119]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("add", "NEW"), "already has 2 of the 2 labels"),
        (("rename", "nothing", "x"), "the model has no label 'nothing'"),
        (("remove", "nothing"), "the model has no label 'nothing'"),
    ],
)
def test_mistakes_end_in_one_line_and_exit_code_2(larger, tmp_path, arguments, problem):
    command, *labels = arguments
    labels = [larger.parent / "new.csv" if label == "NEW" else label for label in labels]

    result = elias("labels", command, larger, *labels, "--out", tmp_path / "out")

    assert result.code == 2
    assert problem in result.err
    assert not (tmp_path / "out").exists()


def test_a_server_predicts_and_explains_added_labels(larger):
    with live(larger) as served, served.client() as client:
        best = client.post("/predict", json={"inputs": "a red herring"}).json()[0][0]
        why = client.post("/explain", json={"inputs": "a red herring", "label": 120}).json()[0]
        page = client.get("/labels/120").json()
        hits = client.get("/labels", params={"q": "herring"}).json()["labels"]

    assert (best["label"], best["uri"]) == ("red herring", "u:1")
    assert (why["labels"][0]["added"], why["labels"][0]["paths"]) == (True, [])
    assert (page["frequency"], page["n_clusters"], page["uri"]) == (1, 0, "u:1")
    assert [hit["label"] for hit in hits] == ["red herring"]
    for shown in (why["labels"][0], page):
        assert (shown["synonyms"], shown["description"]) == (["kipper"], "A smoked fish")


def test_an_explanation_describes_the_label(larger):
    result = elias("explain", larger, "a red herring", "-k", "1")

    assert result.code == 0, result.err
    assert "kipper. A smoked fish" in result.out


def test_labels_without_training_points_are_predicted_by_name(tmp_path):
    rows = [f"cod number {i},fish\nlaw number {i},courts" for i in range(30)]
    (tmp_path / "train.csv").write_text("text,labels\n" + "\n".join(rows) + "\n")
    (tmp_path / "labels.csv").write_text("name\nfish\ncourts\nred wine\n")

    result = elias("train", tmp_path, "--out", tmp_path / "run", "--test-size", "0", *SMALL)
    model = Elias.from_pretrained(tmp_path / "run", device="cpu")

    assert result.code == 0, result.err
    assert "1 of 3 labels have no training point" in result.err
    assert model.predict("a glass of red wine", top_k=1).labels == ["red wine"]
    assert model.predict("cod number 7", top_k=1).labels == ["fish"]
    assert model.explain(["red wine"], top_k=1)[0].labels[0].added


def test_partial_fit_adds_new_classes():
    texts = [f"{word} {i}" for i in range(20) for word in ("cod", "law")]
    classifier = EliasClassifier(epochs=1, dim=16, device="cpu")
    classifier.partial_fit(texts, [["fish"], ["courts"]] * 20, classes=["fish", "courts", "wine"])

    classifier.partial_fit(["a claret"], [["drink", "wine"]])

    assert classifier.classes_.tolist() == ["courts", "fish", "wine", "drink"]
    (best,) = classifier.predict_topk(["strong drink"], k=4)
    assert best.index("drink") < best.index("wine")
    assert classifier.predict(["strong drink"]).shape == (1, 4)
    for y, classes, problem in (
        ([["x", 6]], None, "sorted"),
        (np.array([[1, 0, 1]]), None, "sorted"),  # its columns are no labels that are known
        ([[]], "eel", "a list of labels"),
    ):
        with pytest.raises(DataError, match=problem):
            classifier.partial_fit(["a text"], y, classes=classes)
    assert len(classifier.classes_) == 4
