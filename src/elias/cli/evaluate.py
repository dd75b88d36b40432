"""``elias evaluate`` and ``elias calibrate``: measure predictions and calibrate scores."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

import elias
from elias.cli import console, options
from elias.cli.info import probability_rows
from elias.cli.torchrun import join_world
from elias.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix


_MIN_FOR_DECILES = 100  # minimum number of labels to show recall by decile
_N_GROUPS = 10  # number of groups shown
_SAME = 0.01  # percentage points; smaller differences may come from other hardware
_NOTICEABLE = 0.05  # minimum share of training texts for a warning


@options.expand_groups
def evaluate(
    *,
    run: options.RunPath,
    data: options.DataPath,
    split: Annotated[str, Option(metavar="test|validation|train", help="Split to use.")] = "test",
    ks: Annotated[
        list[int] | None,
        Option(
            "-k", min=1, help="k in P@k, nDCG@k, PSP@k and PSnDCG@k; repeatable (default: 1 3 5)."
        ),
    ] = None,
    component: options.Component = None,
    predictions_file: Annotated[
        Path | None,
        Option("--predictions", metavar="FILE", help="Evaluate the predictions in this file."),
    ] = None,
    threshold: Annotated[
        str | None,
        Option(
            metavar="P|TARGET", help="Threshold or rule for precision, recall and F1 (default: f1)."
        ),
    ] = None,
    per_label: Annotated[
        Path | None, Option(metavar="FILE", help="Write a CSV file with a row for each label.")
    ] = None,
    by: Annotated[
        list[str] | None,
        Option(
            metavar="COLUMN|frequency|broader|FILE",
            help="Also measure groups of points or of labels; repeatable.",
        ),
    ] = None,
    hierarchy: Annotated[
        bool, Option("--hierarchy", help="Also give credit for broader and narrower labels.")
    ] = False,
    device: options.DeviceName = "auto",
    reading: options.CorpusOptions,
    as_json: options.AsJson = False,
) -> None:
    """Measure P, nDCG, PSP, recall, F1 and ECE of a model on a corpus, in percent."""
    from elias import metrics as measures

    ks = sorted(set(ks or measures.KS))
    with join_world(device) as world:
        model = elias.Elias.from_pretrained(run, device=device, world=world)
        # Rank 0 reads first, so that the other processes find the files that it has cached.
        corpus = world.rank0_first(lambda: reading.read_as_trained(data, model))
        corpus, frequencies = choose_points(corpus, model, split)
        points = corpus.split(split)
        component = model.check_component(component)
        if hierarchy:
            _check_broader(model)
        groups = {name: _find_groups(name, corpus, split, model, frequencies) for name in by or ()}
        if predictions_file is None:
            if threshold is not None:
                model.threshold(threshold, component)  # raises errors before the search
            top_k = max(*ks, *measures.RECALL_KS)
            predictions = model.predict_split(points, top_k=top_k, component=component)
        else:
            predictions = _read_predictions(predictions_file, model, split, len(points), threshold)
    if not world.is_rank0:
        return
    predictions = predictions.among(corpus.label_names)
    if points.filters is not None:
        predictions = predictions.drop(points.filters)
    truth, rule, assigned = points.labels, threshold or "f1", None
    if threshold is not None or predictions.probabilities is not None:
        assigned = model.assign(predictions, rule, component)
    a, b = model.config.eval.propensity
    metrics: dict[str, float] = elias.evaluate(predictions, corpus, split=split, ks=ks, a=a, b=b)
    if predictions_file is None:
        _note_fitted_points(metrics, model, corpus, split, component)
    if frequencies is None:  # without them, PSP and PSnDCG are unknown
        metrics = {name: value for name, value in metrics.items() if not name.startswith("PS")}
    results: dict[str, Any] = {"metrics": metrics}
    if hierarchy:
        broader = corpus.label_table.broader_matrix()
        results["hierarchy"] = elias.hierarchy_metrics(predictions, truth, broader, ks)
    if assigned is not None:
        lowest = model.threshold(rule, component)
        results["f1"] = {"threshold": lowest, **elias.f1_metrics(assigned, truth)}
    if predictions.probabilities is not None:
        results["errors"] = _calibration_errors(predictions, truth)
        results["thresholds"] = _compare_thresholds(model, predictions, truth, rule)
    results["groups"] = {
        name: elias.metrics_by_points(predictions, truth, group, (ks[0], ks[-1]), assigned)
        if isinstance(group, list)  # the group of each point, otherwise the labels of each group
        else elias.metrics_by_labels(predictions, truth, group, ks[-1], assigned)
        for name, group in groups.items()
    }
    if per_label is not None:
        rows = measures.per_label(predictions, truth, frequencies, ks[-1], assigned)
        _write_csv(per_label, rows)
        console.note(f"{per_label}: one row for each of {corpus.n_labels:,} labels")
    if as_json:
        _print_json(results)
        return
    if frequencies is not None and len(frequencies) >= _MIN_FOR_DECILES:
        k = measures.RECALL_KS[-1]
        results["deciles"] = measures.recall_by_decile(predictions, truth, frequencies, k)
    console.note(f"results of {run} on the {len(points):,} {split} points of {data}")
    _print_tables(results, rule, keep_best=model.keeps_best(rule, component))


def _print_json(results: Mapping[str, Any]) -> None:
    """Print all results as one JSON object. Merge the sections except thresholds and groups."""
    values: dict[str, Any] = {}
    for section, part in results.items():
        if section not in ("thresholds", "groups"):
            values |= part
        elif part:
            values[section] = part
    rounded = json.loads(json.dumps(values), parse_float=lambda number: round(float(number), 4))
    console.print_json(rounded)


def _compare_thresholds(
    model: elias.Elias, predictions: elias.Predictions, truth: csr_matrix, rule: str
) -> dict[str, dict[str, float]]:
    """Return `f1_metrics` with one threshold for all labels, and with a threshold per label.

    The result is empty if the model has no thresholds per label, or if the user chose another rule.
    """
    from elias.rerank.probabilities import PER_LABEL

    rules, learned = ("f1", PER_LABEL), model.probabilities
    if learned is None or not learned.by_label or rule not in rules:
        return {}
    return {name: elias.f1_metrics(model.assign(predictions, name), truth) for name in rules}


def _calibration_errors(predictions: elias.Predictions, truth: csr_matrix) -> dict[str, float]:
    """Return the calibration errors of the probabilities and of the raw scores."""
    from elias.rerank.probabilities import ECE_AT

    return {
        name: elias.calibration_error(predictions, truth, ECE_AT, calibrated=calibrated)
        for name, calibrated in ((f"ECE@{ECE_AT}", True), (f"ECE@{ECE_AT} of scores", False))
    }


def _print_tables(results: Mapping[str, Any], rule: str, *, keep_best: bool) -> None:
    """Print the results as tables.

    ``rule`` is the value of --threshold. For ``keep_best``, see `Elias.keeps_best`.
    """
    from elias.metrics import RECALL_KS

    console.print_out(console.metrics_table(results["metrics"]))
    if f1 := results.get("f1"):
        described = f"score of at least {f1['threshold']:g}"
        if "errors" in results:  # the model has probabilities
            described = console.describe_rule(f1["threshold"], keep_best=keep_best)
        title = f"labels assigned by --threshold {rule} ({described}):"
        console.print_out("", title, console.f1_table(f1))
    else:
        console.note(
            "no F1: these predictions have no probabilities, so no threshold was chosen; set a "
            "minimum score with --threshold, or add probabilities with elias calibrate"
        )
    if thresholds := results.get("thresholds"):
        cells = [
            [name, *(f"{values[f'{average}-F1']:.2f}" for average in ("micro", "macro"))]
            for name, values in thresholds.items()
        ]
        title = "F1 in percent with one threshold for all labels, and with a threshold per label:"
        console.print_out("", title, console.columns(["--threshold", "micro", "macro"], cells))
    if credited := results.get("hierarchy"):
        title = "with credit for broader and narrower labels:"
        console.print_out("", title, console.metrics_table(credited))
    for name, group_rows in results["groups"].items():
        console.print_out("", *_group_table(name, group_rows))
    if "deciles" in results:
        k = RECALL_KS[-1]
        title = f"contribution of each label decile to R@{k}, most frequent labels first:"
        shares = "  ".join(f"{share:.1f}" for share in results["deciles"])
        console.print_out("", title, f"  {shares}")
    if errors := results.get("errors"):
        listed = ", ".join(f"{name} {value:.2f}%" for name, value in errors.items())
        console.print_out("", f"calibration error: {listed}")


def _find_groups(
    name: str,
    corpus: elias.Corpus,
    split: str,
    model: elias.Elias,
    frequencies: NDArray[np.int64] | None,
) -> list[str] | dict[str, list[int]]:
    """Return a list with the group of each point, or a dictionary from group to label ids.

    Args:
        name: ``frequency`` for groups of labels by their number of training points; ``broader`` for
            groups of labels with the same broader label; a file of label sets; or a column of the
            table, for groups of points.
        corpus: The corpus, with the label ids of the model.
        split: Name of the split that is evaluated.
        model: The model.
        frequencies: Number of training points of each label, if known.
    """
    from elias.data.load import is_table, read_column
    from elias.metrics import frequency_groups

    if name == "frequency":
        if frequencies is None:
            raise DataError(
                f"{corpus.source}: is not the training data of the model; give the training data, "
                "or leave out --by frequency"
            )
        return frequency_groups(frequencies)
    if name == "broader":
        _check_broader(model)
        return model.label_table.broader_groups()
    if Path(name).is_file() or is_table(Path(name), None, ()):
        return _label_sets(Path(name), model)
    return read_column(corpus, split, name)


def _check_broader(model: elias.Elias) -> None:
    """Raise a `DataError` if the model has no broader labels."""
    if model.label_table.broader is None:
        raise DataError(
            "the model does not know which labels are broader; train a model with --label-table "
            "and a vocabulary that has broader labels"
        )


def _label_sets(path: Path, model: elias.Elias) -> dict[str, list[int]]:
    """Read a table. Its first two columns are a label (id or name) and the name of a label set.

    Rows whose label the model does not have are left out, so the table may have a header.
    """
    from elias.data.load import detect_file
    from elias.data.readers.base import ReadOptions
    from elias.data.readers.table import KINDS, TableFile

    kind = detect_file(path)
    table = TableFile(path, kind, ReadOptions(header=False))
    columns = table.names[:2] if kind in KINDS else []
    if len(columns) < 2:
        raise DataError(
            f"{path}: is not a table with two columns; give a label column and a set column"
        )
    pairs = [[str(cell or "").strip() for cell in cells] for _, cells in table.rows(columns)]
    matches = model.label_table.match([label for label, _ in pairs])
    sets: dict[str, list[int]] = {}
    for (_, name), label in zip(pairs, matches, strict=True):
        if label is not None:
            sets.setdefault(name, []).append(label)
    if not sets:
        raise DataError(
            f"{path}: the model has none of these labels, such as {pairs[-1][0]!r}; write ids or "
            "names of labels in the first column"
        )
    if unknown := matches[1:].count(None):
        console.note(f"{path}: the model does not have {unknown:,} of these labels")
    return sets


def _group_table(name: str, rows: list[dict[str, Any]]) -> tuple[str, Any]:
    """Return a title and a table of the groups with the lowest metrics.

    Groups contain points or labels.
    """
    from elias.metrics import MIN_GROUP, large_groups

    if not rows:
        return f"groups by {name}:", "  no label of these points belongs to a group"
    large = large_groups(rows)
    shown = large[:_N_GROUPS]
    size = "points" if "points" in rows[0] else "true pairs"
    title = f"weakest groups by {name} ({len(shown)} of {len(rows)}"
    title += ")" if len(large) == len(rows) else f"; at least {MIN_GROUP} {size})"
    cells = [
        [
            f"{value:.2f}" if isinstance(value, float) else str(value) or "(empty)"
            for value in row.values()
        ]
        for row in shown
    ]
    return f"{title}:", console.columns(list(rows[0]), cells)


def _read_predictions(
    file: Path, model: elias.Elias, split: str, n_points: int, threshold: str | None
) -> elias.Predictions:
    from elias.inference.prediction_io import read_predictions
    from elias.rerank.probabilities import parse_target

    if threshold is not None and parse_target(threshold)[0] is not None:
        raise DataError(f"{file}: has no probabilities; give --threshold a number")
    predictions = read_predictions(file, model.n_labels, model.label_names)
    if len(predictions) != n_points:
        raise DataError(
            f"{file}: has predictions for {len(predictions):,} points, but the {split} split has "
            f"{n_points:,}; give predictions for this split of the corpus"
        )
    return predictions


def _write_csv(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Write rows as CSV, atomically."""
    from elias.data.atomic import staged_file

    first = next(rows)
    try:
        with staged_file(path) as staged, staged.open("w", encoding="utf8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(first), lineterminator="\n")
            writer.writeheader()
            writer.writerows(chain([first], rows))
    except OSError as error:  # its message would name the temporary file
        problem = f"{path}: cannot be written ({error.strerror or error})"
        raise DataError(f"{problem}; give another --per-label") from None


@options.expand_groups
def calibrate(
    *,
    run: options.RunPath,
    data: options.DataPath,
    split: Annotated[str, Option(metavar="validation|test", help="Split to use.")] = "validation",
    out: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="Folder to save to (default: replace the model)."),
    ] = None,
    device: options.DeviceName = "auto",
    reading: options.CorpusOptions,
    as_json: options.AsJson = False,
) -> None:
    """Calibrate the probabilities of a model on points that it was not trained on."""
    from elias.persistence.hub import hub_id
    from elias.persistence.manifest import model_folder
    from elias.rerank.probabilities import PROBABILITIES, fit_probabilities, measure_probabilities

    if out is None and (name := hub_id(run)) is not None:
        raise DataError(f"{name}: a model on the hub cannot be changed; choose a folder with --out")
    if split == "train":
        raise DataError(
            "--split train: the scores of training points are too high to calibrate on; use "
            "validation or test"
        )
    model = elias.Elias.from_pretrained(run, device=device)
    corpus, _ = choose_points(reading.read_as_trained(data, model), model, split)
    if corpus.n_labels > model.n_labels:
        raise DataError(
            f"{data}: has labels that the model does not have; use a corpus without them"
        )
    if _fitted_on(model, corpus, split, model.components[-1]):
        console.warn(
            "the ranker was fitted on these validation points, so the probabilities will be too "
            "high; use data that the model has not seen, for example --split test"
        )
    splits = {split: corpus.split(split)}
    if corpus.test is not None:
        splits["test"] = corpus.test
    predicted = {
        name: (model.predict_split(points), points.labels) for name, points in splits.items()
    }
    model.probabilities = fit_probabilities(*predicted[split])
    if model.probabilities is None:
        raise DataError(f"{data}: has too few {split} points to calibrate on; use more data")
    results = measure_probabilities(model.probabilities, predicted, name=split)
    model.metadata[PROBABILITIES] = results
    folder = model.save_pretrained(out or model_folder(run), overwrite=out is None)
    if as_json:
        console.print_json(results)
        return
    console.note(f"{folder}: calibrated on {len(splits[split]):,} {split} points")
    console.print_out(console.grid(probability_rows(results)))


