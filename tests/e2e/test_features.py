"""A corpus of ready features without a word of text, in the XMC repository's format."""

import json
from dataclasses import replace

import numpy as np
import pytest

from e2e.commands import SMALL, elias
from elias import Elias, EliasConfig, load_corpus, train
from elias.data import convert
from elias.data.synthetic import synthetic_corpus
from elias.errors import ConfigError, DataError
from elias.report import statistics
from elias.text.vectorizer import Featurizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Features of a generated corpus, as ``N D L`` files."""
    corpus = synthetic_corpus(n_points=400, n_labels=60)
    words = Featurizer.fit(corpus.train.texts, char_ngrams=(0, 0), min_count=1)
    splits = {
        name: replace(split, texts=None, features=words.transform(split.texts))
        for name, split in corpus.splits.items()
    }
    path = tmp_path_factory.mktemp("features") / "xmc"
    convert(corpus.with_splits(**splits), path, format="xmc")
    return path


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """A run trained on the features."""
    path = tmp_path_factory.mktemp("runs") / "features"
    result = elias("train", folder, "--out", path, *SMALL)
    assert result.code == 0, result.err
    return path


def test_the_corpus_has_features_and_no_text(folder):
    corpus = load_corpus(folder)

    assert corpus.train.texts is None
    assert corpus.train.features is not None


def test_the_saved_model_ranks_the_features_as_the_trained_one(folder, run):
    corpus = load_corpus(folder)
    config = EliasConfig.from_file(run / "config.json")

    saved = Elias.from_pretrained(run, device="cpu").predict(corpus.test.features)
    trained = train(corpus, config, device="cpu").predict(corpus.test.features)

    assert saved.ids.tolist() == trained.ids.tolist()
    np.testing.assert_array_equal(saved.scores, trained.scores)


def test_evaluate_finds_what_training_recorded_and_better_than_chance(folder, run):
    result = elias("evaluate", run, folder, "--json", "--device", "cpu")

    measured = json.loads(result.out)
    lines = (run / "metrics.jsonl").read_text(encoding="utf8").splitlines()
    recorded = [json.loads(line) for line in lines if '"calibrate"' in line][-1]["test"]
    assert {name: measured[name] for name in recorded} == pytest.approx(recorded, abs=1e-3)
    assert measured["R@10"] > 1.5 * 100 * 10 / 60


def test_predict_says_that_the_model_reads_features(run):
    result = elias("predict", run, stdin=b"some text\n")

    (line,) = result.err.splitlines()
    assert result.code == 2
    assert result.out == ""
    assert "trained on features" in line
    assert "evaluate" in line


def test_a_text_is_refused_by_python_too(run):
    with pytest.raises(DataError, match=r"trained on feature vectors; pass a CSR matrix"):
        Elias.from_pretrained(run, device="cpu").predict(["some text"])


def test_features_of_another_width_are_refused(folder, run):
    features = load_corpus(folder).test.features[:, :-1]

    with pytest.raises(DataError, match="columns, but the model expects"):
        Elias.from_pretrained(run, device="cpu").predict(features)


def test_a_transformer_cannot_read_features(folder):
    config = EliasConfig().override({"encoder.model": "minilm"})

    with pytest.raises(ConfigError, match="features, but no texts; set it to 'bag'"):
        train(load_corpus(folder), config, device="cpu")


def test_a_report_shows_points_without_text_by_number(run, monkeypatch):
    monkeypatch.setattr(statistics, "N_PANELS", 1)

    result = elias("report", run)

    assert result.code == 0, result.err
    assert "<blockquote>Point " in (run / "report.html").read_text(encoding="utf8")
