"""``elias calibrate``: probabilities for a model that has none, or for other data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from elias.cli import console
from elias.cli.eval_data import open_points
from elias.cli.options import (
    AsJson,
    DataPath,
    DeviceName,
    LabelsColumn,
    RunPath,
    Separator,
    TextColumn,
)


def calibrate(
    run: RunPath,
    data: DataPath,
    split: Annotated[
        str, typer.Option(metavar="validation|test", help="Which points to learn from.")
    ] = "validation",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the model there. [in the old one's place]"),
    ] = None,
    device: DeviceName = "auto",
    text: TextColumn = None,
    labels: LabelsColumn = None,
    separator: Separator = None,
    as_json: AsJson = False,
) -> None:
    """Learn what a model's scores say of relevance, from points that it was not trained on."""
    from elias.distributed import SingleProcess
    from elias.errors import DataError
    from elias.inference.predictor import Elias
    from elias.persistence.hub import hub_id
    from elias.persistence.manifest import model_folder
    from elias.rerank.probabilities import add_probabilities

    if out is None and (name := hub_id(run)) is not None:
        raise DataError(f"{name}: a model of the hub stays as it is; name a folder with --out")
    if split == "train":
        raise DataError("--split train: scores of training points are not calibrated; use others")
    model = Elias.from_pretrained(run, device=device)
    chosen = open_points(model, data, split, text, labels, separator, world=SingleProcess())
    if chosen.corpus.n_labels > model.n_labels:
        raise DataError(
            f"{data}: has labels that the model does not know; calibrate on a corpus with its own"
        )
    test = None if split == "test" else chosen.corpus.test
    tests = {} if test is None else {"test": test}
    told = add_probabilities(model, chosen.points, tests, name=split)
    if not told:
        raise DataError(f"{data}: its {split} points are too few to learn from")
    written = model.save_pretrained(out or model_folder(run), overwrite=out is None)
    if as_json:
        typer.echo(json.dumps(told))
        return
    console.note(f"{written}: learned from {len(chosen.points):,} {split} points")
    console.print_out(console.grid(probability_rows(told)))


def probability_rows(told: dict[str, dict[str, dict[str, float]]]) -> list[tuple[str, str]]:
    """Return what is known of a model's probabilities, for a table of names and values."""
    rows = [
        (
            f"ECE@5 {name}",
            f"{error['after']:.2f}% ({error['before']:.2f}% of the scores as they are)",
        )
        for name, error in told.get("errors", {}).items()
    ]
    best: dict[str, float] | None = told.get("f1")  # type: ignore[assignment]
    if best:
        numbers = f"precision {best['precision']:.1f}%, recall {best['recall']:.1f}%"
        rows.append(("threshold of best F1", f"{best['threshold']:g} ({numbers})"))
    return rows
