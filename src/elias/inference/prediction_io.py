"""Read and write files of predictions.

Each chunk of predictions is encoded separately, and the file is the concatenation of its chunks.
Writing therefore needs memory for one chunk only, and can be resumed after the last chunk.
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

from elias.data.readers.files import open_gzip
from elias.data.readers.npz import NPZ_ERRORS, load_sparse
from elias.errors import DataError, did_you_mean
from elias.predictions import Predictions, from_entries

FORMATS = ("jsonl", "csv", "tsv", "parquet", "txt")
"""Formats of predictions; ``txt`` has lines of ``id:score id:score``."""
LABELS, IDS, SCORES, PROBABILITIES = "labels", "label_ids", "scores", "probabilities"
"""Columns of a table of predictions; each cell is a list, best first."""

_SUFFIXES = {".ndjson": "jsonl", ".json": "jsonl", ".text": "txt", ".pq": "parquet"}
_DELIMITER = {"csv": ",", "tsv": "\t"}
_Row = list[tuple[int, float]]
"""Label ids and scores of one point."""


def read_predictions(
    path: str | Path, n_labels: int, label_names: Sequence[str] | None = None
) -> Predictions:
    """Read a file of predictions, written by any tool, with one point per line or row.

    The format is detected: JSON lines as ``elias predict`` writes them, a scipy CSR matrix (.npz),
    or text lines ``id:score id:score`` (after an optional line ``N L``). Each may be gzipped.
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
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not text.strip():
        raise DataError(f"{path}: empty; expected one line of predictions for each point")
    lines = text.removesuffix("\n").split("\n")
    read_rows = _json_rows if text.lstrip().startswith("{") else _text_rows
    rows: list[int] = []
    pairs: _Row = []
    n_points = 0
    for where, row in read_rows(lines, path):
        row_ids = [label_id for label_id, _ in row]
        for label_id, score in row:
            if not 0 <= label_id < n_labels:
                raise DataError(f"{where}: label id {label_id!r:.40} is outside 0..{n_labels - 1}")
            if np.isnan(score):
                raise DataError(f"{where}: the score of label {label_id} is not a number")
        if len(set(row_ids)) < len(row_ids):
            twice = next(i for i in row_ids if row_ids.count(i) > 1)
            raise DataError(f"{where}: label {twice} occurs more than once")
        rows.extend([n_points] * len(row))
        pairs.extend(row)
        n_points += 1
    ids = np.array([label_id for label_id, _ in pairs], dtype=np.int64)
    scores = np.array([score for _, score in pairs], dtype=np.float32)
    shape = (n_points, n_labels)
    return from_entries(np.array(rows, dtype=np.int64), ids, scores, shape, None, label_names)


def _read_npz(
    content: bytes, path: Path, n_labels: int, label_names: Sequence[str] | None
) -> Predictions:
    try:
        matrix = load_sparse(io.BytesIO(content))
    except (OSError, *NPZ_ERRORS) as error:
        raise DataError(f"{path}: not a scipy sparse matrix: {error}") from error
    if matrix.shape[1] != n_labels:
        raise DataError(f"{path}: {matrix.shape[1]} columns, but the corpus has {n_labels} labels")
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
        raise DataError(f"{path}:1: says {header[0]} points, but {len(lines) - 1} lines follow")
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
        """Return the format of a file: ``kind``, or by default the format of its extension.

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
            raise DataError(f"{path}: Parquet is packed already; remove .gz from its name")
        return cls(kind, packed)

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise an error if the format cannot hold one of the kept columns."""
        if self.kind == "txt" and names:
            raise DataError(
                f"--keep {names[0]}: lines of id:score have no columns; write jsonl, csv, tsv or "
                "parquet"
            )
        taken = {LABELS} if self.kind == "jsonl" else {LABELS, IDS, SCORES, PROBABILITIES}
        for name in names:
            if name in taken or names.count(name) > 1:
                reason = "the predictions have this name" if name in taken else "it is given twice"
                raise DataError(f"--keep {name}: {reason}; rename the column in the input")


