"""The update of touched rows is AdamW over all rows with gradients of zero, less old momentum."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elias.kernels import adamw_rows
from elias.kernels.adamw_state import (
    AdamWRates,
    History,
    RowState,
    apply_pending_decay,
)
from elias.training.optimizer import schedule
from reference import adamw


def zero_state(weight):
    return RowState(
        torch.zeros_like(weight), torch.zeros_like(weight), torch.zeros(len(weight)).long()
    )


def bring_up_to_date(weight, state, history):
    apply_pending_decay(weight, (state.mean,), (state.variance,), state.last_step, history)


@given(
    steps=st.lists(st.lists(st.integers(0, 4), unique=True, max_size=5), min_size=1, max_size=12),
    dim=st.integers(1, 9),
    decay=st.sampled_from([0.0, 0.01, 0.5]),
    caught_up_at=st.integers(0, 12),
    seed=st.integers(0, 2**31),
)
def test_skipped_steps_decay_moments_and_weight_at_the_rate_of_each_step(
    steps, dim, decay, caught_up_at, seed
):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, dim, generator=generator)
    gradients = [
        {row: torch.randn(dim, generator=generator) for row in sorted(rows)} for rows in steps
    ]
    lrs = [0.3 * schedule(step, len(steps)) for step in range(len(steps))]
    fast, state, history = weight.clone(), zero_state(weight), History()

    for step, (by_row, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        rows = torch.tensor(list(by_row), dtype=torch.int64)
        values = torch.stack(list(by_row.values())) if by_row else torch.zeros(0, dim)
        history.add(AdamWRates(lr=lr, beta1=0.9, beta2=0.99, eps=1e-8, decay=decay))
        adamw_rows(fast, state, rows, values, history)
        if step == caught_up_at:
            bring_up_to_date(fast, state, history)

    doubles = [{r: g.double() for r, g in by_row.items()} for by_row in gradients]
    rest = (0.9, 0.99), 1e-8, decay
    for row in range(5):
        touched = [step for step, by_row in enumerate(gradients, start=1) if row in by_row]
        if caught_up_at <= len(steps):
            touched.append(caught_up_at)
        last = max(touched, default=0)
        expected = adamw(weight.double(), doubles[:last], lrs[:last], *rest)
        torch.testing.assert_close(fast[row].double(), expected[row], rtol=1e-4, atol=1e-5)
        assert state.last_step[row] == last
    bring_up_to_date(fast, state, history)
    expected = adamw(weight.double(), doubles, lrs, *rest)
    torch.testing.assert_close(fast.double(), expected, rtol=1e-4, atol=1e-5)
    assert (state.last_step == len(steps)).all()


@given(n_steps=st.integers(1, 8), seed=st.integers(0, 2**31))
def test_a_table_touched_whole_in_every_step_is_updated_as_torch_does(n_steps, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 6, generator=generator)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([parameter], lr=0.05, weight_decay=0.1)
    state, history = zero_state(weight), History()

    for step in range(n_steps):
        gradient = torch.randn(4, 6, generator=generator)
        parameter.grad = gradient.clone()
        lr = optimizer.param_groups[0]["lr"] = 0.05 * schedule(step, n_steps)
        optimizer.step()
        history.add(AdamWRates(lr=lr, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.1))
        adamw_rows(weight, state, torch.arange(4), gradient, history)

    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-4, atol=1e-5)


@given(n_steps=st.integers(1, 300), decay=st.sampled_from([0.01, 1.0]), seed=st.integers(0, 2**31))
def test_a_row_without_gradients_decays_as_torch_decays_it(n_steps, decay, seed):
    weight = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
    parameter = torch.nn.Parameter(weight.double())
    optimizer = torch.optim.AdamW([parameter], weight_decay=decay)
    state, history = zero_state(weight), History()

    for step in range(n_steps):
        parameter.grad = torch.zeros_like(parameter)
        lr = optimizer.param_groups[0]["lr"] = 0.1 * schedule(step, n_steps)
        optimizer.step()
        history.add(AdamWRates(lr=lr, beta1=0.9, beta2=0.999, eps=1e-8, decay=decay))
    adamw_rows(weight, state, torch.tensor([1]), torch.zeros(1, 3), history)  # the last step alone
    bring_up_to_date(weight, state, history)

    torch.testing.assert_close(weight.double(), parameter.detach(), rtol=1e-6, atol=1e-12)


def travelled(every, n_touches=200):
    """Return how far a row moves that has a gradient every few steps: here, and with torch."""
    weight = torch.zeros(1, 1)
    parameter = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.0)
    state, history = zero_state(weight), History()
    rates = AdamWRates(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.0)
    for step in range(every * n_touches):
        touched = step % every == 0
        parameter.grad = torch.full_like(parameter, float(touched))
        optimizer.step()
        history.add(rates)
        if touched:
            adamw_rows(weight, state, torch.tensor([0]), torch.ones(1, 1), history)
    return weight.abs().item(), parameter.abs().item()


@pytest.mark.parametrize(("every", "ratio"), [(1, 1.0), (2, 1.9), (10, 6.5), (50, 10.0)])
def test_dense_adamw_goes_further_in_the_steps_a_row_skips_by_its_old_momentum(every, ratio):
    """The one difference, and its size as the documentation has it: about Σ β1^k, k < every."""
    own, dense = travelled(every)

    assert dense / own == pytest.approx(ratio, abs=0.05)
