import pytest
import torch

from elias.kernels.update import AdamWRates, RowState, _adamw_torch, adamw_rows


def on_torch(weight, state, touched, gradient, *, step, rates):
    _adamw_torch(weight, state, touched, gradient, step, rates)


@pytest.fixture(params=[adamw_rows, on_torch], ids=["compiled", "torch"])
def update(request):
    return request.param


@pytest.fixture
def table():
    state = RowState(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
    return torch.ones(3, 2), state


RATES = AdamWRates(lr=0.1, beta1=0.9, beta2=0.999, eps=0.0, decay=0.5)


def test_rows_that_are_not_touched_stay_as_they_are(update, table):
    weight, state = table

    update(weight, state, torch.tensor([1]), torch.ones(1, 2), step=1, rates=RATES)

    assert torch.equal(weight[[0, 2]], torch.ones(2, 2))
    assert state.last_step.tolist() == [0, 1, 0]
    assert not state.mean[[0, 2]].any()


def test_the_first_step_moves_by_the_learning_rate_after_the_decay(update, table):
    weight, state = table
    gradient = torch.tensor([[3.0, -0.2]])

    update(weight, state, torch.tensor([0]), gradient, step=1, rates=RATES)

    torch.testing.assert_close(weight[0], torch.tensor([0.95 - 0.1, 0.95 + 0.1]))


def test_a_row_that_skipped_steps_decays_for_each_of_them(update, table):
    weight, state = table
    rates = RATES._replace(eps=1.0)  # the gradient is zero: nothing else to divide by

    update(weight, state, torch.tensor([2]), torch.zeros(1, 2), step=3, rates=rates)

    torch.testing.assert_close(weight[2], torch.full((2,), 0.95**3))


def test_touching_no_row_changes_nothing(update, table):
    weight, state = table

    update(weight, state, torch.zeros(0).long(), torch.zeros(0, 2), step=1, rates=RATES)

    assert torch.equal(weight, torch.ones(3, 2))
