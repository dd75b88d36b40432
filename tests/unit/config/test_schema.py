import dataclasses
import json

import pytest

from elias.config import (
    EliasConfig,
)
from elias.errors import ConfigError


def test_a_configuration_is_frozen():
    config = EliasConfig()

    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


def test_the_defaults_survive_a_round_trip_through_json():
    config = EliasConfig()

    tree = json.loads(json.dumps(config.to_dict()))

    assert EliasConfig.from_dict(tree) == config


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"seed": "one"}, "seed must be a whole number, not 'one'"),
        ({"seed": True}, "seed must be a whole number, not True"),
        ({"seed": 1.5}, "seed must be a whole number, not 1.5"),
        ({"seed": -1}, "seed must be >= 0 and below 2^32, not -1"),
        ({"seed": 2**32}, "seed must be >= 0 and below 2^32, not 4294967296"),
        ({"index": {"alpha": "x"}}, "index.alpha must be a number, not 'x'"),
        ({"index": {"alpha": 0.5}}, "index.alpha must be >= 1, not 0.5"),
        ({"index": 3}, "index must be a table of keys, not 3"),
        ({"index": {"edge_init": "count"}}, "did you mean 'counts'?"),
        ({"encoder": {"char_ngrams": [3]}}, "encoder.char_ngrams must have 2 values, not 1"),
        ({"encoder": {"char_ngrams": 3}}, "encoder.char_ngrams must be a list, not 3"),
        ({"encoder": {"char_ngrams": [5, 3]}}, "encoder.char_ngrams must be [shortest, longest]"),
        ({"encoder": {"dropout": 1.0}}, "encoder.dropout must be in [0, 1), not 1.0"),
        ({"stages": []}, "stages must not be empty"),
        ({"stages": [{}, {}]}, "stages must have different names"),
        ({"stages": [{"epochs": 0}]}, "stages.stage1.epochs must be >= 1, not 0"),
        ({"stages": [{"label_lr": float("nan")}]}, "stages.stage1.label_lr must be >= 0"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused(tree, message):
    with pytest.raises(ConfigError) as caught:
        EliasConfig.from_dict(tree)

    assert message in str(caught.value)


def test_a_whole_number_is_taken_where_a_number_is_wanted():
    config = EliasConfig.from_dict({"index": {"beta": 75}})

    assert config.index.beta == 75.0
    assert isinstance(config.index.beta, float)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("candidates", 0, "rerank.candidates must be >= 1, not 0"),
        ("word_ngrams", 6, "rerank.word_ngrams must be in 0..5, not 6"),
        ("char_ngrams", [5, 3], "rerank.char_ngrams must be .* not \\[5, 3\\]"),
        ("trees", 0, "rerank.trees must be >= 1, not 0"),
        ("cost", float("inf"), "rerank.cost must be greater than 0 and finite, not inf"),
        ("cost", 0.0, "rerank.cost must be greater than 0 and finite, not 0.0"),
    ],
)
def test_a_ranker_setting_that_cannot_be_is_refused(key, value, message):
    with pytest.raises(ConfigError, match=message):
        EliasConfig().override({f"rerank.{key}": value})


def test_a_ranker_without_any_feature_is_refused():
    with pytest.raises(ConfigError, match="rerank has no features"):
        EliasConfig().override({"rerank.word_ngrams": 0, "rerank.char_ngrams": [0, 0]})


def test_the_stage_of_one_vs_all_can_be_changed_in_the_same_override():
    changes = {"stages.one-vs-all.epochs": 3, "index.label_storage": "compact"}

    first = EliasConfig().override({**changes, "index.kind": "all"})
    last = EliasConfig().override({"index.kind": "all", **changes})

    assert first == last
    assert [stage.epochs for stage in first.stages] == [3]


def test_a_setting_of_the_stage_of_one_vs_all_asks_for_it():
    config = EliasConfig().override({"stages.one-vs-all.epochs": 3})

    assert config.index.kind == "all"
    assert [stage.epochs for stage in config.stages] == [3]
    with pytest.raises(ConfigError, match=r"unknown stage 'stages[.]one-vs-all'"):
        EliasConfig().override({"stages.one-vs-all.epochs": 3, "index.kind": "graph"})


def test_settings_of_stage_1_are_kept_when_every_label_is_scored():
    changes = {"stages.stage1.epochs": 3, "index.kind": "all", "stages.one-vs-all.batch_size": 32}

    (stage,) = EliasConfig().override(changes).stages

    assert (stage.name, stage.epochs, stage.batch_size) == ("one-vs-all", 3, 32)


def test_a_stage_that_learns_a_graph_is_refused_where_there_is_none():
    with pytest.raises(
        ConfigError, match=r"stages\.stage2\.learn_graph: with index\.kind='all' th"
    ):
        EliasConfig().override({"stages.stage2.label_lr": 0.1}).override({"index.kind": "all"})


def test_with_encoder_chooses_a_kind_and_a_model():
    config = EliasConfig().with_encoder("user/model")

    assert (config.encoder.kind, config.encoder.model) == ("transformer", "user/model")
    assert config.with_encoder("bag").encoder.kind == "bag"


def test_an_encoder_without_a_name_is_refused():
    with pytest.raises(ConfigError, match=r"encoder\.model must name a model"):
        EliasConfig().with_encoder(" ")
