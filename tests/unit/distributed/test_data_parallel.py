"""Dropout keyed by point: what a point loses does not depend on who else is in its batch."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig

from elias.config import EncoderConfig
from elias.distributed.data_parallel import KeyedDropout, point_keys
from elias.model.encoder import BagEncoder
from elias.model.transformer import TransformerEncoder
from elias.text.batches import TokenBatch, collate
from elias.text.vectorizer import Featurizer
from tiny_bert import SIZES, make_tokenizer, save_tiny_model

TEXTS = ["red cod", "the north sea", "tape", "herring quota in the sea", "cod cod", ""]
SEED = (5, 1, 77)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A transformer with dropout everywhere: in attention, between layers, on φ."""
    folder = tmp_path_factory.mktemp("bert")
    settings = BertConfig(**SIZES, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
    save_tiny_model(folder, settings)
    config = EncoderConfig(model=str(folder), dropout=0.3, max_length=12)
    return TransformerEncoder.from_config(config).train()


@pytest.fixture(scope="module")
def windows(bert):
    """The same transformer, with texts in windows of three words."""
    config = EncoderConfig(model="windows", dropout=0.3, max_length=5, windows=3)
    return TransformerEncoder(config, bert.transformer, make_tokenizer()).train()


@pytest.fixture(scope="module")
def bag():
    featurizer = Featurizer.fit(TEXTS, char_ngrams=(0, 0), min_count=1)
    config = EncoderConfig(dim=8, hidden_dim=8, dropout=0.3, token_dropout=0.4)
    torch.manual_seed(0)
    return BagEncoder(config, featurizer, featurizer.n_features).train()


@pytest.fixture
def packed(bert, monkeypatch):
    """The same transformer without dropout in attention, which packed texts do not have."""
    encoder = copy.deepcopy(bert)
    encoder.transformer.config.attention_probs_dropout_prob = 0.0
    for layer in encoder.transformer.encoder.layer:
        layer.attention.self.dropout.p = 0.0
    monkeypatch.setattr(encoder, "packs", lambda _: True)
    return encoder


def embedded(encoder, rows, seed=SEED):
    rows = np.array(rows, dtype=np.int64)
    batch = collate(encoder.tokenize(TEXTS), rows)
    with KeyedDropout(point_keys(seed, rows), batch, encoder):
        return encoder(batch)


@pytest.mark.parametrize("kind", ["bag", "bert", "windows"])
def test_dropout_of_a_point_does_not_depend_on_the_batch(kind, request):
    encoder = request.getfixturevalue(kind)
    whole = embedded(encoder, [0, 1, 2, 3, 4, 5])

    parts = torch.cat([embedded(encoder, rows) for rows in ([0, 1], [2, 3, 4], [5])])
    turned = embedded(encoder, [5, 4, 3, 2, 1, 0])

    assert torch.allclose(parts, whole, atol=1e-5)
    assert torch.allclose(turned.flip(0), whole, atol=1e-5)


def test_packed_texts_have_the_dropout_of_padded_texts(packed, monkeypatch):
    rows = [4, 1, 5, 3]
    actual = embedded(packed, rows)
    monkeypatch.setattr(packed, "packs", lambda _: False)

    expected = embedded(packed, rows)

    assert torch.equal(actual == 0, expected == 0)
    torch.testing.assert_close(actual, expected)


def test_compiled_layers_have_the_dropout_of_others_and_share_their_code(bag):
    class Layer(nn.Linear):
        def forward(self, hidden):
            return nn.functional.dropout(super().forward(hidden), 0.4)

    layers = [Layer(8, 8) for _ in range(3)]

    def run(rows, seed):
        batch = collate(bag.tokenize(TEXTS), np.array(rows))
        hidden = torch.ones(len(rows), 5, 8, requires_grad=True)
        with KeyedDropout(point_keys(seed, np.array(rows)), batch, bag):
            for layer in layers:
                hidden = layer(hidden)
        return hidden, *torch.autograd.grad(hidden.square().sum(), layers[0].parameters())

    batches = [([0, 1, 3], (5, 1, 78)), ([4, 1, 2, 0], (5, 1, 79))]
    expected = [run(*batch) for batch in batches]
    for layer in layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True, assume_static_by_default=False):
        actual = [run(*batch) for batch in batches]

    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("kind", ["bag", "bert"])
def test_dropout_differs_between_steps_and_is_off_in_evaluation(kind, request):
    encoder = request.getfixturevalue(kind)
    first, other = embedded(encoder, [0, 3]), embedded(encoder, [0, 3], (5, 1, 78))

    assert (first == 0).any()
    assert ((first == 0) != (other == 0)).any()
    encoder.eval()
    assert torch.equal(embedded(encoder, [0, 3]), embedded(encoder, [0, 3], (5, 1, 78)))
    encoder.train()


@pytest.mark.parametrize("kind", ["bag", "bert"])
def test_a_process_without_points_has_no_embedding_and_no_gradient(kind, request):
    encoder = request.getfixturevalue(kind)
    encoder.zero_grad()

    embedding = embedded(encoder, [])
    embedding.sum().backward()

    assert embedding.shape == (0, encoder.dim)
    for parameter in encoder.parameters():
        if parameter.grad is not None:
            assert not parameter.grad.to_dense().any()


def test_the_requested_share_is_dropped_and_the_rest_is_scaled(bag):
    rows = np.arange(400)
    batch = TokenBatch(torch.zeros(0, dtype=torch.int64), torch.zeros(401, dtype=torch.int64), 0)

    with KeyedDropout(point_keys(SEED, rows), batch, bag):
        first, second = (torch.nn.functional.dropout(torch.ones(400, 500), 0.3) for _ in range(2))

    for mask in (first, second):
        assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
        assert (mask > 0).float().mean() == pytest.approx(0.7, abs=5e-3)
    both = ((first > 0) & (second > 0)).float().mean()
    assert both == pytest.approx(0.49, abs=5e-3)  # two dropouts of a step are independent
    by_point, by_place = (first > 0).float().mean(1).std(), (first > 0).float().mean(0).std()
    assert by_point == pytest.approx((0.21 / 500) ** 0.5, rel=0.2)
    assert by_place == pytest.approx((0.21 / 400) ** 0.5, rel=0.2)
