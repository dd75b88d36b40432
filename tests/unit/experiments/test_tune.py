"""Search spaces, and studies of a few tiny trials."""

import logging
import re
import sqlite3
import tomllib
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import optuna
import pytest

from elias import EliasConfig
from elias.data.synthetic import synthetic_corpus
from elias.errors import ConfigError, DataError, RunError
from elias.experiments import tune as module
from elias.experiments.tune import TunedParameter, config_toml, default_space, read_space, tune
from elias.training.stage import EpochReport

TINY = {
    "encoder.dim": 8,
    "encoder.hidden_dim": 8,
    "index.kind": "graph",
    "stages.stage1.epochs": 1,
    "stages.stage2.epochs": 2,
}
CONFIG = EliasConfig().override(TINY)
SPACE = '"stages.*.label_lr" = { factor = [0.5, 2.0] }\nencoder.dropout = { range = [0.0, 0.6] }\n'


@pytest.fixture(scope="module")
def corpus():
    return synthetic_corpus(n_points=200, n_labels=40)


@pytest.fixture
def space(tmp_path):
    path = tmp_path / "space.toml"
    path.write_text(SPACE, encoding="utf8")
    return path


class Training:
    """Stands in for training: nDCG@5 rises with the epochs, and falls with the dropout."""

    def __init__(self):
        self.seen = []
        self.interrupt_at = -1

    def __call__(self, _world, config, points, *_, on_epoch, **_options):
        self.seen.append((config, points))
        if len(self.seen) == self.interrupt_at:
            raise KeyboardInterrupt
        value = 0.0
        for stage in config.stages:
            for epoch in range(1, stage.epochs + 1):
                value += 10 * (1 - config.encoder.dropout)
                on_epoch(EpochReport(stage.name, epoch, 0.0, 0.0, 0.0, 0.0, {"nDCG@5": value}))
        components = ["stage2", "rerank", "calibrate"] if config.rerank.enabled else ["stage2"]
        metrics = {name: {"validation": {"nDCG@5": value + i}} for i, name in enumerate(components)}
        return SimpleNamespace(components=components, metadata={"metrics": metrics})


@pytest.fixture
def training(monkeypatch):
    training = Training()
    monkeypatch.setattr(module, "train_resolved", training)
    return training


def parse(text, tmp_path, config=CONFIG):
    path = tmp_path / "tried.toml"
    path.write_text(text, encoding="utf8")
    return read_space(path, config, config.resolve(1000, 500))


def study_of(folder):
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'study.db'}")
    trials = optuna.load_study(study_name=None, storage=storage).trials
    storage.engine.dispose()
    return trials


# --- search spaces ---


@pytest.mark.parametrize("kind", ["graph", "all"])
@pytest.mark.parametrize("encoder", ["bag", "minilm"])
def test_the_default_space_fits_encoder_and_index_and_includes_the_defaults(encoder, kind):
    config = EliasConfig().override({"encoder.model": encoder, "index.kind": kind})
    resolved = config.resolve(20_000, 8_000)

    parameters = {p.name: p for p in read_space(None, config, resolved)}

    assert ("stages.*.bag_lr" in parameters) == (encoder == "bag")
    assert ("stages.*.encoder_lr" in parameters) == (encoder == "minilm")
    assert ("index.n_clusters" in parameters) == (kind == "graph")
    assert all(p.start() for p in parameters.values())


def test_with_few_labels_the_default_space_has_the_settings_of_the_ranker_and_one_stage():
    def spaces(n_labels=50, **changes):
        config = EliasConfig().override(changes)
        return {p.name: p for p in read_space(None, config, config.resolve(1000, n_labels))}

    few, plain = spaces(), spaces(**{"rerank.enabled": False})

    ranker = {"rerank.cost", "rerank.word_ngrams", "rerank.char_ngrams"}
    assert few.keys() - plain.keys() == ranker
    assert not any(name.startswith("index.") for name in few)
    assert all(p.start() for p in few.values())
    assert few["rerank.cost"].changes(0.5) == {"rerank.cost": 1.0}  # half of the derived cost
    assert few["rerank.cost"].changes(1.0) == {}
    assert not ranker & spaces(5000, **{"index.kind": "all"}).keys()
    assert "rerank.char_ngrams" not in spaces(**{"rerank.word_ngrams": 0})


