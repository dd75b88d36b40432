"""Options that several commands share."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elias.cli import console

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elias.data.corpus import Corpus
    from elias.data.load import OnDisk
    from elias.inference.predictor import Elias


DataPath = Annotated[
    Path, typer.Argument(metavar="DATA", help="A corpus: a file or folder in any known format.")
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run, or a saved model.")]
TextColumn = Annotated[
    str | None,
    typer.Option(
        "--text", metavar="COLUMN", help="Text column of a table; several as title,abstract."
    ),
]
LabelsColumn = Annotated[
    str | None, typer.Option("--labels", metavar="COLUMN", help="Labels column of a table.")
]
Separator = Annotated[
    str | None,
    typer.Option("--separator", metavar="CHARS", help="What separates labels in one cell."),
]
TestSize = Annotated[
    float | None,
    typer.Option(
        "--test-size",
        metavar="N|SHARE",
        min=0,
        help="Points to set aside for testing, or their share; 0: none. "
        "[a fifth of data without splits]",
    ),
]
DeviceName = Annotated[
    str,
    typer.Option("--device", metavar="auto|cpu|cuda", help="Where to compute; auto: a GPU if any."),
]
Component = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Go only this far: stage2, rerank, calibrate, names. [all that there is]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


def read_corpus(
    path: Path,
    text: str | None = None,
    labels: str | None = None,
    separator: str | None = None,
    *,
    test_size: float | None = None,
    on_disk: OnDisk = "auto",
) -> Corpus:
    """Read the corpus a command was given."""
    from elias.data import load_corpus

    with _options_named():
        return load_corpus(
            path,
            text=text,
            labels=labels,
            separator=separator,
            test_size=test_size,
            on_disk=on_disk,
        )


def as_in_training(path: Path, settings: Mapping[str, Any], **given: str | None) -> dict[str, str]:
    """Return the options to read a file with: those given, else those of the training data."""
    from elias.data.load import reading_options

    with _options_named():
        options = reading_options(path, settings, given)
    used = [f"--{key} {quote(options[key])}" for key in options if given[key] is None]
    if used:
        console.note(f"{path}: read as in training: {' '.join(used)}")
    return options


def reread_corpus(
    path: Path, model: Elias, given: Mapping[str, str | None], *, test_size: float = 0
) -> Corpus:
    """Read a corpus as the model's training data was read, but for the options given."""
    options = as_in_training(path, model.data_settings, **given)
    columns = (options.get(name) for name in ("text", "labels", "separator"))
    return read_corpus(path, *columns, test_size=test_size)


@contextmanager
def _options_named() -> Iterator[None]:
    """Name the command's options in errors, in place of the library's arguments."""
    from elias.errors import DataError

    try:
        yield
    except DataError as error:
        message = str(error)
        for name in ("text", "labels", "separator"):
            message = message.replace(f" {name}=", f" --{name} ")
            message = message.replace(f"({name}=)", f"(--{name})")
        message = message.replace("leave test_size", "leave --test-size")
        message = message.replace("test_size must", "--test-size must")
        raise DataError(message.rstrip()) from error
