"""The paper's experiments by the command line: numbers, resuming, refusals."""

import dataclasses
import json
import shutil
import statistics
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy.sparse import load_npz, save_npz

from e2e.commands import elias
from elias import Elias, EliasConfig, load_corpus, train
from elias.config import EnsembleConfig
from elias.data.synthetic import write_synthetic
from elias.experiments import variants

SMALL = (
    *("--device", "cpu", "--set", "encoder.dim=16", "--set", "encoder.hidden_dim=16"),
    *("--set", "index.n_clusters=8", "--set", "index.edges_per_cluster=16"),
    *("--set", "index.beam_size=4", "--set", "index.shortlist_size=30"),
    *("--set", "stages.stage1.epochs=1", "--set", "stages.stage2.epochs=2"),
    *("--set", "stages.stage2.label_lr=0.05", "--set", "eval.validation_size=30"),
    *("--set", "stages.stage1.score_all=false", "--set", "eval.drop_unhelpful=false"),
    # fewer than labels, so that trees are fitted
    *("--set", "rerank.candidates=20", "--set", "rerank.trees=2"),
)
QUICK = (*SMALL, "--set", "rerank.enabled=false")
"""Without the ranker, for what does not need one."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A generated corpus of 200 training points, 50 test points and 40 labels."""
    return write_synthetic(tmp_path_factory.mktemp("data") / "tiny", n_points=200, n_labels=40)


@pytest.fixture(scope="module")
def ablation(data, tmp_path_factory):
    """The folder of an ablation, and what the command said."""
    folder = tmp_path_factory.mktemp("experiments") / "ablation"
    result = elias(
        *("experiment", "ablation", data, "--out", folder, *SMALL),
        *("--members", 2, "--one-vs-all", "--seeds", "0,1"),
    )
    assert result.code == 0, result.err
    return folder, result


def results(folder, name):
    return json.loads((folder / f"{name}.json").read_text(encoding="utf8"))


def rows_of(folder, name):
    return {
        (row["name"], row["seed"]): row
        for task in results(folder, name)["tasks"]
        for row in task["rows"]
        if row["settings"].get("member", 0) == 0
    }


def evaluated(run, data, component=None):
    part = () if component is None else ("--component", component)
    return json.loads(elias("evaluate", run, data, "--json", "--device", "cpu", *part).out)


def same(row, measured):
    assert row["metrics"]
    assert row["metrics"] == pytest.approx(
        {name: measured[name] for name in row["metrics"]}, abs=1e-3
    )


@pytest.fixture
def trained(monkeypatch):
    """The runs that are trained, in order."""
    seen = []

    def counted(corpus, config, *, out, **options):
        seen.append(Path(out).name)
        return train(corpus, config, out=out, **options)

    monkeypatch.setattr(variants, "train", counted)
    return seen


def test_an_ablation_has_a_line_for_each_component_and_control(ablation):
    folder, result = ablation

    table = results(folder, "ablation")["table"]
    assert [line["title"] for line in table] == [
        *("stage1", "+ stage2 (learned index)", "+ ranker", "+ calibration"),
        "+ label names",
        *("+ ensemble of 2, without label names", "+ ensemble of 2"),
        "fixed index throughout",
        *("one-vs-all", "one-vs-all + ranker"),  # few labels have no calibration
    ]
    shown = [line for line in result.out.splitlines() if "±" in line]
    assert len(shown) == len(table)
    assert f"{table[1]['mean']['P@1']:.2f}±{table[1]['std']['P@1']:.2f}" in shown[1]


def test_the_numbers_of_an_ablation_are_those_of_evaluate(ablation, data):
    folder, _ = ablation
    rows = rows_of(folder, "ablation")

    for name, component in (("stage2", "stage2"), ("rerank", "rerank"), ("names", None)):
        row = rows[f"elias/{name}", 1]
        same(row, evaluated(folder / row["run"], data, component))
    for name in ("fixed/stage2", "one-vs-all/rerank"):
        row = rows[name, 0]
        same(row, evaluated(folder / row["run"], data))


def test_the_ensemble_without_names_is_that_of_models_without_them(ablation, data):
    folder, _ = ablation
    rows = rows_of(folder, "ablation")
    members = []
    for run in ("elias-seed0", "elias-seed0-member1"):
        model = Elias.from_pretrained(folder / "runs" / run, device="cpu")
        model.reranker = dataclasses.replace(model.reranker, names=None, by_name=None)
        members.append(model)
    first, other = members

    together = first.joined_by(
        (other,), dataclasses.replace(first.config, ensemble=EnsembleConfig(members=2))
    )

    assert other.components[-1] == "calibrate"
    same(rows["elias/ensemble-unnamed", 0], together.evaluate(load_corpus(data)))


