import copy
import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elias.config import (
    ONE_VS_ALL_STAGES,
    EliasConfig,
    IndexConfig,
    ResolvedConfig,
    StageConfig,
    complete_tree,
    preset_names,
    preset_summary,
    read_tree,
)
from elias.config.io import merge, parse_override
from elias.config.resolve import validation_size
from elias.errors import ConfigError

PAPER_LABELS = {
    "lf-amazontitles-131k": 131_073,
    "amazon-670k": 670_091,
    "wikipedia-500k": 501_070,
    "amazon-3m": 2_812_281,
}
REPRODUCE = Path(__file__).parents[3] / "scripts" / "reproduce"
INTENTS = {"fast": 8_484, "balanced": 3_341, "best": 14_672, "small": 50}


def test_a_configuration_is_frozen():
    config = EliasConfig()

    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


def test_the_defaults_survive_a_round_trip_through_json():
    config = EliasConfig()

    tree = json.loads(json.dumps(config.to_dict()))

    assert EliasConfig.from_dict(tree) == config


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
        ({"stages": [{"epochs": 0}]}, "stages[stage1].epochs must be >= 1, not 0"),
        ({"stages": [{"label_lr": float("nan")}]}, "stages[stage1].label_lr must be >= 0"),
        ({"eval": {"every": 0}}, "eval.every must be >= 1, not 0"),
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
        ("stages.stage1", "unknown key 'stages.stage1'; name one of its fields"),
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


@pytest.mark.parametrize(("name", "n_labels"), PAPER_LABELS.items())
def test_the_derived_index_of_many_labels_is_the_papers(name, n_labels):
    config = EliasConfig().with_encoder("minilm")
    paper, derived = EliasConfig.preset(name).index, config.resolve(10**6, n_labels).index

    assert derived.n_clusters == paper.n_clusters
    assert derived.edges_per_cluster == pytest.approx(paper.edges_per_cluster, rel=0.4)
    assert (derived.beam_size, derived.train_shortlist) == (paper.beam_size, paper.shortlist_size)


@pytest.mark.parametrize("n_labels", [3341, 8484, 14_672, 41_000, 101_909])
def test_clusters_of_a_bag_encoder_have_25_to_50_labels(n_labels):
    assert 25 <= n_labels / EliasConfig().resolve(1000, n_labels).index.n_clusters <= 50


def test_sizes_that_were_given_are_kept():
    given_index = IndexConfig(n_clusters=16, edges_per_cluster=100, beta=5.0)

    resolved = EliasConfig(index=given_index).resolve(n_points=1000, n_labels=1000).index

    assert (resolved.n_clusters, resolved.edges_per_cluster, resolved.beta) == (16, 100, 5.0)
    assert resolved.beam_size == 16


def test_a_resolved_configuration_is_written_and_read_like_any_other():
    resolved = EliasConfig().resolve(n_points=1000, n_labels=1000)

    assert list(resolved.to_dict()["index"]) == list(EliasConfig().to_dict()["index"])
    assert ResolvedConfig.from_dict(resolved.to_dict()) == resolved
    assert EliasConfig.from_dict(resolved.to_dict()).resolve(1000, 1000) == resolved


def test_sizes_of_a_resolved_configuration_can_be_left_open_again():
    resolved = EliasConfig().resolve(n_points=1000, n_labels=1000)

    again = resolved.override({"index.n_clusters": None}).resolve(n_points=1000, n_labels=1000)

    assert again == resolved


@given(n_points=st.integers(1, 10**7), n_labels=st.integers(1, 10**7))
def test_derived_sizes_fit_together_for_any_data(n_points, n_labels):
    resolved = EliasConfig().resolve(n_points, n_labels)

    index = resolved.index
    assert 1 <= index.beam_size <= index.n_clusters <= n_labels
    assert index.edges_per_cluster * index.n_clusters >= n_labels
    assert index.edges_per_cluster <= n_labels
    assert index.shortlist_size <= min(n_labels, index.beam_size * index.edges_per_cluster)
    assert index.beta >= 1
    assert 0 <= resolved.eval.validation_size <= n_points / 5
    assert resolved.resolve(n_points, n_labels) == resolved


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (IndexConfig(n_clusters=64), "index.n_clusters is 64, more than the number of labels (50)"),
        (IndexConfig(n_clusters=4, beam_size=5), "index.beam_size is 5, more than index.n_clu"),
        (IndexConfig(shortlist_size=60), "index.shortlist_size is 60, more than the number of l"),
        (IndexConfig(beam_size=1, edges_per_cluster=10, shortlist_size=20), "index.beam_size * "),
        (IndexConfig(n_clusters=4, edges_per_cluster=10), "too few for one edge for each of 50"),
    ],
)
def test_given_sizes_that_do_not_fit_are_refused(index, message):
    with pytest.raises(ConfigError) as caught:
        EliasConfig(index=index).resolve(n_points=100, n_labels=50)

    assert message in str(caught.value)


def test_a_corpus_without_labels_is_refused():
    with pytest.raises(ConfigError, match="at least one label"):
        EliasConfig().resolve(n_points=10, n_labels=0)


