"""Test help texts, start-up time, output streams and exit codes of the command line."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import elias
from e2e.commands import elias as run_here
from elias.cli.app import app
from elias.config import preset_names

SOURCE = Path(__file__).parents[2] / "src"
HEAVY = ("torch", "numpy", "scipy", "numba", "transformers", "pyarrow", "fastapi")
CPU_SECONDS = 0.5


def commands(group, path=()):
    """Yield the words of every command, groups included."""
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


ALL = [" ".join(path) for path in commands(get_command(app))]


def run(*args, **options):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, *args], env=environment, capture_output=True, text=True, **options
    )


def test_the_commands_are_those_of_the_documentation():
    assert set(ALL) == {
        *("", "demo", "train", "evaluate", "predict", "explain", "report", "serve", "calibrate"),
        *("info", "presets", "push", "export", "tune"),
        *("labels", "labels list", "labels add", "labels rename", "labels merge", "labels remove"),
        *("data", "data info", "data convert", "data demo", "data synthetic"),
        *("experiment", "experiment ablation", "experiment compare", "experiment sweep"),
        "experiment prune",
    }


@pytest.mark.parametrize("command", ALL)
def test_every_command_explains_itself_on_one_screen(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERMINAL_WIDTH", "100")

    result = run_here(*command.split(), "--help")

    assert result.code == 0
    assert f"elias {command}".strip() in result.out
    assert result.err == ""
    assert len(result.out.splitlines()) <= 40
    assert "bool" not in result.out  # flags have no value
    assert run_here(*command.split(), "-h") == result


def test_help_of_no_command_imports_anything_heavy():
    script = f"""
import sys
from typer.testing import CliRunner
from elias.cli.app import app
for command in {ALL!r}:
    assert CliRunner().invoke(app, [*command.split(), "--help"]).exit_code == 0
print(sorted(set({HEAVY!r}) & set(sys.modules)))
"""

    done = run("-c", script, check=True)

    assert done.stdout == "[]\n"


def test_help_answers_at_once():
    def seconds():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    run("-m", "elias", "--help", check=True)  # compiles the modules where they are new
    before = seconds()
    run("-m", "elias", "--help", check=True)

    # processor time, because another program may hold up the clock
    assert seconds() - before < CPU_SECONDS


def test_the_version_is_that_of_the_package():
    done = run("-m", "elias", "--version", check=True)

    assert done.stdout == f"elias {elias.__version__}\n"
    assert done.stderr == ""


def test_presets_are_listed_for_people_and_programs():
    for_people = run("-m", "elias", "presets", check=True)
    for_programs = run("-m", "elias", "presets", "--json", check=True)

    rows = for_people.stdout.splitlines()[2:]
    assert [row.split()[0] for row in rows] == preset_names()
    assert list(json.loads(for_programs.stdout)) == preset_names()
    assert for_people.stderr == for_programs.stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["nosuchcommand"],
        ["train"],
        ["predict", "model", "-k", "0"],
        ["predict", "model", "-k", "many"],
        ["data", "synthetic", "there", "--points", "-1"],
        ["presets", "--nosuchoption"],
    ],
)
def test_wrong_usage_is_reported_on_stderr_with_exit_code_2(arguments):
    result = run_here(*arguments)

    assert result.code == 2
    assert result.out == ""
    assert result.err


def test_a_mistake_is_one_line_on_stderr_without_a_traceback(tmp_path):
    done = run("-m", "elias", "data", "info", str(tmp_path / "nowhere"))

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"error: {tmp_path / 'nowhere'}: no such file or folder\n"


def test_verbose_shows_the_traceback_of_a_mistake_too(tmp_path):
    done = run("-m", "elias", "-v", "data", "info", str(tmp_path / "nowhere"))

    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_a_bug_shows_a_traceback_and_exits_with_code_1():
    script = """
import elias.config
def broken():
    secret = "local"
    raise ValueError("boom")
elias.config.preset_names = broken
import sys
sys.argv = ["elias", "presets"]
from elias.cli import main
main()
"""

    done = run("-c", script)

    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("Traceback (most recent call last)")
    assert done.stderr.splitlines()[-1] == "ValueError: boom"


def test_a_closed_pipe_is_quiet():
    # a pipe whose reading end is gone, as `| head -0` leaves it
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-m", "elias", "presets", "--json"],
        stdout=writing,
        stderr=subprocess.PIPE,
        env=environment,
        check=False,
    )
    os.close(writing)

    assert done.returncode == 141
    assert done.stderr == b""


def test_names_in_any_script_are_printed_whatever_the_terminals_language(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("texte,étiquettes\n" + "œuf,été\n" * 5, encoding="utf8")

    done = run(
        *("-m", "elias", "data", "info", str(table), "--text", "texte", "--labels", "étiquettes"),
        env={"PYTHONIOENCODING": "ascii"},
        encoding="utf8",
    )

    assert done.returncode == 0, done.stderr
    assert "étiquettes" in done.stdout


def test_the_shell_completes_commands_and_options():
    words = {"elias ev": "evaluate", "elias train data --overw": "--overwrite"}

    for line, expected in words.items():
        environment = {
            "_ELIAS_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(line.count(" ")),
        }
        assert run("-m", "elias", env=environment).stdout.split() == [expected]


@pytest.mark.parametrize(
    ("called", "path", "expected"),
    [("bin/elias", "", "bin/elias"), ("bin/elias", "bin", "elias"), ("pytest", "", "elias")],
)
def test_suggested_commands_start_as_the_program_was_called(
    called, path, expected, tmp_path, monkeypatch
):
    from elias.cli import console

    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "elias").touch(mode=0o755)
    monkeypatch.setattr("sys.argv", [called])
    monkeypatch.setenv("PATH", path)

    assert console.program() == expected
