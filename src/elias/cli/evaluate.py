"""``elias evaluate``: compute metrics of predictions made by a model or read from a file."""

from __future__ import annotations

import csv
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from elias.cli import console, options
from elias.cli.eval_data import load_eval_data
from elias.cli.torchrun import join_world
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elias.cli.eval_data import EvalData
    from elias.inference.predictor import Elias
    from elias.metrics import LabelTable
    from elias.predictions import Predictions


RECALL_KS = (10, 20, 100)


def evaluate(
    run: options.RunPath,
    data: options.DataPath,
    split: Annotated[str, Option(metavar="test|validation|train", help="Points to use.")] = "test",
    ks: Annotated[
        list[int] | None,
        Option("-k", min=1, help="k of P, nDCG, PSP and PSnDCG; repeatable (default: 1 3 5)."),
    ] = None,
    component: options.Component = None,
    predictions_file: Annotated[
        Path | None,
        Option("--predictions", metavar="FILE", help="Evaluate this file instead of the model."),
    ] = None,
    per_label: Annotated[
        Path | None, Option(metavar="FILE", help="CSV file to write, a row per label.")
    ] = None,
    device: options.DeviceName = "auto",
    text: options.TextColumn = None,
    labels: options.LabelsColumn = None,
    separator: options.Separator = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure a model on a corpus: P, nDCG, PSP, PSnDCG, recall and ECE, in percent."""
    ks = sorted(set(ks or (1, 3, 5)))
    columns = {"text": text, "labels": labels, "separator": separator}
    with join_world(device) as world:
        from elias.inference.predictor import Elias

        model = Elias.from_pretrained(run, device=device, world=world)
        eval_data = load_eval_data(model, data, split, columns, world)
        component = model.check_component(component)
        top_k = max(*ks, *RECALL_KS)
        predictions = _predictions(model, eval_data, predictions_file, top_k, component)
    if not world.is_rank0:
        return
    points = eval_data.points
    if points.filters is not None:
        predictions = predictions.drop(points.filters)
    metrics = _measure(model, eval_data, predictions, ks)
    if per_label is not None:
        from elias.metrics import per_label as count_per_label

        table = count_per_label(predictions, points.labels, eval_data.frequencies, k=ks[-1])
        _write_csv(per_label, table)
        console.note(f"{per_label}: one row for each of {eval_data.corpus.n_labels:,} labels")
    calibration = _calibration_errors(eval_data, predictions)
    if as_json:
        metrics |= calibration
        console.print_json({name: round(value, 4) for name, value in metrics.items()})
        return
    console.note(f"{run} on the {len(points):,} {split} points of {data}")
    console.print_out(console.metrics_table(metrics), *_recall_by_decile(eval_data, predictions))
    if calibration:
        errors = ", ".join(f"{name} {value:.2f}%" for name, value in calibration.items())
        console.print_out("", f"calibration error: {errors}")


def _predictions(
    model: Elias, eval_data: EvalData, file: Path | None, top_k: int, component: str
) -> Predictions:
    """Predict the points, or read their predictions from a file."""
    from elias.inference.prediction_io import read_predictions

    points = eval_data.points
    if file is None:
        predictions = model.predict_split(points, top_k=top_k, component=component)
    else:
        predictions = read_predictions(file, model.n_labels, model.label_names)
    if len(predictions) != len(points):
        raise DataError(
            f"{file}: predictions for {len(predictions):,} points, but the {eval_data.split} "
            f"split has {len(points):,}"
        )
    return predictions.among(eval_data.corpus.label_names)


def _measure(
    model: Elias, eval_data: EvalData, predictions: Predictions, ks: Sequence[int]
) -> dict[str, float]:
    """Return the metrics by name, in percent; include PSP only if label frequencies are known."""
    from elias.metrics import inverse_propensities, score

    weights, kinds = None, ["P", "nDCG"]
    if eval_data.frequencies is not None:
        kinds += ["PSP", "PSnDCG"]
        settings, n_points = model.config.eval, len(eval_data.corpus.train)
        weights = inverse_propensities(
            eval_data.frequencies, n_points, settings.propensity_a, settings.propensity_b
        )
    names = [f"{kind}@{k}" for kind in kinds for k in ks] + [f"R@{k}" for k in RECALL_KS]
    return score(predictions, eval_data.points.labels, weights, names)


def _calibration_errors(eval_data: EvalData, predictions: Predictions) -> dict[str, float]:
    """Return ECE@5 of the probabilities and of the raw scores; empty without probabilities."""
    from elias.rerank.probabilities import ECE_AT, calibration_error

    if predictions.probabilities is None:
        return {}
    truth, raw = eval_data.points.labels, f"ECE@{ECE_AT} of scores"
    return {
        f"ECE@{ECE_AT}": calibration_error(predictions, truth, ECE_AT),
        raw: calibration_error(predictions, truth, ECE_AT, calibrated=False),
    }


def _recall_by_decile(eval_data: EvalData, predictions: Predictions) -> list[str]:
    """Format the share of recall from each decile of label frequency; empty if unknown."""
    from elias.metrics import recall_by_decile

    if eval_data.frequencies is None:
        return []
    k, truth = RECALL_KS[-1], eval_data.points.labels
    shares = recall_by_decile(predictions, truth, eval_data.frequencies, k=k)
    title = f"share of R@{k} from each tenth of the labels, most frequent first:"
    return ["", title, "  " + "  ".join(f"{share:.1f}" for share in shares)]


def _write_csv(path: Path, table: LabelTable) -> None:
    """Write a table as CSV, atomically."""
    from elias.data.atomic import staged_file

    rows = table.rows()
    first = next(rows)
    try:
        with (
            staged_file(path) as staged,
            staged.open("w", encoding="utf8", newline="") as file,
        ):
            writer = csv.DictWriter(file, fieldnames=list(first), lineterminator="\n")
            writer.writeheader()
            writer.writerows(chain([first], rows))
    except OSError as error:  # its message would name the temporary file
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from None
