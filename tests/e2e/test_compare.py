"""The comparison by the command line: our models, neighbours, and peers run for real."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from e2e.commands import elias
from elias import EliasConfig, evaluate, load_corpus
from elias.baselines import NearestNeighbours
from elias.data.corpus import Corpus, Split
from elias.data.synthetic import write_synthetic
from elias.experiments import Setting, run_experiment
from elias.experiments import compare as plan_of
from elias.predictions import Predictions

SMALL = (
    *("--device", "cpu", "--set", "encoder.dim=16", "--set", "encoder.hidden_dim=16"),
    *("--set", "stages.stage1.epochs=1", "--set", "stages.stage2.epochs=1"),
    *("--set", "eval.validation_size=20", "--set", "stages.stage1.score_all=false"),
    # fewer than labels, so that trees are fitted
    *("--set", "rerank.candidates=10", "--set", "rerank.trees=2"),
)

OMIKUJI = '''
class Parameters:
    n_trees, cluster_balanced, cluster_k, max_depth = 1, True, 2, 20

class Model:
    """Ranks the labels of the training text by how often they stand there."""

    default_hyper_param = staticmethod(Parameters)

    @classmethod
    def train_on_data(cls, path, parameters):
        print("a peer talks on stdout")
        assert parameters.n_trees == 3
        model = cls()
        model.reverse = not parameters.cluster_balanced
        with open(path, encoding="utf8") as file:
            n_points, n_features, model.n_labels = map(int, file.readline().split())
            lines = file.read().splitlines()
        assert len(lines) == n_points
        model.counts = [0] * model.n_labels
        for line in lines:
            labels, *features = line.split(" ")
            assert all(int(f.split(":")[0]) < n_features for f in features)
            for label in labels.split(","):
                model.counts[int(label)] += 1
        return model

    def save(self, path):
        import os
        os.makedirs(path)
        with open(path + "/weights", "wb") as file:
            file.write(bytes(2_000_000))

    def predict(self, pairs, top_k):
        assert all(value > 0 for _, value in pairs)
        order = sorted(range(self.n_labels), key=lambda i: (-self.counts[i], i))
        if self.reverse:
            order.reverse()
        return [(label, 1.0 / (1 + rank)) for rank, label in enumerate(order[:top_k])]
'''

PECOS = """
class LabelEmbeddingFactory:
    @staticmethod
    def create(y, x, method):
        assert method == "pifa" and y.shape[0] == x.shape[0]
        return y

class Indexer:
    @staticmethod
    def gen(centroids, seed):
        return seed
"""

XLINEAR = '''
import numpy as np
from scipy.sparse import csr_matrix

class XLinearModel:
    """Finds one label for every point: that of its clustering seed."""

    @classmethod
    def train(cls, x, y, C):
        model = cls()
        model.seed, model.n_labels = C, y.shape[1]
        return model

    def save(self, path):
        import os
        os.makedirs(path)

    def predict(self, x, only_topk):
        n = x.shape[0]
        parts = (np.ones(n, np.float32), np.full(n, self.seed), np.arange(n + 1))
        return csr_matrix(parts, shape=(n, self.n_labels))
'''


def interpreter(folder, files, distribution, version="9.9"):
    """A python with packages of its own."""
    packages = folder / "packages"
    for name, text in files.items():
        path = packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf8")
    about = packages / f"{distribution}-{version}.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_synthetic(tmp_path_factory.mktemp("data") / "tiny", n_points=150, n_labels=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder that all comparisons of this module share."""
    return tmp_path_factory.mktemp("experiments") / "compare"


def compare(data, folder, *options):
    output = elias("experiment", "compare", data, "--out", folder, *SMALL, *options)
    assert output.code == 0, output.err
    document = json.loads((folder / "compare.json").read_text(encoding="utf8"))
    return output, {line["name"]: line for line in document["table"]}


