import copy
import dataclasses
import json
from pathlib import Path

import pytest

from elias.config import (
    EliasConfig,
    complete_tree,
    preset_names,
    preset_summary,
    read_tree,
)
from elias.config.io import merge, parse_override
from elias.errors import ConfigError

PAPER_LABELS = {
    "lf-amazontitles-131k": 131_073,
    "amazon-670k": 670_091,
    "wikipedia-500k": 501_070,
    "amazon-3m": 2_812_281,
}

REPRODUCE = Path(__file__).parents[3] / "scripts" / "reproduce"

INTENTS = {"fast": 8_484, "balanced": 3_341, "best": 14_672, "small": 50}


def test_saved_stages_of_earlier_versions_scored_every_label_in_all_steps():
    stage = EliasConfig().resolve(20_000, 32_768).to_dict()["stages"][0]
    assert stage.pop("label_share") == 0.25

    (complete,) = complete_tree({"stages": [stage]})["stages"]

    assert complete == {"label_share": 1.0} | stage


def test_stages_whose_settings_are_not_derived_yet_have_no_label_share():
    stage = EliasConfig().to_dict()["stages"][0]
    del stage["label_share"]

    assert complete_tree({"stages": [stage]})["stages"] == [stage]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_says_what_it_is_for(name):
    config = EliasConfig.preset(name)

    assert EliasConfig.from_dict(config.to_dict()) == config
    assert len(preset_summary(name)) > 20


def test_presets_are_intents_and_the_papers_data_sets():
    assert set(preset_names()) == {*PAPER_LABELS, *INTENTS}


@pytest.mark.parametrize(("name", "n_labels"), (PAPER_LABELS | INTENTS).items())
def test_every_preset_fits_its_data_set(name, n_labels):
    resolved = EliasConfig.preset(name).resolve(n_points=100_000, n_labels=n_labels)

    assert None not in dataclasses.asdict(resolved.index).values()


@pytest.mark.parametrize("path", sorted(REPRODUCE.glob("*.toml")), ids=lambda path: path.stem)
def test_the_settings_of_our_results_still_load(path):
    resolved = EliasConfig.from_file(path).resolve(n_points=100_000, n_labels=20_000)

    assert resolved.stages[-1].epochs > 1


@pytest.mark.parametrize("name", PAPER_LABELS)
def test_the_papers_presets_start_edges_at_random_and_average_the_loss(name):
    config = EliasConfig.preset(name)

    assert config.index.edge_init == "random"
    assert config.loss.reduction == "mean"
    assert [stage.learn_graph for stage in config.stages] == [False, False, True]


def test_an_unknown_preset_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown preset 'balance'; did you mean 'balanced"):
        EliasConfig.preset("balance")


def test_every_unknown_key_is_named_at_once():
    tree = {"indx": {}, "index": {"bta": 1}, "stages": [{"epohcs": 1}]}

    with pytest.raises(ConfigError) as caught:
        EliasConfig.from_dict(tree)

    assert str(caught.value).split("; unknown") == [
        "unknown key 'indx'; did you mean 'index'?",
        " key 'index.bta'; did you mean 'index.beta'?",
        " key 'stages.0.epohcs'; did you mean 'stages.0.epochs'?",
    ]


def test_messages_name_a_stage_by_its_name():
    with pytest.raises(ConfigError, match=r"^stages.stage2.epochs must be a whole number, not 'x'"):
        EliasConfig().override({"stages.stage2.epochs": "x"})
    with pytest.raises(ConfigError, match=r"'stages.first.epohcs'; did you mean 'stages.first.ep"):
        EliasConfig.from_dict({"stages": [{"name": "first", "epohcs": 1}]})


def test_an_unknown_key_near_nothing_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown key 'loss.zzz' \(known: reduction"):
        EliasConfig.from_dict({"loss": {"zzz": 1}})


def test_an_override_reaches_nested_keys_and_stages_by_name_or_position():
    changes = {"index.beta": 75, "stages.stage2.epochs": 3, "stages.0.epochs": 2, "seed": 7}

    config = EliasConfig().override(changes)

    assert (config.index.beta, config.seed) == (75.0, 7)
    assert [stage.epochs for stage in config.stages] == [2, 3]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("index.bta", "unknown key 'index.bta'; did you mean 'index.beta'?"),
        ("indx.beta", "unknown key 'indx'; did you mean 'index'?"),
        ("seed.x", "unknown key 'seed'"),
        ("stages.stage9.epochs", "unknown stage 'stages.stage9'; stages are: stage1, stage2"),
        ("stages.stage1", "unknown key 'stages.stage1'; add the key of a stage"),
    ],
)
def test_an_override_of_an_unknown_key_is_refused(key, message):
    with pytest.raises(ConfigError) as caught:
        EliasConfig().override({key: 1})

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("index.beta=75", ("index.beta", 75)),
        ("index.beta = 1e-4", ("index.beta", 1e-4)),
        ("encoder.model=bert-base-uncased", ("encoder.model", "bert-base-uncased")),
        ("encoder.model='x=y'", ("encoder.model", "x=y")),
        ("encoder.char_ngrams=[3, 5]", ("encoder.char_ngrams", [3, 5])),
        ("stages.0.learn_graph=true", ("stages.0.learn_graph", True)),
        ("index.n_clusters=none", ("index.n_clusters", None)),
    ],
)
def test_an_override_on_the_command_line_is_read_as_toml_or_a_string(text, expected):
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["index.beta", "=3", " = 3"])
def test_an_override_without_key_or_value_is_refused(text):
    with pytest.raises(ConfigError, match="write it as key=value"):
        parse_override(text)


