"""Training does expensive work once: searches of a split, and words of a text per vocabulary."""

from collections import Counter
from dataclasses import replace

import pytest

from elias import EliasConfig, evaluate, f1_metrics, train
from elias.config import IndexConfig, StageConfig
from elias.data.synthetic import synthetic_corpus
from elias.inference import predict
from elias.rerank import added_labels
from elias.text import vectorizer
from elias.training import trainer
from elias.training.trainer import Trainer
from tiny_bert import save_tiny_bert

pytestmark = pytest.mark.slow

SMALL = {
    "index.kind": "graph",
    "encoder.dim": 16,
    "stages.stage1.epochs": 1,
    "stages.stage2.epochs": 2,
}


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no tokens of earlier tests
    return synthetic_corpus(n_points=300, n_labels=30, n_validation=40)


@pytest.fixture
def searches(monkeypatch):
    """The number of texts of each search."""
    sizes, search = [], predict.rank_all

    def counted(model, tokens, *args, **options):
        sizes.append(len(tokens))
        return search(model, tokens, *args, **options)

    monkeypatch.setattr(predict, "rank_all", counted)
    return sizes


@pytest.fixture
def embedded(monkeypatch):
    """The number of texts of each pass of an encoder without a search."""
    sizes, embed_all = [], predict.embed_all

    def counted(encoder, tokens):
        sizes.append(len(tokens))
        return embed_all(encoder, tokens)

    monkeypatch.setattr(predict, "embed_all", counted)
    monkeypatch.setattr(trainer, "embed_all", counted)
    return sizes


@pytest.fixture
def scores(monkeypatch):
    """The validation scores of the next epochs."""
    scores, validate = [], Trainer._validate

    def scored(self, stage, model):
        return validate(self, stage, model) | {self.config.eval.select_by: scores.pop(0)}

    monkeypatch.setattr(Trainer, "_validate", scored)
    return scores


@pytest.mark.parametrize("rerank", [True, False])
@pytest.mark.parametrize("best_epoch", [1, 2])
def test_each_split_is_searched_once_with_the_best_weights(
    corpus, searches, scores, rerank, best_epoch
):
    scores += [1.0, 3.0 - best_epoch, best_epoch]
    train(corpus, EliasConfig().override({**SMALL, "rerank.enabled": rerank}), device="cpu")

    n_test, again = len(corpus.test), [40] * (best_epoch == 1)
    assert searches == [40, n_test, 40, 40, *again, n_test, *[300] * rerank]


def test_compact_labels_are_not_searched_again_in_float32(corpus, searches):
    index = IndexConfig(kind="all", label_storage="compact")
    stages = (StageConfig(name="stage1", epochs=1),)
    config = EliasConfig(index=index, stages=stages).override({"encoder.dim": 16})

    train(corpus, config, device="cpu")

    n_rerank = [300] * config.resolve(300, 30).rerank.enabled
    assert searches == [40, len(corpus.test), *n_rerank]


def test_the_members_of_an_ensemble_are_not_searched_again_for_their_mean(corpus, searches, scores):
    scores += [1, 1, 2] * 2
    train(corpus, EliasConfig().override({**SMALL, "ensemble.members": 2}), device="cpu")

    assert searches == 2 * [40, len(corpus.test), 40, 40, len(corpus.test), 300]


def test_each_text_is_split_into_words_once_per_vocabulary(corpus, monkeypatch):
    splits, words_of = Counter(), vectorizer.words_of

    def counted(text, **options):
        splits[text] += 1
        return words_of(text, **options)

    monkeypatch.setattr(vectorizer, "words_of", counted)

    train(corpus, EliasConfig().override(SMALL), device="cpu")

    for split in (corpus.train, corpus.validation, corpus.test):
        counts = {splits[text] for text, n in Counter(split.texts).items() if n == 1}
        assert counts == {2}  # the encoder's vocabulary (with the bag of words), the ranker's


@pytest.mark.parametrize("embedding", ["none", "encoder"])
def test_the_ranker_and_added_labels_use_the_embeddings_of_the_search(corpus, embedded, embedding):
    config = EliasConfig().override({**SMALL, "rerank.embedding": embedding})

    model = train(without_points(corpus), config, device="cpu")

    assert model.added is not None
    assert embedded == []


def test_each_encoder_embeds_the_points_once_if_the_ranker_uses_another(corpus, embedded, tmp_path):
    bert = {"encoder.model": save_tiny_bert(tmp_path / "bert"), "encoder.max_length": 8}
    config = EliasConfig().override({**SMALL, **bert, "rerank.embedding": "first"})

    model = train(without_points(corpus), config, device="cpu")

    assert model.added is not None
    by_first, by_trained = [300, 40, len(corpus.test)], [40, len(corpus.test)]
    assert Counter(embedded) == Counter([*by_first, *by_trained])


def test_labels_without_points_are_scored_once_with_and_once_without_their_names(
    corpus, monkeypatch
):
    best, calls = added_labels.AddedLabels.best, Counter()

    def counted(self, embedding, texts, *args):
        calls[len(embedding), texts is not None] += 1
        return best(self, embedding, texts, *args)

    monkeypatch.setattr(added_labels.AddedLabels, "best", counted)

    model = train(without_points(corpus), EliasConfig().override(SMALL), device="cpu")

    assert len(model.components) > 2
    n_texts = 40, len(corpus.test)
    assert calls == {(n, named): 1 for n in n_texts for named in (True, False)}


def without_points(corpus):
    """Return the corpus without the training points of every third label."""
    labels = corpus.train.labels.tolil()
    labels[:, ::3] = 0
    return replace(corpus, train=replace(corpus.train, labels=labels.tocsr()))


def test_training_measures_what_the_saved_model_predicts_for_labels_without_points(corpus):
    seen = without_points(corpus)

    model = train(seen, EliasConfig().override(SMALL), device="cpu")

    assert model.added is not None
    predictions = model.predict_split(seen.test, top_k=100)
    measured = evaluate(predictions, seen)
    measured |= f1_metrics(model.assign(predictions), seen.test.labels)
    reported = model.metadata["metrics"][model.components[-1]]["test"]
    reported |= model.metadata["probabilities"]["at_threshold"]["test"]
    for name in ("P@1", "P@5", "R@10", "micro-precision", "micro-recall"):
        assert measured[name] == pytest.approx(reported[name], abs=0.01), name