def test_lists_can_be_searched(tmp_path):
    (parameter,) = parse("encoder.char_ngrams = { values = [[3, 5], [2, 4]] }", tmp_path)
    trial = optuna.trial.FixedTrial({"encoder.char_ngrams": "[2, 4]"})

    assert parameter.suggest(trial) == [2, 4]
    assert parameter.start() == {"encoder.char_ngrams": "[3, 5]"}
    assert parameter.changes([2, 4]) == {"encoder.char_ngrams": [2, 4]}


def test_a_default_of_zero_has_no_multiples():
    config = EliasConfig().override({"stages.stage1.weight_decay": 0.0})

    assert "stages.*.weight_decay" not in default_space(config.resolve(1000, 500))


def test_a_factor_scales_every_stage_and_keeps_whole_numbers(tmp_path):
    rates = {"stages.stage1.label_lr": 4e-3, "stages.stage2.label_lr": 8e-3}
    (rate, epochs) = parse(
        '"stages.*.label_lr" = { factor = [0.5, 2] }\n'
        "[stages.stage2]\nepochs = { factor = [1, 9] }",
        tmp_path,
        CONFIG.override(rates),
    )

    assert rate.changes(0.5) == {"stages.stage1.label_lr": 2e-3, "stages.stage2.label_lr": 4e-3}
    assert epochs.changes(1.6) == {"stages.stage2.epochs": 3}
    assert rate.changes(1.0) == epochs.changes(1.0) == {}


@pytest.mark.parametrize(
    ("rule", "default", "start"),
    [
        (("range", [0.1, 0.7]), 0.5, 0.5),
        (("range", [0.1, 0.4]), 0.5, None),
        (("values", ["mean", "cls"]), "cls", "cls"),
        (("values", [1, 3]), 2, None),
        (("factor", [0.5, 2.0]), 3, 1.0),
        (("factor", [2.0, 4.0]), 3, None),
        (("factor", [0.5, 1.0, 2.0]), 3, 1.0),
        (("range", [0.0, 0.5]), None, None),
        (("range", [0.0, 0.5]), 0.0, 0.0),
    ],
)
def test_the_search_starts_from_the_defaults_that_it_includes(rule, default, start):
    parameter = TunedParameter("key", *rule, {"key": default})

    assert parameter.start() == ({} if start is None else {"key": start})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("encoder.dropot = { range = [0, 1] }", "unknown key; did you mean 'encoder.dropout'"),
        ("encoder.dropout = 0.5", "encoder.dropout: 0.5 is not a search rule; write"),
        ("encoder.dropout = { range = [0.5, 0.1] }", "range = .low, high"),
        ("encoder.dropout = { range = [0.5, 1.5] }", r"must be in \[0, 1\), not 1.5"),
        ("encoder.dim = { range = [1.5, 8.0] }", "must be a whole number"),
        ("encoder.dim = { factor = [-1, 2] }", "write"),
        ("index.beam_size = { values = [] }", "write"),
        ("encoder.char_ngrams = { values = [[3, 5], [2]] }", "must have 2 values, not 1"),
        ("encoder.pooling = { values = ['mean', 'max'] }", "must be one of mean, cls"),
        ("encoder.bottleneck = { factor = [0.5, 2] }", "if the default is a number other than 0"),
        ("encoder.pooling = { factor = [0.5, 2] }", "if the default is a number other than 0"),
        ("", "is empty"),
        ("encoder.dropout = ", "not valid TOML"),
    ],
)
def test_a_mistake_in_a_space_is_named_with_file_and_key(text, problem, tmp_path):
    with pytest.raises(ConfigError, match=rf"tried.toml: .*{problem}"):
        parse(text, tmp_path)


def test_a_written_configuration_reads_back_as_the_same_configuration():
    config = EliasConfig().override(
        {"seed": 3, "encoder.char_ngrams": [2, 4], "stages.stage2.epochs": 9, "index.beta": 7.5}
    )
    one_vs_all = EliasConfig().override({"index.kind": "all", "stages.one-vs-all.epochs": 2})

    for written in (config, one_vs_all, EliasConfig()):
        assert EliasConfig.from_dict(tomllib.loads(config_toml(written))) == written


# --- studies ---


def test_a_study_trains_trials_and_writes_its_best_configuration(corpus, space, tmp_path):
    best = tune(CONFIG, corpus, tmp_path / "t", space=space, trials=2, device="cpu")

    first, second = study_of(tmp_path / "t")
    assert first.params == {"stages.*.label_lr": 1.0, "encoder.dropout": 0.5}
    assert first.value != second.value
    assert list(first.intermediate_values) == [10, *range(15, 21)]  # epochs: 1/1, 1/2 and 2/2
    assert (best == CONFIG) == (first.value > second.value)
    assert best == EliasConfig.from_file(tmp_path / "t" / "best.toml")


