import errno
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from elias.cli import console
from elias.cli.console import report_error, report_errors
from elias.cli.train import resumable_run
from elias.config import EliasConfig
from elias.errors import DataError

METRICS = {
    stage: {"test": dict.fromkeys(console.STAGE_METRICS, 99.99), "validation": {"P@1": 3.0}}
    for stage in ("stage1", "stage2")
}


STAGES = EliasConfig().resolve(n_points=1000, n_labels=5000).stages


def model_with(metadata, components=("stage2", "rerank", "names"), n_labels=1000, stages=STAGES):
    config = SimpleNamespace(stages=stages)
    return SimpleNamespace(
        metadata=metadata, components=components, n_labels=n_labels, config=config
    )


def printed(capsys, *renderables):
    console.print_out(*renderables)
    return capsys.readouterr().out.splitlines()


def test_an_ensembles_table_says_whose_the_other_rows_are(capsys):
    metadata = {"metrics": {**METRICS, "ensemble": METRICS["stage1"]}}

    assert (
        "show its first member"
        in printed(capsys, *console.stage_table(model_with(metadata), "test"))[0]
    )
    shown = printed(capsys, *console.stage_table(model_with({"metrics": METRICS}), "test"))
    assert "member" not in shown[0]


def test_components_that_the_model_was_saved_without_are_named(capsys):
    metadata = {"metrics": {**METRICS, "rerank": METRICS["stage1"], "names": METRICS["stage1"]}}

    shown = printed(
        capsys, *console.stage_table(model_with(metadata, ["stage2", "rerank"]), "test")
    )

    assert shown[0] == "On the test split, in percent (+ label names: not saved):"
    assert shown[1] == "(stage1 scores every label, stage2 searches the index)"


def test_a_stage_that_the_model_was_saved_without_is_named(capsys):
    model = model_with({"metrics": METRICS}, ["stage1"], stages=STAGES[:1])

    heading = printed(capsys, *console.stage_table(model, "test"))[0]

    assert heading == "On the test split, in percent (stage2: not saved):"


def test_the_heading_of_the_stage_table_says_how_certain_the_metrics_are(capsys):
    metrics = {"stage1": {"test": {"P@1": 50.0}}, "rerank": {"test": {"P@1": 25.0}}}
    metadata = {"metrics": metrics, "data": {"splits": {"test": {"points": 20}}}}

    lines = printed(capsys, *console.stage_table(model_with(metadata), "test"))
    of_one_label = printed(capsys, *console.stage_table(model_with(metadata, n_labels=1), "test"))

    assert lines[0] == "On the test split (20 points, standard error of P@1 9.7), in percent:"
    assert of_one_label[0] == "On the test split (20 points), in percent:"


def test_the_stage_table_fits_80_columns(capsys):
    lines = printed(capsys, *console.stage_table(model_with({"metrics": METRICS}), "test"))

    assert max(map(len, lines)) <= 80
    assert lines[-3].split() == ["stage2", *["99.99"] * 10]
    assert lines[-1].startswith("No F1: the model has no probabilities")


def test_a_metric_that_was_not_measured_is_left_blank(capsys):
    lines = printed(capsys, *console.stage_table(model_with({"metrics": METRICS}), "validation"))

    assert lines[-3].split() == ["stage2", "3.00"]


def test_metrics_that_are_the_same_for_every_ranking_are_left_out(capsys):
    lines = printed(
        capsys, *console.stage_table(model_with({"metrics": METRICS}, n_labels=4), "test")
    )

    assert lines[2].split() == ["P@1", "P@3", "nDCG@5", "PSP@1", "PSP@3"]


