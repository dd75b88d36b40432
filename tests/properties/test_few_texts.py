"""A few texts are embedded and ranked by one compiled call as by torch."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from elias.config import EncoderConfig
from elias.model.batch_inference import embed_all, rank_all, rank_few
from elias.model.elias import EliasModel, SearchSizes
from elias.model.encoder import BagEncoder
from elias.model.graph import LabelGraph
from elias.text.tokens import Tokens

N_WORDS = 20


def make(seed, n_texts, n_clusters, n_labels, dim):
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    encoder = BagEncoder(EncoderConfig(dim=dim, hidden_dim=2 * dim), None, N_WORDS)
    edges = torch.randint(0, n_labels + 1, (n_clusters, 4), generator=generator)
    edges = edges.sort(dim=1).values
    edges[:, 1:][edges[:, 1:] == edges[:, :-1]] = n_labels  # a label once per cluster
    logits = torch.randn(edges.shape, generator=generator)
    model = EliasModel(encoder, LabelGraph(edges, n_labels, 2.0, edge_logits=logits), 2.0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    lengths = rng.integers(0, 9, n_texts)
    tokens = Tokens(
        np.concatenate([[0], np.cumsum(lengths)]),
        rng.integers(0, N_WORDS, lengths.sum(), dtype=np.int32),
        rng.random(lengths.sum(), dtype=np.float32),
    )
    return model.eval(), tokens, torch.from_numpy(rng.random(n_labels) < 0.3)


@given(
    st.integers(0, 2**31),
    st.integers(0, 5),
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 9),
    st.booleans(),
)
def test_few_texts_are_ranked_as_many(
    seed, n_texts, n_clusters, n_labels, beam_size, top_k, blocks
):
    model, tokens, blocked = make(seed, n_texts, n_clusters, n_labels, dim=6)
    sizes, blocked = SearchSizes(beam_size, 8), blocked if blocks else None

    few = rank_few(model, model.encoder, tokens, sizes, top_k, blocked)

    many = rank_all(model, tokens, sizes, top_k, blocked=blocked)
    embedding = embed_all(model.encoder, tokens)
    np.testing.assert_allclose(few.embedding, embedding, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(few.scores, many.scores, rtol=1e-3, atol=1e-6)
    p = np.maximum(many.scores, -1)  # labels may change places where two scores are almost equal
    gaps = np.abs(np.diff(p, axis=1, prepend=2, append=p[:, -1:]))
    assert (np.minimum(gaps[:, 1:], gaps[:, :-1])[few.ids != many.ids] < 1e-3).all()
