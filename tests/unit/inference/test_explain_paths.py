import torch

from elias.inference.explain import clusters_of_label, labels_of_cluster, trace
from elias.model.elias import EliasModel
from elias.model.graph import LabelGraph
from properties.test_model import Lookup


def model_over(edges, logits=None, *, n_labels=4, beta=2.0):
    graph = LabelGraph(torch.tensor(edges), n_labels, beta, edge_logits=logits)
    return EliasModel(Lookup(torch.ones(1, 2)), graph, alpha=1.0)


def test_the_strongest_labels_of_a_cluster_have_its_heaviest_edges():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 9.0]])
    model = model_over([[0, 1, 2], [3, 0, 4]], logits)  # 4: no edge

    assert [edge.id for edge in labels_of_cluster(model, 0, 2)] == [1, 2]
    assert [edge.id for edge in labels_of_cluster(model, 1, 2)] == [3, 0]


def test_equal_edges_are_ordered_by_the_classifiers():
    model = model_over([[0, 1, 2, 3]])
    model.clusters.weight.data = torch.tensor([[1.0, 0.0]])
    model.labels.weight.data = torch.tensor([[0.0, 5.0], [-1.0, 0.0], [0.1, 0.0], [1.0, 1.0]])

    edges = labels_of_cluster(model, 0, 3)

    assert [edge.id for edge in edges] == [2, 3, 0]


def test_the_view_of_a_graph_lists_the_edges_of_its_dense_matrix():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 9.0]])
    model = model_over([[0, 1, 2], [3, 0, 4]], logits, beta=1.5).eval()  # 4: no edge
    dense = torch.zeros(2, 4)
    dense[0, :3] = 1.5 * logits[0].softmax(0)
    dense[1, [3, 0]] = 1.5 * logits[1, :2].softmax(0)
    dense = dense.clamp(max=1)

    for cluster in range(2):
        edges = labels_of_cluster(model, cluster)
        assert [edge.id for edge in edges] == dense[cluster].argsort(descending=True)[
            : 3 - cluster
        ].tolist()
        torch.testing.assert_close(
            torch.tensor([e.score for e in edges]), dense[cluster, [e.id for e in edges]]
        )
    for label in range(4):
        edges = clusters_of_label(model, label)
        assert [edge.id for edge in edges] == [
            c for c in dense[:, label].argsort(descending=True).tolist() if dense[c, label]
        ]
        torch.testing.assert_close(
            torch.tensor([e.score for e in edges]), dense[[e.id for e in edges], label]
        )
    assert clusters_of_label(model, 4) == []


def test_a_graph_of_one_cluster_has_one_path_of_score_one_to_every_label():
    model = model_over([[0, 1, 2, 3]])

    traced = trace(model, torch.ones(1, 2), torch.tensor([[2, 0]]), beam_size=5, n_paths=3)

    assert traced.clusters.tolist() == [[[0], [0]]]
    assert traced.path_scores.tolist() == [[[1.0], [1.0]]]
    torch.testing.assert_close(traced.p, traced.classifier)


def test_no_texts_have_no_paths():
    model = model_over([[0, 1, 2, 3]])
    nothing = torch.empty((0, 3), dtype=torch.int64)

    traced = trace(model, torch.ones(0, 2), nothing, beam_size=1, n_paths=2)

    assert traced.p.shape == (0, 3)
