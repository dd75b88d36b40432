"""The ``elias`` command: global options and the list of commands.

Modules of this package import slow packages such as torch inside functions, so that
``elias --help`` responds quickly.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer import Option

import elias
from elias.cli import console, data, experiment, labels, options
from elias.cli.demo import demo
from elias.cli.evaluate import calibrate, evaluate
from elias.cli.explain import explain
from elias.cli.export import export, push
from elias.cli.info import info, presets, report
from elias.cli.predict import predict
from elias.cli.serve import serve
from elias.cli.torchrun import check_single_process, exit_at_once_if_joined
from elias.cli.train import train, tune

LOGGED_COMMANDS = ("demo", "experiment", "serve", "train", "tune")
"""Commands that log their steps by default."""


class Commands(options.Group):
    """A command group that turns exceptions into one-line messages and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        with console.report_errors():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Extreme multi-label classification with a label index learned end to end (ELIAS).",
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"elias {elias.__version__}")
        raise typer.Exit


@app.callback()
def configure(
    ctx: typer.Context,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Log more and show tracebacks.")
    ] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Log warnings and errors only.")] = False,
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Set up logging on stderr. Results are printed on stdout."""
    del version
    command = ctx.invoked_subcommand
    console.set_up(verbose=verbose, quiet=quiet, log_steps=command in LOGGED_COMMANDS)
    check_single_process(command)


app.command(cls=options.Command)(demo)
app.add_typer(data.app, name="data")
for _command in (train, tune, evaluate, calibrate, predict, explain, report, serve, push, export):
    app.command(cls=options.Command)(_command)
app.add_typer(labels.app, name="labels")
app.add_typer(experiment.app, name="experiment")
app.command(cls=options.Command)(info)
app.command(cls=options.Command)(presets)


def main() -> None:
    """Run the command line and exit with 0, 1 (a bug), 2 (user error) or 130 (Ctrl-C)."""
    # These must be set before torch is imported. OpenMP threads that spin while they wait slow down
    # other programs on the same cores, and training itself (up to five times slower). Spinning for
    # some microseconds is faster than sleeping, since one parallel loop often follows another.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # JSON is always UTF-8, whatever the locale
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    with exit_at_once_if_joined():
        app(prog_name="elias")
