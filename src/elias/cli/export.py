"""``elias export``: write a model as one ONNX file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from elias.cli import console, options


def export(
    model: options.ModelPath,
    out: Annotated[Path, Argument(metavar="OUT.onnx", help="The file to write.")],
    top_k: Annotated[
        int | None, Option("-k", "--top-k", min=1, help="Maximum labels per text (default: 100).")
    ] = None,
    int8: Annotated[
        bool, Option("--int8", help="Store weights in 8 bits: smaller, slightly less exact.")
    ] = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Write encoder and search as one ONNX file with tokenizer and labels.

    Ranker, calibration and probabilities are not exported: the file ranks as the last stage does.
    """
    from elias.inference.predictor import Elias

    elias = Elias.from_pretrained(model, device="cpu")
    start = time.monotonic()
    elias.export_onnx(out, top_k=top_k, int8=int8, overwrite=overwrite)
    size = out.stat().st_size / 1e6
    console.note(f"{out}: {size:,.1f} MB, written in {time.monotonic() - start:.0f} s")
    stage, *left_out = elias.components
    if left_out:
        console.note(f"it ranks as --component {stage} does; not exported: {', '.join(left_out)}")