def test_the_summary_has_all_trials_and_the_importance_of_parameters(
    corpus, space, tmp_path, training, caplog
):
    caplog.set_level(logging.INFO, "elias")

    best = tune(CONFIG, corpus, tmp_path / "t", space=space, trials=8)

    assert best.encoder.dropout == min(config.encoder.dropout for config, _ in training.seen)
    lines = [line for line in caplog.messages if line.startswith("trial")]
    assert [line.partition(":")[0] for line in lines] == [f"trial {n}" for n in range(8)]
    assert "best nDCG@5 15.00" in lines[0]
    markdown = (tmp_path / "t" / "summary.md").read_text(encoding="utf8")
    assert re.search(r"\| encoder.dropout \| 0 to 0.6 \| .* \| \d+% \|", markdown)
    assert len(re.findall(r"^\| \d+ \|", markdown, re.MULTILINE)) == 8
    page = (tmp_path / "t" / "summary.html").read_text(encoding="utf8")
    assert "stages.*.label_lr" in " ".join(ElementTree.fromstring(page).itertext())
    copy = read_space(tmp_path / "t" / "space.toml", CONFIG, CONFIG.resolve(200, 40))
    assert copy == read_space(space, CONFIG, CONFIG.resolve(200, 40))


def test_trials_train_without_test_points_ranker_and_ensemble(corpus, space, tmp_path, training):
    config = CONFIG.override({"ensemble.members": 2})

    best = tune(config, corpus, tmp_path / "t", space=space, trials=1)

    ((trial, points),) = training.seen
    assert corpus.test is not None
    assert points.test is None
    assert len(points.validation) == trial.eval.validation_size
    assert not trial.rerank.enabled
    assert best.rerank.enabled is None
    assert (trial.ensemble.members, best.ensemble.members) == (1, 2)


def test_a_space_can_ask_for_the_ranker_which_is_judged_before_calibration(
    corpus, tmp_path, training
):
    path = tmp_path / "space.toml"
    path.write_text("rerank.cost = { values = [0.5, 1.0] }", encoding="utf8")

    tune(CONFIG, corpus, tmp_path / "t", space=path, trials=1)

    assert training.seen[0][0].rerank.enabled
    assert study_of(tmp_path / "t")[0].value == 16


def test_with_few_labels_trials_train_the_ranker_and_are_judged_by_it(corpus, tmp_path, training):
    config = EliasConfig().override({"encoder.dim": 8, "stages.stage1.epochs": 2})

    best = tune(config, corpus, tmp_path / "t", trials=8)

    assert all(trial.rerank.enabled for trial, _ in training.seen)
    assert not any(trial.intermediate_values for trial in study_of(tmp_path / "t"))
    first = study_of(tmp_path / "t")[0]
    assert (first.params["rerank.cost"], first.params["rerank.char_ngrams"]) == (1.0, "[2, 5]")
    assert first.value == 11  # of the ranker
    assert best == EliasConfig.from_file(tmp_path / "t" / "best.toml")
    copy = read_space(tmp_path / "t" / "space.toml", config, config.resolve(200, 40))
    assert copy == read_space(None, config, config.resolve(200, 40))


def test_the_same_call_continues_a_study_and_another_is_refused(corpus, space, tmp_path, training):
    out = tmp_path / "t"
    for trials in (1, 1, 2):
        tune(CONFIG, corpus, out, space=space, trials=trials)

    assert len(training.seen) == 2
    with pytest.raises(RunError, match=r"config.seed is 1 instead of 0.*--overwrite"):
        tune(replace(CONFIG, seed=1), corpus, out, space=space, trials=1)
    with pytest.raises(RunError, match=r"other inputs \(space"):
        tune(CONFIG, corpus, out, trials=1)
    with pytest.raises(RunError, match=r"other inputs \(points"):
        tune(CONFIG, synthetic_corpus(n_points=210, n_labels=40), out, space=space, trials=1)
    tune(replace(CONFIG, seed=1), corpus, out, space=space, trials=1, overwrite=True)
    assert len(study_of(out)) == 1


def test_an_interrupted_study_is_kept_and_its_last_trial_does_not_count(
    corpus, space, tmp_path, training
):
    out, training.interrupt_at = tmp_path / "t", 2

    with pytest.raises(KeyboardInterrupt, match="run the same command again to continue"):
        tune(CONFIG, corpus, out, space=space, trials=3)
    assert (out / "best.toml").exists()
    tune(CONFIG, corpus, out, space=space, trials=3)

    states = [trial.state.name for trial in study_of(out)]
    assert states == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]


