"""Predicting files of any size: in chunks, and going on where an interruption left off.

Chunks wait in a hidden folder beside the output, each written whole. The folder remembers what
was asked of which model about which input, so that chunks of different work never meet.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import elias
from elias.data.readers.files import sanitize
from elias.data.readers.text_rows import TextFile, TextRow
from elias.errors import DataError, ModelError
from elias.inference.prediction_io import PredictionFormat, PredictionWriter
from elias.progress import hushed, progress

if TYPE_CHECKING:
    from elias.inference.predictor import Elias
    from elias.predictions import Predictions


CHUNK = 4096
"""Texts in memory at a time, and at most lost to an interruption."""
TEXT = "text"
"""What the text's own column is called, where no other is kept."""
_STATE_FILE = "state.json"
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class FileTask:
    """A file of texts, and the file that their labels go to."""

    source: TextFile
    out: Path
    format: PredictionFormat
    chunk_size: int = CHUNK
    overwrite: bool = False

    @classmethod
    def plan(
        cls,
        source: TextFile,
        out: str | Path,
        *,
        format: str | None = None,
        chunk_size: int | None = None,
        overwrite: bool = False,
    ) -> FileTask:
        """Check, before anything is computed, that the output can be written.

        Args:
            source: The texts, and the columns kept with them; without any, the text is.
            out: The output. Its name says the form (.jsonl, .csv, .tsv, .parquet, or .txt for lines
                of ``id:score``; .gz packs text) unless ``format`` does.
            format: One of `elias.inference.prediction_io.FORMATS`.
            chunk_size: Texts in memory at a time, `CHUNK` unless given.
            overwrite: Replace the output that is there, and begun work that was another.

        Raises:
            DataError: If something is in the way, or the form has no place for a kept column.
        """
        out = Path(out)
        form = PredictionFormat.of(out, format)
        form.check_kept(source.keep)
        chunk_size = CHUNK if chunk_size is None else chunk_size
        if chunk_size < 1:
            raise DataError(f"chunk_size must be a whole number >= 1, not {chunk_size}")
        if not out.resolve().parent.is_dir():
            raise DataError(f"{out}: its folder is not there; make it first")
        if out.is_dir():
            raise DataError(f"{out}: is a folder; name a file in it")
        if out.exists() and out.samefile(source.path):
            raise DataError(f"{out}: is the input itself; choose another output")
        if out.exists() and not overwrite:
            raise DataError(f"{out}: already exists; choose another file, or add --overwrite")
        return cls(source, out, form, chunk_size, overwrite)

    @property
    def folder(self) -> Path:
        """Where chunks wait until all are there."""
        place = self.out.resolve()
        return place.with_name(f".{place.name}.partial")

    @property
    def kept(self) -> tuple[str, ...]:
        """The columns that come before the labels."""
        if self.format.kind == "txt":
            return ()
        return self.source.keep or (TEXT,)


@dataclass(frozen=True, slots=True)
class FileDone:
    """What became of a file."""

    texts: int
    """How many texts it holds."""
    resumed: int
    """How many of them were there from before an interruption."""


@dataclass(slots=True)
class _Survey:
    """What one look through all rows says: nothing is computed for a file with a bad row."""

    texts: int = 0
    types: dict[str, str] = field(default_factory=dict)
    """For each kept column that is not typed by its file: the Arrow type that holds it."""


def predict_file(
    model: Elias,
    task: FileTask,
    *,
    ask: Callable[..., Predictions] | None = None,
    **options: Any,
) -> FileDone:
    """Write the labels of a file's texts to another file, in the order of the input.

    After an interruption the same call goes on. The output appears under its name only when it is
    whole; an interrupted and an uninterrupted run write the same bytes. Memory does not grow with
    the file.

    Args:
        model: A model that was read from a folder, so that it can be told from others.
        task: What to read and write.
        ask: What answers in place of `Elias.predict`, with the help of other processes.
        options: Those of `Elias.predict`: ``top_k``, ``threshold``, ``only``, ``without``,
            ``component``, ``batch_size``.

    Raises:
        DataError: If a row cannot be read, or begun work lies there that was another.
    """
    if model.model.encoder.reads_features:
        raise DataError("this model was trained on features, and a file of texts has none")
    before = _stamp(task.source.path)
    asked = _asked(model, task, options)
    with _claimed(task.folder):
        survey = _begin(task, asked)
        resumed = _count_done(task, survey)
        writer = PredictionWriter(task.format, task.kept, _arrow_types(task, survey))
        try:
            _predict_rest(ask or model.predict, task, writer, survey.texts, options)
        except KeyboardInterrupt:
            done = f"{_count_done(task, survey):,} of {survey.texts:,} texts are done"
            raise KeyboardInterrupt(f"{done}; the same command goes on") from None
        if _stamp(task.source.path) != before:
            raise DataError(f"{task.source.path}: changed while it was read; run the command again")
        _finish(task, writer)
    return FileDone(survey.texts, resumed)


def _predict_rest(
    ask: Callable[..., Predictions],
    task: FileTask,
    writer: PredictionWriter,
    total: int,
    options: dict[str, Any],
) -> None:
    """Write the chunks that are not there yet."""
    done = _complete_parts(task.folder)
    rows = islice(task.source.rows(), done * task.chunk_size, None)
    with progress("Predicting", total) as advance, hushed():
        advance(min(done * task.chunk_size, total))
        for number, chunk in enumerate(_chunks(rows, task.chunk_size), start=done):
            texts, _ = sanitize([row.text for row in chunk])
            found = ask(texts, **options)
            kept = [row.kept for row in chunk] if task.source.keep else [(text,) for text in texts]
            _write(_part(task.folder, number), writer.encode(kept, found, first=number == 0))
            advance(len(chunk))


