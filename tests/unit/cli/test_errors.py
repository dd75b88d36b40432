import logging
from pathlib import Path

import pytest
import typer

from elias.cli import console
from elias.cli.errors import report_error, report_errors, resumable_run
from elias.errors import DataError


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (DataError("file.csv:3: broken"), 2, "error: file.csv:3: broken\n"),
        (DataError("two\n  lines"), 2, "error: two lines\n"),
        (FileNotFoundError(2, "No such file", "a.txt"), 2, "error: a.txt: No such file\n"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_what_the_user_can_mend_becomes_one_line_and_a_code(error, code, line, capsys):
    with pytest.raises(typer.Exit) as caught, report_errors():
        raise error

    assert caught.value.exit_code == code
    assert capsys.readouterr() == ("", line)


def test_what_was_told_at_once_is_not_told_again(capsys):
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


def test_an_interrupt_while_training_says_what_it_leaves(capsys):
    with pytest.raises(typer.Exit), report_errors(), resumable_run(Path("runs/mine")):
        raise KeyboardInterrupt

    said = "runs/mine/model was not written; run the same command again to start over"
    assert capsys.readouterr().err == f"interrupted: {said}\n"


@pytest.mark.parametrize("error", [ValueError("boom"), OSError("no file named")])
def test_a_bug_passes_through(error):
    with pytest.raises(type(error)), report_errors():
        raise error


@pytest.fixture
def told(capsys):
    """Say something at every level and return what is shown."""
    yield lambda: (_say_all(), capsys.readouterr().err.split())[1]
    for handler in list(logging.getLogger("elias").handlers):
        logging.getLogger("elias").removeHandler(handler)
    logging.getLogger("elias").setLevel(logging.NOTSET)
    console.progress.enable(False)


def _say_all():
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
def test_how_much_is_told(options, shown, told):
    console.set_up(**{"verbose": False, "quiet": False, "log_steps": False, **options})

    assert told() == shown


def test_verbose_tells_everything_and_who_says_it(told):
    console.set_up(verbose=True, quiet=False, log_steps=False)

    words = told()

    assert words[:4] == ["elias.model:", "debug", "elias.model:", "info"]


def test_a_long_log_line_stays_a_line(capsys, told):
    console.set_up(verbose=False, quiet=False, log_steps=False)
    told()

    console.note("x" * 500)

    assert capsys.readouterr().err == "x" * 500 + "\n"
