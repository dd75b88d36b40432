"""``elias predict``: texts in, ranked labels out."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elias import progress
from elias.cli import console
from elias.cli.inputs import STDIN, chunks, find_file, read_rows
from elias.cli.options import Component, DeviceName, Overwrite, TextColumn
from elias.cli.torchrun import follow_predict, join_world, shared_predict
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from elias.data.readers.text_rows import TextFile, TextRow
    from elias.distributed import World
    from elias.inference.batch_predict import FileTask
    from elias.inference.predictor import Elias
    from elias.predictions import Predictions


CHUNK = 1024
SECONDS_BEFORE_BAR = 2.0

Labels = list[str] | None


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A saved model, or a run.")],
    texts: Annotated[
        Path,
        typer.Argument(
            metavar="[FILE|-]", help="One text per line, or a table; - (or nothing): stdin."
        ),
    ] = STDIN,
    top_k: Annotated[
        int | None,
        typer.Option(
            "-k", "--top-k", min=1, help="Labels per text. [5; with a threshold at most 100]"
        ),
    ] = None,
    threshold: Annotated[
        str | None,
        typer.Option(
            metavar="P|TARGET",
            help="Leave out less probable labels: 0.3, f1, precision=0.8 or recall=0.6.",
        ),
    ] = None,
    only: Annotated[
        Labels,
        typer.Option(metavar="LABEL", help="Choose among these names or ids; @FILE; may repeat."),
    ] = None,
    without: Annotated[
        Labels, typer.Option(metavar="LABEL", help="Keep off these names or ids, likewise.")
    ] = None,
    component: Component = None,
    text: TextColumn = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN", help="Write this column of a table, not the text; may repeat."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="OUTPUT",
            help="A file: .jsonl, .csv, .tsv, .parquet, .txt (id:score); .gz packs. Resumes.",
        ),
    ] = None,
    file_format: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="What to write there. [by its name]"),
    ] = None,
    chunk_size: Annotated[
        int | None,
        typer.Option(min=1, help="Texts in memory at a time with --out."),
    ] = None,
    overwrite: Overwrite = False,
    device: DeviceName = "auto",
) -> None:
    """Label texts: one JSON object per line, with text and labels (id, label, score).

    With --out the labels go to a file, whole or not at all; after an interruption the same command
    goes on. Processes that torchrun starts share the texts and the model's labels out.
    """
    if out is None and (file_format or chunk_size or overwrite):
        raise DataError("--format, --chunk-size and --overwrite need a file; name it by --out")

    def plan() -> Iterator[TextRow] | FileTask:
        settings = _data_settings(model)
        if out is None:
            return read_rows(texts, text, keep or [], settings)
        source = _file_of_texts(texts, text, keep or [], settings)
        from elias.inference.batch_predict import FileTask

        return FileTask.plan(
            source, out, format=file_format, chunk_size=chunk_size, overwrite=overwrite
        )

    with join_world(device) as world:
        # what is wrong with the texts or the output is better refused before a model is read
        planned = world.run_on_rank0(plan)
        elias = _reader_of_texts(model, device, world)
        component = elias.check_component(component)
        options = {
            "top_k": top_k,
            "threshold": None if threshold is None else elias.threshold(threshold, component),
            "only": wanted_labels(only, elias.label_names),
            "without": wanted_labels(without, elias.label_names),
            "component": component,
        }
        if planned is None:  # one of several processes, and not the first
            follow_predict(world, elias, options)
            return
        from elias.inference.batch_predict import FileTask

        with shared_predict(world, elias) as ask:
            if isinstance(planned, FileTask):
                _to_file(elias, planned, options, ask)
            else:
                _to_stdout(ask, planned, keep, options, size=_stdout_chunk(texts))


def _reader_of_texts(folder: Path, device: str, world: World) -> Elias:
    from elias.inference.predictor import Elias

    elias = Elias.from_pretrained(folder, device=device, world=world)
    if elias.model.encoder.reads_features:
        raise DataError(
            f"{folder}: was trained on features, and this command reads texts; use elias evaluate, "
            "or in Python Elias.predict with a CSR matrix"
        )
    return elias


def _data_settings(folder: Path) -> dict[str, Any]:
    """Return how the model's training data was read, without loading the model."""
    from elias.persistence.hub import place_of
    from elias.persistence.manifest import read_data_settings

    return read_data_settings(place_of(folder))