def _fitted_on(model: elias.Elias, corpus: elias.Corpus, split: str, component: str) -> bool:
    """Return whether the ranker or the calibration was fitted on the points of a split."""
    trained_on = model.metadata.get("data", {}).get("splits", {}).get("train", {}).get("points")
    is_ranked = component != model.components[0]
    return split == "validation" and is_ranked and trained_on == len(corpus.train)


def _note_fitted_points(
    metrics: Mapping[str, float],
    model: elias.Elias,
    corpus: elias.Corpus,
    split: str,
    component: str,
) -> None:
    """Print a note if the ranker or the calibration was fitted on the measured points.

    Such metrics are too high. The note compares them with the metrics that training computed for
    the same points by cross-fitting, which have no such bias.
    """
    if not _fitted_on(model, corpus, split, component):
        return
    recorded = model.metadata.get("metrics", {}).get(component, {}).get(split) or {}
    for name, value in recorded.items():
        if value is not None and metrics.get(name, 0.0) > value + _SAME:
            console.note(
                "the ranker or the calibration was fitted on these points, so the metrics are too "
                f"high: {name} is {metrics[name]:.2f}, but training measured {value:.2f} by "
                "cross-fitting"
            )
            return


def _warn_of_training_texts(points: elias.Split, model: elias.Elias) -> None:
    """Print a warning if the model was trained on many of the texts."""
    from elias.data.splits import TRAINING_SKETCH, share_in_sketch

    share = share_in_sketch(points.texts or [], model.metadata.get(TRAINING_SKETCH, ""))
    if share >= _NOTICEABLE:
        console.warn(
            f"the model was trained on about {share:.0%} of these texts, so its metrics on new "
            "texts may be lower; give other texts"
        )


