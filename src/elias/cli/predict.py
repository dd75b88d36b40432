"""``elias predict``: predict labels for texts."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from elias import progress
from elias.cli import console, options
from elias.cli.inputs import STDIN, chunks, open_file, read_rows
from elias.cli.torchrun import follow_predict, join_world, shared_predict
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from elias.data.readers.text_rows import TextRow
    from elias.inference.batch_predict import FileTask
    from elias.inference.predictor import Elias
    from elias.predictions import Predictions


CHUNK = 1024


def predict(
    model: options.ModelPath,
    texts: Annotated[
        Path,
        Argument(metavar="[FILE|-]", help="One text per line, or a table; - or nothing: stdin."),
    ] = STDIN,
    top_k: Annotated[
        int | None,
        Option("-k", "--top-k", min=1, help="Labels per text (default: 5; with a threshold 100)."),
    ] = None,
    threshold: Annotated[
        str | None,
        Option(metavar="P|TARGET", help="Minimum probability: 0.3, f1, precision=0.8, recall=0.6."),
    ] = None,
    only: Annotated[
        list[str] | None,
        Option(metavar="LABEL", help="Predict only these names or ids, or @FILE; repeatable."),
    ] = None,
    without: Annotated[
        list[str] | None,
        Option(metavar="LABEL", help="Never predict these names or ids, or @FILE; repeatable."),
    ] = None,
    component: options.Component = None,
    text: options.TextColumn = None,
    keep: Annotated[
        list[str] | None,
        Option(metavar="COLUMN", help="Write this column instead of the text; repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        Option(
            metavar="OUTPUT",
            help="File to write: .jsonl, .csv, .tsv, .parquet, .txt (id:score), or .gz.",
        ),
    ] = None,
    file_format: Annotated[
        str | None,
        Option("--format", metavar="NAME", help="Format of OUTPUT (default: by its extension)."),
    ] = None,
    chunk_size: Annotated[int | None, Option(min=1, help="Texts in memory with --out.")] = None,
    overwrite: options.Overwrite = False,
    device: options.DeviceName = "auto",
) -> None:
    """Predict labels: one JSON object per text, with the text and its labels (id, label, score).

    With --out the labels go to a file, which appears when it is complete. Run the same command
    again to resume an interrupted one. Processes started by torchrun share the work.
    """
    if out is None and (file_format or chunk_size or overwrite):
        raise DataError("--format, --chunk-size and --overwrite need a file; name it with --out")

    def open_texts() -> Iterator[TextRow] | FileTask:
        from elias.inference.batch_predict import FileTask
        from elias.persistence.hub import find_model
        from elias.persistence.manifest import Manifest

        settings = Manifest(find_model(model))["data_settings"]
        if out is None:
            return read_rows(texts, text, keep or [], settings)
        if texts == STDIN:
            raise DataError("--out: stdin cannot be read again after an interruption; give a file")
        source = open_file(texts, text, keep or [], settings)
        return FileTask.plan(
            source, out, format=file_format, chunk_size=chunk_size, overwrite=overwrite
        )

    with join_world(device) as world:
        from elias.inference.predictor import Elias

        # Check the texts and the output before the model is loaded.
        source = world.run_on_rank0(open_texts)
        elias = Elias.from_pretrained(model, device=device, world=world)
        if elias.model.encoder.reads_features:
            raise DataError(
                f"{model}: was trained on features, and this command reads texts; use elias "
                "evaluate, or in Python Elias.predict with a CSR matrix"
            )
        component = elias.check_component(component)
        arguments = {
            "top_k": top_k,
            "threshold": None if threshold is None else elias.threshold(threshold, component),
            "only": parse_labels(only, elias.label_names),
            "without": parse_labels(without, elias.label_names),
            "component": component,
        }
        if source is None:  # another process than rank 0
            follow_predict(world, elias, arguments)
            return
        from elias.inference.batch_predict import FileTask

        with shared_predict(world, elias) as predict_texts:
            if isinstance(source, FileTask):
                _write_file(elias, source, arguments, predict_texts)
            else:
                size = 1 if texts == STDIN and sys.stdin.isatty() else CHUNK
                _write_stdout(predict_texts, source, keep, arguments, size)


def _write_file(
    elias: Elias,
    task: FileTask,
    arguments: dict[str, Any],
    predict_texts: Callable[..., Predictions],
) -> None:
    from elias.inference.batch_predict import predict_file

    # Nothing appears on stdout, so log the progress even where there is no terminal for a bar.
    console.set_up(verbose=console.is_verbose(), quiet=console.is_quiet(), log_steps=True)
    start = time.monotonic()
    done = predict_file(elias, task, predict=predict_texts, **arguments)
    seconds = max(time.monotonic() - start, 1e-9)
    resumed = f", {done.resumed:,} of them before the interruption" if done.resumed else ""
    speed = (done.texts - done.resumed) / seconds
    console.note(f"{task.out}: {done.texts:,} texts{resumed}, {speed:,.0f} per second")


def _write_stdout(
    predict_texts: Callable[..., Predictions],
    rows: Iterable[TextRow],
    keep: Sequence[str] | None,
    arguments: dict[str, Any],
    size: int,
) -> None:
    from elias.data.readers.files import sanitize
    from elias.inference.prediction_io import json_line

    if sys.stdout.isatty():
        progress.enable(False)  # a bar would mix with the results
    count = 0
    # One bar for all texts, none for each chunk.
    with progress.progress("Predicting") as advance, progress.progress_disabled():
        for chunk in chunks(rows, size):
            texts, _ = sanitize([row.text for row in chunk])
            predictions = predict_texts(texts, **arguments).to_dicts()
            for row, text, labels in zip(chunk, texts, predictions, strict=True):
                columns = dict(zip(keep, row.kept, strict=True)) if keep else {"text": text}
                sys.stdout.write(json_line(columns, labels))
            sys.stdout.flush()
            advance(len(chunk))
            count += len(chunk)
    if not count:
        console.note("no texts were given")


def parse_labels(values: Sequence[str] | None, names: Sequence[str]) -> list[str | int] | None:
    """Return label names, and ids for numbers that are not names; ``@FILE`` holds one per line.

    >>> parse_labels(["fish", "1"], ["fish", "law"])
    ['fish', 1]
    """
    from elias.data.readers.files import read_lines

    if not values:
        return None
    labels: list[str] = []
    for value in values:
        if not value.startswith("@"):
            labels.append(value)
            continue
        lines = [line.strip() for line in read_lines(Path(value[1:])) if line.strip()]
        if not lines:
            raise DataError(f"{value[1:]}: is empty; it should hold one label per line")
        labels += lines
    known = set(names)
    return [int(label) if label not in known and label.isdecimal() else label for label in labels]
