"""The update of touched rows is AdamW over all rows, seen at the rows touched last."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elias.kernels.update import AdamWRates, RowState, _adamw_torch, adamw_rows
from reference import adamw


def on_torch(weight, state, touched, gradient, *, step, rates):
    _adamw_torch(weight, state, touched, gradient, step, rates)


def zero_state(weight):
    return RowState(
        torch.zeros_like(weight), torch.zeros_like(weight), torch.zeros(len(weight)).long()
    )


@pytest.mark.parametrize("update", [adamw_rows, on_torch])
@given(
    steps=st.lists(st.lists(st.integers(0, 4), unique=True, max_size=5), min_size=1, max_size=12),
    dim=st.integers(1, 9),
    decay=st.sampled_from([0.0, 0.01, 0.5]),
    seed=st.integers(0, 2**31),
)
def test_rows_that_skip_steps_end_where_dense_adamw_puts_them(update, steps, dim, decay, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, dim, generator=generator)
    gradients = [
        {row: torch.randn(dim, generator=generator) for row in sorted(rows)} for rows in steps
    ]
    rates = AdamWRates(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, decay=decay)
    fast, state = weight.clone(), zero_state(weight)

    for step, by_row in enumerate(gradients, start=1):
        rows = torch.tensor(list(by_row), dtype=torch.int64)
        values = torch.stack(list(by_row.values())) if by_row else torch.zeros(0, dim)
        update(fast, state, rows, values, step=step, rates=rates)

    for row in range(5):
        touched = [step for step, by_row in enumerate(gradients, start=1) if row in by_row]
        last = touched[-1] if touched else 0
        doubles = [{r: g.double() for r, g in by_row.items()} for by_row in gradients[:last]]
        expected = adamw(weight.double(), doubles, 0.1, (0.9, 0.99), 1e-8, decay)
        torch.testing.assert_close(fast[row].double(), expected[row], rtol=1e-4, atol=1e-5)
        assert state.last_step[row] == last


@given(n_steps=st.integers(1, 8), seed=st.integers(0, 2**31))
def test_a_table_touched_whole_in_every_step_is_updated_as_torch_does(n_steps, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 6, generator=generator)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([parameter], lr=0.05, weight_decay=0.1)
    rates = AdamWRates(lr=0.05, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.1)
    state = zero_state(weight)

    for step in range(1, n_steps + 1):
        gradient = torch.randn(4, 6, generator=generator)
        parameter.grad = gradient.clone()
        optimizer.step()
        adamw_rows(weight, state, torch.arange(4), gradient, step=step, rates=rates)

    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-4, atol=1e-5)
