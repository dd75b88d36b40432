"""Commands that torchrun starts, and that several processes cannot share out."""

import pytest
from typer.testing import CliRunner

from elias.cli.app import app


def run_command(monkeypatch, size, *command):
    where = {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    return CliRunner().invoke(app, list(command), prog_name="elias")


@pytest.mark.parametrize(
    "command", ["calibrate", "report", "experiment", "serve", "export", "push", "demo"]
)
def test_commands_that_cannot_share_work_are_refused(monkeypatch, command):
    result = run_command(monkeypatch, "2", command, "x")

    assert result.exit_code == 2
    assert result.stderr.startswith(
        f"error: elias {command}: cannot be divided among the 2 processes"
    )
    assert "run it without torchrun (only evaluate, predict, train support" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_single_process_of_torchrun_may_run_any_command(monkeypatch):
    assert run_command(monkeypatch, "1", "presets").exit_code == 0