@pytest.fixture(scope="module")
def alone(data, folder):
    """A comparison for which no peer is found."""
    return compare(data, folder)


@pytest.fixture(scope="module")
def with_peers(alone, data, folder, tmp_path_factory):
    """The same comparison once both peers are there."""
    del alone
    home = tmp_path_factory.mktemp("omikuji"), tmp_path_factory.mktemp("pecos")
    omikuji = interpreter(home[0], {"omikuji.py": OMIKUJI}, "omikuji")
    modules = {
        "pecos/__init__.py": "",
        "pecos/xmc/__init__.py": PECOS,
        "pecos/xmc/xlinear/__init__.py": "",
        "pecos/xmc/xlinear/model.py": XLINEAR,
    }
    pecos = interpreter(home[1], modules, "libpecos")
    return compare(
        *(data, folder, "--ranker-features", "--members", 2),
        *("--peer-python", f"omikuji={omikuji}", "--peer-python", f"pecos={pecos}"),
    )


def close(line, predictions, data):
    expected = evaluate(predictions, load_corpus(data))
    assert {"P@1", "PSP@3", "R@100"} <= line["mean"].keys()
    for name in ("P@1", "P@5", "PSP@3", "R@10", "R@100"):
        assert line["mean"][name] == pytest.approx(expected[name], abs=1e-3), name


def test_every_component_is_compared_with_one_vs_all_and_neighbours(alone):
    _, lines = alone

    measured = [name for name, line in lines.items() if line["mean"]]
    assert measured == [
        *("elias/stage2", "elias/rerank", "elias/calibrate", "elias/names"),
        *("one-vs-all/one-vs-all", "one-vs-all/rerank"),  # few labels have no calibration
        "knn",
    ]
    for name in measured:
        costs = lines[name]["mean"]
        assert all(costs[key] > 0 for key in ("train_seconds", "ms_per_point", "megabytes"))
    assert lines["elias/stage2"]["mean"]["megabytes"] < lines["elias/rerank"]["mean"]["megabytes"]


def test_a_missing_peer_gives_a_line_without_numbers(alone, folder):
    output, lines = alone

    for name, package in (("parabel/words", "omikuji"), ("xr-linear/words", "pecos")):
        assert lines[name]["mean"] == {}
        assert f"--peer-python {package}=PATH" in lines[name]["note"]
        assert lines[name]["note"] in output.out
    assert json.loads((folder / "compare.json").read_text(encoding="utf8"))["finished"]


def test_neighbours_are_measured_as_evaluate_does(alone, data):
    corpus = load_corpus(data)

    close(alone[1]["knn"], NearestNeighbours(corpus).predict(corpus.test.texts, top_k=100), data)


def test_peers_are_run_by_their_own_interpreters(with_peers, data):
    output, lines = with_peers
    corpus = load_corpus(data)
    counts = corpus.label_frequencies()
    often = np.lexsort((np.arange(30), -counts))
    shape = (len(corpus.test), 30)
    scores = np.broadcast_to(1 / (1 + np.arange(30)), shape)

    for kind in ("words", "ranker"):
        for name, order in (("parabel", often), ("bonsai", often[::-1])):
            actual = Predictions.from_scores(np.broadcast_to(order, shape), scores, 30)
            close(lines[f"{name}/{kind}"], actual, data)
            assert lines[f"{name}/{kind}"]["mean"]["megabytes"] == 2.0
            assert lines[f"{name}/{kind}"]["settings"]["version"] == "9.9"
    assert "a peer talks" not in output.out


def test_the_ensemble_of_xr_linear_averages_its_clusterings(with_peers, data):
    _, lines = with_peers
    n = len(load_corpus(data).test)
    one = csr_matrix((np.ones(n), np.zeros(n, int), np.arange(n + 1)), shape=(n, 30))
    three = csr_matrix(
        (np.full(3 * n, 1 / 3), np.tile(np.arange(3), n), np.arange(0, 3 * n + 1, 3)),
        shape=(n, 30),
    )

    close(lines["xr-linear/words"], Predictions.from_csr(one, 100), data)
    close(lines["xr-linear-x3/words"], Predictions.from_csr(three, 100), data)
    assert lines["xr-linear-x3/words"]["title"] == "XR-Linear ×3"
    assert lines["xr-linear-x3/ranker"]["title"] == "XR-Linear ×3, our features"


