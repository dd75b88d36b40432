from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias.config import RerankConfig, ResolvedRerank
from elias.errors import DataError
from elias.rerank.sparse_ranker import RankerFeatures, unit_embedding
from elias.text.vectorizer import SplitTexts

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


def test_held_out_texts_get_the_features_that_a_vocabulary_of_the_training_texts_gives():
    texts = ["red cod pie", "red cod soup", "green tea", "red tea?", "blue soup!", "42"]
    config = ResolvedRerank(enabled=True, char_ngrams=(2, 4))
    features = RankerFeatures.fit(SplitTexts(texts, symbols=True), config)
    whole = features.featurizer
    seen = np.unique(features.transform(texts[:3]).indices)
    n_words = len(whole.words)
    own = replace(
        whole,
        words=tuple(whole.words[i] for i in seen if i < n_words),
        ngrams=tuple(whole.ngrams[i - n_words] for i in seen if i >= n_words),
        idf=whole.idf[seen],
    )

    actual = features.as_new(features.transform(texts[3:]), features.transform(texts[:3]))

    expected = own.transform(texts[3:], unit=True).toarray()
    np.testing.assert_allclose(actual[:, seen].toarray(), expected, rtol=1e-5)
    assert actual.nnz == np.count_nonzero(expected)
    assert (lengths(actual) > 0).tolist() == [True, True, False]


def test_given_features_of_held_out_points_are_kept():
    given = csr_matrix(np.float32([[0.6, 0.8, 0], [0, 0, 1]]))
    features = RankerFeatures.fit(given, ResolvedRerank(enabled=True))

    assert (features.as_new(given[1:], given[:1]) != given[1:]).nnz == 0


def test_an_embedding_is_scaled_to_length_one():
    actual = unit_embedding(np.float32([[3, 4], [0, 0]]))

    np.testing.assert_allclose(actual, [[0.6, 0.8], [0, 0]])
