import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from elias.model.graph import LabelGraph, partition_edges


def make_graph(edge_labels, n_labels, beta=1.5, logits=None):
    if logits is not None:
        logits = torch.tensor(logits)
    return LabelGraph(torch.tensor(edge_labels), n_labels, beta, edge_logits=logits)


def test_edge_scores_match_equation_5_by_hand():
    graph = make_graph([[0, 1]], 2, beta=1.5, logits=[[0.0, math.log(4)]])  # shares 1/5, 4/5

    torch.testing.assert_close(graph.edge_log_scores().exp(), torch.tensor([[0.3, 1.0]]))


@given(beta=st.floats(1.0, 500.0), seed=st.integers(0, 2**31))
def test_a_cluster_never_spends_more_than_its_budget(beta, seed):
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) * 5
    graph = LabelGraph(torch.arange(12).view(3, 4), 12, beta, edge_logits=logits)

    scores = graph.edge_log_scores().exp()

    assert (scores >= 0).all()
    assert (scores <= 1).all()
    assert (scores.sum(dim=1) <= beta * (1 + 1e-5)).all()


def test_a_slot_without_an_edge_takes_no_share_of_the_budget():
    graph = make_graph([[0, 2, 2]], 2, beta=1.0, logits=[[1.0, 9.0, 9.0]])

    assert graph.edge_log_scores().tolist() == [[0.0, -math.inf, -math.inf]]


def test_every_edge_of_a_fixed_graph_scores_one():
    graph = make_graph([[0, 1], [2, 3]], 3)

    assert graph.edge_log_scores().exp().tolist() == [[1.0, 1.0], [1.0, 0.0]]
    assert not graph.edge_logits.requires_grad


def test_a_logit_far_below_the_others_keeps_a_finite_log_score():
    graph = make_graph([[0, 1]], 2, logits=[[0.0, -300.0]])

    assert graph.edge_log_scores()[0, 1].item() < -290
    assert graph.edge_log_scores().isfinite().all()


def test_a_saturated_edge_passes_no_gradient():
    graph = make_graph([[0, 1, 2]], 3, beta=1.5, logits=[[5.0, 0.0, 0.0]])

    graph.edge_log_scores()[0, 0].backward()

    assert not graph.edge_logits.grad.any()


def test_a_cluster_without_edges_has_gradients_of_zero():
    graph = make_graph([[0, 1], [2, 2]], 2, beta=1.0, logits=[[0.0, 1.0], [0.0, 0.0]])

    scores = graph.edge_log_scores()
    scores[scores.isfinite()].sum().backward()

    assert graph.edge_logits.grad.isfinite().all()
    assert graph.edge_logits.grad[1].tolist() == [0.0, 0.0]


def test_the_strongest_parent_has_the_largest_share_not_the_largest_logit():
    graph = make_graph([[0, 1], [0, 2]], 3, beta=1.0, logits=[[5.0, 9.0], [1.0, 0.0]])

    assert graph.strongest_parents().tolist() == [1, 0, 1]


def test_a_label_without_an_edge_has_no_parent():
    graph = make_graph([[0], [0]], 2, logits=[[0.0], [0.0]])

    assert graph.strongest_parents().tolist() == [0, 2]  # of equal parents the first; C for none


def test_a_partition_becomes_rows_of_labels():
    edges = partition_edges(torch.tensor([1, 0, 1, 1]), 3)

    assert edges.tolist() == [[1, 4, 4], [0, 2, 3], [4, 4, 4]]


def test_a_graph_that_only_searches_computes_its_scores_once_until_they_change():
    graph = make_graph([[0, 1], [1, 2]], 3, logits=[[0.0, 1.0], [2.0, 0.0]]).eval()

    with torch.no_grad():
        first = graph.unsaturated_log()
        assert graph.unsaturated_log() is first
        graph.edge_logits[0, 0] = 3.0
        changed = graph.unsaturated_log()

    assert changed is not first
    torch.testing.assert_close(changed, graph.unsaturated_log())
    assert changed[0, 0] > first[0, 0]


def test_cached_scores_are_discarded_when_training_begins():
    graph = make_graph([[0, 1]], 2, logits=[[0.0, 1.0]]).eval()
    with torch.no_grad():
        before = graph.unsaturated_log()
        graph.train()
        # a kernel that writes in place leaves torch's count of changes as it was
        torch.from_numpy(graph.edge_logits.detach().numpy())[0, 0] = 3.0
        after = graph.eval().unsaturated_log()

    assert after[0, 0] > before[0, 0]


def test_gradients_still_flow_after_a_search():
    graph = make_graph([[0, 1]], 2, logits=[[0.0, 1.0]]).eval()
    with torch.no_grad():
        graph.unsaturated_log()

    graph.unsaturated_log()[0, 0].backward()

    assert graph.edge_logits.grad is not None
