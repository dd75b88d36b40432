"""``elias evaluate``: how good the predictions are, ours or another tool's."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elias.cli import console
from elias.cli.eval_data import open_points
from elias.cli.options import (
    AsJson,
    Component,
    DataPath,
    DeviceName,
    LabelsColumn,
    RunPath,
    Separator,
    TextColumn,
)
from elias.cli.torchrun import join_world

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elias.cli.eval_data import Chosen
    from elias.inference.predictor import Elias
    from elias.metrics import LabelTable
    from elias.predictions import Predictions


RECALL_KS = (10, 20, 100)


def evaluate(
    run: RunPath,
    data: DataPath,
    split: Annotated[
        str, typer.Option(metavar="test|validation|train", help="Which points to evaluate on.")
    ] = "test",
    ks: Annotated[
        list[int] | None,
        typer.Option("-k", min=1, help="Where to cut P, nDCG, PSP, PSnDCG; may repeat [1 3 5]."),
    ] = None,
    component: Component = None,
    predictions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Evaluate these predictions instead of the model's."),
    ] = None,
    per_label: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a CSV with a row for each label.")
    ] = None,
    device: DeviceName = "auto",
    text: TextColumn = None,
    labels: LabelsColumn = None,
    separator: Separator = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model on a corpus: P, nDCG, PSP, PSnDCG, recall and ECE, in percent."""
    cuts = tuple(sorted(set(ks or (1, 3, 5))))
    with join_world(device) as world:
        from elias.inference.predictor import Elias

        model = Elias.from_pretrained(run, device=device, world=world)
        chosen = open_points(model, data, split, text, labels, separator, world=world)
        component = model.check_component(component)
        found = _predictions(model, chosen, predictions, max(*cuts, *RECALL_KS), component)
    if not world.is_rank0:
        return
    judged = Judgement(model, chosen, found, cuts)
    metrics = judged.metrics()
    if per_label is not None:
        write_csv(per_label, judged.by_label())
        console.note(f"{per_label}: a row for each of {chosen.corpus.n_labels:,} labels")
    if as_json:
        metrics |= judged.calibration()
        typer.echo(json.dumps({name: round(value, 4) for name, value in metrics.items()}))
        return
    console.note(f"{run} on the {len(chosen.points):,} {split} points of {data}")
    console.print_out(
        console.metrics_table(metrics), *judged.decile_lines(), *judged.calibration_lines()
    )


@dataclass(frozen=True, slots=True)
class Judgement:
    """Predictions for some points beside the truth."""

    model: Elias
    chosen: Chosen
    predictions: Predictions
    ks: Sequence[int]

    def metrics(self) -> dict[str, float]:
        """Return every metric that can be measured by its name, in percent."""
        from elias.metrics import inverse_propensities, score

        settings, frequencies = self.model.config.eval, self.chosen.frequencies
        weights, kinds = None, ["P", "nDCG"]
        if frequencies is not None:
            kinds += ["PSP", "PSnDCG"]
            weights = inverse_propensities(
                frequencies,
                len(self.chosen.corpus.train),
                settings.propensity_a,
                settings.propensity_b,
            )
        names = [f"{kind}@{k}" for kind in kinds for k in self.ks]
        names += [f"R@{k}" for k in RECALL_KS]
        return score(self._allowed(), self.chosen.points.labels, weights, names)

    def calibration(self) -> dict[str, float]:
        """Return ECE@5 of the probabilities and of the scores as they are, where both are known."""
        from elias.rerank.probabilities import ECE_AT, calibration_error

        found, truth = self._allowed(), self.chosen.points.labels
        if found.probabilities is None:
            return {}
        return {
            f"ECE@{ECE_AT}": calibration_error(found, truth, ECE_AT),
            f"ECE@{ECE_AT} of scores": calibration_error(found, truth, ECE_AT, calibrated=False),
        }

    def calibration_lines(self) -> list[str]:
        """Return the same in words."""
        told = [f"{name} {value:.2f}%" for name, value in self.calibration().items()]
        return ["", "how far probabilities are off: " + ", ".join(told)] if told else []

    def by_label(self) -> LabelTable:
        """Return how each label fared."""
        from elias.metrics import per_label as count

        truth = self.chosen.points.labels
        return count(self._allowed(), truth, self.chosen.frequencies, k=max(self.ks))

    def decile_lines(self) -> list[str]:
        """Return what each tenth of the labels contributes to the widest recall, if known."""
        from elias.metrics import recall_by_decile

        truth, frequencies = self.chosen.points.labels, self.chosen.frequencies
        if frequencies is None:
            return []
        shares = recall_by_decile(self._allowed(), truth, frequencies, k=RECALL_KS[-1])
        shown = "  ".join(f"{share:.1f}" for share in shares)
        title = f"share of R@{RECALL_KS[-1]} from each tenth of the labels, most frequent first:"
        return ["", f"{title}\n  {shown}"]

    def _allowed(self) -> Predictions:
        filters = self.chosen.points.filters
        return self.predictions if filters is None else self.predictions.drop(filters)


def _predictions(
    model: Elias, chosen: Chosen, file: Path | None, top_k: int, component: str
) -> Predictions:
    from elias.inference.prediction_io import read_predictions

    points = chosen.points
    if file is None:
        found = model.predict_split(points, top_k=top_k, component=component)
    else:
        found = read_predictions(file, model.n_labels, model.label_names)
    if len(found) != len(points):
        from elias.errors import DataError

        raise DataError(
            f"{file}: predictions for {len(found):,} points, but the {chosen.split} split has "
            f"{len(points):,}"
        )
    return found.among(chosen.corpus.label_names)


def write_csv(path: Path, table: LabelTable) -> None:
    """Write the table whole: to a temporary file, then renamed."""
    temporary = path.with_name(f".{path.name}.writing")
    rows = iter(table.rows())
    first = next(rows)
    try:
        with temporary.open("w", encoding="utf8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(first), lineterminator="\n")
            writer.writeheader()
            writer.writerow(first)
            writer.writerows(rows)
        temporary.replace(path)
    except OSError as error:  # names the temporary file
        from elias.errors import DataError

        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from None
    finally:
        temporary.unlink(missing_ok=True)
