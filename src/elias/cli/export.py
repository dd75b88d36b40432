"""``elias export``: a model as one ONNX file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from elias.cli import console
from elias.cli.options import Overwrite


def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A saved model, or a run.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.onnx", help="The file to write.")],
    top_k: Annotated[
        int | None, typer.Option("-k", "--top-k", min=1, help="Most labels it ranks. [100]")
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Weights in 8 bits: smaller, a little less exact.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write encoder and search as one ONNX file with tokenizer and labels.

    A ranker, calibration and probabilities are not exported: the file ranks as the last stage.
    """
    from elias.inference.predictor import Elias

    elias = Elias.from_pretrained(model, device="cpu")
    start = time.monotonic()
    elias.export_onnx(out, top_k=top_k, int8=int8, overwrite=overwrite)
    size = out.stat().st_size / 1e6
    console.note(f"{out}: {size:,.1f} MB, written in {time.monotonic() - start:.0f} s")
    left_out = ", ".join(elias.components[1:])
    if left_out:
        stage = elias.components[0]
        console.note(f"it ranks as --component {stage} does; not exported: {left_out}")
