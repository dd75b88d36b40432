"""One-vs-all is the search of a graph whose one cluster holds every label, without the search."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elias.config import EliasConfig, EncoderConfig
from elias.errors import ModelError
from elias.kernels.device import limit_threads
from elias.kernels.one_vs_all_loss import every_label_loss
from elias.model.elias import EliasModel, SearchSizes
from elias.model.encoder import BagEncoder
from elias.model.one_vs_all import OneVsAll
from elias.text.batches import collate
from elias.text.vectorizer import Featurizer
from label_chunks import in_chunks
from saved_models import load, save

N_LABELS = 11
TEXTS = ["red cod", "blue cod", "red tape", "cod in the blue sea", ""]
POSITIVES = torch.tensor([[0, 4], [3, 11], [10, 11], [11, 11], [2, 7]])  # 11 pads
SIZES = SearchSizes(1, N_LABELS)
CONFIG = EliasConfig().override({"index.kind": "all", "encoder.dim": 4, "encoder.hidden_dim": 4})


@pytest.fixture
def model():
    featurizer = Featurizer.fit(TEXTS, char_ngrams=(0, 0), min_count=1)
    config = EncoderConfig(dim=4, hidden_dim=4, char_ngrams=(0, 0))
    model = OneVsAll(BagEncoder(config, featurizer, featurizer.n_features), N_LABELS).eval()
    torch.nn.init.normal_(model.labels.bias)
    return model


def batch(model):
    return collate(model.encoder.tokenize(TEXTS), np.arange(len(TEXTS)))


@pytest.mark.parametrize("mean", [True, False])
def test_loss_and_gradients_are_those_of_searching_the_whole_graph(model, mean):
    tokens = batch(model)
    searched = EliasModel.losses(
        model,
        model.encoder(tokens),
        POSITIVES,
        torch.where(POSITIVES < N_LABELS, 0, 1),
        SIZES,
        shortlist_weight=1.0,
        mean=mean,
    )
    searched.total.backward()
    expected = {
        name: p.grad.to_dense()
        for name, p in model.named_parameters()
        if not name.startswith(("clusters", "graph"))  # no gradient: every score is cut at 1
    }
    model.zero_grad()

    losses = model.all_losses(model.encoder(tokens), POSITIVES, mean=mean)
    losses.total.backward()

    torch.testing.assert_close(losses, searched)
    gradients = {
        name: p.grad.to_dense() for name, p in model.named_parameters() if name in expected
    }
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("blocked", [[], [0, 5], list(range(N_LABELS))])
@pytest.mark.parametrize("top_k", [1, 4, 30])
def test_the_ranking_is_that_of_searching_the_whole_graph(model, blocked, top_k):
    embedding = model.encoder(batch(model)).detach()
    mask = torch.zeros(N_LABELS, dtype=torch.bool)
    mask[blocked] = True

    labels, p = model.rank(embedding, SIZES, top_k, mask)

    expected_labels, expected_p = EliasModel.rank(model, embedding, SIZES, top_k, mask)
    assert torch.equal(labels, expected_labels)
    torch.testing.assert_close(p, expected_p)


def test_permuted_labels_are_ranked_alike(model):
    embedding = model.encoder(batch(model)).detach()
    before, p = model.rank(embedding, SIZES, N_LABELS)
    order = torch.randperm(N_LABELS)

    model.labels.weight.data = model.labels.weight.data[order]
    model.labels.bias.data = model.labels.bias.data[order]
    after, p_after = model.rank(embedding, SIZES, N_LABELS)

    assert torch.equal(order[after], before)
    torch.testing.assert_close(p_after, p)


def test_of_equal_classifiers_the_lower_label_comes_first(model):
    model.labels.weight.data[:] = model.labels.weight.data[0].clone()
    model.labels.bias.data[:] = 0.5

    labels, _ = model.rank(model.encoder(batch(model)).detach(), SIZES, 6)

    assert labels.tolist() == [list(range(6))] * len(TEXTS)


class Largest(TorchDispatchMode):
    """Notes the most numbers of any tensor that an operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        sizes = [part.numel() for part in tree_leaves(answer) if isinstance(part, torch.Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return answer


def test_neither_all_logits_nor_all_gradients_are_in_memory():
    n_points, n_labels, dim, chunk = 6, 500, 8, 20
    embedding = torch.randn(n_points, dim, requires_grad=True)
    weight, bias = torch.randn(n_labels, dim).requires_grad_(), torch.zeros(n_labels)
    positives = torch.randint(n_labels, (n_points, 1))
    moved = []

    with limit_threads(1), Largest() as largest:  # it sees the operations of this thread
        loss = in_chunks(
            chunk,
            every_label_loss,
            embedding,
            weight,
            bias,
            positives,
            scale=1.0,
            update=lambda rows, *_: moved.extend(range(n_labels)[rows]),
        )
        loss.backward()

    assert moved == list(range(n_labels))
    assert largest.numbers <= chunk * dim
    assert weight.grad is None


# saving


@pytest.mark.parametrize("storage", ["full", "compact"])
def test_a_saved_model_is_one_vs_all_again_and_ranks_the_same(model, storage, tmp_path):
    config = CONFIG.override({"index.label_storage": storage}).resolve(10, N_LABELS)
    if storage == "compact":
        model.compact()
    names = [f"label {i}" for i in range(N_LABELS)]
    folder = tmp_path / "model"

    again = load(save(folder, model, config, names)).model

    embedding = model.encoder(batch(model)).detach()
    stored = load_file(folder / "model.safetensors")["labels.weight"]
    assert stored.dtype == model.labels.weight.dtype
    assert isinstance(again, OneVsAll)
    assert again.labels.weight.dtype == torch.float32
    for ours, theirs in zip(
        again.rank(embedding, SIZES, 5), model.rank(embedding, SIZES, 5), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_graph_that_does_not_hold_every_label_is_refused(model, tmp_path):
    config = CONFIG.resolve(10, N_LABELS)
    names = [f"label {i}" for i in range(N_LABELS)]
    model.graph.edge_labels = model.graph.edge_labels[:, :-1]
    save(tmp_path / "model", model, config, names)

    with pytest.raises(ModelError, match=r"graph.edge_labels has shape \(1, 10\), not \(1, 11\)"):
        load(tmp_path / "model")
