"""How a command fails: one line on stderr and an exit code, or our bug's traceback."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from elias.cli import talk
from elias.errors import EliasError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

USER_MISTAKE = 2
INTERRUPTED = 130
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
        _tell(str(error))
        raise typer.Exit(USER_MISTAKE) from error
    except OSError as error:
        if error.filename is None:  # not about a file of the user's
            raise
        _tell(f"{error.filename}: {error.strerror}")
        raise typer.Exit(USER_MISTAKE) from error
    except KeyboardInterrupt as interrupt:
        typer.echo(": ".join(["interrupted", *map(str, interrupt.args)]), err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def training(run: Path | None) -> Iterator[None]:
    """Have an interrupt say what it leaves of a training run."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{run}/model was not written; the same command starts the run over"
        ) from None


def _tell(problem: str) -> None:
    if talk.is_verbose():
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
