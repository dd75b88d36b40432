"""Products with rows of a table, and their gradients, are those of the dense product."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elias.kernels import bag_sum, label_logits, plain

SIZES = {
    "n_points": st.integers(1, 6),
    "n_rows": st.integers(1, 9),
    "dim": st.integers(1, 33),
    "seed": st.integers(0, 2**31),
}


def dense_logits(embedding, weight, bias, labels):
    """All L logits of each point, and the ones asked for; 0 for padding."""
    table = torch.cat([embedding @ weight.T + bias, embedding.new_zeros(len(embedding), 1)], dim=1)
    return table.gather(1, labels)


def dense_bags(weight, ids, offsets, coefficients):
    """A matrix of coefficients times the table."""
    matrix = torch.zeros(len(offsets) - 1, len(weight), dtype=weight.dtype)
    for row in range(len(offsets) - 1):
        for j in range(offsets[row], offsets[row + 1]):
            matrix[row, ids[j]] += coefficients[j]
    return matrix @ weight


def value_and_gradients(function, parameters, rest, upstream):
    """The value, and the dense gradients of its product with ``upstream``."""
    parameters = [part.clone().requires_grad_() for part in parameters]
    value = function(*parameters, *rest)
    (value * upstream.to(value.dtype)).sum().backward()
    gradients = [part.grad.to_dense() if part.grad.is_sparse else part.grad for part in parameters]
    return [value.detach(), *gradients]


def assert_all_close(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def logits_in_pieces(monkeypatch, gathered):
    monkeypatch.setattr(plain, "_MAX_DENSE_LOGITS", 0)
    monkeypatch.setattr(plain, "_MAX_GATHERED", gathered)
    return plain.label_logits


@pytest.mark.parametrize("version", ["compiled", "torch dense", "torch gathered"])
@given(n_labels=st.integers(1, 10), **SIZES)
def test_label_logits_and_gradients_match_the_dense_product(
    version, n_points, n_rows, dim, n_labels, seed
):
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(n_points, dim, generator=generator)
    weight = torch.randn(n_rows, dim, generator=generator)
    bias = torch.randn(n_rows, generator=generator)
    labels = torch.randint(0, n_rows + 1, (n_points, n_labels), generator=generator)
    upstream = torch.randn(n_points, n_labels, generator=generator)
    parameters = [embedding, weight, bias]

    with pytest.MonkeyPatch.context() as patch:
        function = {
            "compiled": lambda: label_logits,
            "torch dense": lambda: plain.label_logits,
            "torch gathered": lambda: logits_in_pieces(patch, 2 * n_labels * dim),  # two at a time
        }[version]()
        actual = value_and_gradients(function, parameters, [labels], upstream)

    doubles = [part.double() for part in parameters]
    assert_all_close(actual, value_and_gradients(dense_logits, doubles, [labels], upstream))


@given(longest=st.integers(0, 5), **SIZES)
def test_bags_and_their_gradient_match_a_dense_product(n_points, n_rows, dim, longest, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (n_points,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, n_rows, (int(offsets[-1]),), generator=generator)
    coefficients = torch.randn(len(ids), generator=generator)
    weight = torch.randn(n_rows, dim, generator=generator)
    upstream = torch.randn(n_points, dim, generator=generator)

    actual = value_and_gradients(bag_sum, [weight], [ids, offsets, coefficients], upstream)

    rest = [ids, offsets, coefficients.double()]
    assert_all_close(actual, value_and_gradients(dense_bags, [weight.double()], rest, upstream))
