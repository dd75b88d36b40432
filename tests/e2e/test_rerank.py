"""The ranker and the calibration as parts of a trained model."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModel

from elias import Elias, EliasConfig, train
from elias.data.synthetic import synthetic_corpus
from elias.errors import ConfigError, ModelError
from elias.inference.explain import ranker_terms
from tiny_bert import save_tiny_bert

SMALL = {
    "encoder.dim": 16,
    "encoder.hidden_dim": 16,
    "index.n_clusters": 8,
    "index.edges_per_cluster": 24,
    "index.beam_size": 6,
    "stages.stage1.epochs": 1,
    "stages.stage1.score_all": False,
    "eval.drop_unhelpful": False,
    "stages.stage2.epochs": 1,
    "rerank.candidates": 10,
    "rerank.char_ngrams": [3, 3],
    "rerank.trees": 2,
    "eval.validation_size": 60,
}


@pytest.fixture(scope="module")
def corpus():
    return synthetic_corpus(n_points=500, n_labels=60, seed=5)


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "reranked"
    train(corpus, EliasConfig().override(SMALL), out=folder, device="cpu")
    return folder


@pytest.fixture(scope="module")
def model(run):
    return Elias.from_pretrained(run, device="cpu")


def test_components_rank_the_same_candidates_by_their_own_scores(model, corpus):
    """p·q and the calibrated score, computed label by label from what `explain` tells."""
    texts = list(corpus.test.texts[:15])
    searched = model.predict(texts, top_k=10, component="stage2")
    by_product = model.predict(texts, top_k=10, component="rerank")
    final = model.predict(texts, top_k=10)

    for row, explained in enumerate(model.explain(texts, top_k=10)):
        result = {label.id: label for label in explained.labels}
        assert set(searched[row].ids.tolist()) == set(by_product[row].ids.tolist())
        assert set(result) == set(final[row].ids.tolist())  # some may be proposed by their names
        for label_id, score in zip(by_product[row].ids, by_product[row].scores, strict=True):
            if label_id not in result:
                continue
            label = result[label_id]
            assert score == pytest.approx(label.p * label.ranker_score, rel=1e-4, abs=1e-12)
        for label_id, score in zip(final[row].ids, final[row].scores, strict=True):
            label = result[label_id]
            mixture = label.calibrated_score + label.p * label.ranker_score
            assert score == pytest.approx(mixture, rel=1e-4, abs=1e-12)
        assert (np.diff(final[row].scores) <= 0).all()


def test_labels_after_the_candidates_keep_the_order_of_the_model(model, corpus):
    texts = list(corpus.test.texts[:15])
    searched = model.predict(texts, top_k=25, component="stage2")
    final = model.predict(texts, top_k=25, component="calibrate")  # names would propose others

    for row in range(len(texts)):
        assert final[row].ids[10:].tolist() == searched[row].ids[10:].tolist()
        assert set(final[row].ids[:10]) == set(searched[row].ids[:10])
        assert final[row].scores[10] < final[row].scores[9]


def test_fewer_labels_than_candidates_may_be_asked_for(model, corpus):
    texts = list(corpus.test.texts[:15])

    few = model.predict(texts, top_k=3)

    np.testing.assert_array_equal(few.ids, model.predict(texts, top_k=10).ids[:, :3])


def test_one_text_is_ranked_as_among_many(model, corpus):
    texts = list(corpus.test.texts[:15])
    together = model.predict(texts)

    for row, text in enumerate(texts):
        np.testing.assert_allclose(
            model.predict([text])[0].scores, together[row].scores, rtol=1e-4, atol=1e-9
        )


def test_excluded_labels_are_not_predicted(model, corpus):
    texts = list(corpus.test.texts[:15])
    kept_off = model.predict(texts, top_k=1).ids[:, 0].tolist()

    actual = model.predict(texts, without=kept_off)

    assert not set(kept_off) & set(actual.ids.ravel().tolist())


def test_the_terms_of_a_label_add_up_to_the_margin_of_the_ranker(model, corpus):
    text = corpus.test.texts[0]
    reranker = model.reranker
    ids = model.predict([text], top_k=4).ids

    terms = ranker_terms(reranker, text, ids[0].tolist(), count=10_000)

    margins = reranker.ranker.score(reranker.features.transform([text]), None, ids)[0]
    for label, found, margin in zip(ids[0], terms, margins, strict=True):
        total = reranker.ranker.biases[label] + sum(one.weight for one in found)
        assert total == pytest.approx(margin, abs=1e-5)
        assert all(one.term in text.casefold() for one in found)


def test_each_component_is_measured_and_recorded(run, model, corpus):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    recorded = {line["stage"]: line for line in lines if line["event"] == "stage"}

    assert list(recorded) == ["stage1", "stage2", "rerank", "calibrate", "names"]
    for component in ("stage2", "rerank", "calibrate", "names"):
        measured = model.evaluate(corpus, component=component)
        for metric in ("P@1", "P@5", "R@10"):
            assert recorded[component]["test"][metric] == pytest.approx(measured[metric], abs=1e-4)
    assert recorded["rerank"]["test"]["P@1"] > recorded["stage2"]["test"]["P@1"]


def test_a_run_repeats_bit_for_bit(model, corpus):
    again = train(corpus, EliasConfig().override(SMALL), device="cpu")

    texts = list(corpus.test.texts[:15])
    np.testing.assert_array_equal(again.predict(texts).scores, model.predict(texts).scores)


def test_without_held_out_points_there_is_no_calibration(corpus):
    config = EliasConfig().override(SMALL | {"eval.validation_size": 0})

    assert train(corpus, config, device="cpu").components == ("stage2", "rerank")


def test_no_ranker_is_trained_if_disabled(corpus):
    config = EliasConfig().override(SMALL | {"rerank.enabled": False})

    assert train(corpus, config, device="cpu").components == ("stage2",)


def test_the_ranker_can_read_the_embedding(corpus):
    config = EliasConfig().override(SMALL | {"rerank.embedding": "encoder"})
    model = train(corpus, config, device="cpu")

    assert model.reranker.ranker.n_dense == 16
    assert len(model.predict(list(corpus.test.texts[:3]))) == 3


def test_a_bag_has_no_embedding_before_training(corpus, tmp_path):
    config = EliasConfig().override(SMALL | {"rerank.embedding": "first"})

    with pytest.raises(ConfigError, match=r"rerank\.embedding='first'.*transformer"):
        train(corpus, config, out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_missing_or_broken_ranker_is_an_error(model, tmp_path):
    folder = model.save_pretrained(tmp_path / "model")
    path = folder / "ranker" / "ranker.safetensors"
    path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(ModelError, match=r"ranker\.safetensors"):
        Elias.from_pretrained(folder, device="cpu")
    for file in (folder / "ranker").iterdir():
        file.unlink()
    (folder / "ranker").rmdir()
    with pytest.raises(ModelError, match="ranker"):
        Elias.from_pretrained(folder, device="cpu")


def test_the_ranker_can_read_the_embedding_from_before_training(corpus, tmp_path):
    bert = save_tiny_bert(tmp_path / "bert")
    changes = {
        "encoder.model": bert,
        "encoder.max_length": 8,
        "rerank.embedding": "first",
    }
    model = train(corpus, EliasConfig().override(SMALL | changes), device="cpu")
    texts = ["red herring", "cod quota in the north sea"]
    before = AutoModel.from_pretrained(bert).state_dict()["embeddings.word_embeddings.weight"]

    loaded = Elias.from_pretrained(model.save_pretrained(tmp_path / "model"), device="cpu")

    first = loaded.first_encoder.transformer.state_dict()["embeddings.word_embeddings.weight"]
    trained = loaded.model.encoder.transformer.state_dict()["embeddings.word_embeddings.weight"]
    assert torch.equal(first, before)
    assert not torch.equal(trained, before)
    np.testing.assert_array_equal(loaded.predict(texts).scores, model.predict(texts).scores)
    label = loaded.explain(texts[1:], top_k=1, words=True)[0].labels[0]  # by a transformer
    assert [texts[1][word.start : word.end] for word in label.words] == texts[1].split()
    assert any(word.effect for word in label.words)
    (tmp_path / "model" / "first_encoder" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"first_encoder.model\.safetensors"):
        Elias.from_pretrained(tmp_path / "model", device="cpu")
