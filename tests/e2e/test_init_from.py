"""Training that starts from a model."""

from dataclasses import replace

import pytest
import torch

from elias import Elias, EliasConfig, train
from elias.data.synthetic import synthetic_corpus
from elias.errors import ConfigError
from elias.training.train import starting_config

CHANGES = {
    "encoder.dim": 16,
    "encoder.hidden_dim": 16,
    "stages.stage1.epochs": 1,
    "stages.stage1.score_all": False,
    "eval.drop_unhelpful": False,
    "stages.stage2.epochs": 1,
    "rerank.enabled": False,
}
CONFIG = EliasConfig().override(CHANGES)
STILL = dict.fromkeys(("encoder_lr", "bag_lr", "cluster_lr", "label_lr", "edge_lr"), 0.0)


@pytest.fixture(scope="module")
def corpus():
    return synthetic_corpus(n_points=400, n_labels=60)


@pytest.fixture(scope="module")
def model(corpus):
    return train(corpus, CONFIG, device="cpu")


def weights(model):
    return {name: value.clone() for name, value in model.model.state_dict().items()}


def still(stage):
    """The stage, with nothing learned in it."""
    return replace(stage, **STILL, weight_decay=0.0)


def only_stage2(stage2):
    return replace(CONFIG, stages=(stage2,))


@pytest.mark.parametrize("stages", [CONFIG.stages, CONFIG.stages[1:]], ids=["both", "second"])
def test_the_given_model_does_not_change(corpus, model, stages):
    before, config, names = weights(model), model.config, list(model.label_names)

    train(corpus, replace(CONFIG, stages=stages), device="cpu", init_from=model)

    after = weights(model)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert (model.config, list(model.label_names)) == (config, names)


def test_a_first_stage_that_learns_the_graph_continues_with_that_of_the_model(corpus, model):
    again = train(corpus, only_stage2(still(CONFIG.stages[1])), device="cpu", init_from=model)

    after = weights(again)
    assert all(torch.equal(value, after[name]) for name, value in weights(model).items())


def test_more_training_changes_edge_scores_but_not_which_edges_exist(corpus, model):
    again = train(corpus, only_stage2(CONFIG.stages[1]), device="cpu", init_from=model)

    before, after = weights(model), weights(again)
    assert torch.equal(before["graph.edge_labels"], after["graph.edge_labels"])
    assert not torch.equal(before["graph.edge_logits"], after["graph.edge_logits"])


def test_a_saved_model_serves_as_well_as_the_one_in_memory(corpus, model, tmp_path):
    saved = Elias.from_pretrained(model.save_pretrained(tmp_path / "model"), device="cpu")

    ours, theirs = (
        weights(train(corpus, CONFIG, device="cpu", init_from=start)) for start in (model, saved)
    )

    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_the_classifiers_of_the_same_labels_are_kept(corpus, model):
    stage1 = replace(still(CONFIG.stages[0]), keep_labels=True)

    again = train(corpus, replace(CONFIG, stages=(stage1,)), device="cpu", init_from=model)

    assert torch.equal(weights(again)["labels.weight"], weights(model)["labels.weight"])


def test_only_the_encoder_of_a_model_with_other_labels_is_used(model):
    other = synthetic_corpus(n_points=300, n_labels=40, seed=1)
    stages = tuple(replace(still(stage), keep_encoder=True) for stage in CONFIG.stages)

    new = train(other, replace(CONFIG, stages=stages), device="cpu", init_from=model)

    before, after = weights(model), weights(new)
    encoder = [name for name in before if name.startswith("encoder.")]
    assert new.n_labels == 40
    assert encoder
    assert all(torch.equal(before[name], after[name]) for name in encoder)


def test_with_other_labels_the_graph_is_not_reused(model):
    other = synthetic_corpus(n_points=300, n_labels=40, seed=1)

    with pytest.raises(ConfigError, match="learn_graph"):
        train(other, only_stage2(CONFIG.stages[1]), device="cpu", init_from=model)


def test_the_encoder_is_described_as_the_given_models_whatever_was_configured(
    corpus, model, tmp_path
):
    config = CONFIG.override({"encoder.dim": 32, "encoder.hidden_dim": 24})

    again = train(corpus, config, device="cpu", init_from=model, out=tmp_path / "run")

    saved = Elias.from_pretrained(tmp_path / "run", device="cpu")
    texts = corpus.test.texts
    assert again.config.encoder == model.config.encoder
    assert saved.predict(texts).ids.tolist() == again.predict(texts).ids.tolist()


@pytest.mark.parametrize(("changes", "message"), [({}, False), ({"encoder.dim": 32}, True)])
def test_unused_encoder_settings_are_reported(model, caplog, changes, message):
    caplog.set_level("INFO", logger="elias")

    config = starting_config(CONFIG.override(changes), model)

    assert config.encoder == model.config.encoder
    assert ("using the encoder and the encoder settings" in caplog.text) is message


def test_all_stages_continue_from_the_given_model(corpus, model):
    config = replace(CONFIG, stages=tuple(still(stage) for stage in CONFIG.stages))

    again = train(corpus, config, device="cpu", init_from=model)

    after = weights(again)
    assert all(torch.equal(value, after[name]) for name, value in weights(model).items())


def test_a_model_with_the_fixed_graph_keeps_its_clusters_and_classifiers(corpus):
    changes = {"stages.stage1.cluster_with_encoder": False}
    config = CONFIG.override(changes)
    config = replace(config, stages=config.stages[:1])
    first = train(corpus, config, device="cpu")

    again = train(
        corpus, replace(config, stages=(still(config.stages[0]),)), device="cpu", init_from=first
    )

    after = weights(again)
    assert all(torch.equal(value, after[name]) for name, value in weights(first).items())


def test_holding_out_more_than_half_of_the_points_is_refused(corpus):
    with pytest.raises(ConfigError, match=r"eval.validation_size is 300.*400 training points"):
        train(corpus, CONFIG.override({"eval.validation_size": 300}), device="cpu")
