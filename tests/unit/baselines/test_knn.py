import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias import evaluate
from elias.baselines import NearestNeighbours
from elias.data.corpus import Corpus, Split
from elias.data.synthetic import synthetic_corpus
from elias.errors import DataError

TEXTS = ["red cod", "red cod fishing", "blue tape", "blue tape measure"]
LABELS = csr_matrix(np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1], [0, 0, 1]], dtype=np.float32))


@pytest.fixture
def corpus():
    return Corpus(train=Split(labels=LABELS, texts=TEXTS), label_names=["fish", "work", "office"])


def test_the_labels_of_similar_texts_come_first(corpus):
    actual = NearestNeighbours(corpus).predict(["a cod, red", "tape"])

    assert actual[0].labels == ["fish", "work"]
    assert actual[1].labels == ["office"]
    assert actual[0].scores[0] > actual[0].scores[1]


def test_a_text_without_a_known_word_has_no_neighbour(corpus):
    actual = NearestNeighbours(corpus).predict(["zebra", ""])

    assert [ranking.labels for ranking in actual] == [[], []]


def test_no_texts_give_no_predictions(corpus):
    assert len(NearestNeighbours(corpus).predict([])) == 0


def test_neighbours_beyond_the_kth_do_not_count(corpus):
    actual = NearestNeighbours(corpus, k=1).predict(["red cod"])

    assert actual[0].labels == ["fish"]
    assert actual[0].scores[0] == pytest.approx(1)


def test_pairs_that_a_filter_forbids_are_not_predicted(corpus):
    split = Split(labels=LABELS[:1], texts=["red cod"], filters=np.array([[0, 0]]))

    actual = NearestNeighbours(corpus).predict_split(split, top_k=1)

    assert actual[0].labels == ["work"]


def test_neighbours_beat_chance_by_far():
    corpus = synthetic_corpus(n_points=300, n_labels=30)

    actual = NearestNeighbours(corpus).predict_split(corpus.test)

    assert evaluate(actual, corpus)["P@1"] > 50


@pytest.mark.parametrize(
    ("texts", "problem"), [("red cod", "a list of texts"), (csr_matrix((1, 4)), "a list of texts")]
)
def test_inputs_other_than_a_list_of_texts_are_refused(corpus, texts, problem):
    with pytest.raises(DataError, match=problem):
        NearestNeighbours(corpus).predict(texts)


def test_features_of_another_width_are_refused():
    train = Split(labels=LABELS, features=csr_matrix(np.eye(4, dtype=np.float32)))
    neighbours = NearestNeighbours(Corpus(train=train, label_names=["a", "b", "c"]))

    with pytest.raises(DataError, match="a CSR matrix with 4 columns"):
        neighbours.predict(csr_matrix((2, 5)))


def test_no_neighbours_are_refused(corpus):
    with pytest.raises(DataError, match="k must be a whole number >= 1, not 0"):
        NearestNeighbours(corpus, k=0)
