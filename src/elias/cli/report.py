"""``elias report``: a run to look at, as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elias.cli import console
from elias.cli.options import DeviceName, LabelsColumn, Separator, TextColumn


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run, or a saved model.")],
    data: Annotated[
        Path | None,
        typer.Argument(metavar="[DATA]", help="Its corpus; by default where the run read it."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The file to write. [RUN/report.html]"),
    ] = None,
    text: TextColumn = None,
    labels: LabelsColumn = None,
    separator: Separator = None,
    device: DeviceName = "auto",
) -> None:
    """Write a page about a run: metrics, the paper's figures, examples, settings, times."""
    from elias.report.report import write_report

    given = {"text": text, "labels": labels, "separator": separator}
    reading = {name: value for name, value in given.items() if value is not None}
    written = write_report(run, data, out=out, reading=reading or None, device=device)
    console.note("open it in a browser; it needs no network")
    typer.echo(written)
