"""Writing a corpus as one table: text, labels, split.

A table holds texts and labels. Where names alone would not bring the same labels back (they
repeat, are not sorted, or some label has no point), a column ``label_ids`` keeps the ids; a label
that no point has keeps no name. CSV and TSV cells hold the labels joined by ``|`` where that can
be read back, else JSON lists.
"""

from __future__ import annotations

import csv
import io
import json
from itertools import chain, pairwise
from typing import IO, TYPE_CHECKING, Any

from elias.data.formats.columns import IDS, SPLIT, WEIGHTS
from elias.data.formats.labels import detect_separator, order_names, split_cells
from elias.data.formats.matrices import is_binary
from elias.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scipy.sparse import csr_matrix

    from elias.data.corpus import Corpus

_SEPARATOR = "|"
_DELIMITER = {"csv": ",", "tsv": "\t"}


def left_out(corpus: Corpus) -> list[str]:
    """Say what of a corpus a table cannot hold."""
    splits = corpus.splits.values()
    missing = []
    if any(split.features is not None for split in splits):
        missing.append("features")
    if any(split.filters is not None for split in splits):
        missing.append("filter pairs")
    if corpus.label_features is not None:
        missing.append("label features")
    unused = corpus.n_labels - len(_used(corpus))
    if unused:
        missing.append(f"the names of {unused} labels that no point has")
    return missing


def write_table(corpus: Corpus, stream: IO[bytes], kind: str) -> None:
    """Write all splits to a stream as ``jsonl``, ``csv``, ``tsv`` or ``parquet``."""
    columns = _columns(corpus)
    if kind == "jsonl":
        _write_json(columns, stream)
    elif kind == "parquet":
        _write_parquet(columns, stream)
    else:
        _write_delimited(columns, stream, _DELIMITER[kind])


def _columns(corpus: Corpus) -> dict[str, list[Any]]:
    splits = corpus.splits
    texts = [split.texts for split in splits.values()]
    if any(part is None for part in texts):
        raise DataError(
            f"{corpus.source or 'the corpus'}: has features but no texts, and a table needs "
            "texts; write it as xmc, folder or pecos"
        )
    ids = list(chain.from_iterable(_rows(s.labels, s.labels.indices) for s in splits.values()))
    names = corpus.label_names
    columns: dict[str, list[Any]] = {
        "text": list(chain.from_iterable(part or () for part in texts)),
        "labels": [[names[label] for label in row] for row in ids],
    }
    if not _names_suffice(corpus):
        columns[IDS] = ids
    if not all(is_binary(split.labels) for split in splits.values()):
        weights = (_rows(s.labels, s.labels.data) for s in splits.values())
        columns[WEIGHTS] = list(chain.from_iterable(weights))
    columns[SPLIT] = [name for name, split in splits.items() for _ in range(len(split))]
    return columns


def _rows(matrix: csr_matrix, flat: Any) -> list[list[Any]]:
    values = flat.tolist()
    return [values[start:end] for start, end in pairwise(matrix.indptr.tolist())]


def _used(corpus: Corpus) -> set[int]:
    return set(
        chain.from_iterable(split.labels.indices.tolist() for split in corpus.splits.values())
    )


def _names_suffice(corpus: Corpus) -> bool:
    names = list(corpus.label_names)
    distinct = set(names)
    return (
        len(distinct) == len(names) == len(_used(corpus))
        and "" not in distinct
        and order_names(names) == names
    )


def _write_json(columns: dict[str, list[Any]], stream: IO[bytes]) -> None:
    for values in zip(*columns.values(), strict=True):
        row = dict(zip(columns, values, strict=True))
        stream.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8"))


def _write_parquet(columns: dict[str, list[Any]], stream: IO[bytes]) -> None:
    import pyarrow as pa
    from pyarrow.parquet import write_table as write_parquet

    types = {
        "text": pa.large_string(),
        "labels": pa.large_list(pa.large_string()),
        IDS: pa.large_list(pa.int64()),
        WEIGHTS: pa.large_list(pa.float32()),
        SPLIT: pa.string(),
    }
    schema = pa.schema([(name, types[name]) for name in columns])
    write_parquet(pa.table(columns, schema=schema), stream)


def _write_delimited(columns: dict[str, list[Any]], stream: IO[bytes], delimiter: str) -> None:
    plain = IDS not in columns and WEIGHTS not in columns
    cells = {
        name: _join(values, plain=plain) if name in ("labels", IDS, WEIGHTS) else values
        for name, values in columns.items()
    }
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="", write_through=True)
    # All cells quoted: before Python 3.13 a lone carriage return would go out bare.
    writer = csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(cells)
    writer.writerows(zip(*cells.values(), strict=True))
    text.detach()


def _join(lists: Sequence[list[Any]], *, plain: bool) -> list[str]:
    """Return lists as cells: joined where reading them back gives the same lists, else JSON."""
    if plain:
        joined = [_SEPARATOR.join(row) for row in lists]
        if _reads_back(joined, lists):
            return joined
    return [json.dumps(row, ensure_ascii=False) for row in lists]


def _reads_back(joined: Sequence[str], lists: Sequence[list[Any]]) -> bool:
    def refuse(_: int, problem: str) -> DataError:
        return DataError(problem)

    try:
        found = detect_separator(joined, refuse)
        if found != _SEPARATOR and (found != "" or any(len(row) > 1 for row in lists)):
            return False
        return split_cells(joined, found, refuse).values == list(chain.from_iterable(lists))
    except DataError:  # a name that looks like a list
        return False
