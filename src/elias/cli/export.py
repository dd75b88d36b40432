"""``elias export`` and ``elias push``: export a model to ONNX or push it to the hub."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

import elias
from elias.cli import console, options


def export(
    model: options.ModelPath,
    out: Annotated[Path, Argument(metavar="OUT.onnx", help="The file to write.")],
    top_k: Annotated[
        int | None, Option("-k", "--top-k", min=1, help="Maximum labels per text (default: 100).")
    ] = None,
    int8: Annotated[
        bool, Option("--int8", help="Store weights in 8 bits: smaller, slightly less accurate.")
    ] = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Export the encoder and the search as one ONNX file with tokenizer and labels.

    Ranker, calibration and probabilities are not exported, so the file ranks by the last stage.
    """
    loaded = elias.Elias.from_pretrained(model, device="cpu")
    start = time.monotonic()
    loaded.export_onnx(out, top_k=top_k, int8=int8, overwrite=overwrite)
    size = out.stat().st_size / 1e6
    console.note(f"{out}: {size:,.1f} MB, written in {time.monotonic() - start:.0f} s")
    stage, *left_out = loaded.components
    if left_out:
        console.note(f"it ranks like --component {stage}; not exported: {', '.join(left_out)}")


def push(
    model: options.ModelPath,
    repo_id: Annotated[str, Argument(metavar="USER/NAME", help="The repository on the hub.")],
    private: Annotated[
        bool | None, Option("--private/--public", help="Visibility of a new repository.")
    ] = None,
    revision: Annotated[
        str | None,
        Option(metavar="BRANCH", help="Branch, created if it does not exist (default: main)."),
    ] = None,
    license_name: Annotated[
        str | None, Option("--license", metavar="ID", help="License for the model card, e.g. mit.")
    ] = None,
    message: Annotated[str | None, Option("-m", "--message", help="Commit message.")] = None,
) -> None:
    """Push a model and its card to the Hugging Face hub, and print its URL."""
    loaded = elias.Elias.from_pretrained(model, device="cpu")
    url = loaded.push_to_hub(
        repo_id, private=private, revision=revision, license=license_name, message=message
    )
    typer.echo(url)