def choose_points(
    corpus: elias.Corpus, model: elias.Elias, split: str
) -> tuple[elias.Corpus, NDArray[np.int64] | None]:
    """Return the corpus with the requested split and with the label ids of the model.

    If the corpus has only a training split, restore the splits of the training run. If the corpus
    is not the training data, use all of its points as the test split.

    Returns:
        The corpus, and the number of training points of each label, or None if the model was not
        trained on the training split.

    Raises:
        DataError: If the split does not exist, or if ``split`` is ``test`` and the model was
            trained on all points.
    """
    from elias.data.corpus import SPLITS
    from elias.data.splits import restore_splits, validation_split

    if split not in SPLITS:
        raise DataError(f"--split {split!r}: is not a split; use one of {', '.join(SPLITS)}")
    is_training_data, source, n_points = True, corpus.source, len(corpus.train)
    if list(corpus.splits) == ["train"]:
        restored = restore_splits(corpus, model.label_names, model.metadata)
        is_training_data = restored is not None
        corpus = restored or corpus
        if split == "test" and corpus.test is None:
            if is_training_data:
                raise DataError(
                    f"{source}: the model was trained on all {n_points:,} points, so there are no "
                    "test points; give other data, or evaluate with --split train"
                )
            console.note(
                f"{source}: has no test split, so all {n_points:,} points are evaluated, without "
                "PSP and PSnDCG, which need the training points"
            )
            corpus = corpus.with_splits(test=corpus.train)
    if split == "validation" and corpus.validation is None:
        if not is_training_data:
            raise DataError(
                f"{source}: has no validation split and is not the training data; use --split test"
            )
        # Keep the whole training split, because propensities are computed on all of it.
        _, held_out = validation_split(corpus, model.config)
        if held_out is None:
            raise DataError(
                f"{source}: has no validation split, and training held out no points; use "
                "--split test"
            )
        corpus = corpus.with_splits(validation=held_out)
    corpus = corpus.align_labels(model.label_names)
    if split == "test":
        _warn_of_training_texts(corpus.split(split), model)
    return corpus, corpus.label_frequencies() if is_training_data else None