def test_a_toml_file_and_the_json_of_a_run_are_read_alike(tmp_path):
    config = EliasConfig().override({"index.beta": 75})
    (tmp_path / "own.toml").write_text("[index]\nbeta = 75\n", encoding="utf8")
    run = {"format_version": 1, **config.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(run), encoding="utf8")

    assert EliasConfig.from_file(tmp_path / "own.toml") == config
    assert EliasConfig.from_file(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", b"[index", "not valid TOML"),
        ("a.json", b"{", "not valid JSON"),
        ("a.json", b"[1]", "must contain a table of keys, not a list"),
        ("a.toml", b"\xff", "cannot be read"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        read_tree(path)

    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: no such file"):
        read_tree(tmp_path / "absent.toml")


def test_merging_lays_tables_key_by_key_and_lists_whole():
    base = {"index": {"alpha": 1, "beta": 2}, "stages": [{"epochs": 1}, {"epochs": 2}]}
    over = {"index": {"beta": 3}, "stages": [{"epochs": 9}]}

    merged = merge(base, over)

    assert merged == {"index": {"alpha": 1, "beta": 3}, "stages": [{"epochs": 9}]}
    assert base["index"] == {"alpha": 1, "beta": 2}


def test_a_json_file_of_a_few_keys_leaves_the_others_at_their_defaults(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(
        '{"rerank": {"candidates": 50}, "stages": [{"name": "a", "learn_graph": true}]}'
    )

    config = EliasConfig.from_file(path)

    assert config.rerank == dataclasses.replace(EliasConfig().rerank, candidates=50)
    assert config.stages[0].score_all is None


@pytest.mark.parametrize("tree", ['{"stages": [1]}', '{"stages": 1}', '{"index": 3}'])
def test_a_json_file_of_another_shape_is_refused(tmp_path, tree):
    path = tmp_path / "mine.json"
    path.write_text(tree)

    with pytest.raises(ConfigError, match="must be a"):
        EliasConfig.from_file(path)


OLD_TREE = {
    "encoder": {"kind": "transformer", "model": "user/model", "capture": True},
    "eval": {"propensity_a": 0.6, "propensity_b": 2.6, "every": 1},
    "checkpoint": {"steps": 20, "keep": 5},
    "index": {"beam_size": 20, "train_clusters": 25},
    "stages": [{"name": "a", "warmup": 0.1, "max_grad_norm": 0.0, "score_all": True}],
    "rerank": {"trees": 1, "tree_leaf": 1, "loss": "logistic", "transform": "sigmoid"},
}


def test_a_removed_key_with_the_value_that_is_now_constant_is_accepted(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(OLD_TREE))

    config = EliasConfig.from_file(path)

    assert (config.rerank.trees, config.rerank.loss) == (1, "logistic")
    assert (config.encoder.model, config.eval.propensity) == ("user/model", (0.6, 2.6))


@pytest.mark.parametrize(
    ("section", "key", "value", "reason"),
    [
        ("encoder", "capture", False, "'encoder.capture', which was removed: it is always True"),
        ("stages", "warmup", 0.2, r"'stages\.\w+\.warmup', which was removed: it is always 0.1"),
        ("eval", "every", 5, "'eval.every', which was removed: it is always 1"),
        ("index", "train_clusters", 30, "'index.train_clusters', .* index.beam_size"),
        ("rerank", "tree_leaf", 20, "'rerank.tree_leaf', which was removed: .* rerank.trees"),
        ("rerank", "transform", "l3-hinge", "'rerank.transform', .* from rerank.loss"),
    ],
)
def test_a_removed_key_with_another_value_is_refused_or_dropped(section, key, value, reason):
    tree = copy.deepcopy(OLD_TREE)
    (tree["stages"][0] if section == "stages" else tree[section])[key] = value

    with pytest.raises(ConfigError, match=reason):
        EliasConfig.from_dict(complete_tree(tree))
    dropped = complete_tree(tree, drop_removed=True)
    assert dropped == complete_tree(OLD_TREE)
    assert EliasConfig.from_dict(dropped).rerank.trees == 1


@pytest.mark.parametrize(("kind", "model"), [("bag", "bag"), ("transformer", "minilm")])
def test_the_kind_of_an_encoder_is_now_said_by_its_model(kind, model):
    tree = complete_tree({"encoder": {"kind": kind, "model": "minilm"}})

    assert tree == {"encoder": {"model": model}}


@pytest.mark.parametrize(
    "key", ["encoder.kind", "eval.every", "rerank.mixture", "stages.stage1.max_grad_norm"]
)
def test_a_removed_key_cannot_be_set(key):
    with pytest.raises(ConfigError, match=f"unknown key '{key}', which was removed: "):
        EliasConfig().override({key: 1.0})
