"""Every label scored in chunks is every label scored at once: loss, gradients, updates, ranking."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from elias.kernels import adamw_dense, every_label_bce, plain
from elias.kernels.adamw_state import AdamWRates, stochastic_round
from elias.kernels.one_vs_all_loss import every_label_loss, every_label_top, with_positives
from elias.model.elias import LinearRows
from elias.training.optimizer import ChunkedUpdate
from label_chunks import in_chunks

SIZES = {
    "n_points": st.integers(1, 5),
    "n_labels": st.integers(1, 9),
    "dim": st.integers(1, 6),
    "chunk_size": st.integers(1, 10),
    "seed": st.integers(0, 2**31),
}


class Problem:
    """Random embeddings, classifiers and relevant labels."""

    def __init__(self, n_points, n_labels, dim, seed):
        generator = torch.Generator().manual_seed(seed)
        self.embedding = torch.randn(n_points, dim, generator=generator)
        self.weight = torch.randn(n_labels, dim, generator=generator)
        self.bias = torch.randn(n_labels, generator=generator)
        self.relevant = torch.rand(n_points, n_labels, generator=generator) < 0.4
        ids = torch.where(self.relevant, torch.arange(n_labels), n_labels)
        most = max(1, int(self.relevant.sum(dim=1).max()))
        self.positives = ids.sort(dim=1).values[:, :most]  # padded with n_labels

    def leaves(self, dtype):
        parts = (self.embedding, self.weight, self.bias)
        return [part.to(dtype, copy=True).requires_grad_() for part in parts]

    def dense_loss(self, embedding, weight, bias, scale):
        logits = embedding @ weight.T + bias
        truth = self.relevant.to(logits.dtype)
        return scale * cross_entropy(logits, truth, reduction="sum")


@given(**SIZES, scale=st.sampled_from([1.0, 0.25]))
def test_loss_and_gradients_are_those_of_the_dense_loss(
    n_points, n_labels, dim, chunk_size, seed, scale
):
    problem = Problem(n_points, n_labels, dim, seed)
    chunked, dense = problem.leaves(torch.float32), problem.leaves(torch.float64)

    loss = in_chunks(chunk_size, every_label_loss, *chunked, problem.positives, scale)
    (3 * loss).backward()  # a multiple, as in any sum of losses

    expected = problem.dense_loss(*dense, scale)
    (3 * expected).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(chunked, dense, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


@given(**SIZES, share=st.sampled_from([0.0, 0.3, 1.0]))
def test_the_loss_of_sampled_labels_is_the_dense_loss_of_these_and_the_positives(
    n_points, n_labels, dim, chunk_size, seed, share
):
    problem = Problem(n_points, n_labels, dim, seed)
    drawn = torch.rand(n_labels, generator=torch.Generator().manual_seed(seed)) < share
    sampled, dense = problem.leaves(torch.float32), problem.leaves(torch.float64)

    sample = with_positives(drawn, problem.positives)
    inputs = (*sampled, problem.positives)
    loss = in_chunks(chunk_size, every_label_loss, *inputs, scale=0.5, sample=sample)
    loss.backward()

    is_scored = drawn | problem.relevant.any(dim=0)
    logits = dense[0] @ dense[1].T + dense[2]
    truth = problem.relevant.to(logits.dtype)
    expected = 0.5 * cross_entropy(logits, truth, reduction="none")[:, is_scored].sum()
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(sampled, dense, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


@given(**SIZES)
def test_classifiers_that_are_not_sampled_stay_and_others_move_as_if_alone(
    n_points, n_labels, dim, chunk_size, seed
):
    problem = Problem(n_points, n_labels, dim, seed)
    sample = with_positives(torch.arange(n_labels) % 3 == 0, problem.positives)
    others = torch.ones(n_labels, dtype=torch.bool)
    others[sample] = False
    rates = AdamWRates(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-3, decay=0.3)

    def updated(rows, positives, sample):
        tables = LinearRows(len(rows), dim)
        tables.weight.data.copy_(problem.weight[rows])
        tables.bias.data.copy_(problem.bias[rows])
        moments = ChunkedUpdate(tables, rates, rates._replace(decay=0.0))
        for step in (1, 2):
            in_chunks(
                chunk_size,
                every_label_loss,
                problem.embedding,
                tables.weight,
                tables.bias,
                positives,
                scale=0.5,
                update=moments.update(step, 1.0),
                sample=sample,
            )
        return torch.cat([tables.weight, tables.bias.unsqueeze(1)], dim=1).detach()

    ours = updated(torch.arange(n_labels), problem.positives, sample)
    alone = updated(sample, torch.searchsorted(sample, problem.positives.contiguous()), None)

    torch.testing.assert_close(ours[sample], alone, rtol=1e-5, atol=1e-6)
    before = torch.cat([problem.weight, problem.bias.unsqueeze(1)], dim=1)
    assert torch.equal(ours[others], before[others])


@given(
    n_points=st.integers(1, 5),
    n_labels=st.sampled_from([1, 7, 511, 512, 513, 1100]),
    spread=st.sampled_from([0.1, 3.0, 40.0]),
    seed=st.integers(0, 2**31),
)
def test_the_compiled_loss_is_the_plain_one_whatever_the_blocks_and_the_logits(
    n_points, n_labels, spread, seed
):
    problem = Problem(n_points, n_labels, 6, seed)
    embedding = spread * problem.embedding
    positives = problem.positives - 1  # numbers outside the rows are ignored, also negative ones
    parts = (problem.weight, problem.bias)

    loss, residual, sums = every_label_bce(embedding, *parts, positives, 0.25)

    doubles = (part.double() for part in (embedding, *parts))
    expected = plain.every_label_bce(*doubles, positives, 0.25)
    torch.testing.assert_close(loss.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(residual.double(), expected[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sums.double(), expected[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_shows_in_the_loss(value):
    loss, residual, _ = every_label_bce(
        torch.ones(1, 1), torch.ones(3, 1), torch.tensor([0, value, 0]), torch.tensor([[0]]), 1.0
    )

    assert not loss.isfinite()
    assert residual[0, [0, 2]].isfinite().all()


@given(
    n_rows=st.integers(1, 4),
    dim=st.integers(1, 40),
    decay=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**31),
)
def test_the_compiled_dense_update_is_the_plain_one(n_rows, dim, decay, seed):
    generator = torch.Generator().manual_seed(seed)
    tables = [torch.zeros(n_rows, dim) for _ in range(3)]
    twins = [table.clone() for table in tables]
    rates = AdamWRates(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, decay=decay)

    for step in range(1, 5):
        gradient = torch.randn(n_rows, dim, generator=generator)
        adamw_dense(*tables, gradient, step=step, rates=rates)
        plain.adamw_dense(*twins, gradient, step, rates)

    for ours, theirs in zip(tables, twins, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@given(**SIZES, decay=st.sampled_from([0.0, 0.3]), eps=st.sampled_from([1e-3, 1e-1]))
def test_classifiers_updated_in_chunks_end_where_torchs_adamw_puts_them(
    n_points, n_labels, dim, chunk_size, seed, decay, eps
):
    problem = Problem(n_points, n_labels, dim, seed)
    rows = LinearRows(n_labels, dim)
    rows.weight.data.copy_(problem.weight)
    rows.bias.data.copy_(problem.bias)
    rates = AdamWRates(lr=0.1, beta1=0.9, beta2=0.999, eps=eps, decay=decay)
    moments = ChunkedUpdate(rows, rates, rates._replace(decay=0.0))
    _, weight, bias = problem.leaves(torch.float64)
    groups = [{"params": [weight], "weight_decay": decay}, {"params": [bias], "weight_decay": 0.0}]
    torchs = torch.optim.AdamW(groups, lr=0.1, eps=eps)

    for step in range(1, 5):
        scale = 1 / step  # a schedule
        embedding, twin = (problem.leaves(dtype)[0] for dtype in (torch.float32, torch.float64))
        in_chunks(
            chunk_size,
            every_label_loss,
            embedding,
            rows.weight,
            rows.bias,
            problem.positives,
            scale=1 / n_points,
            update=moments.update(step, scale),
        ).backward()
        for group in torchs.param_groups:
            group["lr"] = 0.1 * scale
        torchs.zero_grad()
        problem.dense_loss(twin, weight, bias, 1 / n_points).backward()
        torchs.step()

        assert rows.weight.grad is None
        torch.testing.assert_close(embedding.grad.double(), twin.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(rows.weight.detach().double(), weight.detach(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(rows.bias.detach().double(), bias.detach(), rtol=1e-3, atol=1e-3)


@given(**SIZES, top_k=st.integers(1, 12), n_blocked=st.integers(0, 4))
def test_the_best_labels_are_those_of_the_dense_logits_and_ties_go_by_id(
    n_points, n_labels, dim, chunk_size, seed, top_k, n_blocked
):
    problem = Problem(n_points, n_labels, dim, seed)
    # whole numbers: exact sums and many ties
    embedding, weight, bias = (part.detach().round() for part in problem.leaves(torch.float32))
    blocked = torch.zeros(n_labels, dtype=torch.bool)
    blocked[torch.randperm(n_labels)[:n_blocked]] = True

    inputs = (embedding, weight, bias, top_k, blocked)
    labels, logits = in_chunks(chunk_size, every_label_top, *inputs)

    scores = (embedding @ weight.T + bias).masked_fill(blocked, -torch.inf)
    for row, actual, values in zip(scores.tolist(), labels.tolist(), logits.tolist(), strict=True):
        expected = sorted(range(n_labels), key=lambda label: (-row[label], label))[:top_k]
        assert actual == expected
        assert values == [row[label] for label in expected]


@given(
    values=st.lists(
        st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False), min_size=1, max_size=9
    ),
    seed=st.integers(0, 2**31),
)
def test_a_value_is_rounded_to_one_of_its_neighbours_in_bfloat16(values, seed):
    torch.manual_seed(seed)
    exact = torch.tensor(values)

    rounded = stochastic_round(exact)

    below = (exact.view(torch.int32) & -(2**16)).view(torch.float32)  # towards zero
    above = ((exact.view(torch.int32) & -(2**16)) + 2**16).view(torch.float32)
    assert rounded.dtype == torch.bfloat16
    assert ((rounded.float() == below) | ((rounded.float() == above) & (exact != below))).all()


@given(value=st.floats(-100, 100, width=32).filter(lambda value: abs(value) > 1e-3))
def test_stochastic_rounding_is_right_on_average(value):
    torch.manual_seed(0)
    n = 20_000
    exact = torch.full((n,), value)

    mean = stochastic_round(exact).double().mean().item()

    last_digit = 2.0 ** (torch.frexp(exact[:1]).exponent.item() - 8)
    assert mean == pytest.approx(exact[0].item(), abs=5 * last_digit / 2 / n**0.5)


@given(
    n_rows=st.integers(1, 4),
    dim=st.integers(1, 6),
    n_steps=st.integers(1, 6),
    seed=st.integers(0, 2**31),
)
def test_compact_moments_follow_adamw_with_one_second_moment_for_a_row(n_rows, dim, n_steps, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_rows, dim, generator=generator).bfloat16()
    mean, variance = torch.zeros_like(weight), torch.zeros(n_rows, 1)
    rates = AdamWRates(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.1)
    twin = weight.double()
    first, second = torch.zeros(n_rows, dim).double(), torch.zeros(n_rows, 1).double()

    for step in range(1, n_steps + 1):
        gradient = torch.randn(n_rows, dim, generator=generator)
        adamw_dense(weight, mean, variance, gradient, step=step, rates=rates)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * (gradient.double() ** 2).mean(dim=1, keepdim=True)
        size = (second / (1 - 0.999**step)).sqrt() + 1e-8
        twin = twin * (1 - 0.1 * 0.1) - 0.1 * (first / (1 - 0.9**step)) / size

    # each step may be off by a last digit: 1/128 of the weight
    assert weight.dtype == mean.dtype == torch.bfloat16
    torch.testing.assert_close(variance.double(), second, rtol=1e-4, atol=1e-6)
    largest = max(1.0, twin.abs().max().item())
    torch.testing.assert_close(weight.double(), twin, rtol=0, atol=n_steps * largest / 64)
