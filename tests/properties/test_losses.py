"""The losses and their gradients are those of the naive formula, and stay finite beyond it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elias.model import losses
from elias.model.losses import classification_loss, shortlist_loss
from reference import cross_entropy

VERSIONS = pytest.mark.parametrize("version", [losses._bce_compiled, losses._bce_torch])

LOGITS = st.floats(-8, 8, width=32)
LOG_SCORES = st.floats(-6, 0, width=32)
SLOTS = st.lists(
    st.tuples(LOGITS, LOG_SCORES, st.booleans(), st.booleans()), min_size=1, max_size=12
)
EXTREME = [-200.0, -90.0, -1e-8, 0.0, 1e-8, 90.0, 200.0]


def tensors(slots):
    logits, logs, relevant, stored = zip(*slots, strict=True)
    return (
        torch.tensor([logits], requires_grad=True),
        torch.tensor([logs], requires_grad=True),
        torch.tensor([relevant]),
        torch.tensor([stored]),
    )


@given(slots=SLOTS)
def test_the_classification_loss_and_its_gradients_match_the_naive_formula(slots):
    logits, logs, relevant, stored = tensors(slots)
    z, log_scores = (part.detach().double().requires_grad_() for part in (logits, logs))

    loss = classification_loss(logits, logs, relevant, stored)
    loss.backward()

    naive = 0 * (z + log_scores).sum()
    for i in stored[0].nonzero().flatten().tolist():
        p = torch.sigmoid(z[0, i]) * torch.exp(log_scores[0, i])
        naive = naive + cross_entropy(p, bool(relevant[0, i]))
    gradients = torch.autograd.grad(naive, [z, log_scores])
    torch.testing.assert_close(loss.double(), naive, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.grad.double(), gradients[0], rtol=2e-4, atol=1e-6)
    torch.testing.assert_close(logs.grad.double(), gradients[1], rtol=2e-4, atol=1e-6)


@VERSIONS
@pytest.mark.parametrize("relevant", [True, False])
@pytest.mark.parametrize("log_score", [0.0, -1e-8, -1e-3, -200.0])
@pytest.mark.parametrize("logit", EXTREME)
def test_loss_and_gradients_are_finite_for_extreme_scores(version, logit, log_score, relevant):
    slots = (part.detach() for part in tensors([(logit, log_score, relevant, True)]))

    for found in version(*slots):
        assert found.isfinite().all()


@given(n_slots=st.integers(1, 70), seed=st.integers(0, 2**31))
def test_the_compiled_loss_and_its_gradients_are_those_of_torch(n_slots, seed):
    generator = torch.Generator().manual_seed(seed)
    z = 12 * torch.randn(3, n_slots, generator=generator)
    logs = -(10 ** (6 * torch.rand(3, n_slots, generator=generator) - 4))
    relevant, stored = (torch.rand(3, n_slots, generator=generator) < p for p in (0.2, 0.9))
    logs = logs.masked_fill(torch.rand(3, n_slots, generator=generator) < 0.2, 0.0)

    fast, slow = (
        run(z, logs, relevant, stored) for run in (losses._bce_compiled, losses._bce_torch)
    )

    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@VERSIONS
def test_a_logit_that_is_not_a_number_makes_the_loss_so(version):
    logits = torch.tensor([[1.0, float("nan"), 2.0]])

    loss, *_ = version(logits, torch.zeros(1, 3), torch.zeros(1, 3).bool(), torch.ones(1, 3).bool())

    assert loss.isnan()


@given(
    logs=st.lists(st.floats(-50, 0, width=32), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
)
def test_the_shortlist_loss_sums_the_reached_positives(logs, seed):
    reached = torch.rand(1, len(logs), generator=torch.Generator().manual_seed(seed)) < 0.5
    positive_log = torch.tensor([logs], requires_grad=True)

    loss = shortlist_loss(positive_log, reached)
    loss.backward()

    expected = -sum(log for log, seen in zip(logs, reached[0].tolist(), strict=True) if seen)
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert torch.equal(positive_log.grad, -reached.float())
