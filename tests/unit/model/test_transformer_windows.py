"""Texts longer than `max_length`, read in windows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elias.config import EncoderConfig
from elias.errors import ConfigError
from elias.model import transformer
from elias.model.batch_inference import embed_all
from elias.model.transformer import TransformerEncoder
from elias.text.batches import collate
from tiny_bert import WORDS, save_tiny_bert

CLS, SEP = 2, 3
LENGTH = 5  # of a window: three words and two special tokens
TEXTS = ["red cod", "sea " * 3, "the red cod in the north sea", "", "tape " * 9, "quota " * 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_bert(tmp_path_factory.mktemp("bert") / "model")


@pytest.fixture(scope="module")
def encoders(folder):
    """An encoder for each kind of pooling, with the same weights."""
    return {pooling: make_encoder(folder, pooling=pooling) for pooling in ("mean", "cls")}


def make_encoder(folder, **changes):
    values = {"dropout": 0.0, "max_length": LENGTH, "windows": 4} | changes
    torch.manual_seed(3)  # for the bottleneck
    return TransformerEncoder.from_config(EncoderConfig(model=folder, **values)).eval()


def embed(encoder, texts):
    return encoder(collate(encoder.tokenize(texts), np.arange(len(texts))))


def embed_slowly(encoder, words):
    """Encode each window of a text by itself, and return their mean, weighted by tokens."""
    n_words = encoder.max_length - 2
    parts = [words[i : i + n_words] for i in range(0, max(1, len(words)), n_words)]
    parts = parts[: encoder.windows]
    with torch.no_grad():
        vectors = [embed(encoder, [" ".join(part)])[0] for part in parts]
    weights = [len(part) + 2 for part in parts]
    return sum(w * v for w, v in zip(weights, vectors, strict=True)) / sum(weights)


def test_every_window_has_the_special_tokens(folder):
    tokens = make_encoder(folder).tokenize(["red cod tape in the north sea", "red", "sea " * 12])

    first, second, third = (tokens.take(np.array([row])).ids.tolist() for row in range(3))
    assert first == [CLS, 5, 6, 9, SEP, CLS, 10, 11, 12, SEP, CLS, 13, SEP]
    assert second == [CLS, 5, SEP]
    assert third == [CLS, 13, 13, 13, SEP] * 4
    assert tokens.n_truncated == 0


def test_longer_texts_are_cut_after_the_last_window_and_counted(folder):
    tokens = make_encoder(folder, windows=2).tokenize(["sea " * 6, "sea " * 7, "sea " * 100])

    assert tokens.lengths.tolist() == [10, 10, 10]
    assert tokens.n_truncated == 2


def test_tokens_in_windows_have_their_own_cache_entries(folder):
    one, two, three = (make_encoder(folder, windows=n).fingerprint for n in (1, 2, 3))

    assert len({one, two, three}) == 3
    assert "windows" not in one  # entries of earlier versions stay valid


@settings(max_examples=30, deadline=None)
@given(
    words=st.lists(st.lists(st.sampled_from(WORDS[:2]), max_size=16), min_size=1, max_size=8),
    at_once=st.integers(1, 20),
    pooling=st.sampled_from(["mean", "cls"]),
)
def test_embedding_is_the_mean_of_windows_encoded_one_by_one(encoders, words, at_once, pooling):
    encoder = encoders[pooling]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(transformer, "_WINDOWS_AT_ONCE", at_once)
        embedding = embed(encoder, [" ".join(text) for text in words])

    expected = torch.stack([embed_slowly(encoder, text) for text in words])
    assert torch.allclose(embedding, expected, atol=1e-5)


def test_bottleneck_and_dropout_follow_the_mean(folder):
    encoder = make_encoder(folder, bottleneck=6, dropout=0.5)
    text = "the red cod in the north sea"
    with torch.no_grad():
        embedding = embed(encoder, [text])
        dropped = embed(encoder.train(), [text] * 50)

    assert torch.allclose(embedding[0], embed_slowly(encoder.eval(), text.split()), atol=1e-5)
    survives = dropped != 0
    assert 0.3 < survives.float().mean() < 0.7
    assert torch.allclose(dropped[survives], (2 * embedding).expand(50, -1)[survives], atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"pooling": "cls"}, {"bottleneck": 6}])
def test_texts_of_one_window_are_embedded_as_without_windows(changes, folder):
    texts = ["red cod tape", "", "sea"]
    with_windows = make_encoder(folder, **changes)
    without = make_encoder(folder, windows=1, **changes)

    assert torch.equal(embed(with_windows, texts), embed(without, texts))


def test_gradients_pass_through_all_windows(folder):
    encoder = make_encoder(folder)
    text = "the red cod in the north sea"
    embed(encoder, [text, "red"])[0].sum().backward()
    gradients = {name: p.grad.clone() for name, p in encoder.named_parameters()}
    encoder.zero_grad()
    parts = [["the", "red", "cod"], ["in", "the", "north"], ["sea"]]
    total = sum((len(part) + 2) / 13 * embed(encoder, [" ".join(part)])[0] for part in parts)
    total.sum().backward()

    for name, parameter in encoder.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-4), name


def test_gradient_checkpointing_changes_no_gradient(folder):
    gradients = []
    for checkpointing in (False, True):
        encoder = make_encoder(folder, gradient_checkpointing=checkpointing).train()
        embed(encoder, TEXTS).square().sum().backward()
        gradients.append([p.grad for p in encoder.parameters()])

    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_batches_of_any_size_give_the_same_embeddings(encoders):
    encoder = encoders["mean"]
    tokens = encoder.tokenize(TEXTS)
    whole = embed_all(encoder, tokens)

    for batch_size in (1, 2, 4):
        parts = embed_all(encoder, tokens, batch_size=batch_size)
        np.testing.assert_allclose(parts, whole, atol=1e-5)


def test_an_empty_text_beside_windows_is_embedded_as_alone(encoders):
    """Some tokenizers add no special tokens, and an empty text then has no tokens at all."""
    encoder = encoders["mean"]
    tokens = encoder.tokenize(["sea " * 9])
    offsets = np.array([0, 0, len(tokens.ids)])
    both = collate(type(tokens)(offsets, tokens.ids), np.arange(2))
    alone = collate(type(tokens)(np.array([0, 0]), tokens.ids[:0]), np.arange(1))

    with torch.no_grad():
        assert torch.allclose(encoder(both)[0], encoder(alone)[0], atol=1e-6)


def test_windows_needed_counts_windows_of_most_texts(encoders):
    encoder = encoders["mean"]

    assert encoder.windows_needed(["red"]) == 1
    assert encoder.windows_needed(["sea " * 3] * 99 + ["sea " * 60]) == 1
    assert encoder.windows_needed(["sea " * 3] * 90 + ["sea " * 60] * 10) == 20


def test_graphs_are_not_captured_with_windows(folder):
    assert make_encoder(folder, windows=1).capturable
    assert not make_encoder(folder, windows=2).capturable


def test_a_number_of_windows_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"encoder\.windows must be >= 1, not 0"):
        EncoderConfig(windows=0)
