"""The ``elias`` command: its options for all commands, and the commands it is made of.

No module of this package imports anything heavy at its top: `elias --help` must answer at once.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import elias
from elias.cli import console, data, experiment
from elias.cli.calibrate import calibrate
from elias.cli.demo import demo
from elias.cli.errors import explained
from elias.cli.evaluate import evaluate
from elias.cli.explain import explain
from elias.cli.export import export
from elias.cli.info import info, presets
from elias.cli.predict import predict
from elias.cli.push import push
from elias.cli.report import report
from elias.cli.serve import serve
from elias.cli.torchrun import leaving, refuse_several
from elias.cli.train import train

TALKATIVE = ("demo", "experiment", "serve", "train")
"""The commands whose progress is told step by step without being asked."""
TRAINING = ("demo", "experiment", "train")
"""The commands that train."""


class Commands(TyperGroup):
    """A group of commands whose failures are explained and turned into exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        with explained():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Extreme multi-label classification with an index that is learned end to end (ELIAS).",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"elias {elias.__version__}")
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Tell more, and show tracebacks.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Tell only warnings and errors.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Set up what the commands tell on stderr; results go to stdout."""
    del version
    console.set_up(verbose=verbose, quiet=quiet, talkative=ctx.invoked_subcommand in TALKATIVE)
    refuse_several(ctx.invoked_subcommand)
    if ctx.invoked_subcommand in TRAINING:
        let_threads_sleep()


def let_threads_sleep() -> None:
    """Have idle threads sleep, which OpenMP lets spin unless told otherwise before it is loaded.

    Where other programs want the cores too, a spinning thread takes the time from the one that it
    waits for: a training step was seen to take more than twice as long. What is set already stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


app.command()(demo)
app.add_typer(data.app, name="data")
app.command()(train)
app.command()(evaluate)
app.command()(calibrate)
app.command()(predict)
app.command()(explain)
app.command()(report)
app.command()(serve)
app.command()(push)
app.command()(export)
app.add_typer(experiment.app, name="experiment")
app.command()(info)
app.command()(presets)


def main() -> None:
    """Run the command line and exit with 0, 1 (our bug), 2 (the user's to mend) or 130 (^C)."""
    # Before torch is imported: threads that wait by spinning take the cores from those that work
    # as soon as another program runs beside them (training took five times as long).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # JSON is UTF-8, whatever the terminal's language
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    with leaving():
        app(prog_name="elias")
