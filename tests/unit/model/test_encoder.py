import numpy as np
import pytest
import torch

from elias.config import EncoderConfig
from elias.model.encoder import BagEncoder
from elias.text.batches import collate
from elias.text.vectorizer import Featurizer

TEXTS = ["red cod", "blue cod liver", "red tape"]


def make_encoder(texts=TEXTS, **options):
    config = EncoderConfig(dim=8, hidden_dim=6, **options)
    featurizer = Featurizer.fit(texts, char_ngrams=(3, 4), min_count=1)
    return BagEncoder(config, featurizer, featurizer.n_features)


def embed(encoder, texts):
    tokens = encoder.tokenize(texts)
    with torch.no_grad():
        return encoder(collate(tokens, np.arange(len(texts))))


def test_an_empty_text_and_one_of_unknown_words_become_the_same_vector():
    embedding = embed(make_encoder().eval(), ["", "zzzz", "🐟"])

    assert embedding.isfinite().all()
    assert torch.equal(embedding[0], embedding[1])
    assert torch.equal(embedding[0], embedding[2])


def test_a_text_is_embedded_alike_alone_and_among_others():
    encoder = make_encoder().eval()

    together = embed(encoder, TEXTS)

    for text, row in zip(TEXTS, together, strict=True):
        torch.testing.assert_close(embed(encoder, [text])[0], row)


def test_nothing_is_dropped_when_not_training():
    encoder = make_encoder(dropout=0.5, token_dropout=0.5).eval()

    assert torch.equal(embed(encoder, TEXTS), embed(encoder, TEXTS))


def test_tokens_and_embedding_are_dropped_while_training():
    for options in ({"dropout": 0.0, "token_dropout": 0.5}, {"dropout": 0.5, "token_dropout": 0.0}):
        encoder = make_encoder(**options).train()

        assert not torch.equal(embed(encoder, TEXTS), embed(encoder, TEXTS))


def test_the_table_is_a_parameter_whose_gradient_is_sparse():
    encoder = make_encoder()
    (name,) = encoder.table_names()

    encoder(collate(encoder.tokenize(["red"]), np.array([0]))).sum().backward()

    assert dict(encoder.named_parameters())[name].grad.is_sparse


def test_the_fingerprint_follows_the_vocabulary_alone():
    same, other = make_encoder(), make_encoder([*TEXTS, "green tape"])

    assert make_encoder().fingerprint == same.fingerprint
    assert make_encoder().fingerprint != other.fingerprint


def test_an_encoder_of_given_features_refuses_text():
    encoder = BagEncoder(EncoderConfig(dim=4), None, 10)

    with pytest.raises(AssertionError, match="reads features, not texts"):
        encoder.tokenize(["red cod"])
