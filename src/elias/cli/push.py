"""``elias push``: a model to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def push(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A saved model, or a run.")],
    repo_id: Annotated[str, typer.Argument(metavar="USER/NAME", help="Where to, on the hub.")],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Who sees a new repository.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="A branch, made if it is not there. [main]")
    ] = None,
    license_name: Annotated[
        str | None,
        typer.Option("--license", metavar="ID", help="For the card, as the hub spells it: mit."),
    ] = None,
    message: Annotated[
        str | None, typer.Option("-m", "--message", help="What the commit says.")
    ] = None,
) -> None:
    """Push a model and its card to the Hugging Face hub, and print its address."""
    from elias.inference.predictor import Elias

    elias = Elias.from_pretrained(model, device="cpu")
    typer.echo(
        elias.push_to_hub(
            repo_id, private=private, revision=revision, license=license_name, message=message
        )
    )
