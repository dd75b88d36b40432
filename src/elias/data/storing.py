"""Writing a corpus to a folder a few rows at a time, and opening such a folder memory-mapped."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from elias.data.corpus import Corpus, Split
from elias.data.disk import (
    INDICES,
    INDPTR,
    OFFSETS,
    TEXTS,
    VALUES,
    DiskTexts,
    index_type,
    mapped,
    read_labels,
)
from elias.data.formats.matrices import from_lists
from elias.data.formats.options import Reading
from elias.data.formats.sources import mend
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

DESCRIPTION = "corpus.json"
NAMES = "names.json"
_CODES, _WEIGHTS = "codes.spool", "weights.spool"
_FORMAT = 1
_ROWS = 1 << 16
_WIDENED = 1 << 20


class SplitWriter:
    """Takes the rows of one split; `finish` puts its labels into canonical form."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.n_mended = 0
        self._files: dict[str, IO[bytes]] = {}
        self._digest = hashlib.sha256()
        self._sizes: list[NDArray[np.int32]] = []
        self._counts: list[NDArray[np.int32]] = []

    def __len__(self) -> int:
        """Return how many rows there are."""
        return sum(map(len, self._sizes))

    @property
    def n_entries(self) -> int:
        """Return how many labels the rows have, repeats included."""
        return sum(int(counts.sum()) for counts in self._counts)

    def add(
        self,
        texts: Sequence[str],
        counts: NDArray[np.int64],
        codes: NDArray[np.int64],
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        """Add rows: their texts, how many labels each has, and all their labels.

        Args:
            texts: NULs and lone surrogates are mended.
            counts: (rows,) labels of each row.
            codes: numbers that stand for the labels until `finish` is told which are which.
            weights: relevance; in all calls or in none.
        """
        whole, changed = mend(texts)
        self.n_mended += changed
        encoded = [text.encode("utf-8") for text in whole]
        sizes = np.fromiter(map(len, encoded), np.int32, len(encoded))
        joined = b"".join(encoded)
        self._digest.update(sizes.tobytes())
        self._digest.update(joined)
        self._sizes.append(sizes)
        self._counts.append(counts.astype(np.int32))
        self._write(TEXTS, joined)
        self._write(_CODES, codes.astype("<i4").tobytes())
        if weights is not None:
            self._write(_WEIGHTS, weights.astype("<f4").tobytes())

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
        weighted = _WEIGHTS in self._files
        self.close()
        counts = np.concatenate([np.zeros(0, np.int32), *self._counts])
        indptr = self._write_entries(counts, new_ids, n_labels, weighted=weighted)
        (self.folder / INDPTR).write_bytes(indptr.tobytes())
        sizes = np.concatenate([np.zeros(1, np.int32), *self._sizes])
        (self.folder / OFFSETS).write_bytes(np.cumsum(sizes, dtype="<i8").tobytes())
        for name in (_CODES, _WEIGHTS):
            (self.folder / name).unlink(missing_ok=True)
        return {
            "points": len(counts),
            "entries": int(indptr[-1]),
            "digest": self._digest.hexdigest(),
        }

    def _write_entries(
        self,
        counts: NDArray[np.int32],
        new_ids: NDArray[np.int64] | None,
        n_labels: int,
        *,
        weighted: bool,
    ) -> NDArray[Any]:
        """Write the ids and values of all rows, and return where each row begins."""
        bounds = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        codes = mapped(self.folder / _CODES, "<i4")
        weights = mapped(self.folder / _WEIGHTS, "<f4") if weighted else None
        lengths: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        wide = self.folder / "wide.spool"
        with wide.open("wb") as indices, (self.folder / VALUES).open("wb") as values:
            for start in range(0, len(counts), _ROWS):
                part = counts[start : start + _ROWS].astype(np.int64)
                entries = slice(bounds[start], bounds[start + len(part)])
                ids = codes[entries].astype(np.int64)
                ids = ids if new_ids is None else new_ids[ids]
                own = None if weights is None else np.array(weights[entries])
                matrix = from_lists(part, ids, n_labels, own)
                matrix.eliminate_zeros()
                indices.write(matrix.indices.astype("<i4").tobytes())
                values.write(matrix.data.astype("<f4").tobytes())
                lengths.append(np.diff(matrix.indptr).astype(np.int64))
        indptr = np.cumsum(np.concatenate(lengths))
        # SciPy wants one type for both arrays: the wider one, where there are so many entries
        kind = index_type(int(indptr[-1]), n_labels)
        if kind == "<i4":
            wide.rename(self.folder / INDICES)
        else:
            _widen(wide, self.folder / INDICES)
        return indptr.astype(kind)


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
            source=source,
            format=described["format"],
            notes=described["notes"],
            **splits,  # type: ignore[arg-type]  # its keys are the names of splits
        )
        return Reading(corpus, has_splits=bool(described["has_splits"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder}: is not a whole stored corpus ({error})") from error


def _open_split(folder: Path, about: dict[str, Any], n_labels: int) -> Split:
    texts = DiskTexts(folder, about["digest"])
    if len(texts) != about["points"]:
        raise DataError(f"{folder}: has {len(texts)} texts where {about['points']} are told of")
    labels = read_labels(folder, about["points"], about["entries"], n_labels)
    filters = None
    if (folder / "filters.npy").exists():
        filters = np.load(folder / "filters.npy", allow_pickle=False)
    return Split(labels=labels, texts=texts, filters=filters)
