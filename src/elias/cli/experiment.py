"""``elias experiment``: the paper's tables on any corpus."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elias.cli import console
from elias.cli.options import (
    DataPath,
    DeviceName,
    LabelsColumn,
    Overwrite,
    Separator,
    TestSize,
    TextColumn,
    read_corpus,
    reread_corpus,
)
from elias.cli.train import chosen_config, show_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elias.data import Corpus
    from elias.experiments import Plan, Result, Setting
    from elias.experiments.prune import Cut
    from elias.inference.predictor import Elias


Out = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", help="Where results go; models go below DIR/runs."),
]
Preset = Annotated[
    str | None, typer.Option(metavar="NAME", help="Start from a preset; see elias presets.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A TOML file, or a config.json.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key; may repeat."),
]
Seeds = Annotated[
    str | None,
    typer.Option(
        metavar="S,S,…", help="Seeds to average over. (default: that of the configuration)"
    ),
]
Component = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="What to measure, e.g. rerank. (default: the last stage)"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]


@dataclass(frozen=True, slots=True)
class Reading:
    """How the corpus is read."""

    text: str | None
    labels: str | None
    separator: str | None
    test_size: float | None

    def corpus(self, data: Path) -> Corpus:
        """Read it."""
        return read_corpus(data, self.text, self.labels, self.separator, test_size=self.test_size)

    def corpus_of(self, model: Elias, data: Path) -> Corpus:
        """Read it as the model's training read it, with the same test points."""
        from elias.data.splits import DEFAULT_TEST_SHARE, hold_out_test, restore_splits

        given = {"text": self.text, "labels": self.labels, "separator": self.separator}
        corpus = reread_corpus(data, model, given, test_size=self.test_size or 0)
        if self.test_size is not None or list(corpus.splits) != ["train"]:
            return corpus
        cut = restore_splits(corpus, model.label_names, model.metadata)
        return cut or hold_out_test(corpus, DEFAULT_TEST_SHARE, seed=0)


@dataclass(frozen=True, slots=True)
class Given:
    """What to train on what, and where results go."""

    data: Path
    out: Path
    preset: str | None
    config: Path | None
    changes: list[str]
    seeds: str | None
    device: str
    overwrite: bool

    def setting(self, reading: Reading) -> Setting:
        """Check the options, read the corpus, and tell what is going to be trained."""
        chosen = chosen_config(self.preset, self.config, self.changes)
        seeds = None if self.seeds is None else whole_numbers("--seeds", self.seeds)

        from elias.experiments import Setting
        from elias.kernels.device import pick_device
        from elias.training.trainer import check_plan

        # what is wrong is better refused before a large corpus is read
        check_plan(chosen, None)
        pick_device(self.device)
        corpus = reading.corpus(self.data)
        setting = Setting.of(chosen, corpus, self.out, seeds=seeds, **self._place())
        show_plan(setting.config, corpus)
        return setting

    def setting_of(self, model: Path, reading: Reading) -> tuple[Elias, Setting]:
        """Read a trained model and its corpus."""
        from elias.errors import ConfigError, DataError
        from elias.experiments import Setting
        from elias.inference.predictor import Elias

        named = {
            "--preset": self.preset,
            "--config": self.config,
            "--set": self.changes,
            "--seeds": self.seeds,
        }
        useless = [name for name, value in named.items() if value]
        if useless:
            raise ConfigError(f"{useless[0]} trains a model, and --model gives one; leave one out")
        trained = Elias.from_pretrained(model, device=self.device)
        corpus = reading.corpus_of(trained, self.data)
        if list(corpus.label_names) != list(trained.label_names):
            raise DataError(f"{self.data}: its labels are not those of {model}; give its corpus")
        setting = Setting.of(trained.config, corpus, self.out, **self._place())
        if trained.metadata.get("data", {}).get("splits") != setting.data["splits"]:
            console.warn(f"{model} was trained on other points; these may be among them")
        return trained, setting

    def _place(self) -> dict[str, Any]:
        return {"device": self.device, "overwrite": self.overwrite}


