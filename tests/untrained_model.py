"""A model that was not trained, for tests of prediction."""

import torch

from elias import Elias, EliasConfig
from elias.config import EncoderConfig, IndexConfig
from elias.model.elias import EliasModel
from elias.model.encoder import BagEncoder
from elias.model.graph import LabelGraph, partition_edges
from elias.text.vectorizer import Featurizer

TEXTS = ["red cod", "blue cod", "red tape"]
NAMES = [*(f"label {i}" for i in range(38)), "twin", "twin"]


def untrained_model():
    """Return a model of 40 labels, which ranks texts though it was not trained."""
    torch.manual_seed(0)
    featurizer = Featurizer.fit(TEXTS, char_ngrams=(0, 0), min_count=1)
    encoder = BagEncoder(EncoderConfig(dim=8, hidden_dim=8), featurizer, featurizer.n_features)
    edges = partition_edges(torch.arange(40) % 8, 8)
    graph = LabelGraph(edges, 40, 2.0, edge_logits=torch.rand(edges.shape))
    index = IndexConfig(
        n_clusters=8, edges_per_cluster=5, beam_size=2, shortlist_size=6, beta=2.0, alpha=1.5
    )
    config = EliasConfig(index=index).resolve(len(TEXTS), 40)
    return Elias(EliasModel(encoder, graph, alpha=1.5), config, NAMES)


def predicted_ids(predictions):
    return [set(ranking.ids.tolist()) for ranking in predictions]
