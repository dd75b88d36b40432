"""`EliasClassifier` is what scikit-learn takes for an estimator, with texts and many labels."""

import warnings

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix, issparse
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import estimator_checks

from elias import EliasClassifier
from elias.data.synthetic import synthetic_corpus
from elias.errors import ConfigError, DataError

QUICK = {
    "dim": 16,
    "epochs": 3,
    "device": "cpu",
    "settings": {"encoder.hidden_dim": 16, "stages.stage1.epochs": 1},
}


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def corpus():
    return synthetic_corpus(n_points=300, n_labels=30)


@pytest.fixture(scope="module")
def texts(corpus):
    return list(corpus.train.texts)


@pytest.fixture(scope="module")
def names(corpus):
    return [[corpus.label_names[i] for i in row.indices] for row in corpus.train.labels]


@pytest.fixture(scope="module")
def fitted(texts, names):
    return EliasClassifier(**QUICK).fit(texts, names)


@pytest.mark.parametrize(
    "check",
    [
        estimator_checks.check_no_attributes_set_in_init,
        estimator_checks.check_parameters_default_constructible,
        estimator_checks.check_get_params_invariance,
        estimator_checks.check_set_params,
        estimator_checks.check_estimator_cloneable,
        estimator_checks.check_estimator_repr,
        estimator_checks.check_do_not_raise_errors_in_init_or_set_params,
        estimator_checks.check_estimator_tags_renamed,
        estimator_checks.check_valid_tag_types,
    ],
    ids=lambda check: check.__name__,
)
def test_scikit_learns_own_checks_that_need_no_table_of_numbers_hold(check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check("EliasClassifier", EliasClassifier())


def test_fit_returns_itself_and_what_was_learned_ends_in_an_underscore(texts, corpus):
    numbers = [[10 * int(i) for i in row.indices] for row in corpus.train.labels]
    classifier = EliasClassifier(**QUICK)
    before = dict(vars(classifier))

    assert classifier.fit(texts, numbers) is classifier
    learned = set(vars(classifier)) - set(before)
    assert learned == {"model_", "classes_"}
    assert {name: getattr(classifier, name) for name in before} == before
    assert classifier.predict_topk(texts[:1], k=1)[0][0] % 10 == 0  # labels may be numbers


def test_an_unfitted_estimator_raises_an_error(texts):
    for method in ("predict", "predict_proba", "predict_topk"):
        with pytest.raises(NotFittedError):
            getattr(EliasClassifier(), method)(texts)


def test_decisions_and_probabilities_are_csr_over_the_classes(fitted, texts):
    decided, probable = fitted.predict(texts), fitted.predict_proba(texts)

    assert issparse(decided)
    assert decided.shape == probable.shape == (len(texts), len(fitted.classes_))
    assert set(decided.data) == {1}
    assert probable.min() >= 0
    assert probable.max() <= 1
    threshold = fitted.model_.threshold("f1")
    assert (probable.toarray() >= threshold).astype(int).tolist() == decided.toarray().tolist()
    assert fitted.classes_.tolist() == sorted(fitted.classes_)


def test_the_best_labels_are_names_in_order_of_probability(fitted, texts):
    best = fitted.predict_topk(texts[:5], k=3)

    probable = fitted.predict_proba(texts[:5]).toarray()
    column = {name: i for i, name in enumerate(fitted.classes_)}
    for row, labels in enumerate(best):
        values = [probable[row, column[label]] for label in labels]
        assert values == sorted(values, reverse=True)
        assert values[0] == probable[row].max()


def test_the_estimator_learns(fitted, texts, names, corpus):
    tested = [[corpus.label_names[i] for i in row.indices] for row in corpus.test.labels]

    assert fitted.score(texts, names) > 0.6
    assert fitted.score(corpus.test.texts, tested) > 0.3
    assert fitted.score(texts[:2], [["unknown"], []]) == 0.0


@pytest.mark.parametrize("kind", ["series", "array", "tuple", "frame"])
def test_texts_and_labels_come_in_any_sequence(kind, texts, names, fitted):
    def ragged(rows):
        array = np.empty(len(rows), dtype=object)
        array[:] = rows
        return array

    def frame(rows):
        return pd.DataFrame({"column": rows})

    kinds = {"series": pd.Series, "tuple": tuple, "frame": frame}
    as_texts, as_labels = kinds.get(kind, np.array), kinds.get(kind, ragged)

    classifier = EliasClassifier(**QUICK).fit(as_texts(texts), as_labels(names))

    assert classifier.predict_topk(as_texts(texts[:3])) == fitted.predict_topk(texts[:3])
    assert classifier.score(as_texts(texts), as_labels(names)) == fitted.score(texts, names)


@pytest.mark.parametrize("make", [csr_matrix, lambda m: csr_matrix(m).toarray()])
def test_labels_may_be_a_matrix_whose_columns_stay(make, corpus, texts):
    labels = make(corpus.train.labels)

    classifier = EliasClassifier(**QUICK).fit(texts, labels)

    assert classifier.classes_.tolist() == list(range(30))
    assert classifier.predict(texts).shape == corpus.train.labels.shape
    assert classifier.score(texts, labels) > 0.6


def test_a_clone_learns_the_same(fitted, texts, names):
    again = clone(fitted)
    assert not hasattr(again, "model_")

    assert again.fit(texts, names).predict_topk(texts[:5]) == fitted.predict_topk(texts[:5])


def test_parameters_become_the_configuration():
    config = EliasClassifier(
        dim=32, epochs=7, n_clusters=4, rerank=False, members=2, random_state=5
    ).config()

    assert config.encoder.dim == 32
    assert [stage.epochs for stage in config.stages] == [7, 7]
    assert config.index.n_clusters == 4
    assert not config.rerank.enabled
    assert config.ensemble.members == 2
    assert config.seed == 5
    assert EliasClassifier("minilm").config() == type(config)().with_encoder("minilm")
    preset = EliasClassifier(preset="small")
    assert preset.config() == type(config).preset("small")
    assert EliasClassifier(settings={"index.alpha": 3}).config().index.alpha == 3
    with pytest.raises(ConfigError, match=r"index\.alpa"):
        EliasClassifier(settings={"index.alpa": 3}).config()


def test_it_works_in_a_pipeline_on_texts_and_on_features(texts, names):
    lower = FunctionTransformer(lambda rows: [row.lower() for row in rows])
    on_texts = Pipeline([("lower", lower), ("elias", EliasClassifier(**QUICK))])
    on_features = make_pipeline(TfidfVectorizer(), EliasClassifier(**QUICK))

    assert on_texts.fit(texts, names).score(texts, names) > 0.6
    assert on_features.fit(texts, names).score(texts, names) > 0.5


@pytest.mark.parametrize("as_matrix", [False, True])
def test_it_is_cross_validated(as_matrix, texts, names, corpus):
    # scikit-learn's own check of y refuses a sparse one here, though not in a grid search
    labels = corpus.train.labels.toarray() if as_matrix else names

    scores = cross_val_score(EliasClassifier(**QUICK), texts, labels, cv=2, error_score="raise")

    assert len(scores) == 2
    assert scores.min() > 0.2


def test_a_grid_is_searched(texts, corpus):
    search = GridSearchCV(
        EliasClassifier(**QUICK), {"epochs": [1, 2]}, cv=2, error_score="raise"
    ).fit(texts, corpus.train.labels)

    assert search.best_params_["epochs"] in (1, 2)
    assert search.predict(texts).shape == (len(texts), 30)
    assert search.best_estimator_.model_.n_labels == 30


def test_the_threshold_is_a_parameter_like_any_other(fitted, texts):
    few = clone(fitted).set_params(threshold="precision=0.9")
    few.model_, few.classes_ = fitted.model_, fitted.classes_
    many = clone(fitted).set_params(threshold=0.01)
    many.model_, many.classes_ = fitted.model_, fitted.classes_

    assert few.predict(texts).nnz <= fitted.predict(texts).nnz <= many.predict(texts).nnz


def test_without_held_out_points_the_best_label_is_decided_for(texts, names):
    classifier = EliasClassifier(**QUICK, validation_size=0).fit(texts, names)

    assert classifier.predict(texts).getnnz(axis=1).tolist() == [1] * len(texts)
    assert classifier.predict_proba(texts).max() <= 1


@pytest.mark.parametrize(
    ("texts", "labels", "result"),
    [
        ("a text", [["a"]], "put it in a list"),
        (["a", None], [["a"], ["b"]], r"X\[1\] is NoneType"),
        (["a", "b"], ["x", "y"], r"y\[0\] is 'x'; give a list of labels: \['x'\]"),
        (["a", "b"], [["x"]], "2 texts, but y has labels for 1"),
        (["a", "b"], [[], []], "no text has a label"),
        (["a", "b"], [["x"], [1]], "cannot be sorted"),
        (["a"], None, "y is missing"),
    ],
)
def test_mistakes_are_named(texts, labels, result):
    with pytest.raises(DataError, match=result):
        EliasClassifier(**QUICK).fit(texts, labels)