def numbers(option: str, text: str) -> list[float]:
    """Read numbers separated by commas."""
    from elias.errors import ConfigError

    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r}: write numbers with commas between them") from None


def whole_numbers(option: str, text: str) -> list[int]:
    """Read whole numbers separated by commas."""
    from elias.errors import ConfigError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{option} {text!r}: write whole numbers with commas between them, e.g. 0,1,2"
        ) from None


def kept_edges(save: Path | None, keep: str | None, *, overwrite: bool) -> Cut | None:
    """Read which edges the saved model keeps; refuse a folder that is taken before any work."""
    from elias.errors import ConfigError
    from elias.experiments.prune import THRESHOLD, TOP_K, Cut

    if save is None and keep is None:
        return None
    if save is None or keep is None:
        raise ConfigError("--save FOLDER and --keep RULE go together, e.g. --keep threshold=0.25")
    if save.exists() and not overwrite and (not save.is_dir() or any(save.iterdir())):
        raise ConfigError(f"--save {save}: already exists; use --overwrite or another folder")
    by, _, limit = keep.partition("=")
    ways = {"threshold": THRESHOLD, "top": TOP_K}
    try:
        return Cut(ways[by], float(limit))
    except (KeyError, ValueError):
        raise ConfigError(
            f"--keep {keep!r}: write threshold=0.25, or top=100 for so many of each cluster"
        ) from None


app = typer.Typer(
    no_args_is_help=True,
    help="Run the paper's experiments on a corpus: ablation, comparison, sweeps, pruning.",
)


