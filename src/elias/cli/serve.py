"""``elias serve``: serve a model over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from elias.cli import options
from elias.config.io import HUB_PREFIX
from elias.serve.settings import Limits, ServeSettings, check_installed, read_examples, read_keys


@options.expand_groups
def serve(
    *,
    model: Annotated[
        str,
        Argument(metavar="MODEL", help="A saved model, a run folder, or hf://user/model@revision."),
    ],
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0 selects a free port.")] = 8000,
    host: Annotated[str, Option(help="Address; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    host_name: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Host name of this server, besides localhost; repeatable."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        Option(metavar="URL", help="Origin of web pages that may use the server; repeatable."),
    ] = None,
    workers: Annotated[
        int,
        Option(min=1, max=256, help="Number of processes, which share one copy of the weights."),
    ] = 1,
    api_key_file: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="File of API keys, one per line; each request must send one of them.",
        ),
    ] = None,
    examples: Annotated[
        Path | None,
        Option(metavar="FILE", help="Example texts for the page, one per line."),
    ] = None,
    limits: Limits,
    log_texts: Annotated[bool, Option("--log-texts", help="Log the texts of requests.")] = False,
    device: options.DeviceName = "auto",
) -> None:
    """Serve a model over HTTP, with a page at / to try it. SIGHUP reloads the model."""
    check_installed()
    settings = ServeSettings(
        model=model if model.startswith(HUB_PREFIX) else Path(model),
        host=host,
        port=port,
        host_names=tuple(name.lower() for name in host_name or ()),
        allow_origins=tuple(allow_origin or ()),
        workers=workers,
        keys=() if api_key_file is None else read_keys(api_key_file),
        device=device,
        examples=() if examples is None else read_examples(examples),
        log_texts=log_texts,
        limits=limits,
    )

    from elias.serve.server import serve as run_server

    run_server(settings)
