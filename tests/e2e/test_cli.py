"""The command line from a corpus to labelled texts."""

import csv
import json
import re
import shutil
import subprocess
import time

import pytest
import torch

from e2e.commands import SMALL, elias, interrupt, start_elias
from elias import Elias, EliasConfig, load_corpus, train
from elias.config.io import preset_tree
from elias.data import convert
from elias.data.synthetic import write_synthetic
from elias.errors import ConfigError, RunError
from elias.training import train as training
from tiny_bert import MOST_TOKENS, save_tiny_bert


def json_lines(text):
    return [json.loads(line) for line in text.splitlines()]


def records(run, event):
    lines = json_lines((run / "metrics.jsonl").read_text(encoding="utf8"))
    return [line for line in lines if line["event"] == event]


@pytest.fixture(scope="module")
def texts(corpus_folder):
    return load_corpus(corpus_folder).test.texts[:7]


# training


def test_training_leaves_the_configuration_the_metrics_the_log_and_the_model(run):
    left = {path.name for path in run.iterdir()}

    assert left == {"config.json", "metrics.jsonl", "train.log", "partition.npy", "model"}


def test_training_prints_a_row_for_each_stage_and_the_path_of_the_model(trained):
    run, result = trained

    lines = result.out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("stage1"))
    stage1, stage2, ranker, calibration, names = lines[start : start + 5]

    assert stage1.startswith("stage1")
    assert stage2.startswith("stage2")
    assert ranker.startswith("+ ranker")
    assert calibration.startswith("+ calibration")
    assert names.startswith("+ label names")
    assert [line.split()[0] for line in lines[-3:-1]] == ["micro", "macro"]
    assert lines[-1] == str(run / "model")


def test_training_ends_with_the_time_and_three_commands(trained):
    run, result = trained

    *_, title, predict, explain, serve = result.err.splitlines()

    assert "finished in " in result.err
    assert title == "next:"
    assert predict.startswith("  echo ")
    assert predict.endswith(f"| elias predict {run}")
    assert explain.startswith(f"  elias explain {run} ")
    assert serve == f"  elias serve {run}"


def test_training_prints_derived_sizes_on_stderr(trained):
    _, result = trained

    assert "the defaults are used" in result.err
    assert "clusters C" in result.err
    assert "validation points" in result.err


def test_the_configuration_of_a_run_alone_reproduces_it(run, corpus_folder, tmp_path):
    again = tmp_path / "again"

    result = elias(
        *("train", corpus_folder, "--out", again, "--config", run / "config.json"),
        *("--device", "cpu"),
    )

    weights = "model/model.safetensors"
    assert result.code == 0
    assert (again / weights).read_bytes() == (run / weights).read_bytes()
    assert records(again, "stage") == records(run, "stage")


def test_a_seed_gives_one_model_when_threads_share_the_work(tmp_path):
    # torch shares out work of 32,768 items or more: here 256 points x 240 shortlisted labels
    wide = write_synthetic(tmp_path / "wide", n_points=600, n_labels=240)
    options = [*SMALL, "--set", "index.shortlist_size=240", "--set", "rerank.enabled=false"]

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for name in ("one", "two"):
            elias("train", wide, "--out", tmp_path / name, *options)
    finally:
        torch.set_num_threads(before)

    weights = "model/model.safetensors"
    assert (tmp_path / "one" / weights).read_bytes() == (tmp_path / "two" / weights).read_bytes()


def test_another_seed_gives_another_model(run, corpus_folder, tmp_path):
    elias("train", corpus_folder, "--out", tmp_path / "other", *SMALL, "--set", "seed=1")

    weights = "model/model.safetensors"
    assert (tmp_path / "other" / weights).read_bytes() != (run / weights).read_bytes()


def test_a_dry_run_prints_a_configuration_that_can_be_used_and_writes_nothing(
    corpus_folder, tmp_path
):
    out = tmp_path / "run"

    result = elias("train", corpus_folder, "--out", out, *SMALL, "--dry-run", "--json")
    config = EliasConfig.from_dict(json.loads(result.out))

    assert result.code == 0
    assert config.to_dict() == config.resolve(400, 120).to_dict()
    assert config.encoder.dim == 16
    assert "all stages, at most" in result.err
    assert "not included" in result.err
    assert " 0 MiB" not in result.err
    assert "nothing was written" in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_counts_the_parameters_that_the_model_has(run, corpus_folder):
    result = elias("train", corpus_folder, *SMALL, "--dry-run")
    assert result.out == ""
    model = Elias.from_pretrained(run, device="cpu").model

    n_parameters = sum(weight.numel() for weight in model.parameters())
    assert f"parameters: {n_parameters:,};" in result.err


