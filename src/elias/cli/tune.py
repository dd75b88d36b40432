"""``elias tune``: search for better settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from elias.cli import console, options
from elias.cli.train import show_plan
from elias.errors import ConfigError

_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


@options.expand_groups
def tune(
    *,
    data: options.DataPath,
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
        Option(metavar="FILE", help="TOML file with the search space (default: by encoder)."),
    ] = None,
    configuration: options.ConfigOptions,
    device: options.DeviceName = "auto",
    reading: options.CorpusOptions,
    test_size: options.TestSize = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Search for settings that give better results on held-out points.

    The best settings are written to DIR/best.toml, for elias train --config. Run the same command
    again to continue an interrupted study. Test points are not used.
    """
    seconds = None if duration is None else parse_duration(duration)
    config = configuration.build()

    from elias.data.corpus import resolve_config
    from elias.experiments import tune as tuning
    from elias.kernels.device import pick_device
    from elias.training.train import check_plan

    # Check everything that needs no data before a large corpus is read.
    check_plan(config, None)
    pick_device(device)
    corpus = reading.read(data, test_size=test_size, on_disk=config.data.on_disk)
    show_plan(resolve_config(config, corpus), corpus)
    tuning.tune(
        config,
        corpus,
        out,
        space=space,
        trials=trials,
        seconds=seconds,
        device=device,
        overwrite=overwrite,
    )
    console.note(f"{out / tuning.HTML_FILE}: all trials")
    typer.echo(f"{out / tuning.BEST_FILE}")


def parse_duration(text: str) -> int:
    """Return the seconds of a duration.

    >>> parse_duration("1h30m"), parse_duration("45s")
    (5400, 45)
    """
    match = _DURATION.fullmatch(text.strip())
    hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    if total == 0:
        raise ConfigError(f"--time {text!r}: write hours, minutes or seconds, e.g. 1h30m or 90s")
    return total