def test_the_stages_of_the_ensemble_are_those_that_training_makes(ablation, data):
    folder, _ = ablation
    config = EliasConfig.from_file(folder / "runs" / "elias-seed1" / "config.json")

    together = train(load_corpus(data), config.override({"ensemble.members": 2}), device="cpu")

    # a single model trains its ranker on the held-out points too in the end
    for stage in ("stage1", "stage2"):
        row = rows_of(folder, "ablation")[f"elias/{stage}", 1]
        same(row, together.metadata["metrics"][stage]["test"])


def test_the_table_has_means_and_deviations_over_seeds_and_members(ablation):
    folder, _ = ablation
    actual = results(folder, "ablation")
    rows = [row for task in actual["tasks"] for row in task["rows"]]
    line = next(line for line in actual["table"] if line["name"] == "elias/rerank")

    values = {
        (row["seed"], row["settings"]["member"]): row["metrics"]["P@5"]
        for row in rows
        if row["name"] == "elias/rerank"
    }

    assert set(values) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert line["mean"]["P@5"] == pytest.approx(statistics.fmean(values.values()))
    assert line["std"]["P@5"] == pytest.approx(statistics.stdev(values.values()))
    assert line["n_seeds"] == 4
    markdown = (folder / "ablation.md").read_text(encoding="utf8")
    assert f"| {line['mean']['P@5']:.2f} ± {line['std']['P@5']:.2f} |" in markdown


def test_the_files_are_complete_and_describe_the_experiment(ablation):
    folder, _ = ablation

    document = results(folder, "ablation")

    assert document["finished"]
    assert document["seeds"] == [0, 1]
    assert document["config"]["encoder"]["dim"] == 16
    assert document["data"]["splits"]["test"]["points"] == 50
    assert {"elias-xmc", "python", "torch"} <= document["versions"].keys()
    assert all(task["seconds"] > 0 for task in document["tasks"])
    plot = ElementTree.fromstring((folder / "ablation.svg").read_text(encoding="utf8"))
    assert "one-vs-all + ranker" in [text.text for text in plot.iter() if text.tag.endswith("text")]
    assert not list(folder.glob(".*"))


def test_a_second_command_trains_nothing_and_prints_the_same(ablation, data, trained):
    folder, result = ablation

    again = elias(
        *("experiment", "ablation", data, "--out", folder, *SMALL),
        *("--members", 2, "--one-vs-all", "--seeds", "0,1"),
    )

    assert again.code == 0, again.err
    assert again.out == result.out
    assert trained == []


def test_other_experiments_reuse_trained_models(ablation, data, trained):
    folder, _ = ablation

    result = elias("experiment", "sweep", "beam", data, "--out", folder, *SMALL, "--values", "1,4")

    assert result.code == 0, result.err
    assert trained == []
    same(
        rows_of(folder, "sweep-beam")["beam=4", 0],
        rows_of(folder, "ablation")["elias/stage2", 0]["metrics"],
    )


def test_an_interrupted_experiment_resumes(data, tmp_path, monkeypatch):
    command = ("experiment", "ablation", data, "--out", tmp_path, *QUICK, "--members", 2)
    seen = []

    def interrupted(corpus, config, *, out, **options):
        if len(seen) == 1:
            raise KeyboardInterrupt
        seen.append(Path(out).name)
        return train(corpus, config, out=out, **options)

    monkeypatch.setattr(variants, "train", interrupted)
    first = elias(*command)
    left = results(tmp_path, "ablation")
    monkeypatch.setattr(
        variants, "train", lambda *a, out, **k: (seen.append(out.name), train(*a, out=out, **k))[1]
    )
    second = elias(*command)

    assert first.code == 130
    assert "run the same command again to continue" in first.err
    assert [line["name"] for line in left["table"]] == ["elias/stage1", "elias/stage2"]
    assert not left["finished"]
    assert second.code == 0, second.err
    assert seen == ["elias-seed0", "elias-seed0-member1", "fixed-seed0"]
    done = results(tmp_path, "ablation")
    assert done["finished"]
    assert done["tasks"][0] == left["tasks"][0]


def test_more_seeds_can_be_added_to_an_experiment(data, tmp_path, trained):
    command = ("experiment", "sweep", "shortlist", data, "--out", tmp_path, *QUICK, "--values", 9)

    first = elias(*command, "--seeds", "3")
    second = elias(*command, "--seeds", "3,4")

    assert (first.code, second.code) == (0, 0), second.err
    assert trained == ["elias-seed3", "elias-seed4"]
    assert results(tmp_path, "sweep-shortlist")["table"][0]["n_seeds"] == 2


