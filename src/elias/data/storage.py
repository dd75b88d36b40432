"""Writing a corpus to a folder a few rows at a time, and opening such a folder memory-mapped."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from elias.data.corpus import Corpus, Split
from elias.data.mapped import (
    FEATURES,
    INDICES,
    INDPTR,
    OFFSETS,
    TEXTS,
    VALUES,
    DiskTexts,
    index_type,
    mapped,
    read_csr,
)
from elias.data.readers.base import Reading
from elias.data.readers.files import mend
from elias.data.readers.npz import from_lists
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix


DESCRIPTION = "corpus.json"
NAMES = "names.json"
LABELS = "labels"
"""The folder of the labels' own features."""
_CODES, _WEIGHTS, _WIDE = "codes.spool", "weights.spool", "{}wide.spool"
_FORMAT = 1
_ROWS = 1 << 16
_WIDENED = 1 << 20


class MatrixWriter:
    """Writes a CSR matrix a few rows at a time."""

    def __init__(self, folder: Path, n_columns: int, prefix: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._prefix = prefix
        self._n_columns = n_columns
        self._lengths: list[NDArray[np.int32]] = []
        self._indices = (folder / _WIDE.format(prefix)).open("wb")
        self._values = (folder / f"{prefix}{VALUES}").open("wb")

    def append(self, rows: csr_matrix) -> None:
        """Add rows in canonical form."""
        self._indices.write(rows.indices.astype("<i4").data)
        self._values.write(rows.data.astype("<f4").data)
        self._lengths.append(np.diff(rows.indptr).astype(np.int32))

    def close(self) -> None:
        """Close the files."""
        self._indices.close()
        self._values.close()

    def finish(self) -> dict[str, int]:
        """Write where each row begins, and return the sizes."""
        self.close()
        lengths = np.concatenate([np.zeros(1, np.int32), *self._lengths])
        indptr = np.cumsum(lengths, dtype=np.int64)
        # SciPy wants one type for both arrays: the wider one, where there are so many entries
        kind = index_type(int(indptr[-1]), self._n_columns)
        wide, target = (
            self._folder / name for name in (_WIDE.format(self._prefix), f"{self._prefix}{INDICES}")
        )
        if kind == "<i4":
            wide.rename(target)
        else:
            _widen(wide, target)
        (self._folder / f"{self._prefix}{INDPTR}").write_bytes(indptr.astype(kind).data)
        return {
            "rows": len(indptr) - 1,
            "columns": self._n_columns,
            "entries": int(indptr[-1]),
        }


def store_matrix(parts: Iterable[csr_matrix], folder: Path, prefix: str = "") -> dict[str, int]:
    """Write a matrix that comes a few rows at a time, and return its sizes."""
    writer = None
    try:
        for rows in parts:
            if writer is None:
                writer = MatrixWriter(folder, rows.shape[1], prefix)
            writer.append(rows)
    finally:
        if writer is not None:
            writer.close()
    assert writer is not None, "a reader refuses a matrix without rows"
    return writer.finish()


class SplitWriter:
    """Takes the rows of one split; `finish` puts its labels into canonical form."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.n_mended = 0
        self.weighted = True
        """Whether weights that were given count."""
        self._files: dict[str, IO[bytes]] = {}
        self._digest = hashlib.sha256()
        self._sizes: list[NDArray[np.int32]] = []
        self._counts: list[NDArray[np.int32]] = []

    def __len__(self) -> int:
        """Return how many rows there are."""
        return sum(map(len, self._counts))

    @property
    def n_entries(self) -> int:
        """Return how many labels the rows have, repeats included."""
        return sum(int(counts.sum()) for counts in self._counts)

    def add(
        self,
        texts: Sequence[str] | None,
        counts: NDArray[np.int64],
        codes: NDArray[np.int64],
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        """Add rows: their texts, how many labels each has, and all their labels.

        Args:
            texts: NULs and lone surrogates are mended; None where there are features alone, in all
                calls or in none.
            counts: (rows,) labels of each row.
            codes: numbers that stand for the labels until `finish` is told which are which.
            weights: relevance; in all calls or in none.
        """
        if texts is not None:
            self._add_texts(texts)
        self._counts.append(counts.astype(np.int32))
        self._write(_CODES, codes.astype("<i4").tobytes())
        if weights is not None:
            self._write(_WEIGHTS, weights.astype("<f4").tobytes())

    def _add_texts(self, texts: Sequence[str]) -> None:
        whole, changed = mend(texts)
        self.n_mended += changed
        encoded = [text.encode("utf-8") for text in whole]
        sizes = np.fromiter(map(len, encoded), np.int32, len(encoded))
        joined = b"".join(encoded)
        self._digest.update(sizes.tobytes())
        self._digest.update(joined)
        self._sizes.append(sizes)
        self._write(TEXTS, joined)

    def _write(self, name: str, content: bytes) -> None:
        if name not in self._files:
            self._files[name] = (self.folder / name).open("wb")
        self._files[name].write(content)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def finish(self, new_ids: NDArray[np.int64] | None, n_labels: int) -> dict[str, Any]:
        """Write the labels, ``new_ids[code]`` each, sorted and once; return what describes all."""
        weighted = _WEIGHTS in self._files and self.weighted
        self.close()
        counts = np.concatenate([np.zeros(0, np.int32), *self._counts])
        sizes = store_matrix(
            self._entries(counts, new_ids, n_labels, weighted=weighted), self.folder
        )
        for name in (_CODES, _WEIGHTS):
            (self.folder / name).unlink(missing_ok=True)
        if self._sizes:
            lengths = np.concatenate([np.zeros(1, np.int32), *self._sizes])
            (self.folder / OFFSETS).write_bytes(np.cumsum(lengths, dtype="<i8").data)
        return {
            "points": len(counts),
            "entries": sizes["entries"],
            "texts": bool(self._sizes),
            "digest": self._digest.hexdigest(),
        }

    def _entries(
        self,
        counts: NDArray[np.int32],
        new_ids: NDArray[np.int64] | None,
        n_labels: int,
        *,
        weighted: bool,
    ) -> Iterator[csr_matrix]:
        """Yield the labels of all rows."""
        bounds = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        codes = mapped(self.folder / _CODES, "<i4")
        weights = mapped(self.folder / _WEIGHTS, "<f4") if weighted else None
        for start in range(0, len(counts), _ROWS):
            part = counts[start : start + _ROWS].astype(np.int64)
            entries = slice(bounds[start], bounds[start + len(part)])
            ids = codes[entries].astype(np.int64)
            ids = ids if new_ids is None else new_ids[ids]
            own = None if weights is None else np.array(weights[entries])
            matrix = from_lists(part, ids, n_labels, own)
            matrix.eliminate_zeros()
            yield matrix


def _widen(source: Path, target: Path) -> None:
    narrow = mapped(source, "<i4")
    with target.open("wb") as out:
        for start in range(0, len(narrow), _WIDENED):
            out.write(narrow[start : start + _WIDENED].astype("<i8").tobytes())
    source.unlink()


def write_description(folder: Path, description: dict[str, Any], names: Sequence[str]) -> None:
    """Write what a corpus is beside its splits; last, so that it is there if all is."""
    (folder / NAMES).write_text(json.dumps(list(names), ensure_ascii=False), encoding="utf-8")
    described = {"format_version": _FORMAT, **description}
    (folder / DESCRIPTION).write_text(json.dumps(described, indent=2), encoding="utf-8")


def open_corpus(folder: Path, source: Path) -> Reading:
    """Return the corpus that was stored in a folder, memory-mapped.

    Raises:
        DataError: If it is not there, or not whole.
    """
    try:
        described = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        names = json.loads((folder / NAMES).read_text(encoding="utf-8"))
        if described["format_version"] != _FORMAT:
            raise DataError(f"{folder}: is of another version")
        splits = {
            name: _open_split(folder / name, about, len(names))
            for name, about in described["splits"].items()
        }
        corpus = Corpus(
            label_names=names,
            label_features=_open_matrix(folder / LABELS, described.get("label_features"), FEATURES),
            source=source,
            format=described["format"],
            notes=described["notes"],
            **splits,  # type: ignore[arg-type]  # its keys are the names of splits
        )
        return Reading(corpus, has_splits=bool(described["has_splits"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder}: is not a whole stored corpus ({error})") from error


def _open_split(folder: Path, about: dict[str, Any], n_labels: int) -> Split:
    texts = DiskTexts(folder, about["digest"]) if about.get("texts", True) else None
    if texts is not None and len(texts) != about["points"]:
        raise DataError(f"{folder}: has {len(texts)} texts where {about['points']} are told of")
    filters = None
    if (folder / "filters.npy").exists():
        filters = np.load(folder / "filters.npy", allow_pickle=False)
    return Split(
        labels=read_csr(folder, (about["points"], n_labels), about["entries"]),
        texts=texts,
        features=_open_matrix(folder, about.get("features"), FEATURES),
        filters=filters,
    )


def _open_matrix(folder: Path, about: dict[str, int] | None, prefix: str) -> csr_matrix | None:
    if about is None:
        return None
    return read_csr(folder, (about["rows"], about["columns"]), about["entries"], prefix)
