"""``elias train`` and ``elias tune``: train a model on a corpus, and search for better settings."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

import elias
from elias.cli import console, options
from elias.cli.info import config_rows
from elias.cli.torchrun import join_world
from elias.config.resolve import MAX_SCORED_LABELS, reasons
from elias.errors import ConfigError

if TYPE_CHECKING:
    from elias.config import EliasConfig, ResolvedConfig
    from elias.training.dry_run import DryRun


_SHOWN_SECONDS = 1.0  # minimum duration of a step whose time is printed
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


@options.expand_groups
def train(
    *,
    out: Annotated[Path | None, Option(metavar="RUN", help="Run folder to create.")] = None,
    training: options.TrainingOptions,
    init_from: Annotated[
        Path | None, Option(metavar="MODEL", help="Saved model to train further.")
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Estimate memory and time, and exit.")
    ] = False,
    as_json: Annotated[
        bool, Option("--json", help="With --dry-run: print all settings as JSON.")
    ] = False,
    ignore_memory: Annotated[
        bool,
        Option("--ignore-memory", help="Train even if memory may not suffice."),
    ] = False,
) -> None:
    """Train a model on a corpus; RUN/model is written when training is finished.

    Run the same command again to resume an interrupted run.
    """
    start_time = time.monotonic()
    if out is None and not dry_run:
        raise typer.BadParameter("give a run folder, or use --dry-run", param_hint="--out")
    if as_json and not dry_run:
        raise ConfigError("--json: works only with --dry-run; add --dry-run")
    configuration, device, overwrite = training.configuration, training.device, training.overwrite
    if init_from is not None and configuration.encoder is not None:
        raise ConfigError("--init-from: uses the encoder of the saved model; leave out --encoder")

    from elias.distributed import SingleProcess, launched_rank

    rank = launched_rank() or 0
    if rank:
        console.show_errors_only()
        if dry_run:
            return
    config = configuration.build()

    from elias.kernels.device import pick_device
    from elias.training.numba_cache import compile_in_background
    from elias.training.train import check_plan, encoder_hint, plan_training, train_resolved

    # Check everything that needs no data before a large corpus is read.
    check_plan(config, None if dry_run or rank else out, overwrite=overwrite)
    target_device = pick_device(device)
    if not dry_run and not rank:
        compile_in_background()
    with nullcontext(SingleProcess()) if dry_run else join_world(device) as world:
        # With several processes, each process later moves its share of the model to its GPU.
        init_device = "cpu" if world.shards_labels else device
        start = None
        if init_from is not None:
            start = elias.Elias.from_pretrained(init_from, device=init_device)
        corpus = world.rank0_first(lambda: training.read_corpus(config))
        own_device = world.device if world.shards_labels else target_device
        corpus, config, resolved = plan_training(config, corpus, start, own_device)
        configuration.note_defaults()
        show_plan(config, resolved, corpus, continues=start is not None)
        is_chosen = start is not None or configuration.chooses_encoder
        hint = None if is_chosen else encoder_hint(resolved, corpus, target_device)
        if hint is not None:
            console.note(f"{hint}: --encoder minilm (--encoder bag hides this note)")
        if dry_run:
            from elias.training.dry_run import estimate_run

            estimate = estimate_run(
                resolved, corpus, target_device, init_from=start, keeps_checkpoints=out is not None
            )
            _show_estimate(estimate)
            if as_json:
                typer.echo(json.dumps(resolved.to_dict(), indent=2, ensure_ascii=False))
            return
        times = {"start": time.monotonic() - start_time}
        with resumable_run(out, overwrite=overwrite):
            world = world if world.shards_labels else SingleProcess(target_device)
            settings = {"overwrite": overwrite, "ignore_memory": ignore_memory}
            model = train_resolved(world, resolved, corpus, out, init_from=start, **settings)
    if model is not None and out is not None:
        times |= model.metadata.get("timings", {})
        _show_result(model, out, corpus, describe_times(times, time.monotonic() - start_time))


def _show_result(model: elias.Elias, out: Path, corpus: elias.Corpus, times: str) -> None:
    """Print timings, metrics of each component, the model folder and commands to try next."""
    console.note(f"finished in {times}")
    metrics = model.metadata.get("metrics", {})
    splits = {split for measured in metrics.values() for split in measured}
    if splits:
        split = "test" if "test" in splits else "validation"
        console.print_out(*console.stage_table(model, split))
    typer.echo(f"{out}/model")
    console.note("\n".join(["next:", *(f"  {line}" for line in next_commands(out, corpus))]))


def describe_times(steps: dict[str, float], duration: float) -> str:
    """Return the duration of a run in words, with the steps that took longest."""
    from elias.progress import seconds

    # "other" is negative for a resumed run
    steps = steps | {"other": duration - sum(steps.values())}
    shown = [f"{name} {seconds(value)}" for name, value in steps.items() if value >= _SHOWN_SECONDS]
    return seconds(duration) + (f": {', '.join(shown)}" if shown else "")


def next_commands(run: Path, corpus: elias.Corpus) -> list[str]:
    """Return three commands to try with a trained model."""
    program, folder = console.program(), shlex.quote(str(run))
    texts = (corpus.test or corpus.train).texts
    if texts is None:
        data = shlex.quote(str(corpus.source or "DATA"))
        return [
            f"{program} evaluate {folder} {data}",
            f"{program} report {folder}",
            f"{program} info {folder}",
        ]
    first = next((text for text in texts if text.strip()), "")
    text = _quoted(console.one_line(textwrap.shorten(first, 60, placeholder="")) or "a text")
    can_serve = importlib.util.find_spec("fastapi") is not None
    return [
        f"echo {text} | {program} predict {folder}",
        f"{program} explain {folder} {text}",
        f"{program} {'serve' if can_serve else 'report'} {folder}",
    ]


def _quoted(text: str) -> str:
    """Quote a text for a shell. If it has an apostrophe, prefer double quotes.

    >>> print(_quoted("a dog's life"), _quoted("five $"))
    "a dog's life" 'five $'
    """
    return f'"{text}"' if "'" in text and not set(text) & set('"$`\\!') else shlex.quote(text)


def show_plan(
    config: EliasConfig,
    resolved: ResolvedConfig,
    corpus: elias.Corpus,
    *,
    continues: bool = False,
) -> None:
    """Print the sizes of the corpus and the resolved configuration on stderr.

    Settings that are not set in ``config`` are printed with the reason for their value. With
    ``continues``, a saved model is trained further, without stage 0.
    """
    counts = ", ".join(f"{len(split):,} {name}" for name, split in corpus.splits.items())
    why = reasons(config, resolved, len(corpus.train), corpus.n_labels)
    rows = [("points", counts), ("labels", corpus.n_labels), *config_rows(resolved, why)]
    if resolved.loss.label_contrast and corpus.train.texts is not None and not continues:
        first = next(i for i, row in enumerate(rows) if row[0] == resolved.stages[0].name)
        others = ", or with other texts of the label" * (corpus.n_labels > MAX_SCORED_LABELS)
        task = f"trains the encoder to compare texts with label texts{others}"
        rows.insert(first, ("stage 0", f"{task}, if half of the points allow it"))
    if corpus.validation is not None:
        rows = [row for row in rows if row[0] != "validation points"]
    console.show(console.grid(rows))


@contextmanager
def resumable_run(run: Path | None, *, overwrite: bool = False) -> Iterator[None]:
    """Add instructions for resuming the training run to the message of an interrupt."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        from elias.training.run import can_resume

        remedy = "run the same command again to start over"
        if run is not None and can_resume(run):
            command = "run the same command again" + (" without --overwrite" if overwrite else "")
            remedy = f"{command} to resume from the last checkpoint"
        state = ": ".join([f"{run}/model was not written", *map(str, interrupt.args)])
        interrupt.args = (f"{state}; {remedy}",)
        raise