@dataclass(frozen=True, slots=True)
class PredictionWriter:
    """Encode chunks of predictions, and join the chunks to a file."""

    format: PredictionFormat
    columns: tuple[str, ...] = ()
    """Names of the columns before the predictions."""
    types: Mapping[str, Any] | None = None
    """Arrow types of these columns for Parquet; string by default."""

    def encode(
        self, rows: Sequence[Sequence[Any]], predictions: Predictions, *, first: bool
    ) -> bytes:
        """Return a chunk of the file.

        Args:
            rows: For each text, the cells of the columns before the predictions.
            predictions: The labels of each text.
            first: True for the first chunk, which starts with the header of a CSV or TSV table.
        """
        if self.format.kind == "parquet":
            return self._parquet(rows, predictions)
        if self.format.kind == "jsonl":
            text = "".join(
                json_line(dict(zip(self.columns, row, strict=True)), labels)
                for row, labels in zip(rows, predictions.to_dicts(), strict=True)
            )
        elif self.format.kind == "txt":  # nine digits represent a float32 exactly
            text = "".join(
                " ".join(f"{i}:{s:.9g}" for i, s in zip(row.ids, row.scores, strict=True)) + "\n"
                for row in predictions
            )
        else:
            text = self._delimited(rows, predictions, first=first)
        data = text.encode("utf8", "replace")
        # each chunk is a gzip member; without a date the same predictions give the same bytes
        return gzip.compress(data, mtime=0) if self.format.packed else data

    def join(self, parts: Iterable[Path], target: IO[bytes]) -> None:
        """Concatenate files of encoded chunks to ``target``."""
        if self.format.kind != "parquet":
            for part in parts:
                with part.open("rb") as stream:
                    shutil.copyfileobj(stream, target, 1 << 20)
            return
        from pyarrow.parquet import ParquetFile, ParquetWriter

        writer = None
        for part in parts:  # each becomes a row group
            with ParquetFile(part) as file:
                writer = writer or ParquetWriter(target, file.schema_arrow)
                writer.write_table(file.read())
        if writer is not None:
            writer.close()

    def _delimited(
        self, rows: Sequence[Sequence[Any]], predictions: Predictions, *, first: bool
    ) -> str:
        lists = _columns(predictions)
        text = io.StringIO(newline="")
        # all cells quoted: before Python 3.13 a lone carriage return would not be quoted
        writer = csv.writer(
            text,
            delimiter=_DELIMITER[self.format.kind],
            quoting=csv.QUOTE_ALL,
            lineterminator="\n",
        )
        if first:
            writer.writerow([*self.columns, *lists])
        writer.writerows(
            [*map(as_cell, row), *(json.dumps(cell, ensure_ascii=False) for cell in cells)]
            for row, cells in zip(rows, zip(*lists.values(), strict=True), strict=True)
        )
        return text.getvalue()

    def _parquet(self, rows: Sequence[Sequence[Any]], predictions: Predictions) -> bytes:
        import pyarrow as pa
        from pyarrow.parquet import write_table

        arrays = {}
        for index, name in enumerate(self.columns):
            kind = (self.types or {}).get(name, pa.large_string())
            cells = [row[index] for row in rows]
            if pa.types.is_large_string(kind) or pa.types.is_string(kind):
                cells = [None if cell is None else as_cell(cell) for cell in cells]
            arrays[name] = pa.array(cells, type=kind)
        items = {LABELS: pa.large_string(), IDS: pa.int64()}
        for name, lists in _columns(predictions).items():
            arrays[name] = pa.array(lists, type=pa.large_list(items.get(name, pa.float32())))
        out = io.BytesIO()
        write_table(pa.table(arrays), out)
        return out.getvalue()


def json_line(columns: Mapping[str, Any], labels: Sequence[Mapping[str, Any]]) -> str:
    """Return one line of JSON with the kept columns and the labels of a text."""
    return json.dumps({**columns, LABELS: labels}, ensure_ascii=False, default=str) + "\n"


def as_cell(value: Any) -> str:
    """Return a value as a cell of a table.

    >>> [as_cell(value) for value in ("a", None, 7, True, ["x"])]
    ['a', '', '7', 'true', '["x"]']
    """
    if value is None:
        return ""
    if isinstance(value, bool | list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _columns(predictions: Predictions) -> dict[str, list[list[Any]]]:
    """Return the columns of a table; each cell is the list of values of one text, best first."""
    rankings = list(predictions)
    columns: dict[str, list[list[Any]]] = {
        LABELS: [ranking.labels for ranking in rankings],
        IDS: [ranking.ids.tolist() for ranking in rankings],
        SCORES: [ranking.scores.tolist() for ranking in rankings],
    }
    if predictions.probabilities is not None:
        columns[PROBABILITIES] = [
            [] if ranking.probabilities is None else ranking.probabilities.tolist()
            for ranking in rankings
        ]
    return columns
