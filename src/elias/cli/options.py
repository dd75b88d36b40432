"""Options shared by several commands, and functions that read corpora with them."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from elias.cli import console

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elias.config import EliasConfig
    from elias.data.corpus import Corpus
    from elias.data.load import OnDisk
    from elias.inference.predictor import Elias


DataPath = Annotated[Path, Argument(metavar="DATA", help="A corpus in any supported format.")]
ModelPath = Annotated[Path, Argument(metavar="MODEL", help="A saved model, or a run folder.")]
RunPath = Annotated[Path, Argument(metavar="RUN", help="A run folder, or a saved model.")]
TextColumn = Annotated[
    str | None,
    Option("--text", metavar="COLUMN", help="Text column of a table; several as title,abstract."),
]
LabelsColumn = Annotated[
    str | None, Option("--labels", metavar="COLUMN", help="Labels column of a table.")
]
Separator = Annotated[
    str | None,
    Option("--separator", metavar="CHARS", help="Separator between the labels in a cell."),
]
TestSize = Annotated[
    float | None,
    Option(
        "--test-size",
        metavar="N|SHARE",
        min=0,
        help="Number or share of test points; 0: none (default: a fifth of data without splits).",
    ),
]
Preset = Annotated[
    str | None, Option(metavar="NAME", help="Preset to start from; see elias presets.")
]
ConfigFile = Annotated[
    Path | None,
    Option("--config", metavar="FILE", help="A TOML file, or the config.json of a run."),
]
Changes = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Set one key, e.g. index.beta=75; repeatable."),
]
DeviceName = Annotated[
    str, Option("--device", metavar="auto|cpu|cuda", help="Device; auto: a GPU if available.")
]
Component = Annotated[
    str | None,
    Option(metavar="NAME", help="Last component: stage2, rerank, calibrate, names (default: all)."),
]
TopK = Annotated[int, Option("-k", "--top-k", min=1, help="Labels per text.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace existing output.")]


def build_config(preset: str | None, file: Path | None, changes: list[str] | None) -> EliasConfig:
    """Build the configuration from defaults, preset, file and single changes; later ones win."""
    from elias.config import EliasConfig, merge, parse_override, preset_tree, read_tree

    if preset is None and file is None:
        console.note("no --preset and no --config: the defaults are used")
    tree = {} if preset is None else preset_tree(preset)
    if file is not None:
        tree = merge(tree, read_tree(file))
    return EliasConfig.from_dict(tree).override(dict(map(parse_override, changes or [])))


def read_corpus(
    path: Path,
    text: str | None = None,
    labels: str | None = None,
    separator: str | None = None,
    *,
    test_size: float | None = None,
    on_disk: OnDisk = "auto",
) -> Corpus:
    """Read a corpus with the options of a command."""
    from elias.data import load_corpus

    with errors_name_options():
        return load_corpus(
            path,
            text=text,
            labels=labels,
            separator=separator,
            test_size=test_size,
            on_disk=on_disk,
        )


def read_corpus_as_trained(
    path: Path, model: Elias, columns: Mapping[str, str | None], *, test_size: float = 0
) -> Corpus:
    """Read a corpus with the options of the model's training data; given options override them."""
    options = training_options(path, model.data_settings, **columns)
    values = (options.get(name) for name in ("text", "labels", "separator"))
    return read_corpus(path, *values, test_size=test_size)


def training_options(
    path: Path, settings: Mapping[str, Any], **columns: str | None
) -> dict[str, str]:
    """Return the options for reading a file: given options, completed by the training options."""
    from elias.data.load import reading_options

    with errors_name_options():
        options = reading_options(path, settings, columns)
    reused = [f"--{key} {quote(options[key])}" for key in options if columns[key] is None]
    if reused:
        console.note(f"{path}: read as in training: {' '.join(reused)}")
    return options


@contextmanager
def errors_name_options() -> Iterator[None]:
    """Replace library argument names in error messages by command-line option names."""
    from elias.errors import DataError

    try:
        yield
    except DataError as error:
        message = str(error)
        for name in ("text", "labels", "separator"):
            message = message.replace(f" {name}=", f" --{name} ")
            message = message.replace(f"({name}=)", f"(--{name})")
        message = message.replace("overwrite=True", "--overwrite")
        message = message.replace("leave test_size", "leave --test-size")
        message = message.replace("test_size must", "--test-size must")
        raise DataError(message.rstrip()) from error
