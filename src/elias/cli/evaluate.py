"""``elias evaluate``: how good the predictions are, ours or another tool's."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elias.cli import tables, talk
from elias.cli.options import (
    AsJson,
    DataPath,
    DeviceName,
    LabelsColumn,
    Separator,
    TextColumn,
    read_corpus,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elias.data import Corpus
    from elias.metrics import LabelTable
    from elias.pipeline import Elias
    from elias.predictions import Predictions

RECALL_KS = (10, 20, 100)


def evaluate(  # noqa: PLR0913 - each is an option of its own
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run, or a saved model.")],
    data: DataPath,
    split: Annotated[
        str, typer.Option(metavar="test|validation", help="Which points to evaluate on.")
    ] = "test",
    ks: Annotated[
        list[int] | None,
        typer.Option("-k", min=1, help="Where to cut P, nDCG, PSP, PSnDCG; may repeat [1 3 5]."),
    ] = None,
    component: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Use only this much of the model, e.g. stage2."),
    ] = None,
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
    """Measure a model on a corpus: P, nDCG, PSP, PSnDCG and recall, in percent."""
    from elias.pipeline import Elias

    model = Elias.from_pretrained(run, device=device)
    check_component(model, component)
    corpus = with_validation(read_corpus(data, text, labels, separator), model, split)
    model.check_labels(corpus)
    cuts = tuple(sorted(set(ks or (1, 3, 5))))
    found = _predictions(model, corpus, split, predictions, max(*cuts, *RECALL_KS))
    judged = Judgement(model, corpus, split, found, cuts)
    metrics = judged.metrics()
    if per_label is not None:
        write_csv(per_label, judged.by_label())
        talk.note(f"{per_label}: a row for each of {corpus.n_labels:,} labels")
    if as_json:
        typer.echo(json.dumps({name: round(value, 4) for name, value in metrics.items()}))
        return
    talk.note(f"{run} on the {len(corpus.split(split)):,} {split} points of {data}")
    tables.print_out(tables.metrics_table(metrics), "", judged.decile_line())


@dataclass(frozen=True, slots=True)
class Judgement:
    """Predictions for a split beside the truth."""

    model: Elias
    corpus: Corpus
    split: str
    predictions: Predictions
    ks: Sequence[int]

    def metrics(self) -> dict[str, float]:
        """Return every metric by its name, in percent."""
        from elias.metrics import evaluate as measure

        settings = self.model.config.eval
        return measure(
            self.predictions,
            self.corpus,
            split=self.split,
            ks=self.ks,
            recall_ks=RECALL_KS,
            a=settings.propensity_a,
            b=settings.propensity_b,
        )

    def by_label(self) -> LabelTable:
        """Return how each label fared."""
        from elias.metrics import per_label as count

        truth, frequencies = self.corpus.split(self.split).labels, self.corpus.label_frequencies()
        return count(self._allowed(), truth, frequencies, k=max(self.ks))

    def decile_line(self) -> str:
        """Return what each tenth of the labels contributes to the widest recall."""
        from elias.metrics import recall_by_decile

        truth, frequencies = self.corpus.split(self.split).labels, self.corpus.label_frequencies()
        shares = recall_by_decile(self._allowed(), truth, frequencies, k=RECALL_KS[-1])
        shown = "  ".join(f"{share:.1f}" for share in shares)
        title = f"share of R@{RECALL_KS[-1]} from each tenth of the labels, most frequent first:"
        return f"{title}\n  {shown}"

    def _allowed(self) -> Predictions:
        filters = self.corpus.split(self.split).filters
        return self.predictions if filters is None else self.predictions.drop(filters)


def check_component(model: Elias, component: str | None) -> None:
    """Refuse a component that the model does not have."""
    from elias.errors import ConfigError, nearest

    last = model.config.stages[-1]
    known = list(dict.fromkeys([last.name, "stage2" if last.learn_graph else "stage1"]))
    if component is not None and component not in known:
        hint = nearest(component, known)
        raise ConfigError(
            f"--component {component!r}: the model has no such part{hint} (it has: "
            f"{', '.join(known)}; metrics of earlier stages stand in the run's metrics.jsonl)"
        )


def with_validation(corpus: Corpus, model: Elias, split: str) -> Corpus:
    """Return the corpus with the validation split it lacks: the one the model's run held out."""
    from elias.errors import DataError
    from elias.pipeline.fitting import validation_split

    if split not in ("test", "validation"):
        raise DataError(f"--split {split!r}: is not one of test, validation")
    if split == "test" or corpus.validation is not None:
        return corpus
    _, held_out = validation_split(corpus, model.config)
    if held_out is None:
        raise DataError(f"{corpus.source}: has no validation split, and the run held none out")
    # the training split stays whole: propensities are about all of it
    return corpus.with_splits(validation=held_out)


def _predictions(
    model: Elias, corpus: Corpus, split: str, file: Path | None, top_k: int
) -> Predictions:
    from elias.predictions import read_predictions

    points = corpus.split(split)
    if file is None:
        return model.predict_split(points, top_k=top_k)
    found = read_predictions(file, corpus.n_labels, corpus.label_names)
    if len(found) != len(points):
        from elias.errors import DataError

        raise DataError(
            f"{file}: predictions for {len(found):,} points, but the {split} split has "
            f"{len(points):,}"
        )
    return found


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