def test_set_overrides_config_overrides_preset_overrides_defaults(corpus_folder, tmp_path):
    preset = "amazon-670k"
    file = tmp_path / "mine.toml"
    file.write_text('[index]\nalpha = 4\nbeta = 5\n[encoder]\nmodel = "bag"\n')

    result = elias(
        *("train", corpus_folder, "--dry-run", "--json", "--preset", preset),
        *("--config", file, "--set", "index.beta=6", "--set", "index.n_clusters=8"),
        *("--set", "index.edges_per_cluster=50", "--set", "index.beam_size=4"),
        *("--set", "index.shortlist_size=60", "--set", "index.train_shortlist=60"),
        *("--set", "index.label_storage=full"),
    )
    tree = json.loads(result.out)

    assert tree["index"]["beta"] == 6
    assert tree["index"]["alpha"] == 4
    assert tree["encoder"]["model"] == "bag"
    assert tree["stages"][0]["epochs"] == preset_tree(preset)["stages"][0]["epochs"]
    assert tree["seed"] == 0


def test_an_encoder_is_one_option_and_its_files_say_how_it_pools(corpus_folder, tmp_path):
    bert = save_tiny_bert(tmp_path / "bert")
    (tmp_path / "bert" / "1_Pooling").mkdir()
    (tmp_path / "bert" / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    short = [f"stages.{stage}.epochs=1" for stage in ("stage1", "stage2")]

    result = elias(
        *("train", corpus_folder, "--out", tmp_path / "run", "--encoder", bert, "--device", "cpu"),
        *(word for change in (*short, "rerank.enabled=false") for word in ("--set", change)),
    )
    saved = Elias.from_pretrained(tmp_path / "run", device="cpu").config.encoder

    assert result.code == 0, result.err
    assert (saved.kind, saved.model, saved.pooling) == ("transformer", bert, "cls")
    assert saved.max_length <= MOST_TOKENS


def test_a_saved_model_brings_its_own_encoder(run, corpus_folder, tmp_path):
    result = elias(
        *("train", corpus_folder, "--out", tmp_path / "more", "--init-from", run),
        *("--encoder", "bag"),
    )

    assert (result.code, "leave out --encoder" in result.err) == (2, True)


def test_training_can_start_from_a_saved_model(run, corpus_folder, tmp_path):
    out, more = tmp_path / "more", tmp_path / "more.toml"
    more.write_text('[[stages]]\nname = "stage2"\nlearn_graph = true\nepochs = 1\n')

    result = elias(
        *("train", corpus_folder, "--out", out, "--init-from", run, "--config", more),
        *("--device", "cpu"),
    )

    first_of_stage2 = next(line for line in records(run, "epoch") if line["stage"] == "stage2")
    assert result.code == 0, result.err
    assert records(out, "epoch")[0]["loss"] < first_of_stage2["loss"]


# run folders


def test_training_into_a_finished_run_is_refused(run, corpus_folder):
    result = elias("train", corpus_folder, "--out", run, *SMALL)

    assert result.code == 2
    assert result.out == ""
    assert f"error: {run}: holds a finished run; use --overwrite" in result.err


@pytest.mark.parametrize(
    ("options", "problem"),
    [([], "holds a finished run"), (["--overwrite", "--set", "eval.select_by=F1"], "'F1'")],
)
def test_invalid_settings_are_refused_before_the_corpus_is_read(run, options, problem):
    result = elias("train", "nowhere", "--out", run, *SMALL, *options)

    assert result.code == 2
    assert problem in result.err
    assert "no such file" not in result.err


def test_training_checks_its_plan_once(corpus_folder, tmp_path, monkeypatch):
    checked, check_plan = [], training.check_plan

    def counted(config, out, **options):
        checked.append(out)
        return check_plan(config, out, **options)

    monkeypatch.setattr(training, "check_plan", counted)

    result = elias("train", corpus_folder, "--out", tmp_path / "run", *SMALL)

    assert result.code == 0
    assert checked == [tmp_path / "run"]


def test_a_dry_run_may_name_a_finished_run(run, corpus_folder):
    result = elias("train", corpus_folder, "--out", run, *SMALL, "--dry-run")

    assert result.code == 0


@pytest.mark.parametrize(
    ("changes", "error"), [({}, RunError), ({"eval.select_by": "F1"}, ConfigError)]
)
def test_python_refuses_invalid_settings_before_a_text_is_read(
    run, corpus_folder, tmp_path, monkeypatch, changes, error
):
    def too_late(*_):
        raise AssertionError("the encoder was begun")

    monkeypatch.setattr("elias.training.initialization.build_encoder", too_late)
    out = tmp_path / "new" if changes else run

    with pytest.raises(error):
        train(load_corpus(corpus_folder), EliasConfig().override(changes), out=out)


def test_training_into_a_run_begun_with_another_configuration_is_refused(
    run, corpus_folder, tmp_path
):
    (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())

    result = elias("train", corpus_folder, "--out", tmp_path, *SMALL, "--set", "seed=7")

    assert result.code == 2
    assert "started here with another configuration" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_overwrite_replaces_a_run(run, corpus_folder, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    options = ["train", corpus_folder, "--out", tmp_path / "run", *SMALL]

    result = elias(*options, "--set", "seed=3", "--overwrite")

    assert result.code == 0
    assert Elias.from_pretrained(tmp_path / "run", device="cpu").config.seed == 3


def test_an_interrupted_run_has_no_model_and_the_same_command_resumes(corpus_folder, tmp_path):
    out = tmp_path / "run"
    command = ["train", corpus_folder, "--out", out, *SMALL, "--set", "stages.stage2.epochs=60"]
    process = start_elias(*command, stdout=subprocess.PIPE)
    patience = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() or not records(out, "epoch"):
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < patience
        time.sleep(0.01)

    interrupt(process)
    printed, message = process.communicate(timeout=60)
    left = {path.name for path in out.iterdir()}
    result = elias(*command)

    assert process.returncode == 130
    assert printed == b""
    assert b"Traceback" not in message
    last = message.decode().splitlines()[-1]
    assert last.startswith(f"interrupted: {out}/model was not written")
    assert last.endswith("; run the same command again to resume from the last checkpoint")
    # within a stage it says where, and goes on there; between stages the last one is kept whole
    _, _, where = last.partition("stopped after ")
    assert "resumed" in result.err
    assert where.split(";")[0] in result.err
    left.discard("partition.npy")  # there if stage 1 was over when the signal came
    assert left == {"checkpoints", "config.json", "metrics.jsonl", "train.log"}
    assert result.code == 0
    assert (out / "model").is_dir()


# evaluating


def test_evaluate_prints_one_json_object_in_percent_as_the_python_api_measures(run, corpus_folder):
    result = elias("evaluate", run, corpus_folder, "--json", "--device", "cpu")

    measured = Elias.from_pretrained(run, device="cpu").evaluate(load_corpus(corpus_folder))
    shown = json.loads(result.out)
    assert set(shown) - set(measured) == {"threshold", "ECE@5", "ECE@5 of scores"}
    assert {name: shown[name] for name in measured} == {
        name: round(value, 4) for name, value in measured.items()
    }
    assert {"P@1", "P@5", "nDCG@5", "PSP@3", "PSnDCG@5", "R@10", "R@100"} <= set(measured)
    assert measured["P@1"] > 1


@pytest.mark.parametrize("split", ["test", "validation"])
def test_evaluate_finds_what_training_recorded(run, corpus_folder, split):
    # later components are recorded cross-fitted on validation points
    component = ("--component", "stage2") if split == "validation" else ()
    result = elias("evaluate", run / "model", corpus_folder, "--split", split, "--json", *component)

    stages = {line["stage"]: line for line in records(run, "stage")}
    recorded = stages["stage2" if component else "names"][split]
    measured = json.loads(result.out)
    assert {name: measured[name] for name in recorded} == pytest.approx(recorded, abs=1e-3)


def test_evaluate_prints_a_table_for_people(run, corpus_folder):
    result = elias("evaluate", run, corpus_folder, "-k", 1, "-k", 7)

    header = result.out.splitlines()[0].split()
    assert header == ["%", "@1", "@7", "@10", "@20", "@100"]
    assert "contribution of each label decile to R@100, most frequent labels first:" in result.out
    assert "100 test points" in result.err


def test_evaluate_takes_predictions_from_a_file(run, corpus_folder, tmp_path):
    corpus = load_corpus(corpus_folder)
    lines = tmp_path / "texts.txt"
    lines.write_text("\n".join(corpus.test.texts) + "\n", encoding="utf8")
    file = tmp_path / "predictions.jsonl"
    file.write_text(elias("predict", run, lines, "-k", 100).out, encoding="utf8")

    result = elias("evaluate", run, corpus_folder, "--predictions", file, "--json")

    ours = json.loads(elias("evaluate", run, corpus_folder, "--json").out)
    from_file = json.loads(result.out)
    assert from_file == pytest.approx({name: ours[name] for name in from_file})
    missing = set(ours) - set(from_file)  # a file has no probabilities
    assert {"ECE@5", "threshold", "micro-F1", "macro-recall"} <= missing


def test_evaluate_writes_a_row_for_each_label(run, corpus_folder, tmp_path):
    file = tmp_path / "labels.csv"

    result = elias("evaluate", run, corpus_folder, "--per-label", file, "--json")

    with file.open(encoding="utf8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    labels = load_corpus(corpus_folder).test.labels
    hits = sum(int(row["hits@5"]) for row in rows)
    assert len(rows) == 120
    assert sum(int(row["test_count"]) for row in rows) == labels.nnz
    assert 100 * hits / (5 * 100) == pytest.approx(json.loads(result.out)["P@5"])
    recall = sum(int(row["hits"]) for row in rows) / labels.nnz
    assert 100 * recall == pytest.approx(json.loads(result.out)["micro-recall"], abs=1e-3)
    assert [path.name for path in tmp_path.iterdir()] == ["labels.csv"]


def test_f1_after_training_is_that_of_evaluate(run, corpus_folder):
    shown = elias("evaluate", run, corpus_folder).out

    recorded = Elias.from_pretrained(run, device="cpu").metadata["probabilities"]
    values = [f"{value:.2f}" for value in recorded["at_threshold"]["test"].values()]
    (micro,) = (line.split()[1:] for line in shown.splitlines() if line.startswith("micro"))
    assert micro == values[:3]
    assert "labels assigned by --threshold f1 (" in shown


@pytest.mark.parametrize("component", ["stage2", "rerank", "calibrate", "names"])
def test_a_component_is_measured_as_training_recorded_it(run, corpus_folder, component):
    result = elias("evaluate", run, corpus_folder, "--json", "--component", component)

    recorded = Elias.from_pretrained(run, device="cpu").metadata["metrics"][component]["test"]
    measured = json.loads(result.out)
    assert {name: measured[name] for name in recorded} == pytest.approx(recorded, abs=1e-3)


def test_the_last_component_uses_the_whole_model(run, corpus_folder):
    narrowed = elias("evaluate", run, corpus_folder, "--json", "--component", "names")

    assert narrowed.out == elias("evaluate", run, corpus_folder, "--json").out


# predicting


def test_predict_writes_a_json_line_for_each_text_as_the_python_api_ranks(run, texts):
    result = elias("predict", run, "-k", 3, "--device", "cpu", stdin="\n".join(texts).encode())

    expected = Elias.from_pretrained(run, device="cpu").predict(texts, top_k=3).to_dicts()
    lines = json_lines(result.out)
    assert [line["text"] for line in lines] == texts
    assert [line["labels"] for line in lines] == expected
    assert set(expected[0][0]) == {"id", "label", "score", "probability"}


def test_predict_prints_a_table_of_probabilities_on_a_terminal(run, texts):
    result = elias("predict", run, "-k", 2, "--table", stdin=f"{texts[0]}\n".encode())

    labels = Elias.from_pretrained(run, device="cpu").predict(texts[:1], top_k=2)[0]
    title, *rows, end = result.out.splitlines()
    assert texts[0].startswith(title.removesuffix("…"))
    assert [row.split(maxsplit=1)[1] for row in rows] == labels.labels
    assert [row.split()[0] for row in rows] == [f"{p:.0%}" for p in labels.probabilities]
    assert end == ""


@pytest.mark.parametrize("name", ["texts.txt", "texts.jsonl", "texts.csv.gz", "texts.parquet"])
def test_predict_reads_lines_and_tables(run, corpus_folder, tmp_path, name):
    corpus = load_corpus(corpus_folder)
    file = tmp_path / name
    if name == "texts.txt":
        file.write_text("\n".join([*corpus.train.texts, *corpus.test.texts]), encoding="utf8")
    else:
        convert(corpus, file)

    result = elias("predict", run, file, "-k", 1)

    lines = json_lines(result.out)
    assert [line["text"] for line in lines] == [*corpus.train.texts, *corpus.test.texts]


def test_predict_reads_a_named_column_of_json_lines_on_stdin(run):
    result = elias("predict", run, "--text", "body", stdin=b'{"body": "roda"}\n{"body": null}\n')

    assert [line["text"] for line in json_lines(result.out)] == ["roda", ""]


def test_an_empty_line_is_an_empty_text(run):
    result = elias("predict", run, "-", "-k", 1, stdin=b"roda\n\nvepi\r\n")

    assert [line["text"] for line in json_lines(result.out)] == ["roda", "", "vepi"]


def test_no_texts_give_no_lines(run):
    result = elias("predict", run, stdin=b"")

    assert (result.code, result.out, result.err) == (0, "", "no texts were given\n")


def test_predict_can_be_limited_to_labels_by_name_id_and_file(run, texts, tmp_path):
    names = Elias.from_pretrained(run, device="cpu").label_names
    file = tmp_path / "labels.txt"
    file.write_text(f"{names[4]}\n5\n", encoding="utf8")

    result = elias(
        *("predict", run, "-k", 50, "--only", names[3], "--only", f"@{file}"),
        stdin="\n".join(texts).encode(),
    )

    actual = {label["id"] for line in json_lines(result.out) for label in line["labels"]}
    assert actual == {3, 4, 5}


def test_predict_can_exclude_labels_and_low_scores(run, texts):
    stdin = "\n".join(texts).encode()
    best = json_lines(elias("predict", run, "-k", 1, stdin=stdin).out)[0]["labels"][0]

    result = elias(
        *("predict", run, "-k", 50, "--without", best["label"], "--threshold", best["score"] / 2),
        stdin=stdin,
    )

    labels = [label for line in json_lines(result.out) for label in line["labels"]]
    assert best["label"] not in {label["label"] for label in labels}
    assert min(label["score"] for label in labels) >= best["score"] / 2


def test_a_closed_pipe_ends_predict_silently(run, tmp_path):
    file = tmp_path / "many.txt"
    file.write_text("roda dabuva\n" * 20_000)
    process = start_elias("predict", run, file, "-k", 100, stdout=subprocess.PIPE)

    first = process.stdout.readline()
    process.stdout.close()
    message = process.stderr.read()
    process.stderr.close()

    assert json.loads(first)["text"] == "roda dabuva"
    assert message == b""
    assert process.wait(timeout=60) == 141


# describing


def test_info_describes_a_run_for_people_and_programs(run):
    for_people = elias("info", run)
    info = json.loads(elias("info", run / "model", "--json").out)

    assert "clusters C" in for_people.out
    assert "stage2" in for_people.out
    assert info["labels"] == 120
    assert info["config"]["encoder"]["dim"] == 16
    assert info["metrics"]["stage2"]["test"]["P@1"] > 0


def test_info_counts_the_validation_points_of_the_corpus(tmp_path):
    path = tmp_path / "articles.csv"
    splits = ["train"] * 40 + ["validation"] * 3
    rows = [f"cod {i} wine {i % 2},label {i % 2},{split}\n" for i, split in enumerate(splits)]
    path.write_text("text,labels,split\n" + "".join(rows))
    assert elias("train", path, "--out", tmp_path / "run", "--device", "cpu").code == 0

    described = elias("info", tmp_path / "run").out

    assert re.search(r"^validation points +3$", described, re.MULTILINE)


def test_info_verifies_every_file_of_a_model(run, tmp_path):
    assert "all SHA-256 checksums are correct" in elias("info", run, "--verify").out
    info = json.loads(elias("info", run, "--verify", "--json").out)
    assert info["files"] > 2

    copy = shutil.copytree(run / "model", tmp_path / "model")
    content = bytearray((copy / "vocabulary.txt").read_bytes())
    content[100] ^= 1
    (copy / "vocabulary.txt").write_bytes(content)

    result = elias("info", copy, "--verify")
    assert result.code == 2
    assert "vocabulary.txt: damaged: its SHA-256 checksum is wrong" in result.err


def test_data_info_counts_a_corpus_for_people_and_programs(corpus_folder):
    for_people = elias("data", "info", corpus_folder)
    info = json.loads(elias("data", "info", corpus_folder, "--json").out)

    assert "labels per point" in for_people.out
    assert info["labels"] == 120
    assert info["splits"]["train"]["points"] == 400


def test_data_convert_prints_where_it_wrote(corpus_folder, tmp_path):
    result = elias("data", "convert", corpus_folder, tmp_path / "c.jsonl")

    assert result.out == f"{tmp_path / 'c.jsonl'}\n"
    assert load_corpus(tmp_path / "c.jsonl").n_labels == 120


def test_data_synthetic_makes_the_corpus_that_python_makes(corpus_folder, tmp_path):
    result = elias(
        *("data", "synthetic", tmp_path / "same", "--points", 400, "--labels", 120, "--seed", 0)
    )

    names = ("raw/trn_X.txt", "raw/tst_X.txt", "Y.trn.npz", "Y.tst.npz")
    assert result.code == 0
    assert [(tmp_path / "same" / name).read_bytes() for name in names] == [
        (corpus_folder / name).read_bytes() for name in names
    ]


def test_python_trains_the_same_model_as_the_command_line(run, corpus_folder, texts):
    config = EliasConfig.from_file(run / "config.json")

    model = train(load_corpus(corpus_folder), config, device="cpu")

    saved = Elias.from_pretrained(run, device="cpu").predict(texts)
    assert model.predict(texts).ids.tolist() == saved.ids.tolist()


# mistakes


@pytest.fixture
def broken(tmp_path):
    """Files and folders with something wrong, by name."""
    (tmp_path / "latin1.txt").write_bytes(b"fine\ncaf\xe9\n")
    (tmp_path / "utf16.txt").write_text("text,labels\ncod,fish\n", encoding="utf-16")
    (tmp_path / "empty.csv").write_bytes(b"")
    (tmp_path / "table.csv").write_text("title,tags\ncod,fish\n")
    (tmp_path / "rows.jsonl").write_text('{"title": "cod", "tags": ["fish"]}\n{"title": 1\n')
    (tmp_path / "bad.toml").write_text("[index\n")
    (tmp_path / "typo.toml").write_text("[encoder]\ndims = 4\n[[stages]]\nepoch = 3\n")
    (tmp_path / "short.jsonl").write_text('{"labels": [{"id": 1, "score": 1.0}]}\n')
    (tmp_path / "empty").mkdir()
    return tmp_path


MISTAKES = {
    "data info {tmp}/nowhere": "nowhere: no such file or folder",
    "data info {tmp}/empty.csv": "empty.csv: is empty; give a file with a row for each text",
    "data info {tmp}/rows.jsonl": "rows.jsonl:2: not a JSON object",
    "data info {tmp}/table.csv --text titel": "no column 'titel'",
    "data info {tmp}/table.csv --labels tag": "did you mean 'tags'?",
    "data info {data} --separator ,": "where --separator has no meaning",
    "data convert {data} {tmp}/x --format jsnl": "did you mean 'jsonl'?",
    "data convert {data} {tmp}/table.csv": "another name, or pass --overwrite",
    "data synthetic {tmp}": "already exists",
    "train {tmp}/nowhere --out {tmp}/run": "nowhere: no such file",
    "train {data} --out {tmp}/run --preset balance": "did you mean 'balanced'?",
    "train {data} --out {tmp}/run --set index.bta=3": "did you mean 'index.beta'?",
    "train {data} --out {tmp}/run --set indx.beta=3": "did you mean 'index'?",
    "train {data} --out {tmp}/run --set stages.stage2.epoch=3": "mean 'stages.stage2.epochs'?",
    "train {data} --out {tmp}/run --set stages.stage9.epochs=3": "stages are: stage1, stage2",
    "train {data} --out {tmp}/run --set encoder.kind=bag": "was removed: set encoder.model to bag",
    "train {data} --out {tmp}/run --config {tmp}/typo.toml": "did you mean 'encoder.dim'?",
    "train {data} --dry-run --config {tmp}/typo.toml": "did you mean 'stages.0.epochs'?",
    "train {data} --dry-run --preset wordnet": "presets: ",
    "train {data} --dry-run --device cpu --set index.kind=graph"
    " --set index.label_storage=compact": "set it to 'full'",
    "train {data} --out {tmp}/run --set encoder.min_count=5": "was removed: it is always 2",
    "train {data} --out {tmp}/run --set encoder.model={tmp}/empty": ("empty"),
    "train {data} --out {tmp}/run --set encoder.model=./none": ("error: ./none: no such folder"),
    "train {data} --out {tmp}/run --set index.beta": "write it as key=value",
    "train {data} --out {tmp}/run --json": "only with --dry-run",
    "train {data} --out {tmp}/run --set seed=abc": "seed must be a whole number",
    "train {data} --out {tmp}/run --set stages.stage2.epochs=x": "stages.stage2.epochs must be a",
    "train {data} --out {tmp}/run --set index.n_clusters=5000": "more than the number of labels",
    "train {data} --out {tmp}/run --set eval.select_by=F1": "unknown metric 'F1'",
    "train {data} --out {tmp}/run --config {tmp}/bad.toml": "bad.toml: not valid TOML",
    "train {data} --out {tmp}/run --config {tmp}/none.toml": "none.toml: no such file",
    "train {data} --out {tmp}/run --device tpu9": "unknown device 'tpu9'",
    "train {data} --out {tmp}/table.csv": "table.csv: is a file",
    "train {data} --out {tmp}/run --init-from {tmp}/empty": "empty: has no config.json",
    "evaluate {tmp}/nowhere {data}": "nowhere: no such folder",
    "evaluate {run} {tmp}/table.csv": "table.csv: the model knows none of the 1 labels",
    "evaluate {run} {data} --split tets": "--split 'tets'",
    "evaluate {run} {data} --component ensemble": "component 'ensemble'",
    "evaluate {tmp}/table.csv {run}": "table.csv: is a file, not the folder of a saved model",
    "predict {run} --component stage3": "did you mean 'stage2'?",
    "evaluate {run} {data} --predictions {tmp}/short.jsonl": "short.jsonl: has predictions for 1",
    "evaluate {run} {data} --predictions {tmp}/none": "none: cannot be read",
    "evaluate {run} {data} --per-label {tmp}/no/dir.csv": "/no/dir.csv: cannot be written",
    "predict {tmp}/empty": "empty: has no config.json",
    "predict {tmp}/table.csv {run}": "table.csv: is a file, not the folder of a saved model; give "
    "the model first",
    "predict {run} {tmp}/nowhere.txt": "nowhere.txt: no such file",
    "predict {run} {tmp}/empty": "empty: is a folder",
    "predict {run} {tmp}/latin1.txt": "latin1.txt:2: not UTF-8 (byte 0xe9); save it as UTF-8, or "
    "pass --encoding cp1252",
    "predict {run} {tmp}/utf16.txt": "utf16.txt:1: is UTF-16; save it as UTF-8",
    "data info {tmp}/utf16.txt": "utf16.txt:1: is UTF-16; save it as UTF-8",
    "predict {run} {tmp}/table.csv --text body": "no column 'body'",
    "predict {run} {tmp}/rows.jsonl": "rows.jsonl:2: not a JSON object",
    "predict {run} --only nosuchlabel": "no label 'nosuchlabel'",
    "predict {run} --without 120": "no label 120",
    "predict {run} --only @{tmp}/none": "none: no such file",
    "info {tmp}/nowhere": "nowhere: no such folder",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_gets_one_line_that_names_it_and_exit_code_2(command, broken, run, corpus_folder):
    before = sorted(broken.rglob("*"))
    args = command.format(tmp=broken, data=corpus_folder, run=run).split()

    result = elias("-q", *args, stdin=b"roda\n")

    (line,) = result.err.splitlines()
    assert result.code == 2
    assert result.out == ""
    assert line.startswith("error: ")
    assert MISTAKES[command] in line
    assert sorted(broken.rglob("*")) == before


def test_bytes_on_stdin_that_are_not_utf8_are_named_by_line(run):
    result = elias("predict", run, stdin=b"fine\n\xff\n")

    assert result.code == 2
    assert result.err.startswith("error: stdin:2: not UTF-8 (byte 0xff)")


def test_the_defaults_are_named_with_the_plan_and_not_before_an_error(tmp_path, corpus_folder):
    mistake = elias("train", tmp_path / "nowhere", "--dry-run")
    plan = elias("train", corpus_folder, "--dry-run", "--device", "cpu")

    assert mistake.code == 2
    assert "the defaults are used" not in mistake.err
    assert plan.code == 0
    assert "the defaults are used" in plan.err


def test_training_needs_a_run_folder(corpus_folder):
    result = elias("train", corpus_folder)

    assert result.code == 2
    assert "--out" in result.err