def test_another_configuration_is_refused_unless_it_may_overwrite(data, tmp_path, trained):
    command = ("experiment", "sweep", "beam", data, "--out", tmp_path, "--values", "2", *QUICK)
    other = ("--set", "index.beta=3")

    assert elias(*command).code == 0
    by_its_run = elias(*command, *other)
    (tmp_path / "runs").rename(tmp_path / "away")
    by_its_results = elias(*command, *other)
    (tmp_path / "away").rename(tmp_path / "runs")
    replaced = elias(*command, *other, "--overwrite")

    for result, path in ((by_its_run, "runs/elias-seed0"), (by_its_results, "sweep-beam.json")):
        (line,) = (line for line in result.err.splitlines() if line.startswith("error: "))
        assert result.code == 2
        assert str(tmp_path / path) in line
        assert "(index.beta is 3.0 instead of 5.0); use --overwrite or another --out" in line
    assert replaced.code == 0, replaced.err
    assert trained == ["elias-seed0", "elias-seed0"]
    assert results(tmp_path, "sweep-beam")["config"]["index"]["beta"] == 3.0


def test_other_data_is_refused(data, tmp_path):
    other = tmp_path / "other"  # the same in every number, but for which point has which labels
    shutil.copytree(data, other)
    labels = load_npz(other / "Y.trn.npz")
    save_npz(other / "Y.trn.npz", labels[np.arange(labels.shape[0])[::-1]])
    command = ("--out", tmp_path / "out", *QUICK, "--values", "2")
    assert elias("experiment", "sweep", "beam", data, *command).code == 0

    same_file = elias("experiment", "sweep", "beam", other, *command)
    (tmp_path / "out" / "sweep-beam.json").unlink()
    same_run = elias("experiment", "sweep", "beam", other, *command)

    assert same_file.code == same_run.code == 2
    assert "was made with other data; use --overwrite or another --out" in same_file.err
    assert "was trained on other data; use --overwrite or another --out" in same_run.err


def test_a_sweep_of_what_training_needs_trains_each_value(data, tmp_path, trained):
    result = elias(
        "experiment", "sweep", "lambda", data, "--out", tmp_path, *QUICK, "--values", "1,0"
    )

    assert result.code == 0, result.err
    assert trained == ["lambda-0-seed0", "elias-seed0"]
    for value, name in ((0, "lambda-0-seed0"), (1, "elias-seed0")):
        row = rows_of(tmp_path, "sweep-lambda")[f"lambda={value}", 0]
        same(row, evaluated(tmp_path / "runs" / name, data))
    config = EliasConfig.from_file(tmp_path / "runs" / "lambda-0-seed0" / "config.json")
    assert [stage.shortlist_loss_weight for stage in config.stages] == [0.0, 0.0]
    assert (tmp_path / "sweep-lambda.svg").exists()


@pytest.mark.parametrize(("component", "ranked"), [("stage2", False), ("rerank", True)])
def test_a_sweep_trains_a_ranker_only_where_it_is_measured(data, tmp_path, component, ranked):
    result = elias(
        *("experiment", "sweep", "lambda", data, "--out", tmp_path, *SMALL, "--values", "0"),
        *("--component", component),
    )

    assert result.code == 0, result.err
    config = EliasConfig.from_file(tmp_path / "runs" / "lambda-0-seed0" / "config.json")
    assert config.rerank.enabled is ranked


def test_fewer_edges_than_the_shortlist_needs_shorten_it(data, tmp_path):
    result = elias(
        "experiment",
        "sweep",
        "kappa",
        data,
        "--out",
        tmp_path,
        *QUICK,
        "--values",
        "5,16",
        "--json",
    )

    assert result.code == 0, result.err
    assert [line["settings"] for line in json.loads(result.out)["table"]] == [
        {"kappa": 5.0},
        {"kappa": 16.0},
    ]
    index = EliasConfig.from_file(tmp_path / "runs" / "kappa-5-seed0" / "config.json").index
    assert (index.edges_per_cluster, index.shortlist_size) == (5, 20)


def test_pruning_measures_each_cut_and_saves_one(ablation, data, tmp_path, trained):
    folder, _ = ablation
    pruned_folder = tmp_path / "kept"

    result = elias(
        *("experiment", "prune", data, "--out", folder, *SMALL),
        *(
            "--thresholds",
            "0.55,1",
            "--top-k",
            "2",
            "--save",
            pruned_folder,
            "--keep",
            "threshold=0.55",
        ),
    )

    assert result.code == 0, result.err
    assert trained == []
    table = results(folder, "prune")["table"]
    assert [line["title"] for line in table] == [
        "all",
        "ŝ ≥ 0.55",
        "ŝ ≥ 1",
        "the 2 best of a cluster",
    ]
    assert table[0]["mean"]["edges_removed"] == 0
    assert 0 < table[1]["mean"]["edges_removed"] <= table[2]["mean"]["edges_removed"] < 100
    rows = rows_of(folder, "prune")
    same(rows["threshold=0", 0], rows_of(folder, "ablation")["elias/stage2", 0]["metrics"])
    same(rows["threshold=0.55", 0], evaluated(pruned_folder, data, "stage2"))
    saved = Elias.from_pretrained(pruned_folder, device="cpu")
    assert saved.model.graph.n_edges == rows["threshold=0.55", 0]["costs"]["edges"]
    assert list(saved.metadata["metrics"]) == list(saved.components)
    same({"metrics": saved.metadata["metrics"]["names"]["test"]}, evaluated(pruned_folder, data))
    n_left, n_edges = (rows[f"threshold={t}", 0]["costs"]["edges"] for t in ("0.55", "0"))
    assert f"{n_left:,} of {n_edges:,}, pruned at 0.55" in elias("info", pruned_folder).out


