import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elias.config import (
    EliasConfig,
    IndexConfig,
    ResolvedConfig,
    StageConfig,
)
from elias.config import resolve as rules
from elias.config.resolve import reasons, validation_size
from elias.errors import ConfigError

PAPER_LABELS = {
    "lf-amazontitles-131k": 131_073,
    "amazon-670k": 670_091,
    "wikipedia-500k": 501_070,
    "amazon-3m": 2_812_281,
}


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
    assert 0 <= resolved.eval.validation_size <= n_points / 3
    assert resolved.resolve(n_points, n_labels) == resolved


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (IndexConfig(n_clusters=64), "index.n_clusters is 64, more than the number of labels (50)"),
        (IndexConfig(n_clusters=4, beam_size=5), "index.beam_size is 5, more than index.n_clu"),
        (IndexConfig(shortlist_size=60), "index.shortlist_size is 60, more than the number of l"),
        (IndexConfig(beam_size=1, edges_per_cluster=10, shortlist_size=20), "index.beam_size * "),
        (IndexConfig(n_clusters=4, edges_per_cluster=10), "each of 50 labels needs an edge"),
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
    ("n_points", "held_out"), [(5, 0), (60, 20), (1_000, 100), (24_000, 1_200), (10**6, 2_000)]
)
def test_a_tenth_of_small_data_and_less_of_large_is_held_out(n_points, held_out):
    assert validation_size(n_points) == held_out


def test_more_is_held_out_only_where_the_ranker_trains_on_it_in_the_end():
    sizes = [
        EliasConfig().override(changes).resolve(4000, 50).eval.validation_size
        for changes in ({}, {"rerank.enabled": False}, {"ensemble.members": 3})
    ]

    assert sizes == [800, 400, 400]


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


def test_without_stages_of_its_own_one_vs_all_has_one_that_learns_no_graph():
    given, changed = (
        EliasConfig.from_dict({"index": {"kind": "all"}}),
        EliasConfig().override({"index.kind": "all"}),
    )

    assert given.stages == changed.stages == (StageConfig(name="one-vs-all"),)


INTENTS = ("fast", "balanced", "best", "small")


@pytest.mark.parametrize("encoder", ["bag", "minilm"])
@pytest.mark.parametrize("n_labels", [2, 50, 200, 8484])
@pytest.mark.parametrize("preset", INTENTS)
def test_a_preset_keeps_the_index_and_the_stages_of_the_defaults(preset, n_labels, encoder):
    config, default = EliasConfig.preset(preset).with_encoder(encoder), EliasConfig()

    resolved = config.resolve(4000, n_labels)
    derived = default.with_encoder(encoder).resolve(4000, n_labels)

    assert resolved.index == derived.index
    assert [s.name for s in resolved.stages] == [s.name for s in derived.stages]
    assert [s.score_all for s in resolved.stages] == [s.score_all for s in derived.stages]
    assert resolved.rerank.enabled
    assert resolved.ranks_every_label == derived.ranks_every_label == (n_labels <= 200)


@pytest.mark.parametrize(("given", "n_labels", "resolved"), [(20, 150, 150), (20, 201, 20)])
def test_the_number_of_candidates_does_not_decide_whether_every_label_is_ranked(
    given, n_labels, resolved
):
    config = EliasConfig().override({"rerank.candidates": given}).resolve(4000, n_labels)

    assert config.ranks_every_label == (n_labels <= 200)
    assert config.rerank.candidates == resolved
    derived = EliasConfig().resolve(4000, n_labels)
    assert config.eval.validation_size == derived.eval.validation_size
    assert config.resolve(4000, n_labels) == config


@pytest.mark.parametrize("encoder", ["bag", "minilm"])
@pytest.mark.parametrize("n_labels", [2, 50, 8484, 500_000])
def test_the_fast_preset_trains_for_fewer_epochs(n_labels, encoder):
    fast, default = (
        config.with_encoder(encoder).resolve(20_000, n_labels).stages
        for config in (EliasConfig.preset("fast"), EliasConfig())
    )

    assert sum(stage.epochs for stage in fast) < sum(stage.epochs for stage in default)


@pytest.mark.parametrize(("n_labels", "epochs"), [(2, [5]), (50, [5]), (8484, [5, 5])])
@pytest.mark.parametrize("index", [{}, {"index.label_storage": "compact"}])
def test_epochs_apply_to_the_stages_that_exist(n_labels, epochs, index):
    given = {"stages.stage1.epochs": 5, "stages.stage2.epochs": 5}

    resolved = EliasConfig().override(given | index).resolve(4000, n_labels)

    assert [stage.epochs for stage in resolved.stages] == epochs
    assert resolved.index.kind == EliasConfig().resolve(4000, n_labels).index.kind


def test_settings_of_stage_1_are_those_of_the_only_stage_of_few_labels():
    rates = {"stages.stage1.encoder_lr": 3e-5, "stages.stage1.batch_size": 8}

    (stage,) = EliasConfig().override(rates).resolve(4000, 42).stages

    assert (stage.name, stage.encoder_lr, stage.batch_size) == ("one-vs-all", 3e-5, 8)
    assert stage.score_all


