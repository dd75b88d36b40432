"""Predict labels for files of any size, in chunks, and resume after an interruption.

Finished chunks are stored in a hidden folder next to the output file. The folder also records which
model, input and options were used, so that chunks of different requests are never mixed.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock, Timeout

import elias
from elias.data.atomic import digest, staged_file
from elias.data.load import TextFile, TextRow
from elias.data.readers.files import sanitize
from elias.errors import DataError, ModelError, check_positive
from elias.inference.prediction_io import PredictionFormat
from elias.inference.predictor import Elias
from elias.kernels.device import limit_threads
from elias.persistence.manifest import fingerprint
from elias.predictions import Predictions
from elias.progress import progress, progress_disabled
from elias.text.batches import prefetch

Item = TypeVar("Item")
Result = TypeVar("Result")

CHUNK = 1024
"""Default number of texts in a chunk. An interruption loses the work on at most three chunks."""
TEXT = "text"
"""Name of the output column with the text. It is written if no input column is kept."""
_STATE_FILE = "state.json"
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class FileTask:
    """A prediction task: an input file of texts and an output file for their labels."""

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
        """Create a task after checking that the output can be written.

        Args:
            source: The input file, its text columns and the columns to copy to the output. Without
                columns to copy, the text is copied.
            out: The output file. Unless ``format`` is given, its extension sets the format: .jsonl,
                .csv, .tsv, .parquet, or .txt for lines of ``id:score``. If .gz follows the
                extension, the file is compressed; Parquet does not allow this.
            format: One of `elias.inference.prediction_io.FORMATS`.
            chunk_size: Number of texts in memory at a time, `CHUNK` by default.
            overwrite: Replace an existing output file, and discard unfinished chunks that were
                predicted with other arguments.

        Raises:
            DataError: If the output exists or cannot be written, or the format cannot hold the
                columns to copy.
        """
        out = Path(out)
        form = PredictionFormat.of(out, format)
        form.check_columns(source.keep)
        chunk_size = CHUNK if chunk_size is None else chunk_size
        check_positive(chunk_size=chunk_size)
        if not out.resolve().parent.is_dir():
            raise DataError(f"{out}: its folder does not exist; create it first")
        if out.is_dir():
            raise DataError(f"{out}: is a folder; give the name of a file")
        if out.exists() and out.samefile(source.path):
            raise DataError(f"{out}: is also the input file; choose another output file")
        if out.exists() and not overwrite:
            raise DataError(f"{out}: already exists; choose another file, or add overwrite=True")
        return cls(source, out, form, chunk_size, overwrite)

    @property
    def folder(self) -> Path:
        """Return the hidden folder in which finished chunks are stored."""
        path = self.out.resolve()
        return path.with_name(f".{path.name}.partial")

    def chunk_path(self, index: int) -> Path:
        """Return the path of the file that stores a chunk."""
        return self.folder / f"{index:08d}.part"


@dataclass(frozen=True, slots=True)
class FileDone:
    """Result of `predict_file`."""

    texts: int
    """Number of texts in the output."""
    resumed: int
    """Number of these texts that an earlier, interrupted call had already predicted."""


def predict_file(
    model: Elias,
    task: FileTask,
    *,
    predict: Callable[..., Predictions] | None = None,
    **options: Any,
) -> FileDone:
    """Predict labels for the texts of a file, and write them to another file in the same order.

    To resume after an interruption, call the function again with the same arguments. The output
    file appears only when it is complete, and is identical whether or not the work was interrupted.
    Memory use does not depend on the size of the file.

    Args:
        model: A model that was loaded from a folder. The folder's checksum identifies the model
            when work is resumed.
        task: The input file and the output file.
        predict: Function to call instead of ``model.predict``, for example one that distributes the
            texts over several processes. It is called once for each chunk, in order.
        options: Arguments of `Elias.predict`: ``top_k``, ``threshold``, ``only``, ``without``,
            ``component``, ``batch_size``.

    Raises:
        DataError: If a row cannot be read, or an unfinished call had other arguments.
    """
    if model.model.encoder.reads_features:
        raise DataError(
            "this model was trained on features, so it cannot predict a file of texts; use "
            "Elias.predict with a CSR matrix"
        )
    path = task.source.path
    if not path.is_file():
        raise DataError(f"{path}: no such file; check the path")
    try:
        before, checksum = path.stat(), digest(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the file") from None
    request = {"input": checksum, **_request(model, task, options)}
    with _locked(task.folder):
        n_texts, types = _begin(task, request)
        arrow_types = _arrow_types(task, types)
        n_chunks = next(n for n in count() if not task.chunk_path(n).exists())
        resumed = min(n_chunks * task.chunk_size, n_texts)
        rows = islice(task.source.rows(), n_chunks * task.chunk_size, None)
        chunks = iter(lambda: list(islice(rows, task.chunk_size)), [])

        def predict_chunk(chunk: list[TextRow]) -> tuple[list[TextRow], list[str], Predictions]:
            texts, _ = sanitize([row.text for row in chunk])
            return chunk, texts, (predict or model.predict)(texts, **options)

        def write(
            index: int, chunk: list[TextRow], texts: list[str], predictions: Predictions
        ) -> int:
            columns: dict[str, Sequence[Any]] = {TEXT: texts}
            if task.source.keep:
                cells = zip(*(row.kept for row in chunk), strict=True)
                columns = dict(zip(task.source.keep, cells, strict=True))
            data = task.format.encode(columns, predictions, first=index == 0, types=arrow_types)
            with staged_file(task.chunk_path(index)) as part:
                part.write_bytes(data)
            return len(chunk)

        try:
            # while a chunk is predicted, read the next chunk and write the previous one
            in_pairs = predict is None and model.model.labels.weight.is_cpu
            with (
                progress("Predicting", n_texts) as advance,
                progress_disabled(),
                closing(prefetch(chunks, depth=1)) as ahead,
                closing(_map_in_order(predict_chunk, ahead, in_pairs=in_pairs)) as results,
                ThreadPoolExecutor(1, thread_name_prefix="elias-write") as writer,
            ):
                advance(resumed)
                written: Future[int] | None = None
                for chunk, texts, predictions in results:
                    if written is not None:
                        advance(written.result())
                    written = writer.submit(write, n_chunks, chunk, texts, predictions)
                    n_chunks += 1
                if written is not None:
                    advance(written.result())
        except KeyboardInterrupt:
            done = f"{min(n_chunks * task.chunk_size, n_texts):,} of {n_texts:,} texts are done"
            raise KeyboardInterrupt(f"{done}; run the same command to resume") from None
        after = path.stat()
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise DataError(f"{path}: changed while it was read; run the command again")
        parts = [task.chunk_path(index) for index in range(n_chunks)]
        with staged_file(task.out.resolve()) as whole, whole.open("wb") as stream:
            task.format.join(parts, stream)
        for part in parts:
            part.unlink()
    return FileDone(n_texts, resumed)


def _map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], *, in_pairs: bool
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` for each item, in order.

    If ``in_pairs``, process two items at a time, in two threads with half of the CPU cores each.
    The Python code of one item then overlaps with the compiled code of the other.
    """
    if not in_pairs:
        yield from map(function, items)
        return
    share = max(1, torch.get_num_threads() // 2)

    def work(item: Item) -> Result:
        with limit_threads(share):
            return function(item)

    pool, pending = ThreadPoolExecutor(2, "elias-predict"), deque[Future[Result]]()
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > 2:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _request(model: Elias, task: FileTask, options: dict[str, Any]) -> dict[str, Any]:
    """Return everything that affects the output, except the input file, in JSON types."""
    if model.folder is None:
        raise ModelError(
            "predicting a file needs a saved model; save this model and load it with "
            "Elias.from_pretrained"
        )
    request = {
        "model": fingerprint(model.folder),
        "columns": task.source.columns,
        "keep": task.source.keep,
        "format": [task.format.kind, task.format.packed],
        "chunk_size": task.chunk_size,
        "options": {name: value for name, value in options.items() if value is not None},
        "device": next(model.model.parameters()).device.type,
        "elias": elias.__version__,
    }
    return dict(json.loads(json.dumps(request, default=list)))


def _begin(task: FileTask, request: dict[str, Any]) -> tuple[int, dict[str, str]]:
    """Return the number of texts, and the Arrow types of kept JSON columns for Parquet output.

    If unfinished work exists, read both from its state file. Otherwise read all rows of the input,
    so that an invalid row is reported before the first prediction.
    """
    path = task.folder / _STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf8"))
        differing = sorted(name for name in request if state["request"].get(name) != request[name])
        if not differing:
            return state["texts"], state["types"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        differing = []  # no unfinished work, or an unreadable state file
    if differing and not task.overwrite:
        raise DataError(
            f"{task.out}: an unfinished run differs in: {', '.join(differing)}; run the earlier "
            "command again to resume it, or add overwrite=True to start over"
        )
    for part in task.folder.glob("*.part"):
        part.unlink()
    needs_types = task.format.kind == "parquet" and task.source.kind == "jsonl"
    n_texts, types = 0, dict[str, str]()
    with progress("Checking the input") as advance:
        for n_texts, row in enumerate(task.source.rows(), start=1):
            for name, value in zip(task.source.keep, row.kept, strict=True) if needs_types else ():
                types[name] = _common_type(types.get(name), value)
            if n_texts % CHUNK == 0:
                advance(CHUNK)
    if not n_texts:
        raise DataError(f"{task.source.path}: is empty; give a file with a row for each text")
    state = {"request": request, "texts": n_texts, "types": types}
    with staged_file(path) as staged:
        staged.write_text(json.dumps(state), encoding="utf8")
    return n_texts, types


def _common_type(known: str | None, value: Any) -> str:
    """Return the Arrow type that holds both ``value`` and earlier values of type ``known``."""
    if value is None:
        return known or "null"
    kind = {bool: "bool", int: "int64", float: "double"}.get(type(value), "string")
    if kind == "int64" and not -_INT64 <= value < _INT64:
        kind = "string"
    if known in (None, "null", kind):
        return kind
    return "double" if {known, kind} == {"int64", "double"} else "string"


def _arrow_types(task: FileTask, types: dict[str, str]) -> dict[str, Any]:
    if task.format.kind != "parquet":
        return {}
    import pyarrow as pa

    names = {"bool": pa.bool_(), "int64": pa.int64(), "double": pa.float64()}
    arrow = {name: names.get(kind, pa.large_string()) for name, kind in types.items()}
    return arrow | task.source.arrow_types()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes. Afterwards, remove it if it has no chunks."""
    folder.mkdir(exist_ok=True)
    try:
        with FileLock(folder / "lock", timeout=0):
            try:
                yield
            finally:
                if not any(folder.glob("*.part")):
                    shutil.rmtree(folder, ignore_errors=True)
    except Timeout:
        raise DataError(
            f"{folder}: another process is writing this output; wait until it has finished, or "
            "choose another output file"
        ) from None
