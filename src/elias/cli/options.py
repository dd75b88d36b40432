"""Options shared by several commands, and functions that read configurations and corpora with them.

If the type of a command's parameter is a dataclass, `expand_groups` replaces the parameter by one
option for each field of the dataclass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import wraps
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

import elias
from elias.cli import console
from elias.config import EliasConfig
from elias.config.io import merge, parse_override, preset_tree, read_tree

DataPath = Annotated[Path, Argument(metavar="DATA", help="A corpus in any supported format.")]
ModelPath = Annotated[Path, Argument(metavar="MODEL", help="A saved model, or a run folder.")]
RunPath = Annotated[Path, Argument(metavar="RUN", help="A run folder, or a saved model.")]
TextColumn = Annotated[
    str | None, Option(metavar="COLUMN", help="Text columns, e.g. title,abstract.")
]
Encoding = Annotated[str | None, Option(metavar="NAME", help="Encoding of DATA, e.g. cp1252.")]
TestSize = Annotated[
    float | None,
    Option(
        metavar="N|SHARE",
        min=0,
        help="Test points, 0 for none (default: a fifth, if DATA has no test split).",
    ),
]
DeviceName = Annotated[
    str, Option(metavar="auto|cpu|cuda", help="auto uses a GPU if there is one.")
]
Component = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Last component to use: stage2, rerank, calibrate or names (default: all).",
    ),
]
TopK = Annotated[int, Option("-k", "--top-k", min=1, help="Number of labels per text.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace existing output.")]


class _PlainFlags:
    """Mixin that shows flags in the help as ``--json`` instead of ``--json <bool>``."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of a command."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_PlainFlags, TyperCommand):
    """A command whose help shows flags without ``<bool>``."""


class Group(_PlainFlags, TyperGroup):
    """A group of commands whose help shows flags without ``<bool>``."""


@dataclass(frozen=True, slots=True)
class ConfigOptions:
    """Options that define the configuration."""

    preset: Annotated[
        str | None, Option(metavar="NAME", help="Preset to use; see elias presets.")
    ] = None
    config_file: Annotated[
        Path | None, Option("--config", metavar="FILE", help="TOML file, or config.json of a run.")
    ] = None
    encoder: Annotated[
        str | None, Option(metavar="MODEL", help="bag, minilm, a folder or a hub id.")
    ] = None
    changes: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Set a key, e.g. index.beta=75."),
    ] = None

    def build(self) -> EliasConfig:
        """Build the configuration from the defaults, the preset, the file, --encoder and --set.

        Later values override earlier ones.
        """
        tree = {} if self.preset is None else preset_tree(self.preset)
        if self.config_file is not None:
            tree = merge(tree, read_tree(self.config_file))
        config = EliasConfig.from_dict(tree)
        if self.encoder is not None:
            config = config.with_encoder(self.encoder)
        return config.override(dict(map(parse_override, self.changes or [])))

    @property
    def chooses_encoder(self) -> bool:
        """Return whether an encoder is named, or a file that may name one."""
        return self.encoder is not None or self.config_file is not None

    def note_defaults(self) -> None:
        """Print a note that the defaults are used, if neither a preset nor a file is given."""
        if self.preset is None and self.config_file is None:
            console.note("no --preset and no --config: the defaults are used")


GroupColumn = Annotated[
    str | None,
    Option(
        metavar="COLUMN",
        help="Keep rows with the same value in one split (default: near-duplicates).",
    ),
]


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """Options for reading a corpus."""

    text: TextColumn = None
    labels: Annotated[str | None, Option(metavar="COLUMN", help="Labels column of a table.")] = None
    separator: Annotated[
        str | None, Option(metavar="CHARS", help="Separator of the labels in a cell.")
    ] = None
    no_header: Annotated[bool, Option("--no-header", help="No header; columns are 1, 2, …")] = False
    encoding: Encoding = None
    label_table: Annotated[
        Path | None, Option(metavar="FILE", help="Label table, or SKOS vocabulary.")
    ] = None
    language: Annotated[
        str | None, Option(metavar="CODE", help="Language of label names, e.g. en.")
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Return the options as arguments of `load_corpus`. Options not given are None."""
        values = asdict(self)
        return {"header": False if values.pop("no_header") else None, **values}

    def read(self, path: Path, **settings: Any) -> elias.Corpus:
        """Read a corpus. ``settings`` are further arguments of `load_corpus`."""
        return elias.load_corpus(path, **{**self.arguments(), **settings})

    def read_as_trained(
        self, path: Path, model: elias.Elias, *, test_size: float = 0, group: str | None = None
    ) -> elias.Corpus:
        """Read a corpus with the options of the training data, unless other options are given."""
        columns = {**self.arguments(), "group": group}
        table, language = columns.pop("label_table"), columns.pop("language")
        if table is None and model.label_table.ids is not None:
            table = model.label_table  # the corpus may have label ids instead of names
        options = training_options(path, model.data_settings, columns)
        labels = {"label_table": table, "language": language}
        return CorpusOptions().read(path, test_size=test_size, **labels, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Options of the commands that train models."""

    data: DataPath
    configuration: ConfigOptions
    device: DeviceName = "auto"
    reading: CorpusOptions
    group: GroupColumn = None
    test_size: TestSize = None
    overwrite: Overwrite = False

    def read(self) -> tuple[EliasConfig, elias.Corpus]:
        """Build the configuration, check everything that needs no data, and read the corpus."""
        config = self.configuration.build()

        from elias.kernels.device import pick_device
        from elias.training.train import check_plan

        check_plan(config, None)
        pick_device(self.device)
        corpus = self.read_corpus(config)
        self.configuration.note_defaults()
        return config, corpus

    def read_corpus(self, config: EliasConfig) -> elias.Corpus:
        """Read the corpus, in memory or on disk."""
        settings = {"on_disk": config.data.on_disk, "test_size": self.test_size}
        return self.reading.read(self.data, group=self.group, **settings)


def training_options(
    path: Path, settings: Mapping[str, Any], columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options to read a file. By default, they are the same as for the training data."""
    from elias.data.load import reading_options

    options = reading_options(path, settings, columns)
    reused = [
        "--no-header" if key == "header" else f"--{key} {quote(options[key])}"
        for key in options
        if columns[key] is None and options[key] is not True
    ]
    if reused:
        console.note(f"{path}: read as in training: {' '.join(reused)}")
    return options


def expand_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Replace parameters whose type is a dataclass by one parameter for each of its fields."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()

    @wraps(function)
    def command(**values: Any) -> None:
        function(**{p.name: _collect(p, values) for p in parameters})

    flat = [p.replace(kind=p.KEYWORD_ONLY) for group in parameters for p in _flatten(group)]
    command.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    return command


def _fields(group: Any) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as parameters, or an empty list for any other type."""
    if not (isinstance(group, type) and is_dataclass(group)):
        return []
    return list(inspect.signature(group, eval_str=True).parameters.values())


def _flatten(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    fields = _fields(parameter.annotation)
    return [p for field in fields for p in _flatten(field)] or [parameter]


def _collect(parameter: inspect.Parameter, values: Mapping[str, Any]) -> Any:
    fields = _fields(parameter.annotation)
    if not fields:
        return values[parameter.name]
    return parameter.annotation(**{p.name: _collect(p, values) for p in fields})