def test_precision_recall_and_f1_follow_the_table_of_stages(capsys):
    shares = {"micro-precision": 40.0, "micro-recall": 30.0, "micro-F1": 34.29}
    probabilities = {"f1": {"threshold": 0.25}, "at_threshold": {"test": shares}}

    model = model_with({"metrics": METRICS, "probabilities": probabilities})
    lines = printed(capsys, *console.stage_table(model, "test"))

    assert "With the best F1 on held-out points (probability of at least 0.25):" in lines
    assert lines[-2].split() == ["micro", "40.00", "30.00", "34.29"]


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


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (DataError("file.csv:3: broken"), 2, "error: file.csv:3: broken\n"),
        (DataError("two\n  lines"), 2, "error: two lines\n"),
        (FileNotFoundError(2, "No such file", "a.txt"), 2, "error: a.txt: No such file\n"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_a_user_error_becomes_one_line_and_an_exit_code(error, code, line, capsys):
    with pytest.raises(typer.Exit) as caught, report_errors():
        raise error

    assert caught.value.exit_code == code
    assert capsys.readouterr() == ("", line)


def test_an_error_is_reported_once(capsys):
    error = DataError("broken")
    report_error(error)
    assert capsys.readouterr().err == "error: broken\n"

    with pytest.raises(typer.Exit) as caught, report_errors():
        raise error

    assert caught.value.exit_code == 2
    assert capsys.readouterr().err == ""


def test_an_interrupt_has_a_code_of_its_own(capsys):
    with pytest.raises(typer.Exit) as caught, report_errors():
        raise KeyboardInterrupt

    assert caught.value.exit_code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_interrupt_while_training_says_how_to_continue(capsys):
    with pytest.raises(typer.Exit), report_errors(), resumable_run(Path("runs/mine")):
        raise KeyboardInterrupt

    message = "runs/mine/model was not written; run the same command again to start over"
    assert capsys.readouterr().err == f"interrupted: {message}\n"


@pytest.mark.parametrize("error", [ValueError("boom"), OSError("no file named")])
def test_a_bug_passes_through(error):
    with pytest.raises(type(error)), report_errors():
        raise error


@pytest.fixture
def shown_lines(capsys):
    """Log something at every level and return what is shown."""
    yield lambda: (_log_all(), capsys.readouterr().err.split())[1]
    console.set_up(verbose=False, quiet=False, log_steps=False)
    for handler in list(logging.getLogger("elias").handlers):
        logging.getLogger("elias").removeHandler(handler)
    logging.getLogger("elias").setLevel(logging.NOTSET)
    console.progress.enable(False)


def _log_all():
    logger = logging.getLogger("elias.model")
    logger.debug("debug")
    logger.info("info")
    console.note("note")
    logger.warning("[careful]")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, ["note", "warning:", "[careful]"]),
        ({"log_steps": True}, ["info", "note", "warning:", "[careful]"]),
        ({"quiet": True, "log_steps": True}, ["warning:", "[careful]"]),
    ],
)
def test_the_options_choose_the_log_level(options, shown, shown_lines):
    console.set_up(**{"verbose": False, "quiet": False, "log_steps": False, **options})

    assert shown_lines() == shown


def test_verbose_shows_everything_and_the_logger(shown_lines):
    console.set_up(verbose=True, quiet=False, log_steps=False)

    words = shown_lines()

    assert words[:4] == ["elias.model:", "debug", "elias.model:", "info"]


def test_a_long_log_line_stays_a_line(capsys, shown_lines):
    console.set_up(verbose=False, quiet=False, log_steps=False)
    shown_lines()

    console.note("x" * 500)

    assert capsys.readouterr().err == "x" * 500 + "\n"


def test_errors_name_options_instead_of_arguments():
    message = "other data; use overwrite=True or another out=, ignore_memory=True, device='cpu'"

    assert console.name_options(message) == (
        "other data; use --overwrite or another --out, --ignore-memory, --device cpu"
    )
    assert console.name_options("about=; out=x.csv") == "about=; out=x.csv"


def test_running_out_of_memory_is_reported_in_one_line(capsys):
    with pytest.raises(typer.Exit) as caught, report_errors():
        raise MemoryError("Unable to allocate 9.09 TiB for an array")

    assert caught.value.exit_code == 2
    assert capsys.readouterr().err.startswith("error: out of memory (Unable to allocate 9.09 TiB")


ESCAPE = "\x1b]0;owned\x07\x9b31m\x7f"


@pytest.mark.parametrize(
    "show",
    [
        lambda name: console.print_out(name),
        lambda name: console.print_out(console.grid([("labels", name), (name, 1)])),
        lambda name: console.print_out(console.columns(["", name], [[name, name]])),
        lambda name: console.print_json({name: name}),
        lambda name: console.show(console.columns([name], [[name]])),
        lambda name: report_error(DataError(f"no label {name}")),
    ],
)
def test_escape_sequences_in_a_name_never_reach_the_terminal(capsys, show):
    show(f"cod {ESCAPE}")

    printed = "".join(capsys.readouterr())
    assert "u001b]0;owned" in printed
    assert not set(printed) & set(ESCAPE) - set("]0;owned31m")


def test_escape_sequences_in_a_message_are_escaped(capsys):
    console.set_up(verbose=False, quiet=False, log_steps=True)

    console.warn(f"label {ESCAPE}")

    assert "\x1b" not in capsys.readouterr().err


def test_a_full_disk_is_reported_in_one_line(capsys):
    with pytest.raises(typer.Exit) as caught, report_errors():
        raise OSError(errno.ENOSPC, "No space left on device")

    assert caught.value.exit_code == 2
    assert capsys.readouterr().err == "error: output: No space left on device\n"
