import pytest
import torch

from elias.kernels import adamw_rows
from elias.kernels.adamw_state import (
    AdamWRates,
    History,
    RowState,
    apply_pending_decay,
)


def after(*lrs, **changed):
    history = History()
    for lr in lrs:
        history.add(RATES._replace(lr=lr, **changed))
    return history


@pytest.fixture
def table():
    state = RowState(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
    return torch.ones(3, 2), state


RATES = AdamWRates(lr=0.1, beta1=0.9, beta2=0.999, eps=0.0, decay=0.5)


def test_rows_that_are_not_touched_stay_as_they_are(table):
    weight, state = table

    adamw_rows(weight, state, torch.tensor([1]), torch.ones(1, 2), after(0.1))

    assert torch.equal(weight[[0, 2]], torch.ones(2, 2))
    assert state.last_step.tolist() == [0, 1, 0]
    assert not state.mean[[0, 2]].any()


def test_the_first_step_moves_by_the_learning_rate_after_the_decay(table):
    weight, state = table
    gradient = torch.tensor([[3.0, -0.2]])

    adamw_rows(weight, state, torch.tensor([0]), gradient, after(0.1))

    torch.testing.assert_close(weight[0], torch.tensor([0.95 - 0.1, 0.95 + 0.1]))


def test_a_row_that_skipped_steps_decays_for_each_of_them_at_its_own_rate(table):
    weight, state = table
    history = after(0.2, 0.1, 0.4, eps=1.0)  # the gradient is zero: nothing else to divide by

    adamw_rows(weight, state, torch.tensor([2]), torch.zeros(1, 2), history)

    torch.testing.assert_close(weight[2], torch.full((2,), 0.9 * 0.95 * 0.8))


def test_touching_no_row_changes_nothing(table):
    weight, state = table

    adamw_rows(weight, state, torch.zeros(0).long(), torch.zeros(0, 2), after(0.1))

    assert torch.equal(weight, torch.ones(3, 2))


def test_a_replayed_history_equals_the_original_bit_for_bit():
    lrs = [0.1 / (step + 3) for step in range(2500)]  # more than there is room for at first

    lived = after(*lrs)
    replayed = History()
    replayed.replay(RATES._replace(lr=lr) for lr in lrs)

    n_steps = len(lrs)
    assert torch.equal(lived.decay_log[: n_steps + 1], replayed.decay_log[: n_steps + 1])
    assert (lived.step, lived.rates) == (replayed.step, replayed.rates)
    for history in (lived, replayed):
        for lr in lrs:
            history.add(RATES._replace(lr=lr))
    assert torch.equal(lived.decay_log[: 2 * n_steps + 1], replayed.decay_log[: 2 * n_steps + 1])


def test_pending_decay_of_bfloat16_weights_is_right_on_average():
    weight = torch.ones(500, 200).bfloat16()
    means, variances = (torch.ones(500, 200).bfloat16(),), (torch.ones(500, 1), torch.ones(500))
    last_step = torch.zeros(500, dtype=torch.int32)
    last_step[250:] = 2
    torch.manual_seed(0)

    apply_pending_decay(weight, means, variances, last_step, after(0.001, 0.001, decay=1.0))

    assert weight[:250].double().mean().item() == pytest.approx(0.999**2, abs=1e-4)
    assert (weight[250:] == 1).all()  # these had skipped nothing
    assert means[0][0, 0].item() == pytest.approx(0.81, abs=2e-3)
    assert [v[0].item() for v in variances] == pytest.approx([0.999**2] * 2)
    assert all((moment[250:] == 1).all() for moment in (*means, *variances))
    assert (last_step == 2).all()


def test_without_steps_there_is_no_pending_decay(table):
    weight, state = table

    apply_pending_decay(weight, (state.mean,), (state.variance,), state.last_step, History())

    assert torch.equal(weight, torch.ones(3, 2))
