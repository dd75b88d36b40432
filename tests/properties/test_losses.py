"""The losses and their gradients are those of the naive formula, and stay finite beyond it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elias.kernels import cpu, plain, shortlist_bce
from elias.model.losses import shortlist_loss
from reference import cross_entropy

VERSIONS = pytest.mark.parametrize("version", [cpu.shortlist_bce, plain.shortlist_bce])

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
        *label_ids(torch.tensor([relevant]), torch.tensor([stored])),
    )


def label_ids(relevant, stored):
    """Shortlists of the labels 0, 1, ... with gaps, the relevant ones, and their number."""
    n_labels = relevant.shape[1]
    ids = torch.arange(n_labels).expand_as(relevant)
    positives = ids.masked_fill(~relevant, n_labels).sort(dim=1).values
    return ids.masked_fill(~stored, n_labels), positives, n_labels


@given(slots=SLOTS)
def test_the_classification_loss_and_its_gradients_match_the_naive_formula(slots):
    logits, logs, labels, positives, n_labels = tensors(slots)
    z, log_scores = (part.detach().double().requires_grad_() for part in (logits, logs))

    loss = shortlist_bce(logits, logs, labels, positives, n_labels)
    loss.backward()

    naive = 0 * (z + log_scores).sum()
    for i in sorted(set(labels[0].tolist()) - {n_labels}):
        p = torch.sigmoid(z[0, i]) * torch.exp(log_scores[0, i])
        naive = naive + cross_entropy(p, i in positives[0])
    gradients = torch.autograd.grad(naive, [z, log_scores])
    torch.testing.assert_close(loss.double(), naive, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.grad.double(), gradients[0], rtol=2e-4, atol=1e-6)
    torch.testing.assert_close(logs.grad.double(), gradients[1], rtol=2e-4, atol=1e-6)


@VERSIONS
@pytest.mark.parametrize("relevant", [True, False])
@pytest.mark.parametrize("log_score", [0.0, -1e-8, -1e-3, -200.0])
@pytest.mark.parametrize("logit", EXTREME)
def test_loss_and_gradients_are_finite_for_extreme_scores(version, logit, log_score, relevant):
    logits, logs, *labels = tensors([(logit, log_score, relevant, True)])

    for actual in version(logits.detach(), logs.detach(), *labels):
        assert actual.isfinite().all()


@given(n_slots=st.integers(1, 70), seed=st.integers(0, 2**31))
def test_the_compiled_loss_and_its_gradients_are_those_of_torch(n_slots, seed):
    generator = torch.Generator().manual_seed(seed)
    z = 12 * torch.randn(3, n_slots, generator=generator)
    logs = -(10 ** (6 * torch.rand(3, n_slots, generator=generator) - 4))
    relevant, stored = (torch.rand(3, n_slots, generator=generator) < p for p in (0.2, 0.9))
    logs = logs.masked_fill(torch.rand(3, n_slots, generator=generator) < 0.2, 0.0)

    labels = label_ids(relevant, stored)
    fast, slow = (kernels.shortlist_bce(z, logs, *labels) for kernels in (cpu, plain))

    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@VERSIONS
def test_a_logit_that_is_not_a_number_makes_the_loss_so(version):
    logits = torch.tensor([[1.0, float("nan"), 2.0]])

    loss, *_ = version(logits, torch.zeros(1, 3), torch.arange(3)[None], torch.full((1, 1), 3), 3)

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
