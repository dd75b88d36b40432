import copy
import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from elias.config import EncoderConfig
from elias.model.elias import EliasModel, SearchSizes
from elias.model.encoder import BagEncoder
from elias.model.graph import LabelGraph
from elias.text.batches import collate
from elias.text.vectorizer import Featurizer
from elias.training.optimizer import WARMUP, Optimizer, WeightAverage, schedule
from stages import make_stage

TEXTS = ["red cod", "blue cod", "red tape"]


@pytest.fixture
def model():
    featurizer = Featurizer.fit(TEXTS, char_ngrams=(0, 0), min_count=1)
    encoder = BagEncoder(EncoderConfig(dim=4, hidden_dim=4), featurizer, featurizer.n_features)
    graph = LabelGraph(torch.tensor([[0, 1], [1, 2]]), 3, 1.5, edge_logits=torch.rand(2, 2))
    return EliasModel(encoder.eval(), graph, 1.5)


def backward(model):
    tokens = model.encoder.tokenize(TEXTS)
    positives, parents = torch.tensor([[0], [1], [2]]), torch.tensor([[0], [1], [1]])
    losses = model.losses(
        model.encoder(collate(tokens, np.arange(3))),
        positives,
        parents,
        SearchSizes(2, 3),
        shortlist_weight=1.0,
        mean=False,
    )
    losses.total.backward()


def all_rows(gradient):
    """The same gradient as a sparse tensor that holds every row."""
    rows = torch.arange(len(gradient)).unsqueeze(0)
    return torch.sparse_coo_tensor(rows, gradient, check_invariants=True)