@pytest.mark.usefixtures("training")
def test_a_first_trial_that_was_killed_is_repeated(corpus, space, tmp_path):
    out = tmp_path / "t"
    tune(CONFIG, corpus, out, space=space, trials=1)
    with sqlite3.connect(out / "study.db") as database:
        database.execute("UPDATE trials SET state = 'RUNNING'")
    database.close()

    tune(CONFIG, corpus, out, space=space, trials=1)

    first, second = study_of(out)
    assert first.state.name == "FAIL"
    assert second.params == first.params


@pytest.mark.usefixtures("training")
def test_a_trial_that_lags_behind_is_pruned(corpus, tmp_path):
    path = tmp_path / "space.toml"
    path.write_text("encoder.dropout = { range = [0.4, 0.9] }", encoding="utf8")

    tune(CONFIG, corpus, tmp_path / "t", space=path, trials=15)

    trials = study_of(tmp_path / "t")
    pruned = [trial for trial in trials if trial.state.name == "PRUNED"]
    assert pruned
    assert min(t.number for t in pruned) >= 5
    assert "pruned (" in (tmp_path / "t" / "summary.md").read_text(encoding="utf8")


@pytest.mark.usefixtures("training")
def test_a_trial_is_compared_with_others_at_the_same_share_of_a_stage(corpus, tmp_path):
    path = tmp_path / "space.toml"
    path.write_text("stages.stage1.epochs = { values = [2, 4, 30] }", encoding="utf8")

    tune(CONFIG, corpus, tmp_path / "t", space=path, trials=8)

    for trial in study_of(tmp_path / "t"):
        n_epochs = trial.params["stages.stage1.epochs"]
        values = {step: v for step, v in trial.intermediate_values.items() if step <= 10}
        # the value of the last epoch that has ended by then
        assert values == {step: 5 * (step * n_epochs // 10) for step in values}


@pytest.mark.usefixtures("training")
def test_a_failed_trial_counts_as_pruned_unless_it_is_the_first(corpus, tmp_path, caplog):
    path = tmp_path / "space.toml"
    path.write_text("index.edges_per_cluster = { values = [1, 20] }", encoding="utf8")
    caplog.set_level(logging.INFO, "elias")

    with pytest.raises(ConfigError, match=r"index.edges_per_cluster"):
        tune(CONFIG.override({"index.edges_per_cluster": 1}), corpus, tmp_path / "a", space=path)
    given = CONFIG.override({"index.edges_per_cluster": 20})
    tune(given, corpus, tmp_path / "t", space=path, trials=8)

    assert re.search("trial .*index.edges_per_cluster", caplog.text)


def test_time_stops_the_search_but_not_its_first_trial(corpus, space, tmp_path, training):
    for states in (["COMPLETE"], ["COMPLETE", "PRUNED"]):
        tune(CONFIG, corpus, tmp_path / "t", space=space, seconds=0.001)

        assert [trial.state.name for trial in study_of(tmp_path / "t")] == states
    assert len(training.seen) == 2


def test_index_sizes_are_lowered_until_they_fit(corpus, tmp_path, training):
    path = tmp_path / "space.toml"
    path.write_text(
        "index.n_clusters = { values = [4, 8] }\nindex.beam_size = { values = [8] }\n"
        "index.shortlist_size = { values = [40, 400] }",
        encoding="utf8",
    )

    best = tune(CONFIG, corpus, tmp_path / "t", space=path, trials=4)

    assert {config.index.beam_size for config, _ in training.seen} == {4, 8}
    assert {config.index.shortlist_size for config, _ in training.seen} == {40}
    assert best.index.shortlist_size == 40


def test_without_held_out_points_there_is_nothing_to_compare(corpus, space, tmp_path):
    config = CONFIG.override({"eval.validation_size": 0})

    with pytest.raises(DataError, match="held-out points"):
        tune(config, corpus, tmp_path / "t", space=space)


def test_a_file_that_is_no_study_is_refused(corpus, space, tmp_path):
    (tmp_path / "study.db").write_text("no database " * 99, encoding="utf8")

    with pytest.raises(RunError, match=r"study.db: is not an Optuna study: .*--overwrite"):
        tune(CONFIG, corpus, tmp_path, space=space)
    with pytest.raises(RunError, match="is a file"):
        tune(CONFIG, corpus, space, space=space)
