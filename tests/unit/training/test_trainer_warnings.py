"""Training warns once, and names the remedy."""

import logging

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias import EliasConfig, train
from elias.data.corpus import Corpus, Split
from elias.data.splits import hold_out_test
from elias.data.synthetic import synthetic_corpus
from elias.predictions import Predictions
from elias.training import trainer
from elias.training.trainer import Trainer, find_collapse, halved_rates
from stages import make_stage

pytestmark = pytest.mark.slow

SMALL = {
    "encoder.dim": 16,
    "encoder.hidden_dim": 16,
    "rerank.trees": 2,
    "stages.stage1.epochs": 2,
    "stages.stage2.epochs": 2,
    "index.kind": "graph",
}


@pytest.fixture
def corpus():
    return synthetic_corpus(n_points=300, n_labels=30, n_validation=40)


def test_nearly_all_texts_with_one_label_that_few_have_are_a_collapse():
    truth = csr_matrix(np.eye(30, dtype=np.float32))
    same, right = np.zeros((30, 1), dtype=np.int64), np.arange(30)[:, None]
    scores = np.ones((30, 1), dtype=np.float32)

    problem = find_collapse(Predictions(same, scores, 30), truth)

    assert problem == "100% of the held-out texts get the same best label, but only 3% have it"
    assert find_collapse(Predictions(right, scores, 30), truth) is None
    assert find_collapse(Predictions(same[:19], scores[:19], 30), truth[:19]) is None


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
@pytest.mark.parametrize(("spread", "is_collapse"), [(0.01, True), (0.5, False)])
def test_a_label_that_many_texts_have_is_a_collapse_if_its_score_does_not_depend_on_the_text(
    share, spread, is_collapse
):
    has_label = np.arange(100) < 100 * share
    truth = csr_matrix(np.stack([has_label, ~has_label], axis=1).astype(np.float32))
    log_odds = np.random.default_rng(0).normal(0.4, spread, (100, 1)) + np.array([0, -3])
    scores = (1 / (1 + np.exp(-log_odds))).astype(np.float32)
    ids = np.tile([0, 1], (100, 1))

    problem = find_collapse(Predictions(ids, scores, 2), truth)

    assert (problem is not None) == is_collapse
    if is_collapse:
        assert problem.startswith(
            "100% of the held-out texts get the same best label with nearly the same score (0.59"
        )


def test_the_highest_score_for_every_text_is_no_collapse_if_the_next_label_depends_on_the_text():
    truth = csr_matrix(np.ones((100, 2), dtype=np.float32))
    scores = np.stack([np.ones(100), np.linspace(0.1, 0.6, 100)], axis=1).astype(np.float32)

    assert find_collapse(Predictions(np.tile([0, 1], (100, 1)), scores, 2), truth) is None


def test_the_remedy_of_a_collapse_halves_the_rates_that_the_encoder_has():
    stage = make_stage(name="stage1", encoder_lr=1e-3, bag_lr=1e-2)

    assert halved_rates(stage, "transformer") == "--set stages.stage1.encoder_lr=0.0005"
    assert halved_rates(stage, "bag") == (
        "--set stages.stage1.encoder_lr=0.0005 --set stages.stage1.bag_lr=0.005"
    )


def test_a_collapse_is_reported_once_per_stage_and_for_the_trained_model(
    corpus, caplog, monkeypatch
):
    monkeypatch.setattr(trainer, "find_collapse", lambda *_: "all the same")

    train(corpus, EliasConfig().override({**SMALL, "ensemble.members": 2}), device="cpu")

    remedies = [line.split("--set ")[1] for line in caplog.messages if "all the same" in line]
    assert [remedy.split("=")[0] for remedy in remedies] == [
        "stages.stage1.encoder_lr",
        "stages.stage2.encoder_lr",
        "stages.stage1.encoder_lr",
    ]
    assert remedies[0] == remedies[2] == "stages.stage1.encoder_lr=0.0005 "


def test_a_model_that_did_not_collapse_gives_no_warning(corpus, caplog):
    train(corpus, EliasConfig().override(SMALL), device="cpu")

    assert "collapse" not in caplog.text


@pytest.mark.parametrize(
    ("score", "n_stages", "message"),
    [
        (49.0, 2, "(its nDCG@5 is 49.00 instead of 50.00), but by less than the standard error"),
        (40.0, 1, "(its nDCG@5 is 40.00 instead of 50.00), so the model of stage1 is kept"),
    ],
)
def test_the_log_says_what_becomes_of_a_stage_that_is_worse(
    score, n_stages, message, corpus, caplog, monkeypatch
):
    scores = {"stage1": 50.0, "stage2": score}
    monkeypatch.setattr(Trainer, "_score", lambda _, stage: scores[stage.name])

    with caplog.at_level(logging.INFO):
        model = train(corpus, EliasConfig().override(SMALL), device="cpu")

    assert len(model.config.stages) == n_stages
    assert f"stage2 is worse than stage1 on held-out points {message}" in caplog.text


def test_a_component_that_is_level_with_an_earlier_one_is_kept(corpus, monkeypatch):
    monkeypatch.setattr(Trainer, "_measure", lambda *values: dict.fromkeys(values[-1], 61.31))

    model = train(corpus, EliasConfig().override({**SMALL, "ensemble.members": 2}), device="cpu")

    assert [member.components[-1] for member in model.members] == ["names", "names"]


def single_labels(n_points=60):
    """Return points that each have a label of their own, and one that all have."""
    texts = [f"word{i} text" for i in range(n_points)]
    own = np.hstack([np.eye(n_points), np.ones((n_points, 1))]).astype(np.float32)
    names = [f"word{i}" for i in range(n_points)] + ["text"]
    return Corpus(train=Split(labels=csr_matrix(own), texts=texts), label_names=names)


def test_members_are_announced_and_warn_of_the_data_once(caplog):
    caplog.set_level("INFO", logger="elias")
    corpus = hold_out_test(single_labels(), 0.2, seed=0)

    train(corpus, EliasConfig().override({**SMALL, "ensemble.members": 2}), device="cpu")

    assert [m for m in caplog.messages if m.startswith("member ")] == [
        "member 1 of 2",
        "member 2 of 2",
    ]
    assert sum("no training points" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("drawn", [True, False])
def test_points_that_elias_drew_for_the_test_split_are_named_as_the_cause(caplog, drawn):
    corpus = hold_out_test(single_labels(), 0.2, seed=0)
    if not drawn:
        corpus = Corpus(train=corpus.train, test=corpus.test, label_names=corpus.label_names)

    train(corpus, EliasConfig().override(SMALL), device="cpu")

    (warning,) = (line for line in caplog.messages if "no training points" in line)
    assert warning.startswith("12 of 61 labels have no training points and can only be predicted")
    remedy = "; the points of 12 are in the test split: --test-size 0 trains on all points"
    assert warning.endswith(remedy) == drawn
