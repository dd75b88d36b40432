"""Test `PackedLinear` against `nn.Linear` with the same weights."""

import copy
import pickle

import pytest
import torch
from torch import nn

from elias.kernels.cpu import packed_linear
from elias.kernels.cpu.packed_linear import PackedLinear

pytestmark = pytest.mark.skipif(not packed_linear.can_pack(), reason="torch packs no weights here")


def make_layer(*, bias=True):
    torch.manual_seed(0)
    return PackedLinear(24, 17, bias=bias).eval()


def plain(layer, points):
    return nn.functional.linear(points, layer.weight, layer.bias).detach()


def predict(layer, points):
    with torch.inference_mode():
        return layer(points)


@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 24), (0, 24), (24,)])
@pytest.mark.parametrize("bias", [True, False])
def test_it_predicts_what_a_linear_layer_predicts(shape, bias):
    layer, points = make_layer(bias=bias), torch.randn(shape)

    torch.testing.assert_close(predict(layer, points), plain(layer, points))
    assert layer in packed_linear._PACKED


def test_it_learns_like_a_linear_layer():
    layer, points = make_layer().train(), torch.randn(5, 24)

    layer(points).sum().backward()

    torch.testing.assert_close(layer.weight.grad, points.sum(dim=0).expand(17, -1))
    assert layer not in packed_linear._PACKED


@pytest.mark.parametrize("change", ["in place", "replaced", "loaded", "while training"])
def test_predictions_follow_weights_that_are(change):
    layer, points = make_layer(), torch.randn(5, 24)
    predict(layer, points)

    if change == "in place":
        with torch.no_grad():
            layer.weight.mul_(2)
    elif change == "replaced":
        layer.weight = nn.Parameter(2 * layer.weight.detach())
    elif change == "loaded":
        layer.load_state_dict(
            {name: 2 * value for name, value in layer.state_dict().items()}, assign=True
        )
    else:  # compiled loops write to the memory of a tensor, which torch does not notice
        layer.train()
        layer.weight.detach().numpy()[:] *= 2
        layer.eval()

    torch.testing.assert_close(predict(layer, points), plain(layer, points))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_packs_its_own_weights(clone):
    layer, points = make_layer(), torch.randn(5, 24)
    predict(layer, points)

    other = clone(layer)

    assert other not in packed_linear._PACKED
    assert torch.equal(predict(other, points), predict(layer, points))


def test_other_precisions_are_left_to_torch():
    layer, points = make_layer(), torch.randn(5, 24)

    with torch.autocast("cpu", torch.bfloat16):
        assert predict(layer, points).dtype == torch.bfloat16
    assert predict(layer.double(), points.double()).dtype == torch.float64
    assert layer not in packed_linear._PACKED


def test_without_the_operators_of_torch_it_is_a_linear_layer(monkeypatch):
    layer, points = make_layer(), torch.randn(5, 24)
    monkeypatch.setattr(packed_linear, "can_pack", lambda: False)

    assert torch.equal(predict(layer, points), plain(layer, points))