def _show_estimate(estimate: DryRun) -> None:
    """Print the estimated memory and time of a run on stderr."""
    from elias.progress import seconds as duration
    from elias.training.memory import gib

    rows: list[tuple[str, Any]] = []
    for title, parts in (("GPU", estimate.memory.on_device), ("host", estimate.memory.on_host)):
        shown = {name: gib(size) for name, size in parts.items()}
        rows += [(f"{title}: {name}", size) for name, size in shown.items() if size != "0 MiB"]
    for fit in estimate.fits:
        room = f"{gib(fit.needed)} of {gib(fit.capacity.total)}, {gib(fit.capacity.free)} free"
        processes = "per process" if fit.n_processes == 1 else f"of {fit.n_processes} processes"
        rows.append((f"{fit.memory} {processes}", room))
    if estimate.contrast_seconds:
        rows.append(("stage 0", duration(estimate.contrast_seconds)))
    for stage, seconds in estimate.epoch_seconds.items():
        rows.append((f"{stage}, an epoch", f"{seconds:,.1f} s ({estimate.n_steps[stage]:,} steps)"))
    if estimate.total_seconds:
        rows.append(("all stages, at most", duration(estimate.total_seconds)))
        rows.append(("not included", "set-up, compilation, validation, ranker and tests"))
    console.show(console.grid(rows))
    if estimate.remedies:
        problem = "the run does not fit in memory"
        if all(fit.possible for fit in estimate.fits):
            problem = "other programs use too much memory"
        console.warn(f"{problem}: {'; '.join(estimate.remedies)}")
    console.note(f"parameters: {estimate.n_parameters:,}; nothing was written")


@options.expand_groups
def tune(
    *,
    out: Annotated[Path, Option(metavar="DIR", help="Folder of the study and its results.")],
    trials: Annotated[
        int | None,
        Option(
            metavar="N", min=1, help="Trials in total (default: 20, or as many as --time allows)."
        ),
    ] = None,
    duration: Annotated[
        str | None, Option("--time", metavar="1h30m", help="Time limit, e.g. 2h, 45m or 1h30m.")
    ] = None,
    space: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="TOML file with the search space (default: depends on the encoder).",
        ),
    ] = None,
    training: options.TrainingOptions,
) -> None:
    """Search for settings that give better results on held-out points.

    The best settings are written to DIR/best.toml, for elias train --config. Run the same command
    again to continue an interrupted study. Test points are not used.
    """
    seconds = None if duration is None else parse_duration(duration)

    from elias.data.corpus import resolve_config
    from elias.experiments import tune as tuning

    config, corpus = training.read()
    show_plan(config, resolve_config(config, corpus), corpus)
    tuning.tune(
        config,
        corpus,
        out,
        space=space,
        trials=trials,
        seconds=seconds,
        device=training.device,
        overwrite=training.overwrite,
    )
    console.note(f"{out / tuning.HTML_FILE}: all trials")
    typer.echo(f"{out / tuning.BEST_FILE}")


def parse_duration(text: str) -> int:
    """Convert a duration such as ``1h30m`` to seconds.

    >>> parse_duration("1h30m"), parse_duration("45s")
    (5400, 45)
    """
    match = _DURATION.fullmatch(text.strip())
    hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    if total == 0:
        raise ConfigError(f"--time {text!r}: write hours, minutes or seconds, e.g. 1h30m or 90s")
    return total
