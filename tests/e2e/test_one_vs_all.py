"""One-vs-all by the command line, from training to labelled texts."""

import json

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from e2e.commands import elias
from elias import Elias, EliasConfig, load_corpus, train
from elias.data.corpus import Corpus, Split
from tiny_bert import save_tiny_bert

SMALL = (
    *("--device", "cpu", "--set", "index.kind=all"),
    *("--set", "encoder.dim=16", "--set", "encoder.hidden_dim=16"),
    *("--set", "stages.one-vs-all.epochs=6", "--set", "stages.one-vs-all.batch_size=32"),
    *("--set", "stages.one-vs-all.label_lr=0.05", "--set", "eval.drop_unhelpful=false"),
)


@pytest.fixture(scope="module", params=["full", "compact"])
def trained(request, corpus_folder, tmp_path_factory):
    """A finished run, and what its training said."""
    run = tmp_path_factory.mktemp("runs") / request.param
    storage = f"index.label_storage={request.param}"
    return run, elias("train", corpus_folder, "--out", run, *SMALL, "--set", storage)


@pytest.fixture(scope="module")
def run(trained):
    folder, result = trained
    assert result.code == 0, result.err
    return folder


def test_training_prints_that_every_label_is_scored(trained):
    run, result = trained

    assert "none, every label is scored" in result.err
    assert any(line.startswith("one-vs-all") for line in result.out.splitlines())
    assert result.out.splitlines()[-1] == str(run / "model")


def test_evaluate_finds_what_training_recorded(run, corpus_folder):
    measured = json.loads(elias("evaluate", run, corpus_folder, "--json", "--device", "cpu").out)

    recorded = Elias.from_pretrained(run, device="cpu").metadata["metrics"]["rerank"]["test"]
    assert recorded["P@1"] > 35
    assert {name: measured[name] for name in recorded} == pytest.approx(recorded, abs=1e-3)


def test_predict_ranks_every_label_there_is(run, corpus_folder):
    text = load_corpus(corpus_folder).test.texts[0]

    result = elias("predict", run, "-k", 1000, "--device", "cpu", stdin=text.encode())

    (line,) = (json.loads(line) for line in result.out.splitlines())
    scores = [label["score"] for label in line["labels"]]
    assert sorted(label["id"] for label in line["labels"]) == list(range(120))
    assert scores == sorted(scores, reverse=True)


def test_predict_can_include_and_exclude_labels(run, corpus_folder):
    model = Elias.from_pretrained(run, device="cpu")
    texts = load_corpus(corpus_folder).test.texts[:3]

    only = model.predict(texts, only=[3, 7], top_k=9)
    without = model.predict(texts, without=[3, 7], top_k=120)

    assert all(sorted(ranking.ids) == [3, 7] for ranking in only)
    assert all(len(ranking.ids) == 118 and not {3, 7} & set(ranking.ids) for ranking in without)


def test_info_and_the_card_describe_one_vs_all(run):
    result = elias("info", run)

    assert "every label is scored" in result.out
    assert "clusters" not in result.out
    assert "one-vs-all" in (run / "model" / "README.md").read_text(encoding="utf8")


def test_a_dry_run_counts_the_parameters_that_the_model_has(run, corpus_folder):
    result = elias("train", corpus_folder, *SMALL, "--dry-run")

    model = Elias.from_pretrained(run, device="cpu").model
    n_parameters = sum(weight.numel() for weight in model.parameters())
    assert f"parameters: {n_parameters:,};" in result.err


def test_python_trains_the_same_model_and_it_survives_being_saved(run, corpus_folder, tmp_path):
    corpus = load_corpus(corpus_folder)
    saved = Elias.from_pretrained(run, device="cpu")

    model = train(corpus, EliasConfig.from_file(run / "config.json"), device="cpu")
    again = Elias.from_pretrained(model.save_pretrained(tmp_path / "model"), device="cpu")

    for other in (model, again):
        ours, theirs = saved.predict(corpus.test.texts), other.predict(corpus.test.texts)
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert ours.scores.tolist() == theirs.scores.tolist()


def test_a_stage_that_learns_a_graph_is_refused_in_one_line(corpus_folder, tmp_path):
    config = tmp_path / "graph.toml"
    config.write_text('[[stages]]\nname = "stage2"\nlearn_graph = true\n', encoding="utf8")

    result = elias(
        *("train", corpus_folder, "--config", config, "--set", "index.kind=all"), "--dry-run"
    )

    assert result.code == 2
    assert "error: stages.stage2.learn_graph: with index.kind='all'" in result.err


def test_a_transformer_is_trained_one_vs_all_too(tmp_path):
    rng = np.random.default_rng(0)
    truth = rng.random((80, 5)) < 0.4
    words = ["red", "cod", "tape", "sea", "quota"]
    texts = [" ".join(np.array(words)[row]) for row in truth]
    split = Split(labels=csr_matrix(truth.astype(np.float32)), texts=texts)
    config = EliasConfig().override(
        {
            "index.kind": "all",
            "encoder.model": save_tiny_bert(tmp_path / "bert"),
            "encoder.dropout": 0.0,
            "eval.validation_size": 0,
            "stages.one-vs-all.epochs": 8,
            "stages.one-vs-all.batch_size": 8,
            "stages.one-vs-all.encoder_lr": 5e-3,
            "stages.one-vs-all.label_lr": 5e-2,
        }
    )

    model = train(Corpus(train=split, test=split, label_names=words), config, device="cpu")
    again = Elias.from_pretrained(model.save_pretrained(tmp_path / "model"), device="cpu")

    assert model.metadata["metrics"]["one-vs-all"]["test"]["R@10"] == 100
    assert model.metadata["metrics"]["one-vs-all"]["test"]["P@1"] > 80
    assert sorted(again.predict(["red cod"], top_k=2)[0].labels) == ["cod", "red"]


def test_a_label_that_no_path_leads_to_is_explained_by_its_classifier(run, corpus_folder, tmp_path):
    result = elias("explain", run, "some text", "--json")
    (label, *_) = json.loads(result.out)["labels"]
    reported = elias("report", run, corpus_folder, "--out", tmp_path / "report.html")

    assert label["paths"] == []
    assert label["n_paths"] == 0
    assert label["p"] == pytest.approx(label["classifier_score"])
    table = elias("explain", run, "some text", "-k", 1)
    assert table.code == 0, table.err
    assert "cluster" not in table.out + table.err
    assert table.out.splitlines()[4].split()[-2:] == ["1.", label["label"]]
    assert reported.code == 0, reported.err
    assert "it scores every label" in (tmp_path / "report.html").read_text(encoding="utf8")