def weights(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def test_learning_rates_rise_over_the_warm_up_and_then_fall():
    shares = [schedule(step, 100) for step in range(100)]

    peak = int(np.argmax(shares))
    assert all(0 < share <= 1 for share in shares)
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert peak == pytest.approx(100 * WARMUP, abs=1)


def test_learning_rates_end_near_zero():
    assert schedule(99, 100) < 0.02
    assert schedule(100, 100) == 0


def test_a_stage_of_one_step_changes_the_weights():
    assert schedule(0, 1) > 0


def test_every_parameter_moves_by_its_own_learning_rate(model):
    rates = {"bag_lr": 1e-1, "encoder_lr": 1e-2, "cluster_lr": 1e-3, "label_lr": 1e-4}
    stage = make_stage(**rates, edge_lr=1e-5, weight_decay=0.0)
    expected = {
        "encoder.vectors": 1e-1,
        "encoder.widen.weight": 1e-2,
        "clusters.weight": 1e-3,
        "clusters.bias": 1e-3,
        "labels.weight": 1e-4,
        "labels.bias": 1e-4,
        "graph.edge_logits": 1e-5,
    }
    before = weights(model)

    backward(model)
    Optimizer(model, stage).step(1.0)

    for name, rate in expected.items():  # the first step of Adam is the learning rate
        moved = (weights(model)[name] - before[name]).abs().max().item()
        assert moved == pytest.approx(rate, rel=0.05), name


def test_the_scale_applies_to_every_learning_rate(model):
    before = weights(model)

    backward(model)
    Optimizer(model, make_stage(weight_decay=0.0)).step(0.0)

    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


def test_gains_biases_edges_and_bag_vectors_do_not_decay(model):
    decaying = {"clusters.weight", "labels.weight", "encoder.widen.weight", "encoder.narrow.weight"}
    before = weights(model)
    optimizer = Optimizer(model, make_stage(weight_decay=1.0))
    for name, parameter in model.named_parameters():
        parameter.data += 1
        before[name] += 1
        zeros = torch.zeros_like(parameter.data)
        is_table = name.startswith("labels") or name == "encoder.vectors"
        parameter.grad = all_rows(zeros) if is_table else zeros

    optimizer.step(1.0)

    moved = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert moved == decaying


def test_gradients_are_cleared_after_a_step(model):
    optimizer = Optimizer(model, make_stage())

    backward(model)
    optimizer.step(1.0)

    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_index_is_updated_every_n_steps_with_the_summed_gradient(model):
    """Two steps of a gradient each are for W_L, A and Ŵ_C one step of their sum."""
    rates = {"encoder_lr": 0.0, "bag_lr": 0.0, "weight_decay": 0.0, "label_eps": 1.0}
    twin = copy.deepcopy(model)
    backward(twin)
    backward(twin)
    sums = {name: p.grad.to_dense().clone() for name, p in twin.named_parameters()}
    for name, p in twin.named_parameters():
        p.grad = all_rows(sums[name]) if p.grad.is_sparse else sums[name]
    Optimizer(twin, make_stage(**rates)).step(0.5)

    before = weights(model)
    optimizer = Optimizer(model, make_stage(**rates, index_every=2))
    backward(model)
    optimizer.step(1.0)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    backward(model)
    optimizer.step(0.5)

    for name, value in weights(model).items():
        assert_close(value, weights(twin)[name], rtol=1e-5, atol=1e-7, msg=name)


def test_the_encoder_is_updated_in_every_step(model):
    before = weights(model)
    optimizer = Optimizer(model, make_stage(index_every=3))

    backward(model)
    optimizer.step(1.0)

    moved = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert "encoder.vectors" in moved
    assert all(name.startswith("encoder.") for name in moved)


SCALES = [0.5, 1.0, 0.75, 0.5, 0.25, 0.1]


def move_first_label(model, optimizer, scales):
    """Steps in which only label 0 has a gradient."""
    for scale in scales:
        for name, parameter in model.named_parameters():
            if name.startswith("labels."):
                ones = torch.ones_like(parameter.data[:1])
                rows = torch.zeros(1, 1, dtype=torch.int64)
                gradient = torch.sparse_coo_tensor(
                    rows, ones, parameter.shape, check_invariants=True
                )
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        optimizer.step(scale)


@pytest.mark.parametrize("index_every", [1, 2])
def test_untouched_labels_get_the_pending_decay_of_every_update(model, index_every):
    stage = make_stage(weight_decay=2.0, label_lr=0.1, index_every=index_every)
    before = weights(model)
    optimizer = Optimizer(model, stage)

    move_first_label(model, optimizer, SCALES)
    waiting = weights(model)
    optimizer.apply_pending_decay()

    decayed = math.prod(1 - 0.2 * scale for scale in SCALES[index_every - 1 :: index_every])
    after = weights(model)
    assert torch.equal(waiting["labels.weight"][1:], before["labels.weight"][1:])
    assert_close(after["labels.weight"][1:], decayed * before["labels.weight"][1:])
    assert torch.equal(after["labels.weight"][0], waiting["labels.weight"][0])
    assert torch.equal(after["labels.bias"], waiting["labels.bias"])
    assert torch.equal(after["encoder.vectors"], before["encoder.vectors"])


@pytest.mark.parametrize("recorded", [True, False], ids=["its state has them", "it is of before"])
@pytest.mark.parametrize("index_every", [1, 2])
def test_a_restored_optimizer_uses_the_recorded_scales(model, index_every, recorded):
    stage = make_stage(weight_decay=2.0, label_lr=0.1, index_every=index_every)
    twin = copy.deepcopy(model)
    whole = Optimizer(twin, stage)
    move_first_label(twin, whole, SCALES)
    whole.apply_pending_decay()
    first = Optimizer(model, stage)
    move_first_label(model, first, SCALES[:4])
    state = {name: tensor.clone() for name, tensor in first.state().items()}
    if not recorded:
        for part in ("part.0.", "part.1."):
            state[f"{part}steps"] = torch.tensor(len(state.pop(f"{part}scales")))

    second = Optimizer(model, stage)
    second.restore(state, SCALES.__getitem__)
    move_first_label(model, second, SCALES[4:])
    second.apply_pending_decay()

    assert all(torch.equal(value, weights(twin)[name]) for name, value in weights(model).items())


def test_swapping_the_average_twice_changes_nothing(model):
    average = WeightAverage(model)
    average.update()
    model.labels.weight.data += 1
    average.update()
    before = weights(model)

    average.swap()
    swapped = weights(model)
    average.swap()

    assert not torch.equal(swapped["labels.weight"], before["labels.weight"])
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


def test_the_average_is_the_mean_of_all_but_the_graph(model):
    average = WeightAverage(model)
    start = weights(model)
    assert int(average.state()["count"]) == 0

    for step in range(3):
        for parameter in model.parameters():
            parameter.data += step  # 0, then 1, then 3 above the start
        average.update()
    average.swap()

    torch.testing.assert_close(model.labels.weight.data, start["labels.weight"] + 4 / 3)
    torch.testing.assert_close(model.clusters.bias.data, start["clusters.bias"] + 4 / 3)
    torch.testing.assert_close(model.graph.edge_logits.data, start["graph.edge_logits"] + 3)