@app.command()
def ablation(
    data: DataPath,
    out: Out,
    preset: Preset = None,
    config: ConfigFile = None,
    changes: Changes = None,
    seeds: Seeds = None,
    members: Annotated[
        int | None, typer.Option(metavar="N", help="Members of the ensemble; 1: none. (default: 3)")
    ] = None,
    one_vs_all: Annotated[
        bool, typer.Option("--one-vs-all", help="Train one-vs-all with the same encoder too.")
    ] = False,
    device: DeviceName = "auto",
    text: TextColumn = None,
    labels: LabelsColumn = None,
    separator: Separator = None,
    test_size: TestSize = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Add component by component: stages, ranker, calibration, names, ensemble (Tables 3, 8)."""
    given = Given(data, out, preset, config, changes or [], seeds, device, overwrite)
    setting = given.setting(Reading(text, labels, separator, test_size))

    from elias.experiments import ablation as planned

    _run(planned(setting, members=members, with_one_vs_all=one_vs_all), as_json)


@app.command()
def compare(
    data: DataPath,
    out: Out,
    preset: Preset = None,
    config: ConfigFile = None,
    changes: Changes = None,
    seeds: Seeds = None,
    members: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Members of the ensemble. (default: those of the configuration)"
        ),
    ] = None,
    peer_python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PEER=PATH",
            help="The interpreter that has a peer: omikuji=PATH, pecos=PATH; may repeat.",
        ),
    ] = None,
    ranker_features: Annotated[
        bool, typer.Option("--ranker-features", help="Run the peers on our features too.")
    ] = False,
    device: DeviceName = "auto",
    text: TextColumn = None,
    labels: LabelsColumn = None,
    separator: Separator = None,
    test_size: TestSize = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Put the model beside one-vs-all, nearest neighbours and linear peers (Tables 1 and 2)."""
    from elias.experiments.peers import parse_interpreters

    interpreters = parse_interpreters(peer_python or [])
    given = Given(data, out, preset, config, changes or [], seeds, device, overwrite)
    setting = given.setting(Reading(text, labels, separator, test_size))

    from elias.experiments import compare as planned

    plan = planned(
        setting, members=members, interpreters=interpreters, ranker_features=ranker_features
    )
    _run(plan, as_json)


@app.command()
def sweep(
    parameter: Annotated[
        str,
        typer.Argument(metavar="PARAMETER", help="lambda, kappa, alpha, beta, beam or shortlist."),
    ],
    data: DataPath,
    out: Out,
    values: Annotated[
        str | None,
        typer.Option(
            metavar="V,V,…", help="Values to try. (default: some around the configuration's)"
        ),
    ] = None,
    component: Component = None,
    preset: Preset = None,
    config: ConfigFile = None,
    changes: Changes = None,
    seeds: Seeds = None,
    device: DeviceName = "auto",
    text: TextColumn = None,
    labels: LabelsColumn = None,
    separator: Separator = None,
    test_size: TestSize = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Vary one parameter, all else equal (Table 7); beam and shortlist train one model only."""
    from elias.experiments.sweep import parameter_called

    parameter_called(parameter)
    chosen = None if values is None else numbers("--values", values)
    given = Given(data, out, preset, config, changes or [], seeds, device, overwrite)
    setting = given.setting(Reading(text, labels, separator, test_size))

    from elias.experiments import sweep as planned

    _run(planned(setting, parameter, values=chosen, component=component), as_json)


@app.command()
def prune(
    data: DataPath,
    out: Out,
    model: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Prune this run or saved model; else one is trained."),
    ] = None,
    thresholds: Annotated[
        str | None,
        typer.Option(metavar="T,T,…", help="Lowest edge scores to keep. (default: the paper's)"),
    ] = None,
    tops: Annotated[
        str | None,
        typer.Option(
            "--top-k", metavar="N,N,…", help="Edges of each cluster to keep. (default: shares of κ)"
        ),
    ] = None,
    component: Component = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Save a pruned model; needs --keep.")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(metavar="RULE", help="Edges of the saved model: threshold=0.25 or top=100."),
    ] = None,
    preset: Preset = None,
    config: ConfigFile = None,
    changes: Changes = None,
    seeds: Seeds = None,
    device: DeviceName = "auto",
    text: TextColumn = None,
    labels: LabelsColumn = None,
    separator: Separator = None,
    test_size: TestSize = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Prune the edges of a trained model by threshold and by rank (Table 9)."""
    cut = kept_edges(save, keep, overwrite=overwrite)
    by_threshold = None if thresholds is None else numbers("--thresholds", thresholds)
    by_rank = None if tops is None else whole_numbers("--top-k", tops)
    given = Given(data, out, preset, config, changes or [], seeds, device, overwrite)
    reading = Reading(text, labels, separator, test_size)
    trained, setting = (
        (None, given.setting(reading)) if model is None else given.setting_of(model, reading)
    )

    from elias.experiments import prune as planned
    from elias.experiments.prune import save_pruned

    plan = planned(
        setting, model=trained, thresholds=by_threshold, tops=by_rank, component=component
    )
    _run(plan, as_json)
    if save is not None and cut is not None:
        edges = save_pruned(setting, cut, save, model=trained)
        console.note(
            f"{save}: {edges.after:,} of {edges.before:,} edges, {100 * edges.removed:.1f}% less"
        )


def _run(plan: Plan, as_json: bool) -> None:
    """Carry out a plan and print what came of it."""
    from elias.experiments import carry_out

    with _going_on(plan.setting.folder):
        result = carry_out(plan)
    if as_json:
        typer.echo(json.dumps(result.document, ensure_ascii=False))
    else:
        _show(plan, result)
    console.note(f"written: {', '.join(str(path) for path in result.files)}")


@contextmanager
def _going_on(folder: Path) -> Iterator[None]:
    """Have an interrupt say what it leaves of an experiment."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"what is finished stays in {folder}; the same command goes on from there"
        ) from None


def _show(plan: Plan, result: Result) -> None:
    """Print the table, and below it why a line has not all its numbers."""
    measured = [replace(line, note="") for line in result.lines if line.mean]
    columns = [key for key in plan.table.shown if any(key in line.mean for line in measured)]
    rows = plan.table.rows(measured, columns, between="±")
    console.print_out(console.columns(plan.table.header(columns), rows))
    for line in result.lines:
        if line.note:
            console.print_out(f"{line.title}: {line.note}")
