"""Training with few labels: every label is scored, and unusual corpora train too."""

import numpy as np
import pytest

from elias import EliasConfig, train
from elias.data.synthetic import synthetic_corpus
from elias.estimator import EliasClassifier
from elias.rerank.calibration import MIN_POINTS
from elias.rerank.reranker import FEW_POWERS, Reranker

SMALL = {"encoder.dim": 16, "encoder.hidden_dim": 16, "rerank.trees": 2}


@pytest.fixture(scope="module")
def trained():
    corpus = synthetic_corpus(n_points=300, n_labels=8)
    return corpus, train(corpus, EliasConfig().override(SMALL), device="cpu")


def test_few_labels_are_all_scored(trained):
    _, model = trained

    assert model.config.index.kind == "all"
    assert [stage.name for stage in model.config.stages] == ["one-vs-all"]


def test_the_ranker_of_few_labels_trains_on_the_held_out_points_too(trained):
    corpus, model = trained

    assert model.reranker is not None
    assert model.reranker.refitted
    assert model.reranker.sharpness in FEW_POWERS
    assert model.config.eval.validation_size == len(corpus.train) // 5
    # measured by rankers that have not seen the held-out points
    assert model.metadata["metrics"]["rerank"]["validation"]["P@1"] < 100


def test_the_ranker_of_few_labels_is_kept_if_few_points_are_held_out():
    corpus = synthetic_corpus(n_points=40, n_labels=4)

    model = train(corpus, EliasConfig().override(SMALL), device="cpu")

    assert model.config.eval.validation_size < MIN_POINTS
    assert model.reranker is not None
    assert model.reranker.refitted
    assert model.reranker.sharpness == FEW_POWERS[0]


def test_held_out_points_decide_with_the_features_that_new_texts_have(monkeypatch):
    """Words that only held-out texts have are left out, as unknown words of new texts are."""
    given = {}

    def fit(*arguments, **options):
        given.update(options)
        return original(*arguments, **options)

    original = Reranker.fit
    monkeypatch.setattr(Reranker, "fit", fit)
    rng = np.random.default_rng(0)
    texts = [f"{'good' if i % 2 else 'bad'} own{i}" for i in rng.permutation(150)]
    labels = [["yes"] if "good" in text else ["no"] for text in texts]

    EliasClassifier(settings=SMALL | {"rerank.char_ngrams": (0, 0)}, device="cpu").fit(
        texts, labels
    )

    _, psi, _ = given["validation"]
    assert np.diff(psi.indptr).max() == 1
    assert np.diff(given["refit_psi"].indptr).max() == 3


def words(rng, label):
    """Return a text of random words, some of which name the label."""
    return " ".join([f"{label}{rng.integers(3)}" for _ in range(3)] + [f"w{rng.integers(40)}"] * 3)


CORPORA = {
    "90% with one label": lambda i: ["common"] if i % 10 else ["rare"],
    "labels with one point": lambda i: ["a"] if i > 4 else [f"single{i}"],
    "one label": lambda _: ["only"],
    "points without labels": lambda i: [] if i % 2 else ["a", "b"],
}


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("n_points", [30, 150])
def test_an_unusual_corpus_trains_and_predicts(name, n_points):
    rng = np.random.default_rng(0)
    labels = [CORPORA[name](i) for i in range(n_points)]
    texts = [words(rng, (row or ["none"])[0]) for row in labels]
    texts[0], texts[1] = "", "long " * 20_000
    classifier = EliasClassifier(settings=SMALL, device="cpu")

    predicted = classifier.fit(texts, labels).predict(["common0 common1", ""])

    assert predicted.shape == (2, len(classifier.classes_))
