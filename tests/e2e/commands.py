"""Calling the command line from tests: in this process, or in one of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from typer import testing

from elias.cli.app import app

testing._get_command = cache(testing._get_command)  # building all commands takes 0.1 s

SOURCE = Path(__file__).parents[2] / "src"

SMALL = (
    *("--device", "cpu", "--set", "encoder.dim=16", "--set", "encoder.hidden_dim=16"),
    *("--set", "stages.stage1.epochs=1", "--set", "stages.stage2.epochs=3"),
    *("--set", "stages.stage2.label_lr=0.05", "--set", "stages.stage1.score_all=false"),
    *("--set", "eval.drop_unhelpful=false", "--set", "rerank.trees=2"),
)
"""Options that make training a matter of a second."""

START = (
    # a shell that runs in the background lets its children ignore ^C
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from elias.cli import main; main()"
)


@dataclass(frozen=True)
class Output:
    """The exit code, stdout and stderr of a command."""

    code: int
    out: str
    err: str


def elias(*args, stdin=b""):
    """Run a command in this process."""
    result = testing.CliRunner().invoke(
        app, [str(arg) for arg in args], input=stdin, prog_name="elias"
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Output(result.exit_code, result.stdout, result.stderr)


def start_elias(*args, **options):
    """Start a command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(
        [sys.executable, "-c", START, *map(str, args)],
        env=environment,
        stderr=subprocess.PIPE,
        start_new_session=True,
        **options,
    )


def free_port():
    """Return a port that nothing listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def interrupt(process):
    """Press ^C."""
    process.send_signal(signal.SIGINT)
