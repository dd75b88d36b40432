"""The paths that explain a label are those the search walked, and their scores are predict's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from elias.inference.explain import trace
from elias.kernels import expand_beam
from elias.model.elias import SearchSizes
from properties.test_model import MODEL, make_model, weights_of

BEAM = st.integers(1, 7)


def traced_rank(model, beam_size, n_paths=10, k=8):
    embedding = model.encoder.vectors.detach()
    labels, p = model.rank(embedding, SearchSizes(beam_size, model.n_labels), k)
    return labels, p, trace(model, embedding, labels, beam_size=beam_size, n_paths=n_paths)


@given(case=MODEL, beam_size=BEAM)
def test_the_best_path_gives_exactly_the_score_of_the_ranking(case, beam_size):
    model = make_model(**case)

    labels, p, traced = traced_rank(model, beam_size)

    stored = labels < model.n_labels
    assert torch.equal(traced.p[stored], p[stored])
    assert torch.equal(traced.n_paths[~stored], torch.zeros_like(traced.n_paths[~stored]))
    torch.testing.assert_close(traced.classifier * traced.path_scores[..., 0], traced.p)


@given(case=MODEL, beam_size=BEAM)
def test_the_first_path_is_the_one_that_the_search_keeps(case, beam_size):
    model = make_model(**case)
    labels, _, traced = traced_rank(model, beam_size)
    cluster_log = model.unsaturated_log(model.encoder.vectors.detach())
    best = cluster_log.topk(min(beam_size, model.graph.n_clusters), dim=1)

    selected = expand_beam(
        *(best.indices, best.values, model.graph.edge_labels, model.graph.unsaturated_log()),
        labels,
        n_labels=model.n_labels,
        shortlist_size=model.n_labels,
    ).wanted_paths

    position = selected.clamp(min=0) // model.graph.edge_labels.shape[1]
    clusters = best.indices.gather(1, position).masked_fill(selected < 0, model.graph.n_clusters)
    assert torch.equal(traced.clusters[..., 0], clusters)


@given(case=MODEL, beam_size=BEAM)
def test_the_paths_are_all_that_a_slow_walk_finds_best_first(case, beam_size):
    model = make_model(**case)
    labels, _, traced = traced_rank(model, beam_size)
    weights = weights_of(model)
    edges = reference.edge_budgets(weights)
    budgets = reference.cluster_budgets(weights, model.encoder.vectors.detach().double())

    for row, scores in enumerate(budgets):
        clusters = reference.beam(scores, beam_size)
        for rank, label in enumerate(labels[row].tolist()):
            slow = {
                c: scores[c].clamp(max=1) * edges[c][label].clamp(max=1)
                for c in clusters
                if label in edges[c]
            }
            count = int(traced.n_paths[row, rank])
            actual = traced.path_scores[row, rank, :count].tolist()
            walked = traced.clusters[row, rank, :count].tolist()
            assert sorted(walked) == sorted(slow)
            assert actual == sorted(actual, reverse=True)
            assert actual == pytest.approx([slow[c].item() for c in walked], rel=1e-4, abs=1e-7)
            assert actual == pytest.approx(
                (traced.cluster_scores * traced.edge_scores)[row, rank, :count].tolist(), rel=1e-4
            )


@given(case=MODEL, beam_size=BEAM, n_paths=st.integers(1, 3))
def test_fewer_paths_are_the_best_of_all(case, beam_size, n_paths):
    model = make_model(**case)

    *_, everything = traced_rank(model, beam_size)
    *_, few = traced_rank(model, beam_size, n_paths)

    assert torch.equal(few.clusters, everything.clusters[..., :n_paths])
    assert torch.equal(few.n_paths, everything.n_paths)
