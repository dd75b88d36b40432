"""Turn user errors into one line on stderr and an exit code; keep the traceback of bugs."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import typer

from elias.cli import console
from elias.errors import EliasError, Interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


USER_ERROR = 2
SIGNALLED = 128
"""Offset of exit codes for signals: code 128 + n means signal n, so 130 is Ctrl-C."""


@contextmanager
def report_errors() -> Iterator[None]:
    """Print errors that the user can fix as one line and exit; re-raise all other exceptions."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        raise typer.Exit(SIGNALLED + signal.SIGPIPE) from None
    except EliasError as error:
        report_error(error)
        raise typer.Exit(USER_ERROR) from error
    except OSError as error:
        if error.filename is None:  # not about one of the user's files
            raise
        _print_error(f"{error.filename}: {error.strerror}")
        raise typer.Exit(USER_ERROR) from error
    except KeyboardInterrupt as interrupt:
        typer.echo(": ".join(["interrupted", *map(str, interrupt.args)]), err=True)
        raise typer.Exit(SIGNALLED + _signal_number(interrupt)) from None


@contextmanager
def resumable_run(run: Path | None, *, overwrite: bool = False) -> Iterator[None]:
    """Add instructions for resuming the training run to the message of an interrupt."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        from elias.training.run import can_resume

        state = ": ".join([f"{run}/model was not written", *map(str, interrupt.args)])
        command = "run the same command again" + (" without --overwrite" if overwrite else "")
        goal = "resume from the last checkpoint"
        if run is None or not can_resume(run):
            command, goal = "run the same command again", "start over"
        message = f"{state}; {command} to {goal}"
        raise Interrupted(message, signal_number=_signal_number(interrupt)) from None


def report_error(error: BaseException) -> None:
    """Print an `EliasError` immediately, and at most once.

    `torchrun` kills all processes as soon as one exits, so an error printed at exit can be lost.
    """
    if isinstance(error, EliasError) and not error.reported:
        error.reported = True
        _print_error(str(error))


def _print_error(message: str) -> None:
    if console.is_verbose():
        import traceback

        traceback.print_exc()
    typer.echo(f"error: {' '.join(message.split())}", err=True)


def _signal_number(interrupt: KeyboardInterrupt) -> int:
    return getattr(interrupt, "signal_number", signal.SIGINT)


def _discard_stdout() -> None:
    """Redirect stdout to the null device, so that the flush at interpreter exit cannot fail."""
    with suppress(OSError, ValueError):  # stdout may not be a file at all
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
