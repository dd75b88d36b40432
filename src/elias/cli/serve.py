"""``elias serve``: a model behind HTTP, and a page to look at it with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elias.cli.options import DeviceName
from elias.errors import HUB_PREFIX
from elias.serve.settings import Limits, ServeSettings, check_installed, read_examples, read_keys

_USUAL = Limits()


def serve(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A saved model, a run, or hf://user/model@revision."),
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where to listen; 0: any that is free.")
    ] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0: all of this machine.")
    ] = "127.0.0.1",
    workers: Annotated[
        int, typer.Option(min=1, max=256, help="Processes, each with the model in memory.")
    ] = 1,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Ask for one of the keys in it, one per line."),
    ] = None,
    examples: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Texts the page offers, one per line.")
    ] = None,
    max_inputs: Annotated[
        int, typer.Option(min=1, help="Texts in one request.")
    ] = _USUAL.max_inputs,
    max_text: Annotated[int, typer.Option(min=1, help="Characters of a text.")] = _USUAL.max_text,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request.")] = _USUAL.max_body,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Texts computed at a time.")
    ] = _USUAL.max_batch,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Texts that may wait, of each worker; more are told 429.")
    ] = _USUAL.max_queue,
    timeout: Annotated[
        float, typer.Option(min=0.01, help="Seconds a request may take.")
    ] = _USUAL.timeout,
    log_texts: Annotated[
        bool, typer.Option("--log-texts", help="Put the texts into the access log.")
    ] = False,
    device: DeviceName = "auto",
) -> None:
    """Serve a model over HTTP, with a page at / to try it on. SIGHUP reads the model again."""
    check_installed()
    settings = ServeSettings(
        model=model if model.startswith(HUB_PREFIX) else Path(model),
        host=host,
        port=port,
        workers=workers,
        keys=() if api_key_file is None else read_keys(api_key_file),
        device=device,
        examples=() if examples is None else read_examples(examples),
        log_texts=log_texts,
        limits=Limits(
            max_inputs=max_inputs,
            max_text=max_text,
            max_body=max_body,
            max_batch=max_batch,
            max_queue=max_queue,
            timeout=timeout,
        ),
    )

    from elias.serve.workers import serve as run

    run(settings)
