import math

import pytest
import torch

from elias.kernels import cpu, label_logits, plain, shortlist_bce
from elias.model.elias import LinearRows
from elias.model.losses import classification_loss, shortlist_loss

LABEL, N_LABELS = 2, 3


def loss_of(logit, score, relevant, stored=True):
    """The loss of one slot from z and ŷ."""
    return shortlist_bce(
        torch.tensor([[logit]]),
        torch.tensor([[score]]).log(),
        torch.tensor([[LABEL if stored else N_LABELS]]),
        torch.tensor([[LABEL if relevant else N_LABELS]]),
        N_LABELS,
    ).item()


def test_a_relevant_label_costs_minus_log_p():
    assert loss_of(0.0, 0.5, True) == pytest.approx(-math.log(0.25))


def test_an_irrelevant_label_costs_minus_log_one_minus_p():
    assert loss_of(0.0, 0.5, False) == pytest.approx(-math.log(0.75))


def test_an_empty_slot_costs_nothing():
    assert loss_of(3.0, 0.5, True, stored=False) == 0


@pytest.mark.parametrize("logit", [0.0, 1.0, 40.0, 200.0])
def test_with_a_path_score_of_one_an_irrelevant_label_costs_what_its_logit_does(logit):
    expected = math.log1p(math.exp(-logit)) + logit

    assert loss_of(logit, 1.0, False) == pytest.approx(expected, rel=1e-6)


def test_a_score_that_underflows_costs_its_logarithm():
    logs = torch.tensor([[-500.0]], requires_grad=True)

    loss = shortlist_bce(torch.zeros(1, 1), logs, *[torch.tensor([[LABEL]])] * 2, N_LABELS)
    loss.backward()

    assert loss.item() == pytest.approx(500 + math.log(2))
    assert logs.grad.item() == -1


def test_losses_are_float32_whatever_the_logits_are():
    logits = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)

    loss = shortlist_bce(logits, torch.zeros(1, 1), *[torch.tensor([[LABEL]])] * 2, N_LABELS)
    loss.backward()

    assert loss.dtype == torch.float32
    assert logits.grad.item() == -0.5


@pytest.mark.parametrize("kernels", [cpu, plain])
def test_positives_are_found_in_any_slot_and_padding_is_never_positive(kernels):
    labels = torch.tensor([[0, 3, 5, 6], [6, 2, 1, 0]])
    positives = torch.tensor([[0, 5, 6], [6, 6, 6]])  # 6 labels: 6 is padding

    _, by_logits, _ = kernels.shortlist_bce(*[torch.zeros(2, 4)] * 2, labels, positives, 6)

    assert by_logits.sign().tolist() == [[-1, 1, -1, 0], [0, 1, 1, 1]]


def test_a_positive_that_no_path_reached_adds_nothing_to_the_shortlist_loss():
    logs = torch.tensor([[-2.0, -3.0]])

    assert shortlist_loss(logs, torch.tensor([[True, False]])).item() == 2


class Divided(LinearRows):
    """Rows of which each process would hold a share."""

    whole = False


def test_the_classification_loss_is_the_same_whether_rows_are_whole_or_divided():
    torch.manual_seed(0)
    labels, positives = torch.tensor([[0, 2, 5], [4, 1, 6]]), torch.tensor([[2, 6], [1, 4]])
    embedding, logs = torch.randn(2, 4), -torch.rand(2, 3)
    whole, divided = LinearRows(6, 4), Divided(6, 4)
    divided.load_state_dict(whole.state_dict())

    losses = [
        classification_loss(rows, embedding, logs, labels, positives, 6)
        for rows in (whole, divided)
    ]
    for loss in losses:
        loss.backward()

    logits = label_logits(embedding, whole.weight, whole.bias, labels)
    assert losses[0].item() == shortlist_bce(logits, logs, labels, positives, 6).item()
    assert losses[0].item() == losses[1].item()
    assert torch.equal(whole.weight.grad.to_dense(), divided.weight.grad.to_dense())
