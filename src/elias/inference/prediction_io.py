"""Read and write files of predictions.

A chunk is encoded by itself, and chunks one after the other are the file. So a file of any size
is written with one chunk in memory, and one that was interrupted goes on after its last chunk.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from elias.data.readers.files import open_gzip
from elias.data.readers.npz import load_sparse
from elias.errors import DataError, did_you_mean
from elias.predictions import Entries, Predictions, from_entries

if TYPE_CHECKING:
    from collections.abc import Iterator


_BROKEN = (
    *(ValueError, LookupError, TypeError, EOFError, OSError, OverflowError, MemoryError),
    *(NotImplementedError, RuntimeError, SyntaxError, zipfile.BadZipFile, zlib.error),
)


def read_predictions(
    path: str | Path, n_labels: int, label_names: Sequence[str] | None = None
) -> Predictions:
    """Read a file of predictions, ours or another tool's, one point per line or row.

    Recognised by content, gzipped or not: JSON lines as ``elias predict`` writes them, a scipy
    CSR matrix (.npz), and text lines ``id:score id:score`` (after an optional ``N L`` line).
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            with open_gzip(io.BytesIO(content)) as stream:
                content = stream.read()
        if content[:2] == b"PK":
            return _read_npz(content, str(path), n_labels, label_names)
        text = content.decode("utf8")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not text.strip():
        raise DataError(f"{path}: empty; expected one line of predictions for each point")
    lines = _json_lines if text.lstrip().startswith("{") else _text_lines
    rows: list[int] = []
    pairs: list[tuple[int, float]] = []
    n_points = 0
    for place, found in lines(text.removesuffix("\n").split("\n"), str(path)):
        _check_line(found, n_labels, place)
        rows.extend([n_points] * len(found))
        pairs.extend(found)
        n_points += 1
    ids = np.array([label_id for label_id, _ in pairs], dtype=np.int64)
    scores = np.array([score for _, score in pairs], dtype=np.float32)
    entries = Entries(np.array(rows, dtype=np.int64), ids, scores)
    return from_entries(entries, (n_points, n_labels), None, label_names)


def _read_npz(
    content: bytes, path: str, n_labels: int, label_names: Sequence[str] | None
) -> Predictions:
    try:
        matrix = load_sparse(io.BytesIO(content))
    except _BROKEN as error:
        raise DataError(f"{path}: not a scipy sparse matrix: {error}") from error
    if matrix.shape[1] != n_labels:
        raise DataError(f"{path}: {matrix.shape[1]} columns, but the corpus has {n_labels} labels")
    try:
        return Predictions.from_csr(matrix, label_names=label_names)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _json_lines(lines: Iterable[str], path: str) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    for number, line in enumerate(lines, start=1):
        place = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield place, [(int(label["id"]), float(label["score"])) for label in row["labels"]]
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise DataError(
                f'{place}: expected {{"labels": [{{"id": 3, "score": 0.5}}, ...]}}: {error!r:.200}'
            ) from error


def _text_lines(lines: Sequence[str], path: str) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    header = lines[0].split()
    has_header = len(header) >= 2 and all(part.isdecimal() for part in header)
    if has_header and int(header[0]) != len(lines) - 1:
        raise DataError(f"{path}:1: says {header[0]} points, but {len(lines) - 1} lines follow")
    for number, line in enumerate(lines[has_header:], start=1 + has_header):
        place = f"{path}:{number}"
        found = []
        for pair in line.split():
            label_id, _, score = pair.partition(":")
            try:
                found.append((int(label_id), float(score)))
            except ValueError as error:
                raise DataError(f"{place}: expected id:score, not {pair!r:.60}") from error
        yield place, found


def _check_line(found: Sequence[tuple[int, float]], n_labels: int, place: str) -> None:
    ids = [label_id for label_id, _ in found]
    for label_id, score in found:
        if not 0 <= label_id < n_labels:
            raise DataError(f"{place}: label id {label_id!r:.40} is outside 0..{n_labels - 1}")
        if np.isnan(score):
            raise DataError(f"{place}: the score of label {label_id} is not a number")
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise DataError(f"{place}: label {twice} stands there more than once")


