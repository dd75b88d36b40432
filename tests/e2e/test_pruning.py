"""A pruned model: saved, loaded and asked like any other."""

import numpy as np
import pytest
import torch

from elias import Elias, EliasConfig, train
from elias.data.synthetic import synthetic_corpus
from elias.errors import ConfigError
from elias.inference.edit_model import prune_edges

SMALL = {
    "encoder.dim": 16,
    "encoder.hidden_dim": 16,
    "index.n_clusters": 8,
    "index.edges_per_cluster": 20,
    "index.beam_size": 4,
    "index.shortlist_size": 40,
    "stages.stage1.epochs": 1,
    "stages.stage1.score_all": False,
    "eval.drop_unhelpful": False,
    "stages.stage2.epochs": 2,
    "rerank.enabled": False,
    "eval.validation_size": 30,
}


@pytest.fixture(scope="module")
def corpus():
    return synthetic_corpus(n_points=300, n_labels=40, seed=3)


@pytest.fixture(scope="module")
def ensemble(corpus):
    config = EliasConfig().override(SMALL | {"ensemble.members": 2})
    return train(corpus, config, device="cpu")


@pytest.fixture(scope="module")
def model(ensemble):
    return ensemble.members[0]


def only_paths_kept(model, pruned):
    """The whole model with -inf on the edges that were pruned: what must be found."""
    graph = model.model.graph
    left = {
        (cluster, label)
        for cluster, labels in enumerate(pruned.model.graph.edge_labels.tolist())
        for label in labels
    }
    slots = [
        [(cluster, label) in left for label in labels]
        for cluster, labels in enumerate(graph.edge_labels.tolist())
    ]
    return graph.unsaturated_log().masked_fill(~torch.tensor(slots), -torch.inf)


def test_a_pruned_model_finds_what_the_paths_left_lead_to(model, corpus, monkeypatch):
    texts = corpus.test.texts
    pruned, edges = prune_edges(model, threshold=0.3)
    actual = pruned.predict(texts, top_k=20)

    masked = only_paths_kept(model, pruned)
    monkeypatch.setattr(model.model.graph, "unsaturated_log", lambda _=None: masked)
    expected = model.predict(texts, top_k=20)

    assert 0 < edges.after < edges.before
    np.testing.assert_array_equal(actual.ids, expected.ids)
    np.testing.assert_allclose(actual.scores, expected.scores, rtol=1e-5)


def test_a_pruned_model_is_saved_and_read_again(model, corpus, tmp_path):
    pruned, edges = prune_edges(model, top_k=3)

    folder = pruned.save_pretrained(tmp_path / "pruned")
    again = Elias.from_pretrained(folder, device="cpu")

    texts = corpus.test.texts
    ours, theirs = pruned.predict(texts), again.predict(texts)
    np.testing.assert_array_equal(ours.ids, theirs.ids)
    np.testing.assert_array_equal(ours.scores, theirs.scores)
    assert again.model.graph.n_edges == edges.after == pruned.model.graph.n_edges
    assert again.metadata["pruned"] == {
        "top_k": 3,
        "before": edges.before,
        "after": edges.after,
        "for_labels": edges.for_labels,
    }


def test_pruning_leaves_the_given_model_as_it_was(model, corpus):
    before = model.predict(corpus.test.texts)
    n_edges = model.model.graph.n_edges

    pruned, edges = prune_edges(model, threshold=0.9)

    after = model.predict(corpus.test.texts)
    assert model.model.graph.n_edges == n_edges == edges.before
    np.testing.assert_array_equal(before.scores, after.scores)
    assert "metrics" in model.metadata
    assert "metrics" not in pruned.metadata
    assert pruned.model.encoder is model.model.encoder


def test_every_label_is_found_where_all_clusters_are_searched(model, corpus):
    pruned, _ = prune_edges(model, threshold=1.0)

    actual = pruned.predict(corpus.test.texts[:3], only=range(40), top_k=40)

    assert all(sorted(ranking.ids) == list(range(40)) for ranking in actual)


def test_all_members_of_an_ensemble_are_pruned(ensemble, corpus, tmp_path):
    pruned, edges = prune_edges(ensemble, threshold=0.3)

    again = Elias.from_pretrained(pruned.save_pretrained(tmp_path / "both"), device="cpu")

    parts = [prune_edges(member, threshold=0.3)[1] for member in ensemble.members]
    assert edges.after == sum(part.after for part in parts)
    assert edges.removed == 1 - edges.after / edges.before
    for member, part in zip(again.members, parts, strict=True):
        assert member.model.graph.n_edges == part.after
    texts = corpus.test.texts
    np.testing.assert_array_equal(again.predict(texts).ids, pruned.predict(texts).ids)


def test_a_pruned_model_can_be_trained_further(model, corpus):
    pruned, edges = prune_edges(model, top_k=4)

    again = train(corpus, model.config, device="cpu", init_from=pruned)

    assert again.model.graph.n_edges == edges.after
    assert again.model.graph.removed_log is not None


@pytest.mark.parametrize("given", [{}, {"threshold": 0.5, "top_k": 3}])
def test_one_way_of_pruning_is_named(model, given):
    with pytest.raises(ConfigError, match="either threshold or top_k"):
        prune_edges(model, **given)


def test_one_vs_all_has_no_edges_to_prune(corpus):
    config = EliasConfig().override(
        {"index.kind": "all", "encoder.dim": 16, "stages.one-vs-all.epochs": 1}
    )

    with pytest.raises(ConfigError, match="no learned graph"):
        prune_edges(train(corpus, config, device="cpu"), threshold=0.5)