def test_finished_tasks_are_not_repeated_when_peers_are_installed(with_peers):
    output, lines = with_peers

    assert output.err.count("(already finished)") == 3  # the model, one-vs-all, the neighbours
    assert "the model, seed 0 (already finished)" in output.err
    assert lines["elias/ensemble"]["title"] == "ELIAS++ with label names ×2"


def test_a_peer_that_fails_says_so_in_its_line(alone, data, folder, tmp_path):
    del alone
    broken = OMIKUJI.replace("assert parameters.n_trees == 3", "raise RuntimeError('no such tree')")
    python = interpreter(tmp_path, {"omikuji.py": broken}, "omikuji", version="9.8")
    (folder / ".peer-killed").mkdir()  # what a killed command leaves

    output, lines = compare(data, folder, "--peer-python", f"omikuji={python}")

    assert lines["bonsai/words"]["note"] == "failed: RuntimeError: no such tree"
    assert lines["bonsai/words"]["mean"] == {}
    assert "Bonsai: failed: RuntimeError: no such tree" in output.out
    assert not list(folder.glob(".peer-*"))


def test_an_interpreter_without_the_package_counts_as_a_missing_peer(alone, data, folder):
    del alone

    _, lines = compare(data, folder, "--peer-python", f"pecos={sys.executable}")

    assert lines["xr-linear/words"]["mean"] == {}
    assert "libpecos not found" in lines["xr-linear/words"]["note"]


def test_peers_read_given_features_and_honour_filters(tmp_path):
    rng = np.random.default_rng(0)
    corpus = featured(rng, rng.random((90, 12)) < 0.3)
    home = tmp_path / "omikuji"
    python = interpreter(home, {"omikuji.py": OMIKUJI}, "omikuji")
    config = EliasConfig().override(
        {"encoder.dim": 8, "stages.stage1.epochs": 1, "stages.stage2.epochs": 1}
    )
    setting = Setting.of(config, corpus, tmp_path / "out", device="cpu")

    result = run_experiment(plan_of(setting, interpreters={"omikuji": python}))

    counts = corpus.label_frequencies()
    often = np.lexsort((np.arange(12), -counts))
    shape = (len(corpus.test), 12)
    scores = np.broadcast_to(1 / (1 + np.arange(12)), shape)
    actual = Predictions.from_scores(np.broadcast_to(often, shape), scores, 12)
    expected = evaluate(actual, corpus)  # drops the filtered pairs
    (parabel,) = (line for line in result.lines if line.name == "parabel/words")
    assert parabel.mean["P@5"] == pytest.approx(expected["P@5"], abs=1e-3)
    assert expected["P@5"] != evaluate(actual, unfiltered(corpus))["P@5"]


def featured(rng, truth):
    """A corpus of features alone, the most frequent label forbidden for some test points."""
    words = (truth @ (rng.random((12, 20)) < 0.2)).astype(np.float32) + 0.1

    def split(rows, filters=None):
        labels = csr_matrix(truth[rows].astype(np.float32))
        return Split(labels=labels, features=csr_matrix(words[rows]), filters=filters)

    most = int(truth[:60].sum(axis=0).argmax())
    forbidden = np.array([[row, most] for row in np.flatnonzero(truth[60:, most])])
    return Corpus(
        train=split(slice(0, 60)),
        test=split(slice(60, 90), forbidden),
        label_names=[str(label) for label in range(12)],
    )


def unfiltered(corpus):
    return corpus.with_splits(test=replace(corpus.test, filters=None))
