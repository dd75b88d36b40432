"""``elias train``: from a corpus to a saved model."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elias.cli import console
from elias.cli.errors import training
from elias.cli.info import config_rows
from elias.cli.options import (
    DataPath,
    DeviceName,
    LabelsColumn,
    Overwrite,
    Separator,
    TestSize,
    TextColumn,
    read_corpus,
)
from elias.cli.torchrun import join_world

if TYPE_CHECKING:
    from elias.config import EliasConfig, ResolvedConfig
    from elias.data import Corpus
    from elias.inference.predictor import Elias
    from elias.training.dry_run import Rehearsal


def train(
    data: DataPath,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="RUN", help="The run folder to make.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Start from a preset; see elias presets.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A TOML file, or a run's config.json.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change one key, e.g. index.beta=75; may repeat."
        ),
    ] = None,
    device: DeviceName = "auto",
    init_from: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="Start from a saved model's weights.")
    ] = None,
    text: TextColumn = None,
    labels: LabelsColumn = None,
    separator: Separator = None,
    test_size: TestSize = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Tell the memory and the time it would take, print the resolved configuration "
            "and stop.",
        ),
    ] = False,
    ignore_memory: Annotated[
        bool,
        typer.Option("--ignore-memory", help="Begin even if the memory is expected to run out."),
    ] = False,
) -> None:
    """Train on a corpus; RUN/model appears when all is done.

    A run that was stopped goes on from its last checkpoint when the same command is run again.
    """
    if out is None and not dry_run:
        raise typer.BadParameter("a run folder is needed (or --dry-run)", param_hint="--out")
    helps = first_of_several() is False
    if dry_run and helps:
        return
    chosen = chosen_config(preset, config, changes or [])

    from elias.distributed import SingleProcess
    from elias.inference.predictor import Elias
    from elias.kernels.device import pick_device
    from elias.training.trainer import check_plan, starting_config, train_together
    from elias.training.trainer import train as fit

    # what is wrong is better refused before a large corpus is read
    check_plan(chosen, None if dry_run or helps else out, overwrite=overwrite)
    where = pick_device(device)
    model: Elias | None
    with nullcontext(SingleProcess()) if dry_run else join_world(device) as world:
        # each of several processes moves its own part to its own GPU
        place = "cpu" if world.shards_labels else device
        start = None if init_from is None else Elias.from_pretrained(init_from, device=place)
        on_disk = chosen.data.on_disk
        corpus = world.rank0_first(
            lambda: read_corpus(data, text, labels, separator, test_size=test_size, on_disk=on_disk)
        )
        resolved = starting_config(chosen, start).resolve(len(corpus.train), corpus.n_labels)
        show_plan(resolved, corpus)
        if dry_run:
            from elias.training.dry_run import rehearse

            found = rehearse(
                resolved, corpus, where, init_from=start, keeps_checkpoints=out is not None
            )
            show_rehearsal(found)
            console.note(f"parameters: {found.n_parameters:,}; nothing was written")
            typer.echo(json.dumps(resolved.to_dict(), indent=2, ensure_ascii=False))
            return
        with training(out, overwrite=overwrite):
            how = {"overwrite": overwrite, "ignore_memory": ignore_memory}
            if world.shards_labels:
                model = train_together(world, resolved, corpus, out=out, init_from=start, **how)
            else:
                model = fit(resolved, corpus, out=out, device=device, init_from=start, **how)
    if model is not None:
        show_stages(model)
        typer.echo(f"{out}/model")


def first_of_several() -> bool | None:
    """Say whether `torchrun` started this as the first process, None where nothing did.

    The others tell errors alone: what they do, the first one tells.
    """
    from elias.distributed import launched_rank

    rank = launched_rank()
    if rank:
        console.hush()
    return None if rank is None else rank == 0


def chosen_config(preset: str | None, file: Path | None, changes: list[str]) -> EliasConfig:
    """Return defaults < preset < file < changes."""
    from elias.config import EliasConfig, merge, parse_override, preset_tree, read_tree

    if preset is None and file is None:
        console.note("no --preset and no --config: the defaults are used")
    tree = {} if preset is None else preset_tree(preset)
    if file is not None:
        tree = merge(tree, read_tree(file))
    return EliasConfig.from_dict(tree).override(dict(map(parse_override, changes)))


def show_plan(config: ResolvedConfig, corpus: Corpus) -> None:
    """Tell what is going to be trained, sizes and all, on stderr."""
    counts = ", ".join(f"{len(split):,} {name}" for name, split in corpus.splits.items())
    rows = [("points", counts), ("labels", corpus.n_labels), *config_rows(config)]
    if corpus.validation is not None:
        rows = [row for row in rows if row[0] != "validation points"]
    console.show(console.grid(rows))


def show_stages(model: Elias) -> None:
    """Print the metrics of each stage on the test split, or on what there was to measure on."""
    metrics = model.metadata.get("metrics", {})
    splits = {split for found in metrics.values() for split in found}
    for split in ("test", "validation"):
        if split in splits:
            console.print_out(*console.stage_table(metrics, split))
            return


def show_rehearsal(found: Rehearsal) -> None:
    """Tell what a run would take, on stderr."""
    from elias.training.memory import gib

    rows: list[tuple[str, Any]] = []
    for title, parts in (("GPU", found.expected.device), ("host", found.expected.host)):
        rows += [(f"{title}: {name}", gib(size)) for name, size in parts.items() if size]
    for fit in found.fits:
        room = f"{gib(fit.needed)} of {gib(fit.room.total)}, {gib(fit.room.free)} free"
        whose = "per process" if fit.n_processes == 1 else f"of {fit.n_processes} processes"
        rows.append((f"{fit.where} {whose}", room))
    for stage, seconds in found.epoch_seconds.items():
        rows.append((f"{stage}, an epoch", f"{seconds:,.1f} s ({found.n_steps[stage]:,} steps)"))
    console.show(console.grid(rows))
    if found.remedies:
        whole = all(fit.possible for fit in found.fits)
        problem = "memory is short while others use it" if whole else "the run does not fit"
        console.warn(f"{problem}: {'; '.join(found.remedies)}")
