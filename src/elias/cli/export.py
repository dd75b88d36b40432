"""``elias export``, ``push``: export a model to ONNX or in compact form, or push it to the Hub."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

import elias
from elias.cli import console, options
from elias.errors import ConfigError


def export(
    model: options.ModelPath,
    out: Annotated[
        Path,
        Argument(metavar="OUT", help="ONNX file to write; with --compact, model folder to write."),
    ],
    compact: Annotated[
        bool,
        Option("--compact", help="Write a model folder about a third as large, instead of ONNX."),
    ] = False,
    top_k: Annotated[
        int | None,
        Option("-k", "--top-k", min=1, help="Maximum labels per text in ONNX (default: 100)."),
    ] = None,
    int8: Annotated[
        bool,
        Option("--int8", help="Store ONNX weights in 8 bits (smaller, slightly less accurate)."),
    ] = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Export the encoder and the search as one ONNX file with tokenizer and labels.

    Ranker, calibration and probabilities are not exported, so labels are ranked by the last stage.

    With --compact, write a smaller model folder with all components instead.
    """
    if compact and (int8 or top_k is not None):
        raise ConfigError(
            "--int8 and --top-k apply only to ONNX files; leave them out with --compact"
        )
    loaded = elias.Elias.from_pretrained(model, device="cpu")
    start = time.monotonic()
    if compact:
        loaded.save_pretrained(out, compact=True, overwrite=overwrite)
    else:
        loaded.export_onnx(out, top_k=top_k, int8=int8, overwrite=overwrite)
    files = [path for path in (out, *out.rglob("*")) if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    console.note(f"{out}: {size:,.1f} MB, written in {time.monotonic() - start:.0f} s")
    stage, *left_out = loaded.components
    if left_out and not compact:
        missing = ", ".join(left_out)
        console.note(f"the file ranks labels like --component {stage}; not exported: {missing}")


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
    """Push a model with a model card to the Hugging Face hub, and print the URL."""
    loaded = elias.Elias.from_pretrained(model, device="cpu")
    url = loaded.push_to_hub(
        repo_id, private=private, revision=revision, license=license_name, message=message
    )
    typer.echo(url)
