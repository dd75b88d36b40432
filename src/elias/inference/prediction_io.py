"""Read and write files of predictions.

Files are written in chunks. Each chunk is encoded separately, and the file is the concatenation of
its chunks. Writing therefore needs memory for only one chunk, and can resume after the last chunk.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from elias.data.readers.files import open_gzip, suffix_of
from elias.data.readers.xmc import NPZ_ERRORS, load_sparse
from elias.errors import DataError, did_you_mean, quoted
from elias.predictions import Predictions, from_entries

FORMATS = ("jsonl", "csv", "tsv", "parquet", "txt")
"""File formats for predictions. A line of ``txt`` is ``id:score id:score …``."""
LABELS, IDS, SCORES, PROBABILITIES = "labels", "label_ids", "scores", "probabilities"
URIS = "uris"
"""Columns of a table of predictions. Each cell is a list, best label first."""

_SUFFIXES = {f".{name}": name for name in FORMATS} | {
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".text": "txt",
    ".pq": "parquet",
}
_JSON = json.JSONEncoder(
    ensure_ascii=False, default=str
)  # json.dumps would create an encoder for each call
_DELIMITER = {"csv": ",", "tsv": "\t"}
_Row = list[tuple[int, float]]
"""(label id, score) pairs of one point."""


def read_predictions(
    path: str | Path, n_labels: int, label_names: Sequence[str] | None = None
) -> Predictions:
    """Read predictions of ELIAS or another tool from a file with one line or row per point.

    The format is detected from the content: JSON lines as written by ``elias predict``, a scipy CSR
    matrix (.npz), or lines of ``id:score id:score`` after an optional header ``N L``. The file may
    be gzipped.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            with open_gzip(io.BytesIO(content)) as stream:
                content = stream.read()
        if content[:2] == b"PK":
            return _read_npz(content, path, n_labels, label_names)
        text = content.decode("utf8")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({quoted(error)}); check the file") from error
    if not text.strip():
        raise DataError(f"{path}: empty; expected one line of predictions for each point")
    lines = text.removesuffix("\n").split("\n")
    read_rows = _json_rows if text.lstrip().startswith("{") else _text_rows
    entries: list[tuple[int, int, float]] = []
    point = -1
    for point, (where, row) in enumerate(read_rows(lines, path)):
        ids = [label_id for label_id, _ in row]
        for label_id, score in row:
            if not 0 <= label_id < n_labels:
                raise DataError(
                    f"{where}: label id {label_id!r:.40} is outside 0..{n_labels - 1}; use the "
                    "label ids of this corpus"
                )
            if np.isnan(score):
                raise DataError(f"{where}: the score of label {label_id} is NaN; give a number")
        if len(set(ids)) < len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise DataError(f"{where}: label {twice} occurs more than once; keep one score")
        entries.extend((point, label_id, score) for label_id, score in row)
    points, label_ids, scores = np.array(entries, dtype=np.float64).reshape(-1, 3).T
    points, label_ids = points.astype(np.int64), label_ids.astype(np.int64)
    return from_entries(points, label_ids, scores, (point + 1, n_labels), None, label_names)