@pytest.mark.parametrize(
    ("n_points", "held_out"), [(5, 0), (1_000, 100), (24_000, 1_200), (10**6, 5_000)]
)
def test_a_tenth_of_small_data_and_less_of_large_is_held_out(n_points, held_out):
    assert validation_size(n_points) == held_out


@pytest.mark.parametrize(
    ("n_points", "given", "expected"), [(2, None, 1), (99, None, 1), (100, None, 2), (2, 3, 3)]
)
def test_in_few_texts_a_word_counts_that_stands_in_one(n_points, given, expected):
    config = EliasConfig().override({"encoder.min_count": given})

    assert config.resolve(n_points, n_labels=10).encoder.min_count == expected


def test_a_stage_given_in_part_takes_the_other_values_from_the_defaults():
    config = EliasConfig.from_dict({"stages": [{"name": "only", "epochs": 3}]})

    assert config.stages == (StageConfig(name="only", epochs=3),)


@pytest.mark.parametrize(
    ("n_points", "n_labels", "expected"),
    [(1_000_000, 200_000, True), (1_000_001, 10, False), (10, 200_001, False)],
)
def test_the_ranker_is_trained_unasked_where_a_cpu_is_done_in_minutes(n_points, n_labels, expected):
    resolved = EliasConfig().resolve(n_points, n_labels)

    assert resolved.rerank.enabled is expected


@pytest.mark.parametrize("enabled", [True, False])
def test_a_ranker_that_was_asked_for_or_refused_stays_so(enabled):
    config = EliasConfig().override({"rerank.enabled": enabled})

    assert config.resolve(10, 10).rerank.enabled is enabled
    assert config.resolve(10**7, 10**7).rerank.enabled is enabled


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


# one-vs-all


def test_without_stages_of_its_own_one_vs_all_has_one_that_learns_no_graph():
    given, changed = (
        EliasConfig.from_dict({"index": {"kind": "all"}}),
        EliasConfig().override({"index.kind": "all"}),
    )

    assert given.stages == changed.stages == ONE_VS_ALL_STAGES
    assert not ONE_VS_ALL_STAGES[0].learn_graph


def test_the_stage_of_one_vs_all_can_be_changed_in_the_same_override():
    changes = {"stages.one-vs-all.epochs": 3, "index.label_storage": "compact"}

    first = EliasConfig().override({**changes, "index.kind": "all"})
    last = EliasConfig().override({"index.kind": "all", **changes})

    assert first == last
    assert [stage.epochs for stage in first.stages] == [3]


def test_a_stage_that_learns_a_graph_is_refused_where_there_is_none():
    with pytest.raises(
        ConfigError, match=r"stages\.stage2\.learn_graph: with index\.kind='all' th"
    ):
        EliasConfig.preset("fast").override({"index.kind": "all"})


def test_one_vs_all_resolves_to_one_cluster_of_all_labels_whatever_sizes_were_given():
    config = EliasConfig().override({"index.kind": "all", "index.n_clusters": 64, "index.beta": 9})

    resolved = config.resolve(n_points=100, n_labels=50)

    index = resolved.index
    assert (index.n_clusters, index.edges_per_cluster, index.shortlist_size) == (1, 50, 50)
    assert (index.alpha, index.beta, index.beam_size, index.train_clusters) == (1, 1, 1, 1)
    assert resolved.resolve(n_points=100, n_labels=50) == resolved


def test_a_given_training_shortlist_is_kept_and_else_it_is_two_thirds():
    given = EliasConfig().override({"index.train_shortlist": 120, "index.shortlist_size": 300})

    assert given.resolve(20_000, 8_000).index.train_shortlist == 120
    index = EliasConfig().resolve(20_000, 8_000).index
    assert index.train_shortlist == 2 * index.shortlist_size // 3


def test_a_shortlist_while_training_of_more_labels_than_there_are_is_refused():
    config = EliasConfig().override({"index.train_shortlist": 9_000})

    with pytest.raises(
        ConfigError, match="train_shortlist is 9000, more than the number of labels"
    ):
        config.resolve(20_000, 8_000)


def test_with_encoder_chooses_a_kind_and_a_model():
    config = EliasConfig().with_encoder("user/model")

    assert (config.encoder.kind, config.encoder.model) == ("transformer", "user/model")
    assert config.with_encoder("bag").encoder.kind == "bag"


@pytest.mark.parametrize(("model", "pooling"), [("bert-base-uncased", "cls"), ("minilm", None)])
def test_pooling_that_was_set_for_another_model_is_derived_again(model, pooling):
    config = EliasConfig.preset("amazon-670k").with_encoder(model)

    assert config.encoder.pooling == pooling


def test_an_encoder_without_a_name_is_refused():
    with pytest.raises(ConfigError, match=r"encoder\.model must name a model"):
        EliasConfig().with_encoder(" ")


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
    "eval": {"propensity_a": 0.6, "propensity_b": 2.6},
    "checkpoint": {"steps": 20},
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


@pytest.mark.parametrize("key", ["encoder.kind", "rerank.mixture", "stages.stage1.max_grad_norm"])
def test_a_removed_key_cannot_be_set(key):
    with pytest.raises(ConfigError, match=f"unknown key '{key}', which was removed: "):
        EliasConfig().override({key: 1.0})
