"""How a command fails: one line on stderr and an exit code, or our bug's traceback."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from elias.cli import console
from elias.errors import EliasError, Interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


USER_MISTAKE = 2
SIGNALLED = 128
"""What a shell adds to the number of the signal that ended a program: 130 is ^C."""
CLOSED_PIPE = 141
"""What a shell gives a program that a closed pipe ended (128 + SIGPIPE)."""


@contextmanager
def explained() -> Iterator[None]:
    """Turn what the user can mend into one line and an exit code; let bugs through."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
        raise typer.Exit(CLOSED_PIPE) from None
    except EliasError as error:
        tell_at_once(error)
        raise typer.Exit(USER_MISTAKE) from error
    except OSError as error:
        if error.filename is None:  # not about a file of the user's
            raise
        _tell(f"{error.filename}: {error.strerror}")
        raise typer.Exit(USER_MISTAKE) from error
    except KeyboardInterrupt as interrupt:
        typer.echo(": ".join(["interrupted", *map(str, interrupt.args)]), err=True)
        number = getattr(interrupt, "signal_number", signal.SIGINT)
        raise typer.Exit(SIGNALLED + number) from None


@contextmanager
def training(run: Path | None, *, overwrite: bool = False) -> Iterator[None]:
    """Have an interrupt say what it leaves of a training run, and how to go on."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        from elias.training.run import can_go_on

        left = ": ".join([f"{run}/model was not written", *map(str, interrupt.args)])
        again = "the same command" + (" without --overwrite" if overwrite else "")
        how = f"{again} goes on from the last checkpoint"
        if run is None or not can_go_on(run):
            how = "the same command starts the run over"
        number = getattr(interrupt, "signal_number", signal.SIGINT)
        raise Interrupted(f"{left}; {how}", signal_number=number) from None


def tell_at_once(error: BaseException) -> None:
    """Tell what the user can mend, unless that is done: among several processes it cannot wait.

    `torchrun` ends the others as soon as one has ended.
    """
    if isinstance(error, EliasError) and not error.reported:
        error.reported = True
        _tell(str(error))


def _tell(problem: str) -> None:
    if console.is_verbose():
        import traceback

        traceback.print_exc()
    typer.echo(f"error: {' '.join(problem.split())}", err=True)


def _forget_stdout() -> None:
    """Send what is still to be flushed nowhere, so that the interpreter ends without a word."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):  # stdout may be no file at all
        pass
