"""Reading data again as training read it: columns, separator and test points."""

import csv
import json

import pytest

from e2e.commands import SMALL, elias
from elias import Elias, load_corpus
from elias.data.synthetic import synthetic_corpus

COLUMNS = ("--text", "heading,description", "--labels", "genre", "--separator", ";")
HOW = "read as in training: --text heading,description"


def write_films(path, rows, columns):
    with path.open("w", encoding="utf8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def rows():
    """300 films; the title is a decoy that is read if no column is named."""
    corpus = synthetic_corpus(n_points=300, n_labels=40)
    actual = []
    for text, row in zip(corpus.train.texts, corpus.train.labels, strict=True):
        first, _, rest = text.partition(" ")
        names = ";".join(corpus.label_names[i] for i in row.indices)
        parts = {"title": "a film", "heading": first, "description": rest}
        actual.append({**parts, "tags": "nothing", "genre": names})
    return actual


@pytest.fixture(scope="module")
def films(rows, tmp_path_factory):
    return write_films(tmp_path_factory.mktemp("films") / "films.csv", rows, list(rows[0]))


@pytest.fixture(scope="module")
def film_run(films, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "films"
    result = elias("train", films, *COLUMNS, "--out", run, *SMALL, "--test-size", 50)
    assert result.code == 0, result.err
    return run


def metrics_of(result):
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_a_saved_model_records_how_its_data_was_read(film_run, films):
    model = Elias.from_pretrained(film_run, device="cpu")

    assert model.data_settings == {
        "text": "heading,description",
        "labels": "genre",
        "separator": ";",
        "group": "near-duplicates",
        "test_size": 50,
        "seed": 0,
    }
    again = load_corpus(films, **model.data_settings)
    assert again.fingerprint() == model.metadata["corpus"]


def test_evaluation_uses_the_test_points_and_options_of_training(film_run, films):
    result = elias("evaluate", film_run, films, "--json", "--device", "cpu")

    lines = (film_run / "metrics.jsonl").read_text(encoding="utf8").splitlines()
    recorded = [line for line in map(json.loads, lines) if line["event"] == "stage"][-1]["test"]
    actual = metrics_of(result)
    assert {name: actual[name] for name in recorded} == pytest.approx(recorded, abs=1e-3)
    assert f"{films}: {HOW} --labels genre --separator ';'" in result.err.splitlines()


def test_the_test_points_of_another_seed_are_restored(films):
    from elias import EliasConfig, train
    from elias.cli.evaluate import choose_points

    options = {"text": "heading,description", "labels": "genre", "separator": ";"}
    corpus = load_corpus(films, **options, seed=7, test_size=0.1)
    small = {"encoder.dim": 16, "stages.stage1.epochs": 1, "stages.stage2.epochs": 1}
    model = train(corpus, EliasConfig().override({**small, "rerank.enabled": False}), device="cpu")

    chosen, _ = choose_points(load_corpus(films, **options, test_size=0), model, "test")

    assert chosen.test.texts == corpus.test.texts


def test_an_option_on_the_command_line_wins_and_the_test_points_stay(film_run, films):
    result = elias("evaluate", film_run, films, "--text", "title", "--device", "cpu")

    assert result.code == 0, result.err
    assert "on the 50 test points" in result.err
    assert "read as in training: --labels genre" in result.err
    assert "--text" not in result.err


def test_prediction_reads_the_columns_of_training(film_run, films, rows):
    result = elias("predict", film_run, films, "--device", "cpu")

    texts = [json.loads(line)["text"] for line in result.out.splitlines()]
    assert texts == [f"{row['heading']} {row['description']}" for row in rows]
    assert result.err.splitlines() == [f"{films}: {HOW}"]


def test_prediction_needs_no_labels_column(film_run, rows, tmp_path):
    path = write_films(tmp_path / "new.csv", rows[:3], ["title", "heading", "description"])

    result = elias("predict", film_run, path, "--out", tmp_path / "out.csv", "--device", "cpu")

    assert result.code == 0, result.err
    assert rows[0]["description"] in (tmp_path / "out.csv").read_text(encoding="utf8")


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_a_missing_text_column_is_refused_unless_others_are_named(
    command, film_run, rows, tmp_path
):
    path = write_films(tmp_path / "new.csv", rows[:3], ["title", "heading", "genre"])

    result = elias("-q", command, film_run, path)
    named = elias("-q", command, film_run, path, "--text", "heading", "--device", "cpu")

    (line,) = result.err.splitlines()
    assert result.code == 2
    assert "new.csv: no column 'description'" in line
    assert line.endswith("name the columns to read with --text")
    assert named.code == 0, named.err


def test_lines_of_text_are_read_as_before(film_run, tmp_path):
    (tmp_path / "texts.txt").write_text("one text\n")

    of_file = elias("predict", film_run, tmp_path / "texts.txt", "--device", "cpu")
    of_stdin = elias("predict", film_run, "--device", "cpu", stdin=b"one text\n")

    assert of_file.out == of_stdin.out
    assert json.loads(of_file.out)["text"] == "one text"
    assert of_file.err == of_stdin.err == ""


def test_calibration_reads_the_points_held_out_in_training(film_run, films, tmp_path):
    result = elias("calibrate", film_run, films, "--out", tmp_path / "model", "--device", "cpu")

    assert result.code == 0, result.err
    assert HOW in result.err
    model = Elias.from_pretrained(tmp_path / "model", device="cpu")
    assert model.data_settings["text"] == "heading,description"


def test_pruning_a_model_measures_the_test_points_of_its_training(film_run, films, tmp_path):
    result = elias(
        *("experiment", "prune", films, "--model", film_run, "--out", tmp_path / "pruned"),
        *("--thresholds", "0.1", "--top-k", "2", "--device", "cpu"),
    )

    assert result.code == 0, result.err
    assert HOW in result.err
    assert "was trained on another corpus" not in result.err


def test_a_report_reads_the_data_of_a_model_alone_with_one_option_given(film_run, films, tmp_path):
    result = elias(
        *("report", film_run / "model", films, "--labels", "genre"),
        *("--out", tmp_path / "report.html", "--device", "cpu"),
    )

    assert result.code == 0, result.err
    assert (tmp_path / "report.html").exists()


def test_a_model_without_settings_reads_the_columns_that_look_like_text(
    film_run, films, rows, tmp_path
):
    model = Elias.from_pretrained(film_run, device="cpu")
    del model.metadata["data_settings"]
    model.save_pretrained(tmp_path / "old")

    result = elias("predict", tmp_path / "old", films, "--device", "cpu")

    texts = [json.loads(line)["text"] for line in result.out.splitlines()]
    assert texts == [row["description"] for row in rows]  # all titles are equal
    assert result.err == ""


def test_the_groups_of_a_column_are_kept_in_training_and_evaluation(rows, tmp_path):
    grouped = [{**row, "director": i // 3} for i, row in enumerate(rows)]
    path = write_films(tmp_path / "films.csv", grouped, [*rows[0], "director"])
    run = tmp_path / "run"
    trained = elias("train", path, *COLUMNS, "--group", "director", "--out", run, *SMALL)

    result = elias("evaluate", run, path, "--device", "cpu")

    assert (trained.code, result.code) == (0, 0), trained.err + result.err
    assert "--group director" in result.err
    assert "on the 60 test points" in result.err
    settings = Elias.from_pretrained(run, device="cpu").data_settings
    corpus = load_corpus(path, **settings)
    assert not set(corpus.train.groups) & set(corpus.test.groups)


def test_a_group_column_has_no_meaning_without_columns(tmp_path):
    path = tmp_path / "points.txt"
    path.write_text("1 2 2\n0 0:1.0 1:0.5\n")

    result = elias("data", "info", path, "--group", "author")

    assert result.code == 2
    assert "where --group has no meaning" in result.err
