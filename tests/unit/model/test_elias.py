import math

import pytest
import torch
from torch import nn

from elias.model.elias import EliasModel, SearchSizes, best_labels
from elias.model.encoder import TextEncoder
from elias.model.graph import LabelGraph
from elias.text.batches import TokenBatch


class Constant(TextEncoder):
    """φ is the same learned vector for every text."""

    dim = 2

    def __init__(self):
        super().__init__()
        self.vector = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, batch):
        return self.vector.expand(len(batch), 2)


def make_model(edge_labels, n_labels, cluster_logits, label_logits, alpha=1.0):
    """A model of fixed edges whose logits are given: φ = (1, 0) picks the first weight."""
    model = EliasModel(Constant(), LabelGraph(torch.tensor(edge_labels), n_labels, 1.0), alpha)
    for rows, logits in ((model.clusters, cluster_logits), (model.labels, label_logits)):
        rows.weight.data = torch.tensor([[logit, 0.0] for logit in logits])
    return model


def embed(model, n_texts):
    offsets = torch.zeros(n_texts + 1).long()
    return model.encoder(TokenBatch(ids=torch.zeros(0).long(), offsets=offsets, longest=0))


PHI = torch.tensor([[1.0, 0.0]])


def test_cluster_scores_match_equation_1_by_hand():
    model = make_model([[0], [1]], 2, [0.0, math.log(4)], [0.0, 0.0], alpha=1.5)

    scores = model.unsaturated_log(PHI).clamp(max=0).exp()

    torch.testing.assert_close(scores, torch.tensor([[0.3, 1.0]]))


def test_the_score_is_the_product_of_classifier_and_path():
    model = make_model([[0], [1]], 2, [0.0, math.log(4)], [0.0, math.log(3)])

    labels, p = model.rank(PHI, SearchSizes(2, 2), top_k=2)

    assert labels.tolist() == [[1, 0]]
    torch.testing.assert_close(p, torch.tensor([[0.75 * 0.8, 0.5 * 0.2]]))


def test_equal_scores_are_ranked_by_label_id():
    model = make_model([[3, 1, 0, 2]], 4, [0.0], [0.0, 0.0, 0.0, 0.0])

    labels, _ = model.rank(PHI, SearchSizes(1, 4), top_k=3)

    assert labels.tolist() == [[0, 1, 2]]


def test_slots_without_a_label_hold_the_number_of_labels_and_zero():
    model = make_model([[0, 3], [1, 2]], 3, [5.0, 0.0], [0.0, 0.0, 0.0])

    labels, p = model.rank(PHI, SearchSizes(1, 3), top_k=3)

    assert labels.tolist() == [[0, 3, 3]]
    assert p[0, 1:].tolist() == [0.0, 0.0]


def test_a_blocked_label_frees_its_slot_in_the_shortlist():
    model = make_model([[0, 1, 2]], 3, [0.0], [3.0, 2.0, 1.0])
    blocked = torch.tensor([True, False, False])

    labels, _ = model.rank(PHI, SearchSizes(1, 2), top_k=2, blocked=blocked)

    assert labels.tolist() == [[1, 2]]


def test_parents_of_positives_are_searched_before_better_clusters():
    model = make_model([[0], [1], [2], [3]], 4, [0.0] * 4, [0.0] * 4)
    cluster_log = torch.tensor([[-0.1, -0.2, -0.3, -9.0], [-0.1, -0.2, -9.0, -0.3]])
    parents = torch.tensor([[3, 3], [2, 4]])  # 4: none

    beam = model.training_beam(cluster_log, parents, size=2)

    assert [set(row) for row in beam.tolist()] == [{3, 0}, {2, 0}]


def test_a_positive_outside_the_beam_is_learned_from_through_its_parent():
    model = make_model([[0], [1]], 2, [9.0, 0.0], [0.0, 0.0])
    positives, parents = torch.tensor([[1]]), torch.tensor([[1]])

    losses = model.losses(
        embed(model, 1), positives, parents, SearchSizes(1, 2), shortlist_weight=1.0, mean=False
    )

    assert losses.shortlist.item() == pytest.approx(9, abs=1e-3)


def test_a_saturated_cluster_passes_no_gradient():
    model = make_model([[0], [1]], 2, [9.0, 0.0], [0.0, 0.0], alpha=2.0)

    model.unsaturated_log(PHI).clamp(max=0)[0, 0].backward()

    assert not model.clusters.weight.grad.any()


def test_means_are_over_all_slots_and_sums_over_points():
    model = make_model([[0, 1], [2, 3]], 4, [1.0, 0.0], [0.5, 0.0, 0.0, 0.0])
    positives, parents = torch.tensor([[0, 1], [2, 4]]), torch.tensor([[0, 0], [1, 2]])

    def run(mean):
        sizes = SearchSizes(1, 3)
        return model.losses(
            embed(model, 2), positives, parents, sizes, shortlist_weight=0.5, mean=mean
        )

    sums, means = run(mean=False), run(mean=True)

    assert means.classification.item() == pytest.approx(sums.classification.item() / 3)
    assert means.shortlist.item() == pytest.approx(sums.shortlist.item() / 2)
    torch.testing.assert_close(sums.total, sums.classification + 0.5 * sums.shortlist)


def test_a_batch_without_positives_has_a_finite_loss():
    model = make_model([[0], [1]], 2, [1.0, 0.0], [0.0, 0.0])
    nothing = torch.full((3, 1), 2)

    losses = model.losses(
        embed(model, 3), nothing, nothing, SearchSizes(2, 2), shortlist_weight=1.0, mean=True
    )
    losses.total.backward()

    assert losses.shortlist.item() == 0
    assert all(p.grad.to_dense().isfinite().all() for p in model.labels.parameters())


def test_a_parent_whose_softmax_underflows_still_gives_finite_gradients():
    model = make_model([[0], [1]], 2, [200.0, -200.0], [0.0, 0.0])
    positives, parents = torch.tensor([[1]]), torch.tensor([[1]])

    losses = model.losses(
        embed(model, 1), positives, parents, SearchSizes(2, 2), shortlist_weight=1.0, mean=False
    )
    losses.total.backward()

    assert losses.shortlist.item() == pytest.approx(400)
    assert all(p.grad.to_dense().isfinite().all() for p in model.parameters() if p.requires_grad)


def test_the_best_labels_are_those_of_a_full_sort():
    generator = torch.Generator().manual_seed(0)
    labels = torch.stack([torch.randperm(40, generator=generator)[:30] for _ in range(8)])
    log_p = -torch.randint(0, 4, (8, 30), generator=generator).float()  # with ties
    log_p[log_p == -3] = -torch.inf

    ids, p = best_labels(labels, log_p, 10, n_labels=40)

    for row in range(8):
        order = sorted(range(30), key=lambda i, row=row: (-log_p[row, i], labels[row, i]))[:10]
        expected = labels[row, order].masked_fill(log_p[row, order] == -torch.inf, 40)
        assert torch.equal(ids[row], expected)
        assert torch.equal(p[row], log_p[row, order].exp())
