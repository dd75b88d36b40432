import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias.config import RerankConfig, ResolvedRerank
from elias.errors import DataError
from elias.rerank.sparse_ranker import RankerFeatures, unit_embedding

TEXTS = ["red cod pie", "red cod soup", "green tea"]


def lengths(matrix):
    return np.sqrt(matrix.multiply(matrix).sum(axis=1)).A1


def test_rows_have_length_one_and_words_weigh_as_much_as_ngrams():
    features = RankerFeatures.fit(TEXTS, ResolvedRerank(enabled=True))

    actual = features.transform(TEXTS)

    np.testing.assert_allclose(lengths(actual), 1, rtol=1e-6)
    n_words = len(features.featurizer.words)
    np.testing.assert_allclose(lengths(actual[:, :n_words]), np.sqrt(0.5), rtol=1e-6)
    assert actual.dtype == np.float32


def test_the_vocabulary_holds_the_configured_terms():
    config = RerankConfig(word_ngrams=3, char_ngrams=(2, 3))

    features = RankerFeatures.fit(TEXTS, config)

    assert {"red", "red cod", "red cod pie"} <= set(features.featurizer.words)
    assert {len(ngram) for ngram in features.featurizer.ngrams} == {2, 3}


def test_given_features_pass_through_at_length_one():
    given = csr_matrix(np.float32([[3, 4, 0], [0, 0, 0]]))

    features = RankerFeatures.fit(given, ResolvedRerank(enabled=True))

    assert features.featurizer is None
    np.testing.assert_allclose(features.transform(given).toarray(), [[0.6, 0.8, 0], [0, 0, 0]])


def test_a_ranker_of_the_embedding_alone_has_no_sparse_features():
    config = RerankConfig(word_ngrams=0, char_ngrams=(0, 0), embedding="encoder")

    features = RankerFeatures.fit(TEXTS, config)

    assert features.transform(TEXTS).shape == (3, 0)


def test_texts_without_a_word_are_refused():
    with pytest.raises(DataError, match="the 2 training texts contain no word or n-gram"):
        RankerFeatures.fit(["?", ""], ResolvedRerank(enabled=True))


def test_an_embedding_is_scaled_to_length_one():
    actual = unit_embedding(np.float32([[3, 4], [0, 0]]))

    np.testing.assert_allclose(actual, [[0.6, 0.8], [0, 0]])