@pytest.mark.parametrize(
    "changes",
    [
        {"index.kind": "graph"},
        {"index.n_clusters": 2},
        {"stages.stage1.score_all": False},
        {"stages.stage2.edge_lr": 0.1},
        {"stages.stage2.name": "mine"},
    ],
)
def test_settings_of_an_index_ask_for_one(changes):
    resolved = EliasConfig().override(changes).resolve(n_points=300, n_labels=8)

    assert resolved.index.kind == "graph"
    assert len(resolved.stages) == 2


def test_a_preset_can_be_trained_without_an_index():
    (stage,) = EliasConfig.preset("fast").override({"index.kind": "all"}).stages

    assert stage.epochs == EliasConfig.preset("fast").stages[0].epochs


def test_one_vs_all_resolves_to_one_cluster_of_all_labels_whatever_sizes_were_given():
    config = EliasConfig().override({"index.kind": "all", "index.n_clusters": 64, "index.beta": 9})

    resolved = config.resolve(n_points=100, n_labels=50)

    index = resolved.index
    assert (index.n_clusters, index.edges_per_cluster, index.shortlist_size) == (1, 50, 50)
    assert (index.alpha, index.beta, index.beam_size) == (1, 1, 1)
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


@pytest.mark.parametrize(("model", "pooling"), [("bert-base-uncased", "cls"), ("minilm", None)])
def test_pooling_that_was_set_for_another_model_is_derived_again(model, pooling):
    config = EliasConfig.preset("amazon-670k").with_encoder(model)

    assert config.encoder.pooling == pooling


@pytest.mark.parametrize(
    ("n_points", "n_labels", "expected"),
    [
        (4000, 50, {"index.kind": "50 labels, at most 1,000"}),
        (4000, 50, {"eval.validation_size": "a fifth of the points"}),
        (15_000, 8484, {"eval.validation_size": "15,000 points"}),
        (4000, 8484, {"index.n_clusters": "about 33 labels each"}),
        (4000, 8484, {"index.edges_per_cluster": "about 12 for each label"}),
        (4000, 8484, {"index.shortlist_size": "35% of the labels"}),
        (4000, 8484, {"stages.stage1.score_all": "points × labels at most 20,000,000,000"}),
        (10**7, 8484, {"stages.stage1.score_all": "points × labels more than 20,000,000,000"}),
        (4000, 8484, {"stages.stage2.epochs": "default of a bag"}),
        (4000, 8484, {"stages.stage2.rates": "default of a bag"}),
        (4000, 50, {"stages.one-vs-all.batch_size": "4,000 points"}),
    ],
)
def test_a_derived_setting_has_a_reason(n_points, n_labels, expected):
    why = reasons(EliasConfig(), EliasConfig().resolve(n_points, n_labels), n_points, n_labels)

    assert expected.items() <= why.items()


def test_a_given_setting_has_no_reason():
    changes = {"stages.stage1.epochs": 3, "index.n_clusters": 64, "eval.validation_size": 9}
    given = EliasConfig().override(changes)
    resolved = given.resolve(4000, 8484)

    assert not changes.keys() & reasons(given, resolved, 4000, 8484).keys()
    assert reasons(resolved, resolved, 4000, 8484) == {}


def test_the_reason_of_rates_names_those_that_are_given_and_the_width_of_the_model(monkeypatch):
    monkeypatch.setattr(rules, "pretrained_width", lambda _: 768)
    changes = {"encoder.model": "bert", "encoder.pooling": "cls", "encoder.max_length": 32}
    config = EliasConfig().override({**changes, "stages.stage2.label_lr": 0.1})

    why = reasons(config, config.resolve(4000, 8484), 4000, 8484)

    wide = "default of a transformer, encoder × 384/768 for its width"
    assert why["stages.stage1.rates"] == wide
    assert why["stages.stage2.rates"] == f"{wide}; given: label_lr"


@pytest.mark.parametrize("page", ["reference/configuration.md", "explanation/defaults.md"])
def test_the_pages_have_the_constants_of_the_rules(page):
    text = (Path(__file__).parents[3] / "docs" / page).read_text(encoding="utf8")
    wide, paper = rules.WIDE, rules.PAPER
    bag, transformer = rules.MAX_SCORES["bag"], rules.MAX_SCORES["transformer"]
    facts = [
        f"{rules.MAX_RERANKED_LABELS:,} labels and {rules.MAX_RERANKED_POINTS:,}",
        "{}, {}, {} {} {}".format(*rules.MAX_LENGTHS[:3], "(and|or)", rules.MAX_LENGTHS[3]),
        f"({rules.LONG_TEXT_BYTES} bytes|texts are long)",
        f"{rules.MAX_SCORED_LABELS} labels",
        f"{rules.MAX_WIDE_LABELS['bag']:,}",
        f"{rules.MAX_WIDE_LABELS['transformer']:,}",
        f"{wide.shortlist_share:.0%}( of the)? labels,? .?at most {wide.max_shortlist}",
        f"(many labels: |training and ){paper.max_shortlist}",
        f"{bag / 1e10:g}·10¹⁰.{{1,40}}{transformer / 1e9:g}·10⁹",
        f"twentieth( up to|, at most) {rules.MAX_VALIDATION}",
    ]
    for rule in (wide, paper):
        facts.append(f"{rule.edges_per_label}(·L/C| edges per label)")
        facts.append(f"(Derived: |many labels: |beam ){rule.beam_size}")

    assert [fact for fact in facts if not re.search(fact, text)] == []
