"""``elias push``: push a model to the Hugging Face hub."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument, Option

from elias.cli import options


def push(
    model: options.ModelPath,
    repo_id: Annotated[str, Argument(metavar="USER/NAME", help="The repository on the hub.")],
    private: Annotated[
        bool | None, Option("--private/--public", help="Visibility of a new repository.")
    ] = None,
    revision: Annotated[
        str | None,
        Option(metavar="BRANCH", help="The branch; created if it does not exist (default: main)."),
    ] = None,
    license_name: Annotated[
        str | None, Option("--license", metavar="ID", help="License for the model card, e.g. mit.")
    ] = None,
    message: Annotated[str | None, Option("-m", "--message", help="Commit message.")] = None,
) -> None:
    """Push a model and its card to the Hugging Face hub, and print its address."""
    from elias.inference.predictor import Elias

    elias = Elias.from_pretrained(model, device="cpu")
    url = elias.push_to_hub(
        repo_id, private=private, revision=revision, license=license_name, message=message
    )
    typer.echo(url)