def _file_of_texts(
    source: Path, column: str | None, keep: Sequence[str], settings: dict[str, Any]
) -> TextFile:
    if source == STDIN:
        raise DataError("--out: stdin cannot be read again after an interruption; give a file")
    return find_file(source, column, keep, settings)


def _stdout_chunk(source: Path) -> int:
    return 1 if source == STDIN and sys.stdin.isatty() else CHUNK


def _to_file(
    elias: Elias, task: FileTask, options: dict[str, Any], ask: Callable[..., Predictions]
) -> None:
    from elias.inference.batch_predict import predict_file

    # nothing is seen on stdout, so without a terminal for the bar lines tell how far it is
    console.set_up(verbose=console.is_verbose(), quiet=console.is_quiet(), talkative=True)
    start = time.monotonic()
    done = predict_file(elias, task, ask=ask, **options)
    seconds = max(time.monotonic() - start, 1e-9)
    before = f", {done.resumed:,} of them before" if done.resumed else ""
    speed = (done.texts - done.resumed) / seconds
    console.note(f"{task.out}: {done.texts:,} texts{before}, {speed:,.0f} per second")


def _to_stdout(
    ask: Callable[..., Predictions],
    rows: Iterable[TextRow],
    keep: Sequence[str] | None,
    options: dict[str, Any],
    *,
    size: int,
) -> None:
    from elias.data.readers.files import sanitize
    from elias.inference.prediction_io import json_line

    progress.enable(False)  # a bar for every chunk would flicker; one for all follows below
    with _Counter() as counter:
        for chunk in chunks(rows, size):
            texts, _ = sanitize([row.text for row in chunk])
            found = ask(texts, **options).to_dicts()
            for row, text, labels in zip(chunk, texts, found, strict=True):
                kept = dict(zip(keep, row.kept, strict=True)) if keep else {"text": text}
                sys.stdout.write(json_line(kept, labels))
            sys.stdout.flush()
            counter.add(len(chunk))
    if not counter.count:
        console.note("no texts were given")


def wanted_labels(given: Sequence[str] | None, names: Sequence[str]) -> list[str | int] | None:
    """Return labels as names, or as ids where no label has a number for its name.

    >>> wanted_labels(["fish", "1"], ["fish", "law"])
    ['fish', 1]
    """
    if not given:
        return None
    known = set(names)
    return [
        int(label) if label not in known and label.isdecimal() else label
        for label in _spelled_out(given)
    ]


def _spelled_out(given: Sequence[str]) -> Iterator[str]:
    for label in given:
        if label.startswith("@"):
            yield from _lines_of(Path(label[1:]))
        else:
            yield label


def _lines_of(path: Path) -> list[str]:
    from elias.data.readers.files import read_lines

    lines = [line.strip() for line in read_lines(path) if line.strip()]
    if not lines:
        raise DataError(f"{path}: is empty; it should hold one label per line")
    return lines


class _Counter:
    """Counts texts on stderr once that takes a while, unless the results are seen anyway."""

    def __init__(self) -> None:
        self.count = 0
        self._start = time.monotonic()
        self._shown = sys.stderr.isatty() and not sys.stdout.isatty() and not console.is_quiet()
        self._status: Any = None

    def __enter__(self) -> _Counter:
        return self

    def add(self, count: int) -> None:
        self.count += count
        seconds = time.monotonic() - self._start
        if not self._shown or seconds < SECONDS_BEFORE_BAR:
            return
        if self._status is None:
            self._status = progress.console().status("")
            self._status.start()
        self._status.update(f"{self.count:,} texts, {self.count / seconds:,.0f} per second")

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
