"""Products in bfloat16: as exact as the rounding of their factors allows, and small ones exact."""

import pytest
import torch

from elias.kernels import product
from elias.kernels.cpu.matmul import has_bfloat16


@pytest.mark.parametrize("transposed", [False, True])
def test_a_large_product_differs_from_float64_by_no_more_than_the_rounding(transposed):
    torch.manual_seed(0)
    left, right = torch.randn(256, 300), torch.randn(300, 256)
    if transposed:  # as the gradients of W_L are computed
        left, right = torch.randn(300, 256).T, torch.randn(256, 300).T

    result = product(left, right)

    exact, sizes = left.double() @ right.double(), left.abs().double() @ right.abs().double()
    assert result.dtype == torch.float32
    # each factor and the result are rounded to 8 bits
    assert ((result - exact).abs() <= 3 * 2**-8 * sizes).all()
    if has_bfloat16():
        assert not torch.equal(result, left @ right)


def test_a_small_product_is_not_rounded():
    left, right = torch.randn(20, 300), torch.randn(300, 20)

    assert torch.equal(product(left, right), left @ right)
