"""Labels scored by their texts: the formula of the documentation, worked out label by label."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias import LabelTable
from elias.model.batch_inference import embed_all
from elias.rerank import added_labels
from elias.rerank.added_labels import AddedLabels, label_vectors, offset_for_mean
from elias.text.vectorizer import Featurizer, ngrams_of, words_of
from untrained_model import TEXTS, untrained_model

NAMES = (("red herring", "kipper"), ("tin opener",), ("red tape",))
BACKGROUND = [[0.0, 0.1], [0.1, 0.2], [-0.1, 0.05]]
OFFSET = [0.0, -2.0, 0.5]
N_EXAMPLES = [0, 1, 6]
READ = ["a red herring and a kipper", "the tins are opened", "red, red tape", "wine law", ""]


@pytest.fixture(scope="module")
def model():
    return untrained_model()


@pytest.fixture(params=[None, ("red cod", "blue cod", "red tape")], ids=["own idf", "known idf"])
def added(request):
    vectors = np.float32([[1, 0, 0], [0, 1, 0], [0, 0.6, 0.8]])
    reference = request.param and Featurizer.fit(request.param, char_ngrams=(3, 4), min_count=1)
    labels, offset = np.array([7, 9, 4]), np.float32(OFFSET)
    return AddedLabels(
        labels, vectors, np.float32(BACKGROUND), np.array(N_EXAMPLES), offset, NAMES, reference
    )


def features(text):
    words = words_of(text)
    return {("word", word) for word in words} | {
        ("ngram", ngram) for word in words for ngram in ngrams_of(word, 3, 5)
    }


def slow_coverage(text, names, reference):
    """Return the largest share of a name's summed idf² that occurs in a text."""
    weights = {}
    if reference is None:
        terms = [name for synonyms in NAMES for name in synonyms]
        for feature in set().union(*map(features, terms)):
            count = sum(feature in features(term) for term in terms)
            weights[feature] = 1 + math.log((1 + len(terms)) / (1 + count))
    else:
        kinds = ["word"] * len(reference.words) + ["ngram"] * len(reference.ngrams)
        known = zip(kinds, [*reference.words, *reference.ngrams], strict=True)
        weights = dict(zip(known, reference.idf, strict=True))
    highest = max(weights.values())

    def total(some):
        return sum(weights.get(feature, highest) ** 2 for feature in some)

    shares = [total(features(name) & features(text)) / total(features(name)) for name in names]
    return max(shares)


def slow_probability(phi, text, z, background, coverage, offset, n_examples):
    cosine = sum(a * b for a, b in zip(phi, z, strict=True)) / math.hypot(*phi)
    s = (cosine - background[0]) / background[1]
    if text is None:
        logit = -7.65 + 0.988 * s
    else:
        logit = -7.77 + 0.884 * s + max(0, 5.90 - 0.681 * s) * coverage
    logit += (0.07 * s - 0.05) * math.log(1 + n_examples)
    return 1 / (1 + math.exp(-logit - offset))


def test_coverage_is_the_largest_share_of_a_name_that_the_text_has(added):
    expected = [[slow_coverage(text, names, added.reference) for names in NAMES] for text in READ]

    coverage = added.coverage(READ)

    np.testing.assert_allclose(coverage, expected, rtol=1e-5, atol=1e-7)
    assert coverage[0, 0] == pytest.approx(1)  # both names
    assert coverage[2, 2] == pytest.approx(1)
    assert 0 < coverage[1, 1] < 1  # only n-grams
    assert not coverage[3:].any()


@pytest.mark.parametrize("texts", [READ, None], ids=["with texts", "vectors alone"])
def test_probabilities_follow_the_documented_formula(added, texts):
    phi = np.random.default_rng(0).normal(size=(len(READ), 3)).astype(np.float32)
    coverage = added.coverage(READ)

    probabilities = added.probabilities(phi, texts)

    for i, j in np.ndindex(probabilities.shape):
        expected = slow_probability(
            phi[i].tolist(),
            texts,
            added.vectors[j].tolist(),
            BACKGROUND[j],
            coverage[i, j],
            OFFSET[j],
            N_EXAMPLES[j],
        )
        assert probabilities[i, j] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("mean", [1e-4, 0.06, 0.5])
