"""Training warns once, and names the remedy."""

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
