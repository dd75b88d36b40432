"""``elias predict``: predict labels for texts."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

import elias
from elias import progress
from elias.cli import console, options
from elias.cli.torchrun import follow_predict, join_world, shared_predict
from elias.errors import DataError, escape_controls
from elias.labels import LabelTable

if TYPE_CHECKING:
    from elias.data.load import TextRow


STDIN = Path("-")
CHUNK = 1024


def predict(
    model: options.ModelPath,
    texts: Annotated[
        Path, Argument(metavar="[FILE|-]", help="Text file or table; if omitted or -, read stdin.")
    ] = STDIN,
    top_k: Annotated[
        int | None,
        Option(
            "-k", "--top-k", min=1, help="Labels per text (default: 5, or 100 with --threshold)."
        ),
    ] = None,
    threshold: Annotated[
        str | None,
        Option(
            metavar="P|TARGET",
            help="Minimum probability, e.g. 0.3, or a rule: f1, macro-f1, precision=0.8.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        Option(
            metavar="LABEL", help="Predict only this label (name, id, number or @FILE); repeatable."
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        Option(
            metavar="LABEL",
            help="Never predict this label (name, id, number or @FILE); repeatable.",
        ),
    ] = None,
    component: options.Component = None,
    text: options.TextColumn = None,
    encoding: options.Encoding = None,
    keep: Annotated[
        list[str] | None,
        Option(
            metavar="COLUMN", help="Copy this column to the output instead of the text; repeatable."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option(
            metavar="OUTPUT",
            help="File to write: .parquet, or .jsonl, .csv, .tsv, .txt (id:score), also with .gz.",
        ),
    ] = None,
    file_format: Annotated[
        str | None,
        Option("--format", metavar="NAME", help="Format of OUTPUT (default: by its extension)."),
    ] = None,
    chunk_size: Annotated[int | None, Option(min=1, hidden=True)] = None,
    overwrite: options.Overwrite = False,
    as_json: Annotated[
        bool | None,
        Option(
            "--json/--table",
            help="Print JSON or a table (default: table on a terminal, else JSON).",
        ),
    ] = None,
    device: options.DeviceName = "auto",
) -> None:
    """Predict the labels of texts and print them, as a table or as one JSON object per text.

    With --out, write the labels to a file, which appears when it is complete. Run the same command
    again to resume after an interruption. Processes started by torchrun share the work.
    """
    if out is None and (file_format or chunk_size or overwrite):
        raise DataError("--format and --overwrite apply to a file; give --out FILE")

    def open_source() -> Iterator[TextRow] | elias.FileTask:
        source = open_texts(model, texts, text, keep or [], encoding)
        if out is None:
            return source.rows() if isinstance(source, elias.TextFile) else source
        if not isinstance(source, elias.TextFile):
            raise DataError("--out: stdin cannot be read twice to resume; give the texts as a file")
        return elias.FileTask.plan(
            source, out, format=file_format, chunk_size=chunk_size, overwrite=overwrite
        )

    with join_world(device) as world:
        # Report errors of the texts and the output before the model is loaded.
        source = world.run_on_rank0(open_source)
        loaded = elias.Elias.from_pretrained(model, device=device, world=world)
        if loaded.model.encoder.reads_features:
            raise DataError(
                f"{model}: was trained on features, but this command reads texts; use elias "
                "evaluate, or Elias.predict with a CSR matrix in Python"
            )
        component = loaded.check_component(component)
        if threshold is not None:
            loaded.threshold(threshold, component)  # raises errors before the texts are read
        arguments = {
            "top_k": top_k,
            "threshold": threshold,
            "only": only and parse_labels(only, loaded.label_names),
            "without": without and parse_labels(without, loaded.label_names),
            "component": component,
        }
        if source is None:  # ranks other than 0
            follow_predict(world, loaded, arguments)
            return
        with shared_predict(world, loaded) as predict_texts:
            if isinstance(source, elias.FileTask):
                _write_file(loaded, source, predict=predict_texts, **arguments)
            else:
                size = 1 if texts == STDIN and sys.stdin.isatty() else CHUNK
                if as_json is None:
                    as_json = not sys.stdout.isatty()
                write = _print_json if as_json else _print_table
                _write_stdout(predict_texts, source, keep, arguments, size, write)


def open_texts(
    model: Path, texts: Path, column: str | None, keep: Sequence[str], encoding: str | None
) -> elias.TextFile | Iterator[TextRow]:
    """Return the file of texts, or the rows of stdin. By default, read the columns of training.

    A file is read as a table if a column is given, or if it has the extension of a table format.
    Any other file has one text per line.
    """
    from elias.data.load import is_table
    from elias.persistence.hub import find_model
    from elias.persistence.manifest import Manifest

    if not os.path.exists(texts) and texts != STDIN:  # noqa: PTH110 - Path.exists raises if long
        remedy = "to predict a text, write: echo 'a text' | elias predict MODEL"
        raise DataError(f"{console.one_line(str(texts))}: no such file; {remedy}")
    settings = Manifest(find_model(model))["data_settings"]
    if texts == STDIN:
        return _stdin_rows(column, keep)
    reading: dict[str, Any] = {"text": column, "encoding": encoding}
    if settings and texts.is_file() and is_table(texts, column, keep):
        columns = {"text": column, "header": None, "encoding": encoding}
        reading = options.training_options(texts, settings, columns)
    return elias.TextFile.find(texts, keep=keep, **reading)


def _write_file(model: elias.Elias, task: elias.FileTask, **arguments: Any) -> None:
    # Log the progress if there is no terminal for a progress bar, because stdout shows nothing.
    console.set_up(verbose=console.is_verbose(), quiet=console.is_quiet(), log_steps=True)
    start = time.monotonic()
    done = elias.predict_file(model, task, **arguments)
    seconds = max(time.monotonic() - start, 1e-9)
    resumed = f", {done.resumed:,} of them before the interruption" if done.resumed else ""
    speed = (done.texts - done.resumed) / seconds
    console.note(f"{task.out}: {done.texts:,} texts{resumed}, {speed:,.0f} per second")


def _write_stdout(
    predict_texts: Callable[..., elias.Predictions],
    rows: Iterator[TextRow],
    keep: Sequence[str] | None,
    arguments: dict[str, Any],
    size: int,
    write: Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], None],
) -> None:
    from elias.data.readers.files import sanitize

    if sys.stdout.isatty():
        progress.enable(False)  # a bar would mix with the results
    count = 0
    # Show one progress bar for all texts, and none for each chunk.
    with progress.progress("Predicting") as advance, progress.progress_disabled():
        while chunk := list(islice(rows, size)):
            texts, _ = sanitize([row.text for row in chunk])
            predictions = predict_texts(texts, **arguments).to_dicts()
            for row, text, labels in zip(chunk, texts, predictions, strict=True):
                columns = dict(zip(keep, row.kept, strict=True)) if keep else {"text": text}
                write(columns, labels)
            sys.stdout.flush()
            advance(len(chunk))
            count += len(chunk)
    if not count:
        console.note("no texts were given")


def _print_json(columns: Mapping[str, Any], labels: Sequence[Mapping[str, Any]]) -> None:
    from elias.inference.prediction_io import json_line

    sys.stdout.write(escape_controls(json_line(columns, labels)))


def _print_table(columns: Mapping[str, Any], labels: Sequence[Mapping[str, Any]]) -> None:
    """Print a text, shortened to one line, and a line for each of its labels."""
    title = console.one_line(" | ".join(map(str, columns.values()))) or "(an empty text)"
    width = shutil.get_terminal_size().columns
    lines = [title if len(title) <= width else f"{title[: width - 1]}…"]
    if any(label.get("probability") is None for label in labels):
        lines.append(f"{'score':>6}  label")  # otherwise a score may look like a probability
    for label in labels:
        share = console.likelihood(label.get("probability"), label["score"])
        lines.append(f"{share:>6}  {console.one_line(label['label'])}")
    lines += ["  no label reaches the threshold"] * (not labels)
    sys.stdout.write("\n".join([*lines, "", ""]))


def _stdin_rows(column: str | None, keep: Sequence[str]) -> Iterator[TextRow]:
    """Yield a text for each line of stdin, or for each JSON object if a text column is given."""
    from elias.data.load import TextRow, json_text_rows

    lines = stdin_lines()
    if column is not None:
        return json_text_rows(lines, "stdin", column, keep)
    if keep:
        raise DataError(
            "--keep: plain lines on stdin have no columns; send JSON lines, and give --text"
        )
    return (TextRow(number, line) for number, line in enumerate(lines, start=1))


def stdin_lines() -> Iterator[str]:
    """Yield the lines of stdin. An empty line is an empty text."""
    from elias.data.readers.files import describe_utf8_error

    for number, raw in enumerate(sys.stdin.buffer, start=1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            problem = describe_utf8_error(error).partition(", or pass")[0]  # for files only
            raise DataError(f"stdin:{number}: {problem}") from None
        yield line.rstrip("\n").rstrip("\r")


def parse_labels(values: Sequence[str], names: Sequence[str]) -> list[str | int]:
    """Return the labels given on the command line as names or label numbers.

    A number is a label number, unless a label has that name or id. ``@FILE`` reads labels from a
    file, one per line.

    >>> parse_labels(["fish", "1"], ["fish", "law"])
    ['fish', 1]
    """
    from elias.data.readers.files import read_lines

    labels: list[str] = []
    for value in values:
        if not value.startswith("@"):
            labels.append(value)
            continue
        lines = [line.strip() for line in read_lines(Path(value[1:])) if line.strip()]
        if not lines:
            raise DataError(f"{value[1:]}: is empty; write one label per line")
        labels += lines
    known = {*names, *(LabelTable.of(names).ids or ())}
    return [int(label) if label not in known and label.isdecimal() else label for label in labels]
