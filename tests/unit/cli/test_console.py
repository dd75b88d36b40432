from elias.cli import console
from elias.cli.inputs import chunks
from elias.cli.predict import parse_labels

METRICS = {
    stage: {"test": dict.fromkeys(console.STAGE_METRICS, 99.99), "validation": {"P@1": 3.0}}
    for stage in ("stage1", "stage2")
}


def printed(capsys, *renderables):
    console.print_out(*renderables)
    return capsys.readouterr().out.splitlines()


def test_an_ensembles_table_says_whose_the_other_rows_are(capsys):
    metrics = {**METRICS, "ensemble": METRICS["stage1"]}

    assert "of its first member" in printed(capsys, *console.stage_table(metrics, "test"))[0]
    assert "member" not in printed(capsys, *console.stage_table(METRICS, "test"))[0]


def test_the_stage_table_fits_80_columns(capsys):
    lines = printed(capsys, *console.stage_table(METRICS, "test"))

    assert max(map(len, lines)) <= 80
    assert lines[-1].split() == ["stage2", *["99.99"] * 10]


def test_a_metric_that_was_not_measured_is_left_blank(capsys):
    lines = printed(capsys, *console.stage_table(METRICS, "validation"))

    assert lines[-1].split() == ["stage2", "3.00"]


def test_metrics_stand_in_rows_by_kind_and_columns_by_k(capsys):
    lines = printed(capsys, console.metrics_table({"P@1": 50.0, "P@3": 20.0, "R@10": 70.0}))

    assert [line.split() for line in lines[::2]] == [
        ["%", "@1", "@3", "@10"],
        ["P", "50.00", "20.00"],
    ]
    assert lines[-1].split() == ["R", "70.00"]


def test_what_is_printed_elsewhere_than_to_a_terminal_is_neither_wrapped_nor_padded(capsys):
    long = "word " * 100

    lines = printed(
        capsys, console.grid([("name", long), ("other", 1234), ("missing", None)]), long
    )

    assert lines == [f"name   {long.strip()}", "other  1,234", long.strip()]


def test_brackets_in_a_name_are_not_markup(capsys):
    assert printed(capsys, console.grid([("[bold]", "[red]x")]), "[blue]") == [
        "[bold]  [red]x",
        "[blue]",
    ]


def test_a_label_with_a_number_for_its_name_is_meant_by_name():
    assert parse_labels(["1984", "7"], ["fish", "1984"]) == ["1984", 7]


def test_no_labels_given_means_no_limit():
    assert parse_labels(None, ["fish"]) is None
    assert parse_labels([], ["fish"]) is None


def test_chunks_hold_all_items_in_order():
    assert list(chunks(iter(range(5)), 2)) == [[0, 1], [2, 3], [4]]
