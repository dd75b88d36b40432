"""The model is the paper: rankings, losses and gradients of the slow reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import reference
from elias.kernels.cpu import search
from elias.model.elias import EliasModel, SearchSizes
from elias.model.encoder import TextEncoder
from elias.model.graph import LabelGraph
from elias.text.batches import TokenBatch

MODELS = {
    "n_labels": st.integers(2, 12),
    "n_clusters": st.integers(1, 10),
    "n_edges": st.integers(1, 6),
    "learned": st.booleans(),
    "alpha": st.sampled_from([1.0, 2.0, 3.5, 10.0]),
    "beta": st.sampled_from([1.0, 2.5, 100.0]),
    "seed": st.integers(0, 2**31),
}
MODEL = st.fixed_dictionaries(MODELS)
DIM = 5
PARTS = {
    "cluster_weight": "clusters.weight",
    "cluster_bias": "clusters.bias",
    "label_weight": "labels.weight",
    "label_bias": "labels.bias",
}


class Lookup(TextEncoder):
    """φ is a row of a parameter: the text's only token is the row."""

    def __init__(self, vectors):
        super().__init__()
        self.dim = vectors.shape[1]
        self.vectors = nn.Parameter(vectors)

    def forward(self, batch):
        return self.vectors[batch.ids]


def embed(model, n_points):
    offsets = torch.arange(n_points + 1)
    return model.encoder(TokenBatch(ids=torch.arange(n_points), offsets=offsets, longest=1))


def make_edges(n_clusters, n_edges, n_labels, generator):
    """Different labels under each cluster, some slots empty."""
    edges = torch.full((n_clusters, n_edges), n_labels)
    for cluster in range(n_clusters):
        labels = torch.randperm(n_labels, generator=generator)[:n_edges]
        edges[cluster, : len(labels)] = labels
        edges[cluster, torch.rand(n_edges, generator=generator) < 0.2] = n_labels
    return edges


def make_model(n_labels, n_clusters, n_edges, learned, alpha, beta, seed, n_points=4):
    generator = torch.Generator().manual_seed(seed)
    edges = make_edges(n_clusters, n_edges, n_labels, generator)
    logits = torch.randn(edges.shape, generator=generator) * 2 if learned else None
    graph = LabelGraph(edges, n_labels, beta, edge_logits=logits)
    model = EliasModel(Lookup(torch.randn(n_points, DIM, generator=generator)), graph, alpha)
    for name, parameter in model.named_parameters():
        if not name.startswith(("graph", "encoder")):
            parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def weights_of(model):
    """The model's weights in float64, ready for gradients."""
    parts = {name: value.detach().double() for name, value in model.named_parameters()}
    stored = model.graph.edge_labels < model.n_labels
    logits = [row[kept] for row, kept in zip(parts["graph.edge_logits"], stored, strict=True)]
    rows = zip(model.graph.edge_labels, stored, strict=True)
    return reference.Weights(
        **{short: parts[name].requires_grad_() for short, name in PARTS.items()},
        edge_labels=[row[kept].tolist() for row, kept in rows],
        edge_logits=[row.requires_grad_() for row in logits] if model.graph.learned else None,
        alpha=model.alpha,
        beta=model.graph.beta,
    )


def pairs_of(labels, p, n_labels):
    rows = zip(labels.tolist(), p.tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[0] < n_labels] for row in rows]


def assert_same_ranking(actual, expected):
    for row, slow in zip(actual, expected, strict=True):
        assert [label for label, _ in row] == [label for label, _ in slow]
        assert [p for _, p in row] == pytest.approx([p for _, p in slow], rel=1e-4, abs=1e-7)


@given(
    case=MODEL,
    beam_size=st.integers(1, 7),
    shortlist_size=st.integers(1, 14),
    k=st.integers(1, 9),
    first=st.sampled_from([1, 64]),
)
def test_the_ranking_is_that_of_the_slow_reference(case, beam_size, shortlist_size, k, first):
    model = make_model(**case)
    embedding = model.encoder.vectors.detach()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_FIRST_PATHS", first)  # labels looked at before the search may end
        actual = model.rank(embedding, SearchSizes(beam_size, shortlist_size), k)

    expected = reference.rank(weights_of(model), embedding.double(), beam_size, shortlist_size, k)
    assert_same_ranking(pairs_of(*actual, model.n_labels), expected)


