"""Explanations of a model that was not trained: it still has paths."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from elias import Elias, EliasConfig, train
from elias.config import EncoderConfig, IndexConfig, RerankConfig
from elias.data.synthetic import synthetic_corpus
from elias.errors import DataError
from elias.inference import explain
from elias.model.elias import EliasModel
from elias.model.encoder import BagEncoder
from elias.model.graph import LabelGraph
from elias.rerank.sparse_ranker import RankerFeatures, SparseRanker
from elias.text.vectorizer import Featurizer

TEXTS = ["red cod", "blue cod", "red tape"]
N_LABELS, N_CLUSTERS, N_EDGES = 12, 4, 6


def make(n_clusters=N_CLUSTERS, *, learned=True, beta=2.0, features=False):
    torch.manual_seed(0)
    featurizer = None if features else Featurizer.fit(TEXTS, char_ngrams=(0, 0), min_count=1)
    width = 5 if featurizer is None else featurizer.n_features
    encoder = BagEncoder(EncoderConfig(dim=8, hidden_dim=8), featurizer, width)
    n_edges = N_LABELS if n_clusters == 1 else N_EDGES
    edges = torch.stack([torch.randperm(N_LABELS)[:n_edges] for _ in range(n_clusters)])
    logits = torch.randn(edges.shape) if learned else None
    graph = LabelGraph(edges, N_LABELS, beta, edge_logits=logits)
    index = IndexConfig(
        n_clusters=n_clusters,
        edges_per_cluster=n_edges,
        beam_size=min(3, n_clusters),
        shortlist_size=N_LABELS,
        alpha=1.5,
        beta=beta,
    )
    names = [f"label {i}" for i in range(N_LABELS)]
    config = EliasConfig(index=index).resolve(len(TEXTS), N_LABELS)
    return Elias(EliasModel(encoder, graph, alpha=1.5), config, names)


@pytest.mark.parametrize("n_clusters", [1, N_CLUSTERS])
@pytest.mark.parametrize("learned", [False, True])
def test_the_labels_explained_are_those_predicted_with_their_scores(n_clusters, learned):
    model = make(n_clusters, learned=learned)
    predicted = model.predict(TEXTS, top_k=4)

    explained = model.explain(TEXTS, top_k=4)

    for ranking, explanation in zip(predicted, explained, strict=True):
        assert [label.id for label in explanation.labels] == ranking.ids.tolist()
        assert [label.label for label in explanation.labels] == ranking.labels
        assert [label.score for label in explanation.labels] == ranking.scores.tolist()
        assert [label.p for label in explanation.labels] == ranking.scores.tolist()


def test_only_the_best_path_of_a_label_has_won():
    labels = [label for one in make().explain(TEXTS, paths=5) for label in one.labels]

    assert all([path.won for path in label.paths].index(True) == 0 for label in labels)
    assert all(sum(path.won for path in label.paths) == 1 for label in labels)
    assert max(label.n_paths for label in labels) > 1


def test_fewer_paths_are_shown_than_were_found_where_fewer_are_wanted():
    labels = [label for one in make().explain(TEXTS, paths=1) for label in one.labels]

    assert {len(label.paths) for label in labels} == {1}
    assert max(label.n_paths for label in labels) > 1


def test_every_cluster_on_a_path_is_described():
    for explanation in make().explain(TEXTS):
        used = {path.cluster for label in explanation.labels for path in label.paths}

        assert set(explanation.clusters) == used
        assert all(len(names) == 5 for names in explanation.clusters.values())


def test_an_explanation_is_plain_json():
    explanation = make().explain(TEXTS[:1], top_k=2)[0]

    tree = json.loads(json.dumps(explanation.to_dict()))

    assert tree["text"] == TEXTS[0]
    assert [label["id"] for label in tree["labels"]] == [one.id for one in explanation.labels]
    assert tree["labels"][0]["paths"][0]["won"] is True
    assert tree["labels"][0]["ranker_score"] is None
    assert {one["id"] for one in tree["clusters"]} == set(explanation.clusters)


def test_features_are_explained_without_a_text():
    points = csr_matrix([[1.0, 0, 0, 2, 0], [0, 1, 0, 0, 0]])

    explained = make(features=True).explain(points, top_k=2)

    assert [one.text for one in explained] == [None, None]
    assert all(len(one.labels) == 2 for one in explained)


def test_no_texts_give_no_explanations():
    assert make().explain([]) == []


@pytest.mark.parametrize("paths", [0, -1, 1.5])
def test_a_number_of_paths_that_makes_no_sense_is_refused(paths):
    with pytest.raises(DataError, match=r"^paths must be a whole number >= 1"):
        make().explain(TEXTS, paths=paths)


def test_a_single_text_gives_one_explanation():
    assert make().explain("red cod", top_k=2) == make().explain(["red cod"], top_k=2)[0]


def test_the_effect_of_a_word_is_the_score_that_the_text_loses_without_it():
    model, text = make(), "red, red cod"

    (explanation,) = model.explain([text], top_k=3, words=True)

    for label in explanation.labels:
        assert [text[w.start : w.end] for w in label.words] == ["red", ",", "red", "cod"]
        for word in label.words:
            variant = f"{text[: word.start]} {text[word.end :]}"
            ranking = model.predict([variant], top_k=N_LABELS)[0]
            without = dict(zip(ranking.ids.tolist(), ranking.scores.tolist(), strict=True))
            assert word.effect == pytest.approx(label.score - without[label.id], abs=1e-6)
            assert word.probability is None
        assert label.words[1].effect == 0  # the encoder does not read commas


def test_words_of_a_long_text_are_left_out_in_groups(monkeypatch):
    monkeypatch.setattr(explain, "MAX_PIECES", 3)
    text = "red cod blue cod red tape cod"

    (words,) = explain.word_effects(make(), text, [0])

    assert [text[w.start : w.end] for w in words] == ["red cod blue", "cod red tape", "cod"]


def test_a_text_without_words_has_no_effects():
    (explanation,) = make().explain([" "], top_k=1, words=True)

    assert explanation.labels[0].words == ()


def test_words_of_features_are_refused():
    with pytest.raises(DataError, match=r"^word effects need texts"):
        make(features=True).explain(csr_matrix((1, 5)), words=True)


def test_the_weight_of_a_character_ngram_is_divided_among_its_words():
    texts = ["fishing fish", "fisher", "wine", "winery"]
    config = RerankConfig(word_ngrams=0, char_ngrams=(3, 3))
    features = RankerFeatures.fit(texts, config)
    ngrams = features.featurizer.ngrams
    places = [0, 0], [ngrams.index("<fi"), ngrams.index("sh>")]
    weights = csr_matrix((np.float32([4, 2]), places), shape=(1, len(ngrams)))
    ranker = SparseRanker.from_label_rows(weights, np.zeros(1, np.float32), 0)
    psi = features.transform(["fishing fish"]).toarray()[0]

    reranker = SimpleNamespace(features=features, ranker=ranker)
    (terms,) = explain.ranker_terms(reranker, "fishing fish", [0])

    start, end = 4 * psi[ngrams.index("<fi")], 2 * psi[ngrams.index("sh>")]
    assert {one.term: one.weight for one in terms} == pytest.approx(
        {"fish": start / 2 + end, "fishing": start / 2}
    )


@pytest.fixture(scope="module")
def trained():
    """A model whose ranker reads embeddings, and test texts."""
    corpus = synthetic_corpus(n_points=400, n_labels=40)
    changes = {
        "encoder.dim": 16,
        "index.kind": "graph",
        "rerank.candidates": 3,
        "eval.drop_unhelpful": False,
    }
    config = EliasConfig().override({**changes, "rerank.embedding": "encoder"})
    return train(corpus, config, device="cpu"), corpus.test.texts[:40]


def test_texts_are_encoded_once(trained):
    model, texts = trained
    batches = []
    with model.model.encoder.register_forward_hook(lambda *_: batches.append(1)):
        model.explain(texts)

    assert len(batches) == 1


def test_a_label_that_only_its_name_proposed_has_no_path(trained):
    model, texts = trained

    explained = model.explain(texts, top_k=3)

    labels = [label for one in explained for label in one.labels]
    by_name = [label for label in labels if label.p == 0]
    assert 0 < len(by_name) < len(labels)
    assert all(label.n_paths == 0 and label.paths == () for label in by_name)
    for label in labels:
        assert label.score == pytest.approx(label.calibrated_score + label.p * label.ranker_score)