def test_an_offset_gives_log_odds_the_mean_probability(mean):
    log_odds = np.random.default_rng(2).normal(scale=5, size=(40, 3)).astype(np.float32)

    offset = offset_for_mean(log_odds, mean)

    assert (1 / (1 + np.exp(-log_odds - offset))).mean() == pytest.approx(mean, rel=1e-2)


def test_log_odds_move_half_of_the_way_to_the_expected_number_of_labels(added):
    phi = np.random.default_rng(2).normal(size=(len(READ), 3)).astype(np.float32)
    before = added.log_odds(phi, READ)

    after = added.expecting(0.06, phi, READ).log_odds(phi, READ)

    expected = before + offset_for_mean(before, 0.06 / 3) / 2
    np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-4)


def test_a_name_in_the_text_never_lowers_the_probability(added):
    near = added.vectors * 3  # so similar that the weight of the coverage would be negative
    names = [synonyms[0] for synonyms in NAMES]

    with_names, without = (added.probabilities(near, texts) for texts in (names, [""] * 3))

    assert (np.diag(with_names) >= np.diag(without)).all()


def test_the_best_labels_are_those_of_a_full_sort(added, monkeypatch):
    monkeypatch.setattr(added_labels, "_CELLS", 8)  # several blocks of texts
    phi = np.random.default_rng(1).normal(size=(len(READ), 3)).astype(np.float32)
    expected = added.probabilities(phi, READ)

    ids, probabilities = added.best(phi, READ, 2)

    for row, ranked in enumerate(expected):
        order = np.argsort(-ranked)[:2]
        assert set(ids[row]) == set(added.labels[order])
        np.testing.assert_allclose(sorted(probabilities[row]), sorted(ranked[order]), rtol=1e-5)


def test_blocked_labels_leave_empty_slots(added):
    blocked = np.isin(np.arange(10), [7, 4])

    ids, probabilities = added.best(np.eye(3, dtype=np.float32), None, 3, blocked)

    assert [sorted(row) for row in ids.tolist()] == [[-1, -1, 9]] * 3
    assert ((probabilities > 0) == (ids == 9)).all()


def test_rows_are_joined_and_relabelled(added):
    other = replace(added, labels=np.array([1, 2, 3]))
    new_ids = np.full(10, -1)
    new_ids[[7, 2]] = 5, 6

    chosen = (added + other).relabel(new_ids)

    assert chosen.labels.tolist() == [5, 6]
    assert chosen.vectors.tolist() == added.vectors[:2].tolist()
    assert added.relabel(np.full(10, -1)) is None


def test_a_label_vector_is_its_text_and_half_of_similar_classifiers_and_of_examples(model):
    labels = LabelTable(tuple(f"label {i}" for i in range(40)))
    new = LabelTable(("red cod", "blue tape"))
    shows = csr_matrix(np.float32([[1, 0], [0, 1], [1, 0]]))
    seen = np.arange(40) < 30

    parts = label_vectors(model.model, labels, new, TEXTS, shows, seen=seen)
    vectors, background, counts, offset = parts

    def unit(rows):
        return rows / np.linalg.norm(rows, axis=-1, keepdims=True)

    def phi(texts):
        encoder = model.model.encoder
        return unit(embed_all(encoder, encoder.tokenize(texts)))

    classifiers = unit(model.model.labels.weight.detach().numpy()[:30])
    texts, examples = phi(new.texts()), phi(TEXTS)
    for i, text in enumerate(texts):
        nearest = sorted(range(30), key=lambda j, text=text: -(text @ classifiers[j]))[:10]
        shown = examples[shows.toarray()[:, i] > 0]
        z = text + 0.5 * unit(classifiers[nearest].mean(axis=0))
        z += 0.5 * len(shown) * unit(shown.sum(axis=0))
        np.testing.assert_allclose(vectors[i], unit(z), rtol=1e-4, atol=1e-6)
    assert counts.tolist() == [2, 1]
    assert offset.tolist() == [0, 0]
    assert (background[:, 1] > 0).all()


def test_scores_of_the_labels_of_the_index_stay_equal_to_the_bit(model):
    larger = model.add_labels(["red herring", "red cod"])

    before, after = model.predict(TEXTS, top_k=6), larger.predict(TEXTS, top_k=8)

    for old, new in zip(before, after, strict=True):
        scores = dict(zip(new.ids.tolist(), new.scores.tolist(), strict=True))
        assert {40, 41} <= scores.keys()
        assert (
            dict(zip(old.ids.tolist(), old.scores.tolist(), strict=True)).items() <= scores.items()
        )
