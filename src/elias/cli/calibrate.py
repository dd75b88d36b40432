"""``elias calibrate``: calibrate the scores of a model as probabilities on held-out points."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from elias.cli import console, options
from elias.cli.eval_data import load_eval_data
from elias.errors import DataError


def calibrate(
    run: options.RunPath,
    data: options.DataPath,
    split: Annotated[str, Option(metavar="validation|test", help="Points to use.")] = "validation",
    out: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="Folder to write to (default: replace the model)."),
    ] = None,
    device: options.DeviceName = "auto",
    text: options.TextColumn = None,
    labels: options.LabelsColumn = None,
    separator: options.Separator = None,
    as_json: options.AsJson = False,
) -> None:
    """Calibrate a model's scores as probabilities, on points it was not trained on."""
    from elias.distributed import SingleProcess
    from elias.inference.predictor import Elias
    from elias.persistence.hub import hub_id
    from elias.persistence.manifest import model_folder
    from elias.rerank.probabilities import add_probabilities

    if out is None and (name := hub_id(run)) is not None:
        raise DataError(f"{name}: a model on the hub cannot be changed; name a folder with --out")
    if split == "train":
        raise DataError(
            "--split train: the scores of training points are too high to calibrate on; use "
            "validation or test"
        )
    model = Elias.from_pretrained(run, device=device)
    columns = {"text": text, "labels": labels, "separator": separator}
    eval_data = load_eval_data(model, data, split, columns, SingleProcess())
    if eval_data.corpus.n_labels > model.n_labels:
        raise DataError(
            f"{data}: has labels that the model does not know; calibrate on a corpus with its own"
        )
    splits = {split: eval_data.points}
    if split != "test" and eval_data.corpus.test is not None:
        splits["test"] = eval_data.corpus.test
    predicted = {
        name: (model.predict_split(points), points.labels) for name, points in splits.items()
    }
    results = add_probabilities(model, predicted, name=split)
    if not results:
        raise DataError(f"{data}: has too few {split} points to calibrate on")
    folder = model.save_pretrained(out or model_folder(run), overwrite=out is None)
    if as_json:
        console.print_json(results)
        return
    console.note(f"{folder}: calibrated on {len(eval_data.points):,} {split} points")
    console.print_out(console.grid(probability_rows(results)))


def probability_rows(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the calibration metrics of a model as (name, value) rows."""
    rows = [
        (f"ECE@5 {name}", f"{error['after']:.2f}% ({error['before']:.2f}% before calibration)")
        for name, error in results.get("errors", {}).items()
    ]
    if best := results.get("f1"):
        quality = f"precision {best['precision']:.1f}%, recall {best['recall']:.1f}%"
        rows.append(("threshold of best F1", f"{best['threshold']:g} ({quality})"))
    return rows