def test_a_given_model_is_pruned_without_training(ablation, data, tmp_path, trained):
    folder, _ = ablation
    run = folder / "runs" / "elias-seed1"

    result = elias(
        *("experiment", "prune", data, "--out", tmp_path, "--model", run, "--device", "cpu"),
        *("--thresholds", "0.5", "--top-k", "3", "--component", "rerank"),
    )

    assert result.code == 0, result.err
    assert trained == []
    assert not (tmp_path / "runs").exists()
    same(rows_of(tmp_path, "prune")["threshold=0", 1], evaluated(run, data, "rerank"))


BAD = [
    (("ablation",), ("--seeds", "0,x"), "--seeds '0,x': write whole numbers"),
    (("ablation",), ("--seeds", "1,1"), "give one or more distinct seeds"),
    (("ablation",), ("--members", "0"), "--members must be >= 1, not 0"),
    (("ablation",), ("--preset", "balance"), "did you mean 'balanced'?"),
    (("compare",), ("--peer-python", "omikuji"), "write PACKAGE=PATH"),
    (("compare",), ("--peer-python", "annif=/bin/sh"), "where PACKAGE is one of omikuji, pecos"),
    (("compare",), ("--peer-python", "pecos=/no/python"), "/no/python is not a Python interpreter"),
    (("sweep", "lamda"), (), "cannot sweep 'lamda'; did you mean 'lambda'?"),
    (("sweep", "beam"), ("--values", "1.5"), "b must be a whole number, not 1.5"),
    (
        ("sweep", "beam"),
        ("--values", "9"),
        "--values 9: index.beam_size is 9, more than index.n_clusters (8)",
    ),
    (
        ("sweep", "kappa"),
        ("--values", "1"),
        "--values 1: index.edges_per_cluster * index.n_clusters is 8",
    ),
    (("sweep", "alpha"), ("--values", "few"), "--values 'few': write numbers"),
    (
        ("sweep", "beam"),
        ("--component", "rerank"),
        "will not have this component (use one of: stage2)",
    ),
    (("sweep", "beam"), ("--set", "index.kind=all"), "stages"),
    (("prune",), ("--thresholds", "2"), "a threshold must be in [0, 1]"),
    (("prune",), ("--top-k", "0"), "must be a whole number >= 1, not 0"),
    (("prune",), ("--keep", "top=3"), "--save requires --keep, and --keep requires --save"),
    (("prune",), ("--save", "there", "--keep", "best=3"), "write threshold=0.25, or top=100"),
    (("prune",), ("--save", "there", "--keep", "top=0"), "must be a whole number >= 1, not 0"),
    (("prune",), ("--model", "nowhere"), "--set: has no effect with a trained --model"),
]


@pytest.mark.parametrize(("command", "options", "message"), BAD)
def test_a_mistake_is_one_line_and_trains_nothing(
    command, options, message, data, tmp_path, trained
):
    result = elias("experiment", *command, data, "--out", tmp_path / "out", *QUICK, *options)

    (line,) = (line for line in result.err.splitlines() if line.startswith("error: "))
    assert result.code == 2
    assert result.out == ""
    assert message in line
    assert trained == []
    assert not (tmp_path / "out" / "runs").exists()


def test_a_corpus_without_test_points_has_nothing_to_measure_on(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("text,labels\n" + "red cod,fish\nred tape,office\n" * 20, encoding="utf8")

    result = elias("experiment", "ablation", table, "--out", tmp_path / "out", "--test-size", 0)

    assert result.code == 2
    assert "table.csv: has no test points to measure on; hold some out" in result.err


def test_files_that_are_not_results_are_not_overwritten(data, tmp_path):
    (tmp_path / "sweep-beam.json").write_text("[1, 2]", encoding="utf8")

    result = elias("experiment", "sweep", "beam", data, "--out", tmp_path, *QUICK, "--overwrite")

    assert result.code == 2
    assert "is not a result file of this version; remove it" in result.err
    assert (tmp_path / "sweep-beam.json").read_text(encoding="utf8") == "[1, 2]"
