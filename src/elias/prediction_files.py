"""Files of predictions, ours or another tool's, recognised by content."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from elias.bounded import load_sparse, unpacked
from elias.errors import DataError
from elias.predictions import Entries, Predictions, from_entries

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
            with unpacked(io.BytesIO(content)) as stream:
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