@given(k=st.integers(1, 7), shift=st.sampled_from([-3.0, 0.0, 8.0]), seed=st.integers(0, 2**31))
def test_a_search_that_ends_early_finds_what_one_over_all_labels_finds(k, shift, seed):
    case = {"learned": True, "alpha": 10.0, "beta": 20.0, "seed": seed, "n_points": 3}
    model = make_model(n_labels=300, n_clusters=8, n_edges=90, **case)
    model.labels.bias.data += shift
    embedding = model.encoder.vectors.detach()
    sizes = SearchSizes(5, 200)

    many = model.rank(embedding, sizes, k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_FIRST_PATHS", 300)
        whole = model.rank(embedding, sizes, k)
        patch.setattr(search, "_FIRST_PATHS", 2)
        early = model.rank(embedding, sizes, k)
    alone = [model.rank(point.unsqueeze(0), sizes, k) for point in embedding]

    for actual in (many, early, [torch.cat(parts) for parts in zip(*alone, strict=True)]):
        assert torch.equal(actual[0], whole[0])
        torch.testing.assert_close(actual[1], whole[1], rtol=1e-5, atol=0)  # products of one row


@given(case=MODEL)
def test_a_beam_over_all_clusters_that_keeps_all_labels_is_exhaustive_search(case):
    model = make_model(**case)
    embedding = model.encoder.vectors.detach()
    n_labels, n_clusters = model.n_labels, model.graph.n_clusters

    labels, p = model.rank(embedding, SearchSizes(n_clusters, n_labels), n_labels)

    clusters = model.unsaturated_log(embedding).clamp(max=0).exp()  # (B, C)
    edges = torch.zeros(n_clusters, n_labels + 1)
    edges.scatter_(1, model.graph.edge_labels, model.graph.edge_log_scores().exp())
    paths = (clusters.unsqueeze(-1) * edges[:, :n_labels]).amax(dim=1)  # (B, L)
    dense = paths * torch.sigmoid(embedding @ model.labels.weight.T + model.labels.bias)
    actual = torch.zeros(len(embedding), n_labels + 1).scatter_(1, labels, p)
    torch.testing.assert_close(actual[:, :n_labels], dense, rtol=1e-4, atol=1e-7)


@settings(max_examples=80)
@given(
    case=MODEL,
    beam_size=st.integers(1, 7),
    share=st.floats(0.1, 1.0),
    mean=st.booleans(),
    forcing=st.booleans(),
    weight=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_losses_and_all_gradients_are_those_of_the_slow_reference(
    case, beam_size, share, mean, forcing, weight
):
    model = make_model(**case)
    size = max(1, int(share * model.n_labels))
    positives = make_positives(model, case["seed"])
    parents = parents_of(model, positives)
    if not forcing:
        parents = torch.full_like(parents, model.graph.n_clusters)
    beam_size = beam_size + positives.shape[1]

    actual = model.losses(
        embed(model, len(positives)),
        positives,
        parents,
        SearchSizes(beam_size, size),
        shortlist_weight=weight,
        mean=mean,
    )
    actual.total.backward()

    weights = weights_of(model)
    embedding = model.encoder.vectors.detach().double().requires_grad_()
    lists = (without(positives, model.n_labels), without(parents, model.graph.n_clusters))
    expected = reference.losses(weights, embedding, *lists, (beam_size, size), mean=mean)
    total = expected[0] + weight * expected[1]
    torch.testing.assert_close(actual.classification.double(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual.shortlist.double(), expected[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual.total.double(), total, rtol=1e-4, atol=1e-5)
    assert_same_gradients(model, weights, embedding, total)


def make_positives(model, seed):
    """Up to three positives a point, some points with none; ascending, padded with L."""
    generator = torch.Generator().manual_seed(seed + 1)
    n_points = len(model.encoder.vectors)
    width = min(3, model.n_labels)
    rows = [torch.randperm(model.n_labels, generator=generator)[:width] for _ in range(n_points)]
    positives = torch.stack(rows)
    dropped = torch.rand(positives.shape, generator=generator) < 0.4
    dropped[0] = False
    return positives.masked_fill(dropped, model.n_labels).sort(dim=1).values


def parents_of(model, positives):
    parents = torch.cat([model.graph.strongest_parents(), torch.tensor([model.graph.n_clusters])])
    return parents[positives]


def without(rows, padding):
    return [[value for value in row if value != padding] for row in rows.tolist()]


def assert_same_gradients(model, weights, embedding, total):
    stored = model.graph.edge_labels < model.n_labels
    slow = {name: getattr(weights, short) for short, name in PARTS.items()}
    slow["encoder.vectors"] = embedding
    edges = weights.edge_logits or []
    if total.requires_grad:
        total.backward()
    fast = {name: dense(parameter.grad) for name, parameter in model.named_parameters()}
    for name, parameter in slow.items():
        assert_close_gradient(fast[name], parameter.grad)
    for cluster, logits in enumerate(edges):
        row = fast["graph.edge_logits"][cluster]
        assert_close_gradient(row[stored[cluster]], logits.grad)
        assert not row[~stored[cluster]].any()


def dense(gradient):
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def assert_close_gradient(actual, expected):
    expected = torch.zeros_like(actual).double() if expected is None else expected
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-5)


@given(case=MODEL, shortlist_size=st.integers(1, 14))
def test_blocked_labels_are_replaced_by_others(case, shortlist_size):
    model = make_model(**case)
    embedding = model.encoder.vectors.detach()
    sizes = SearchSizes(model.graph.n_clusters, shortlist_size)
    generator = torch.Generator().manual_seed(case["seed"])
    blocked = torch.rand(model.n_labels, generator=generator) < 0.4

    labels, p = model.rank(embedding, sizes, model.n_labels, blocked)

    weights = weights_of(model)
    edges = [
        {label: score for label, score in row.items() if not blocked[label]}
        for row in reference.edge_budgets(weights)
    ]
    for row, point, scores in zip(
        pairs_of(labels, p, model.n_labels),
        embedding.double(),
        reference.cluster_budgets(weights, embedding.double()),
        strict=True,
    ):
        reached = reference.path_scores(scores, edges, range(len(edges)))
        shortlist = reference.shortlist(reached, shortlist_size)
        expected = {
            label: reference.probability(weights, point, label, reached[label]).item()
            for label in shortlist
        }
        assert dict(row) == pytest.approx(expected, rel=1e-4, abs=1e-7)


@given(case=MODEL)
def test_permuting_the_labels_permutes_the_predictions(case):
    model = make_model(**case)
    embedding = model.encoder.vectors.detach()
    sizes = SearchSizes(2, model.n_labels)
    renamed = torch.randperm(
        model.n_labels, generator=torch.Generator().manual_seed(case["seed"])
    )  # old id → new id
    labels, p = model.rank(embedding, sizes, model.n_labels)
    new_id = torch.cat([renamed, torch.tensor([model.n_labels])])

    model.graph.edge_labels = new_id[model.graph.edge_labels]
    for parameter in (model.labels.weight, model.labels.bias):
        parameter.data = parameter.data[renamed.argsort()]
    new_labels, new_p = model.rank(embedding, sizes, model.n_labels)

    assert torch.equal(new_labels, new_id[labels])
    torch.testing.assert_close(new_p, p)


@given(case=MODEL)
def test_the_strongest_parent_of_a_label_is_the_one_a_loop_finds(case):
    model = make_model(**case)
    weights = weights_of(model)
    if weights.edge_logits is None:
        shares = [torch.zeros(len(row)) for row in weights.edge_labels]
        weights = weights._replace(edge_logits=shares)

    parents = model.graph.strongest_parents()

    expected = [reference.strongest_parent(weights, label) for label in range(model.n_labels)]
    assert parents.tolist() == expected


@given(case=MODEL, extra=st.integers(1, 4))
def test_more_padding_of_the_positives_changes_no_loss(case, extra):
    model = make_model(**case)
    positives = make_positives(model, case["seed"])
    padding = torch.full((len(positives), extra), model.n_labels)
    sizes = SearchSizes(model.graph.n_clusters, model.n_labels)

    def total(positives):
        parents = parents_of(model, positives)
        embedding = embed(model, len(positives))
        return model.losses(
            embedding, positives, parents, sizes, shortlist_weight=0.3, mean=False
        ).total

    torch.testing.assert_close(total(torch.cat([positives, padding], dim=1)), total(positives))
