"""Rows over seeds become lines, and lines become cells."""

import pytest

import elias.experiments
from elias.experiments import run_experiment
from elias.experiments.runner import Row, Table, summarise

TABLE = Table("method", columns=("P@1", "R@100", "train_seconds", "ms_per_point"), shown=("P@1",))


def test_the_old_name_of_run_experiment_warns():
    with pytest.warns(DeprecationWarning, match="run_experiment"):
        old = elias.experiments.carry_out

    assert old is run_experiment


def test_other_names_are_missing_as_in_any_module():
    with pytest.raises(AttributeError, match="no attribute 'carry_on'"):
        _ = elias.experiments.carry_on


def row(name, seed, value=None, **more):
    metrics = {} if value is None else {"P@1": value}
    return Row(name=name, title=name.upper(), seed=seed, metrics=metrics, **more)


def test_lines_come_in_the_order_of_their_first_rows():
    lines = summarise([row("b", 0, 1.0), row("a", 0, 2.0), row("b", 1, 3.0)])

    assert [(line.name, line.n_seeds, line.mean["P@1"]) for line in lines] == [
        ("b", 2, 2.0),
        ("a", 1, 2.0),
    ]
    assert lines[0].std == {"P@1": pytest.approx(2**0.5)}
    assert lines[1].std == {}


def test_a_failed_seed_is_left_out_of_the_mean_and_noted():
    (line,) = summarise([row("a", 0, 5.0), row("a", 1, note="no memory"), row("a", 2, 7.0)])

    assert (line.mean["P@1"], line.n_seeds, line.note) == (6.0, 2, "no memory")


def test_a_table_leaves_out_columns_that_no_line_has_and_escapes_bars():
    lines = summarise([row("a|b", 0, 5.0, costs={"train_seconds": 75.0})])

    assert TABLE.markdown(lines) == (
        "| method | P@1 | training time |\n| --- | --- | --- |\n| A\\|B | 5.00 | 1 min 15 s |\n"
    )


def test_only_metrics_have_a_deviation_and_a_line_without_numbers_says_why():
    rows = [row("a", seed, 5.0 + seed, costs={"ms_per_point": 0.5 + seed}) for seed in (0, 1)]
    lines = summarise([*rows, row("b", 0, note="not found")])

    assert TABLE.rows(lines, ("P@1", "ms_per_point"), between="±") == [
        ["A", "5.50±0.71", "1.000"],
        ["B (not found)", "", ""],
    ]
