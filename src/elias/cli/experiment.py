"""``elias experiment``: the paper's tables on any corpus."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elias.cli import tables, talk
from elias.cli.experiment_options import (
    AsJson,
    Changes,
    Component,
    ConfigFile,
    Given,
    Out,
    Preset,
    Reading,
    Seeds,
    kept_edges,
    numbers,
    whole_numbers,
)
from elias.cli.options import (
    DataPath,
    DeviceName,
    LabelsColumn,
    Overwrite,
    Separator,
    TestSize,
    TextColumn,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elias.experiments import Plan, Result

app = typer.Typer(
    no_args_is_help=True,
    help="Run the paper's experiments on a corpus: ablation, comparison, sweeps, pruning.",
)


@app.command()
def ablation(  # noqa: PLR0913 - each is an option of its own
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
def compare(  # noqa: PLR0913 - each is an option of its own
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
def sweep(  # noqa: PLR0913 - each is an option of its own
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
    from elias.experiments.parameters import parameter_called

    parameter_called(parameter)
    chosen = None if values is None else numbers("--values", values)
    given = Given(data, out, preset, config, changes or [], seeds, device, overwrite)
    setting = given.setting(Reading(text, labels, separator, test_size))

    from elias.experiments import sweep as planned

    _run(planned(setting, parameter, values=chosen, component=component), as_json)


@app.command()
def prune(  # noqa: PLR0913 - each is an option of its own
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
        talk.note(
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
    talk.note(f"written: {', '.join(str(path) for path in result.files)}")


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
    tables.print_out(tables.columns(plan.table.header(columns), rows))
    for line in result.lines:
        if line.note:
            tables.print_out(f"{line.title}: {line.note}")