FORMATS = ("jsonl", "csv", "tsv", "parquet", "txt")
"""What predictions can be written as; ``txt`` is lines of ``id:score id:score``."""
LABELS, IDS, SCORES, PROBABILITIES = "labels", "label_ids", "scores", "probabilities"
"""The columns of a table of predictions: each cell a list, best first."""

_SUFFIXES = {".ndjson": "jsonl", ".json": "jsonl", ".text": "txt", ".pq": "parquet"}
_DELIMITER = {"csv": ",", "tsv": "\t"}
_JSON_COLUMNS = {LABELS}
_ALL_COLUMNS = {LABELS, IDS, SCORES, PROBABILITIES}


@dataclass(frozen=True, slots=True)
class PredictionFormat:
    """The form of a file of predictions."""

    kind: str
    """One of `FORMATS`."""
    packed: bool = False
    """Whether it is gzipped."""

    @classmethod
    def of(cls, path: Path, kind: str | None = None) -> PredictionFormat:
        """Return the form that a file's name, or ``kind``, asks for.

        >>> PredictionFormat.of(Path("labels.csv.gz"))
        PredictionFormat(kind='csv', packed=True)
        """
        packed = path.name.lower().endswith(".gz")
        suffix = Path(path.name[: -len(".gz")] if packed else path.name).suffix.lower()
        if kind is None:
            kind = _SUFFIXES.get(suffix, suffix.removeprefix("."))
            if kind not in FORMATS:
                known = ", ".join(f".{name}" for name in FORMATS)
                raise DataError(
                    f"{path}: the name does not say what to write; end it in one of {known} "
                    "(.gz after it packs text), or choose with --format"
                )
        if kind not in FORMATS:
            known = ", ".join(FORMATS)
            raise DataError(f"--format {kind!r}: not one of {known}{did_you_mean(kind, FORMATS)}")
        if packed and kind == "parquet":
            raise DataError(f"{path}: Parquet is packed already; leave .gz off its name")
        return cls(kind, packed)

    def check_kept(self, names: Sequence[str]) -> None:
        """Refuse columns to keep that the form has no place for."""
        if self.kind == "txt" and names:
            raise DataError(
                f"--keep {names[0]}: lines of id:score have no columns; write jsonl, csv, tsv or "
                "parquet"
            )
        taken = _JSON_COLUMNS if self.kind == "jsonl" else _ALL_COLUMNS
        for name in names:
            if name in taken or names.count(name) > 1:
                why = "the predictions are called so" if name in taken else "it is kept twice"
                raise DataError(f"--keep {name}: {why}; rename the column in the input")


