"""``elias report``: write an HTML report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from elias.cli import console, options


def report(
    run: options.RunPath,
    data: Annotated[
        Path | None,
        Argument(metavar="[DATA]", help="The corpus (default: the path recorded in training)."),
    ] = None,
    out: Annotated[
        Path | None,
        Option("--out", metavar="FILE", help="The file to write (default: RUN/report.html)."),
    ] = None,
    text: options.TextColumn = None,
    labels: options.LabelsColumn = None,
    separator: options.Separator = None,
    device: options.DeviceName = "auto",
) -> None:
    """Write an HTML report of a run: metrics, the paper's figures, examples, settings, times."""
    from elias.report.report import write_report

    columns = {"text": text, "labels": labels, "separator": separator}
    reading = {name: value for name, value in columns.items() if value is not None}
    path = write_report(run, data, out=out, reading=reading or None, device=device)
    console.note("open it in a browser; it needs no network")
    typer.echo(path)
