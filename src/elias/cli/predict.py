"""``elias predict``: texts in, ranked labels out."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elias import progress
from elias.cli import talk
from elias.cli.options import Component, DeviceName, TextColumn
from elias.cli.texts import STDIN, chunks, read_texts
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHUNK = 1024
SECONDS_BEFORE_BAR = 2.0

Labels = list[str] | None


def predict(  # noqa: PLR0913 - each is an option of its own
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
    device: DeviceName = "auto",
) -> None:
    """Label texts: one JSON object per line, with text and labels (id, label, score)."""
    lines = read_texts(texts, text)

    from elias.data.formats.sources import mend
    from elias.pipeline import Elias

    elias = Elias.from_pretrained(model, device=device)
    if elias.model.encoder.reads_features:
        raise DataError(
            f"{model}: was trained on features, and this command reads texts; use elias evaluate, "
            "or in Python Elias.predict with a CSR matrix"
        )
    component = elias.check_component(component)
    lowest = None if threshold is None else elias.threshold(threshold, component)
    among = wanted_labels(only, elias.label_names)
    kept_off = wanted_labels(without, elias.label_names)
    progress.enable(False)  # a bar for every chunk would flicker; one for all follows below
    size = 1 if texts == STDIN and sys.stdin.isatty() else CHUNK
    with _Counter() as counter:
        for raw in chunks(lines, size):
            chunk, _ = mend(raw)
            predictions = elias.predict(
                chunk,
                top_k=top_k,
                threshold=lowest,
                only=among,
                without=kept_off,
                component=component,
            )
            _write(chunk, predictions.to_dicts())
            counter.add(len(chunk))
    if not counter.count:
        talk.note("no texts were given")


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
    from elias.data.formats.sources import read_lines

    lines = [line.strip() for line in read_lines(path) if line.strip()]
    if not lines:
        raise DataError(f"{path}: is empty; it should hold one label per line")
    return lines


def _write(texts: Sequence[str], labels: Sequence[list[dict[str, Any]]]) -> None:
    for text, found in zip(texts, labels, strict=True):
        line = json.dumps({"text": text, "labels": found}, ensure_ascii=False)
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


class _Counter:
    """Counts texts on stderr once that takes a while, unless the results are seen anyway."""

    def __init__(self) -> None:
        self.count = 0
        self._start = time.monotonic()
        self._shown = sys.stderr.isatty() and not sys.stdout.isatty() and not talk.is_quiet()
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