@dataclass(frozen=True, slots=True)
class PredictionWriter:
    """Encodes chunks of predictions, and joins them to a file."""

    format: PredictionFormat
    kept: tuple[str, ...] = ()
    """Names of the columns that come before the predictions."""
    types: Mapping[str, Any] | None = None
    """Their Arrow types, for Parquet; strings where none is given."""

    def encode(
        self, rows: Sequence[Sequence[Any]], predictions: Predictions, *, first: bool
    ) -> bytes:
        """Return a chunk as it stands in the file: the kept cells and labels of each text.

        The ``first`` chunk of a table begins with the names of its columns.
        """
        if self.format.kind == "parquet":
            return self._parquet(rows, predictions)
        if self.format.kind == "jsonl":
            text = self._json_lines(rows, predictions)
        elif self.format.kind == "txt":
            text = _id_lines(predictions)
        else:
            text = self._delimited(rows, predictions, first=first)
        data = text.encode("utf8", "replace")
        # each chunk a member of its own; without a date the same predictions give the same bytes
        return gzip.compress(data, mtime=0) if self.format.packed else data

    def join(self, parts: Iterable[Path], target: IO[bytes]) -> None:
        """Write encoded chunks, each in a file, one after the other."""
        if self.format.kind == "parquet":
            _join_parquet(parts, target)
            return
        for part in parts:
            with part.open("rb") as stream:
                shutil.copyfileobj(stream, target, 1 << 20)

    def _json_lines(self, rows: Sequence[Sequence[Any]], predictions: Predictions) -> str:
        return "".join(
            json_line(dict(zip(self.kept, row, strict=True)), found)
            for row, found in zip(rows, predictions.to_dicts(), strict=True)
        )

    def _delimited(
        self, rows: Sequence[Sequence[Any]], predictions: Predictions, *, first: bool
    ) -> str:
        columns = _columns(predictions)
        text = io.StringIO(newline="")
        # all cells quoted: before Python 3.13 a lone carriage return would go out bare
        writer = csv.writer(
            text,
            delimiter=_DELIMITER[self.format.kind],
            quoting=csv.QUOTE_ALL,
            lineterminator="\n",
        )
        if first:
            writer.writerow([*self.kept, *columns])
        writer.writerows(
            [*map(as_cell, row), *(json.dumps(cell, ensure_ascii=False) for cell in found)]
            for row, found in zip(rows, zip(*columns.values(), strict=True), strict=True)
        )
        return text.getvalue()

    def _parquet(self, rows: Sequence[Sequence[Any]], predictions: Predictions) -> bytes:
        import pyarrow as pa
        from pyarrow.parquet import write_table

        types = dict(self.types or {})
        arrays = {}
        for place, name in enumerate(self.kept):
            wanted = types.get(name, pa.large_string())
            cells = [row[place] for row in rows]
            if pa.types.is_large_string(wanted) or pa.types.is_string(wanted):
                cells = [None if cell is None else as_cell(cell) for cell in cells]
            arrays[name] = pa.array(cells, type=wanted)
        inner = {LABELS: pa.large_string(), IDS: pa.int64()}
        for name, lists in _columns(predictions).items():
            arrays[name] = pa.array(lists, type=pa.large_list(inner.get(name, pa.float32())))
        out = io.BytesIO()
        write_table(pa.table(arrays), out)
        return out.getvalue()


def _id_lines(predictions: Predictions) -> str:
    """Return a line of ``id:score id:score`` for each text; nine digits are all a score has."""
    return "".join(
        " ".join(f"{i}:{score:.9g}" for i, score in zip(found.ids, found.scores, strict=True))
        + "\n"
        for found in predictions
    )


def json_line(kept: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> str:
    """Return one line of JSON for a text's kept cells and labels."""
    return json.dumps({**kept, LABELS: found}, ensure_ascii=False, default=str) + "\n"


def as_cell(value: Any) -> str:
    """Return a value as a table's cell.

    >>> [as_cell(value) for value in ("a", None, 7, True, ["x"])]
    ['a', '', '7', 'true', '["x"]']
    """
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bool | list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _columns(predictions: Predictions) -> dict[str, list[list[Any]]]:
    """Return the lists of each text, best first, by column."""
    rankings = list(predictions)
    columns: dict[str, list[list[Any]]] = {
        LABELS: [found.labels for found in rankings],
        IDS: [found.ids.tolist() for found in rankings],
        SCORES: [found.scores.tolist() for found in rankings],
    }
    if predictions.probabilities is not None:
        columns[PROBABILITIES] = [
            [] if found.probabilities is None else found.probabilities.tolist()
            for found in rankings
        ]
    return columns


def _join_parquet(parts: Iterable[Path], target: IO[bytes]) -> None:
    """Write the rows of Parquet files as one, each file's a row group."""
    from pyarrow.parquet import ParquetFile, ParquetWriter

    writer = None
    for part in parts:
        with ParquetFile(part) as file:
            writer = writer or ParquetWriter(target, file.schema_arrow)
            writer.write_table(file.read())
    if writer is not None:
        writer.close()
