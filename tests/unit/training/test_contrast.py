"""Stage 0: the encoder learns to place texts near the texts of their labels."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from elias.config import EncoderConfig
from elias.model.batched import embed_all
from elias.model.encoder import BagEncoder
from elias.model.transformer import TransformerEncoder
from elias.text.vectorizer import Featurizer
from elias.training.contrast import TEMPERATURE, contrast_loss, train_by_contrast
from elias.training.stage import Points
from stages import make_stage
from tiny_bert import save_tiny_bert


@given(seed=st.integers(0, 2**31), n_texts=st.integers(1, 5), n_labels=st.integers(1, 4))
def test_the_loss_is_the_cross_entropy_of_pairs_without_other_positives(seed, n_texts, n_labels):
    rng = np.random.default_rng(seed)
    phi = rng.standard_normal((n_texts + n_labels, 3))
    relevant = rng.random((n_texts, n_labels)) < 0.3
    own = rng.integers(0, n_labels, n_texts)
    relevant[np.arange(n_texts), own] = True

    unit = phi / np.linalg.norm(phi, axis=1, keepdims=True)
    scores = np.exp(unit[:n_texts] @ unit[n_texts:].T / TEMPERATURE)
    losses = []
    for text, label in enumerate(own):
        pair = scores[text, label]
        other_labels = scores[text][~relevant[text]].sum()
        other_texts = scores[:, label][~relevant[:, label]].sum()
        losses += [-np.log(pair / (pair + other)) for other in (other_labels, other_texts)]

    loss = contrast_loss(*map(torch.from_numpy, (phi, relevant, own)))

    np.testing.assert_allclose(loss, np.mean(losses), atol=1e-9)


@pytest.mark.parametrize("kind", ["bag", "transformer"])
def test_texts_come_near_the_texts_of_their_labels(kind, tmp_path):
    torch.manual_seed(0)
    words, names = ["red", "cod", "north", "sea"], ["tape", "quota", "in", "the"]
    of_text = np.random.default_rng(0).integers(0, 4, 200)
    texts = [words[label] for label in of_text]
    stage = make_stage(batch_size=32)
    if kind == "bag":
        featurizer = Featurizer.fit([*texts, *names], char_ngrams=(0, 0), min_count=1)
        config = EncoderConfig(dim=16, hidden_dim=16)
        encoder = BagEncoder(config, featurizer, featurizer.n_features)
    else:
        encoder = TransformerEncoder.from_config(EncoderConfig(model=save_tiny_bert(tmp_path)))
        stage = replace(stage, encoder_lr=1e-3)
    labels = csr_matrix((np.ones(200), of_text, np.arange(201)), shape=(200, 5))
    labels.data[3] = 0  # a point without labels
    labels.eliminate_zeros()
    own = csr_matrix(np.eye(4, 5))  # the last label has no text
    points = Points(encoder.tokenize(texts), labels)
    label_texts = Points(encoder.tokenize(names), own)

    def share_right():
        phi, of_names = (embed_all(encoder.eval(), part.tokens) for part in (points, label_texts))
        of_names /= np.linalg.norm(of_names, axis=1, keepdims=True)
        return ((phi @ of_names.T).argmax(axis=1) == of_text).mean()

    before = share_right()
    train_by_contrast(encoder, points, label_texts, stage, seed=0)

    assert before < 0.8 < share_right() == 1
