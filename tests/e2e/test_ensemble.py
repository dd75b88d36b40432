"""Several members trained with one command, saved and loaded as one model."""

import json

import numpy as np
import pytest

from elias import Elias, EliasConfig, train
from elias.data.synthetic import synthetic_corpus
from elias.errors import ConfigError, ModelError

STAGES = ("stage1", "stage2", "rerank", "calibrate")
SMALL = {
    "encoder.dim": 16,
    "encoder.hidden_dim": 16,
    "index.n_clusters": 8,
    "index.edges_per_cluster": 12,
    "index.beam_size": 4,
    "stages.stage1.epochs": 1,
    "stages.stage1.score_all": False,
    "eval.drop_unhelpful": False,
    "stages.stage2.epochs": 2,
    "rerank.candidates": 20,
    "rerank.char_ngrams": [0, 0],
    "rerank.trees": 2,
    "eval.validation_size": 30,
}


@pytest.fixture(scope="module")
def corpus():
    return synthetic_corpus(n_points=300, n_labels=40, seed=3)


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "ensemble"
    config = EliasConfig().override(SMALL | {"ensemble.members": 3})
    train(corpus, config, out=folder, device="cpu")
    return folder


@pytest.fixture(scope="module")
def ensemble(run):
    return Elias.from_pretrained(run, device="cpu")


def averaged(members, texts, n_labels):
    """The dense twin: the mean of the members' scores, 0 where a member lacks the label."""
    total = np.zeros((len(texts), n_labels))
    for member in members:
        actual = member.predict(texts, top_k=100)
        for row in range(len(texts)):
            ranking = actual[row]
            total[row, ranking.ids] += ranking.scores
    return total / len(members)


def test_scores_are_the_mean_over_members(ensemble, corpus):
    texts = corpus.test.texts[:20]
    expected = averaged(ensemble.members, texts, corpus.n_labels)

    actual = ensemble.predict(texts, top_k=7)

    for row, ranking in enumerate(actual):
        np.testing.assert_allclose(ranking.scores, expected[row, ranking.ids], rtol=1e-5)
        assert ranking.scores[-1] >= np.sort(expected[row])[-7] - 1e-6


def test_members_differ_in_their_clusters_and_work_alone(ensemble, run, corpus):
    texts = corpus.test.texts[:10]
    first, second, third = ensemble.members
    graphs = [member.model.graph.edge_labels for member in ensemble.members]

    assert not graphs[0].equal(graphs[1])
    assert not graphs[1].equal(graphs[2])
    alone = Elias.from_pretrained(run / "model" / "members" / "2", device="cpu")
    np.testing.assert_array_equal(alone.predict(texts).ids, third.predict(texts).ids)
    assert first.components == second.components == ("stage2", "rerank", "calibrate")
    assert ensemble.components == ("stage2", "rerank", "calibrate", "ensemble")


@pytest.mark.parametrize("component", ["stage2", "rerank", "calibrate"])
def test_one_component_of_an_ensemble_is_its_first_member(ensemble, corpus, component):
    texts = corpus.test.texts[:10]
    first = ensemble.members[0].predict(texts, component=component)

    np.testing.assert_array_equal(ensemble.predict(texts, component=component).ids, first.ids)


def test_a_component_that_is_not_there_is_refused(ensemble, corpus):
    with pytest.raises(ConfigError, match=r"'rerankk'.*did you mean 'rerank'"):
        ensemble.predict(corpus.test.texts[:1], component="rerankk")


@pytest.mark.parametrize("member", [0, 2])
def test_the_labels_of_all_members_are_explained_by_one(ensemble, corpus, member):
    texts = corpus.test.texts[:5]
    ranked = ensemble.predict(texts)
    own = ensemble.members[member].predict(texts, component="stage2", top_k=ensemble.n_labels)

    for row, explained in enumerate(ensemble.explain(texts, member=member)):
        assert [label.id for label in explained.labels] == ranked[row].ids.tolist()
        scores = [label.score for label in explained.labels]
        assert scores == pytest.approx(ranked[row].scores.tolist())
        known = dict(zip(own[row].ids.tolist(), own[row].scores.tolist(), strict=True))
        for label in explained.labels:
            assert label.p == pytest.approx(known.get(label.id, 0.0), abs=1e-5)


def test_a_member_that_is_not_there_explains_nothing(ensemble, corpus):
    with pytest.raises(ConfigError, match="there is no member 7; member indices go from 0 to 2"):
        ensemble.explain(corpus.test.texts[:1], member=7)


def test_a_members_configuration_trains_it_again_by_itself(ensemble, corpus):
    second = ensemble.members[1]

    again = train(corpus, second.config, device="cpu")

    assert second.config.ensemble.members == 1
    texts = corpus.test.texts[:10]
    # a single model trains its ranker on the held-out points too in the end
    stages = [model.predict(texts, component="stage2") for model in (again, second)]
    np.testing.assert_array_equal(*(predicted.scores for predicted in stages))


def test_the_run_records_each_member_and_the_whole(run, ensemble, corpus):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    stages = [(line.get("member", 0), line["stage"]) for line in lines if line["event"] == "stage"]

    assert stages == [
        *((member, stage) for member in range(3) for stage in STAGES),
        (0, "ensemble"),
    ]
    measured = ensemble.evaluate(corpus)
    recorded = ensemble.metadata["metrics"]["ensemble"]["test"]["P@1"]
    assert measured["P@1"] == pytest.approx(recorded, abs=1e-4)


def test_predictions_can_be_limited(ensemble, corpus):
    few = list(corpus.label_names[:3])
    actual = ensemble.predict(corpus.test.texts[:5], only=few)

    assert all(sorted(ranking.labels) == sorted(few) for ranking in actual)


def test_a_missing_member_is_an_error(ensemble, tmp_path):
    folder = ensemble.save_pretrained(tmp_path / "model")
    (folder / "members" / "1" / "model.safetensors").unlink()

    with pytest.raises(ModelError, match=r"members.1.model\.safetensors"):
        Elias.from_pretrained(folder, device="cpu")