def _count_done(task: FileTask, survey: _Survey) -> int:
    return min(_complete_parts(task.folder) * task.chunk_size, survey.texts)


def _chunks(rows: Iterator[TextRow], size: int) -> Iterator[list[TextRow]]:
    while chunk := list(islice(rows, size)):
        yield chunk


def _asked(model: Elias, task: FileTask, options: dict[str, Any]) -> dict[str, Any]:
    """Return everything that the output's bytes depend on, as JSON."""
    plain = {
        name: list(value) if isinstance(value, list | tuple | set) else value
        for name, value in options.items()
        if value is not None
    }
    return {
        "input": _digest(task.source.path),
        "model": fingerprint(model),
        "columns": list(task.source.columns),
        "keep": list(task.source.keep),
        "format": [task.format.kind, task.format.packed],
        "chunk_size": task.chunk_size,
        "options": plain,
        "device": next(model.model.parameters()).device.type,
        "elias": elias.__version__,
    }


def fingerprint(model: Elias) -> str:
    """Return a string that changes with any file of the folder the model was read from."""
    if model.folder is None:
        raise ModelError(
            "a model that was not saved cannot be told from another; save it and read it with "
            "Elias.from_pretrained first"
        )
    digest = hashlib.sha256()
    for path in sorted(path for path in model.folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(model.folder)}\0{_digest(path)}\0".encode())
    return digest.hexdigest()


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    return found.st_size, found.st_mtime_ns


def _begin(task: FileTask, asked: dict[str, Any]) -> _Survey:
    """Return what is known of begun work, or look through the input and begin."""
    state_file = task.folder / _STATE_FILE
    known = _read_state(state_file)
    if known is not None:
        differing = sorted(name for name in asked if known["asked"].get(name) != asked[name])
        if not differing:
            return _Survey(**known["survey"])
        if not task.overwrite:
            raise DataError(
                f"{task.out}: was begun with another {', another '.join(differing)}; repeat that "
                "command to go on, or add --overwrite to begin anew"
            )
    for part in task.folder.glob("*.part"):
        part.unlink()
    survey = _look_through(task)
    state = {"asked": asked, "survey": {"texts": survey.texts, "types": survey.types}}
    _write(state_file, json.dumps(state).encode())
    return survey


def _read_state(path: Path) -> dict[str, Any] | None:
    try:
        state = json.loads(path.read_text(encoding="utf8"))
        return state if {"asked", "survey"} <= state.keys() else None
    except (OSError, ValueError, AttributeError):  # not there, or not ours
        return None


def _look_through(task: FileTask) -> _Survey:
    source = task.source
    typed = task.format.kind == "parquet" and source.kind == "jsonl"
    survey = _Survey()
    with progress("Checking the input") as advance:
        for row in source.rows():
            survey.texts += 1
            if typed:
                for name, value in zip(source.keep, row.kept, strict=True):
                    survey.types[name] = _joined(survey.types.get(name), value)
            if survey.texts % CHUNK == 0:
                advance(CHUNK)
    if not survey.texts:
        raise DataError(f"{source.path}: is empty; give a file with a row for each text")
    return survey


def _joined(known: str | None, value: Any) -> str:
    """Return the Arrow type that holds what was seen so far and one more value."""
    if value is None:
        return known or "null"
    if isinstance(value, bool):
        found = "bool"
    elif isinstance(value, int) and -_INT64 <= value < _INT64:
        found = "int64"
    else:
        found = "double" if isinstance(value, float) else "string"
    if known in (None, "null", found):
        return found
    return "double" if {known, found} == {"int64", "double"} else "string"


def _arrow_types(task: FileTask, survey: _Survey) -> dict[str, Any]:
    if task.format.kind != "parquet":
        return {}
    import pyarrow as pa

    names = {"bool": pa.bool_(), "int64": pa.int64(), "double": pa.float64()}
    found = {name: names.get(kind, pa.large_string()) for name, kind in survey.types.items()}
    return found | task.source.arrow_types()


def _part(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.part"


def _complete_parts(folder: Path) -> int:
    """Return how many chunks are there from the first on."""
    there = {path.name for path in folder.glob("*.part")}
    count = 0
    while _part(folder, count).name in there:
        count += 1
    return count


def _finish(task: FileTask, writer: PredictionWriter) -> None:
    whole = task.folder / "whole"
    parts: Sequence[Path] = [_part(task.folder, i) for i in range(_complete_parts(task.folder))]
    with whole.open("wb") as stream:
        writer.join(parts, stream)
        _flush(stream)
    whole.replace(task.out.resolve())
    for part in parts:
        part.unlink()


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    partial = path.with_suffix(".new")
    with partial.open("wb") as stream:
        stream.write(data)
        _flush(stream)
    partial.replace(path)


def _flush(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Hold the folder of begun work against other processes; it stays only if it has chunks."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        _lock(lock, folder)
        try:
            yield
        finally:
            if not any(folder.glob("*.part")):
                shutil.rmtree(folder, ignore_errors=True)


def _lock(file: IO[str], folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise DataError(
            f"{folder}: another process writes this output; wait for it, or choose another"
        ) from None