def _read_npz(
    content: bytes, path: Path, n_labels: int, label_names: Sequence[str] | None
) -> Predictions:
    try:
        matrix = load_sparse(io.BytesIO(content))
    except (OSError, *NPZ_ERRORS) as error:
        raise DataError(
            f"{path}: not a scipy sparse matrix ({quoted(error)}); save one with "
            "scipy.sparse.save_npz"
        ) from error
    if matrix.shape[1] != n_labels:
        raise DataError(
            f"{path}: {matrix.shape[1]} columns, but the corpus has {n_labels} labels; give a "
            "column for each label"
        )
    try:
        return Predictions.from_csr(matrix, label_names=label_names)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _json_rows(lines: Sequence[str], path: Path) -> Iterator[tuple[str, _Row]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            labels = json.loads(line)["labels"]
            row = [(int(label["id"]), float(label["score"])) for label in labels]
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise DataError(
                f'{path}:{number}: expected {{"labels": [{{"id": 3, "score": 0.5}}, ...]}}: '
                f"{error!r:.200}"
            ) from error
        yield f"{path}:{number}", row


def _text_rows(lines: Sequence[str], path: Path) -> Iterator[tuple[str, _Row]]:
    header = lines[0].split()
    has_header = len(header) >= 2 and all(part.isdecimal() for part in header)
    if has_header and int(header[0]) != len(lines) - 1:
        raise DataError(
            f"{path}:1: says {header[0]} points, but {len(lines) - 1} lines follow; correct the "
            "first line"
        )
    for number, line in enumerate(lines[has_header:], start=1 + has_header):
        row = []
        for pair in line.split():
            label_id, _, score = pair.partition(":")
            try:
                row.append((int(label_id), float(score)))
            except ValueError as error:
                raise DataError(f"{path}:{number}: expected id:score, not {pair!r:.60}") from error
        yield f"{path}:{number}", row


@dataclass(frozen=True, slots=True)
class PredictionFormat:
    """The format of a file of predictions."""

    kind: str
    """One of `FORMATS`."""
    packed: bool = False
    """True if the file is gzipped."""

    @classmethod
    def of(cls, path: Path, kind: str | None = None) -> PredictionFormat:
        """Return the format ``kind``, or if it is None, the format given by the file extension.

        >>> PredictionFormat.of(Path("labels.csv.gz"))
        PredictionFormat(kind='csv', packed=True)
        """
        packed = path.name.lower().endswith(".gz")
        if kind is None:
            suffix = suffix_of(path)
            if suffix not in _SUFFIXES:
                known = ", ".join(f".{name}" for name in FORMATS)
                raise DataError(
                    f"{path}: the file extension does not name a format; use one of {known} "
                    "(plus .gz to compress a text format), or add --format"
                )
            kind = _SUFFIXES[suffix]
        elif kind not in FORMATS:
            known = ", ".join(FORMATS)
            raise DataError(f"--format {kind!r}: use one of {known}{did_you_mean(kind, FORMATS)}")
        if packed and kind == "parquet":
            raise DataError(f"{path}: Parquet is already compressed; remove .gz from the file name")
        return cls(kind, packed)

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise an error if a column cannot be copied to this format."""
        if self.kind == "txt" and names:
            raise DataError(
                f"--keep {names[0]}: the txt format has no columns; use jsonl, csv, tsv or "
                "parquet instead"
            )
        taken = {LABELS} if self.kind == "jsonl" else {LABELS, IDS, SCORES, PROBABILITIES, URIS}
        for name in names:
            if name in taken:
                problem = "the output uses this name; rename the column in the input"
                raise DataError(f"--keep {name}: {problem}")
            if names.count(name) > 1:
                raise DataError(f"--keep {name}: it is given twice; give it once")

    def encode(
        self,
        columns: Mapping[str, Sequence[Any]],
        predictions: Predictions,
        *,
        first: bool,
        types: Mapping[str, Any],
    ) -> bytes:
        """Return the bytes of a chunk of the file.

        Args:
            columns: The columns to write before the predictions, with one cell per text.
            predictions: The labels of each text.
            first: Whether this is the first chunk, in which CSV and TSV have a header.
            types: Arrow types of the columns in Parquet files. The default is string.
        """
        if self.kind == "txt":  # nine digits represent a float32 exactly
            text = "".join(
                " ".join(f"{i}:{s:.9g}" for i, s in zip(row.ids, row.scores, strict=True)) + "\n"
                for row in predictions
            )
        elif self.kind == "jsonl":
            rows = zip(*columns.values(), strict=True)
            text = "".join(
                json_line(dict(zip(columns, row, strict=True)), labels)
                for row, labels in zip(rows, predictions.to_dicts(), strict=True)
            )
        else:
            rankings = list(predictions)
            table: dict[str, Sequence[Any]] = {
                **columns,
                LABELS: [row.labels for row in rankings],
                IDS: [row.ids.tolist() for row in rankings],
                SCORES: [row.scores.tolist() for row in rankings],
            }
            if predictions.has_uris:
                table[URIS] = [[predictions.uri(i) for i in row] for row in table[IDS]]
            if predictions.probabilities is not None:
                values = (row.probabilities for row in rankings)
                table[PROBABILITIES] = [p.tolist() for p in values if p is not None]
            if self.kind == "parquet":
                return _parquet(table, types)
            stream = io.StringIO(newline="")
            # quote all cells, because Python before 3.13 does not quote a lone carriage return
            writer = csv.writer(
                stream, quoting=csv.QUOTE_ALL, delimiter=_DELIMITER[self.kind], lineterminator="\n"
            )
            if first:
                writer.writerow(table)
            writer.writerows(zip(*(map(as_cell, cells) for cells in table.values()), strict=True))
            text = stream.getvalue()
        data = text.encode("utf8", "replace")
        # each chunk is a gzip member; with mtime=0, equal predictions give equal bytes
        return gzip.compress(data, mtime=0) if self.packed else data

    def join(self, parts: Iterable[Path], target: IO[bytes]) -> None:
        """Write the encoded chunks in ``parts`` to ``target``, one after the other."""
        if self.kind != "parquet":
            for part in parts:
                with part.open("rb") as stream:
                    shutil.copyfileobj(stream, target, 1 << 20)
            return
        from pyarrow.parquet import ParquetFile, ParquetWriter

        writer = None
        for part in parts:  # each chunk becomes a row group
            with ParquetFile(part) as file:
                writer = writer or ParquetWriter(target, file.schema_arrow)
                writer.write_table(file.read())
        if writer is not None:
            writer.close()


def _parquet(table: Mapping[str, Sequence[Any]], types: Mapping[str, Any]) -> bytes:
    import pyarrow as pa
    from pyarrow.parquet import write_table

    items = {LABELS: pa.large_string(), IDS: pa.int64(), SCORES: pa.float32()}
    items |= {PROBABILITIES: pa.float32(), URIS: pa.large_string()}
    types = {**types, **{name: pa.large_list(item) for name, item in items.items()}}
    arrays = {}
    for name, cells in table.items():
        kind = types.get(name, pa.large_string())
        if pa.types.is_large_string(kind) or pa.types.is_string(kind):
            cells = [None if cell is None else as_cell(cell) for cell in cells]
        arrays[name] = pa.array(cells, type=kind)
    out = io.BytesIO()
    write_table(pa.table(arrays), out)
    return out.getvalue()


def json_line(columns: Mapping[str, Any], labels: Sequence[Mapping[str, Any]]) -> str:
    """Return a line of JSON with the kept columns and the labels of a text."""
    return _JSON.encode({**columns, LABELS: labels}) + "\n"


def as_cell(value: Any) -> str:
    """Return a value as the text of a table cell.

    >>> [as_cell(value) for value in ("a", None, 7, True, ["x"])]
    ['a', '', '7', 'true', '["x"]']
    """
    if value is None:
        return ""
    if isinstance(value, bool | list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)
