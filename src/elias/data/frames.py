"""Read tables that are in memory: pandas and other data frames, Arrow tables, `datasets`, lists.

A table is written to a temporary Parquet file, so that it is read exactly like a file. The other
packages are not imported: a pandas frame, for instance, is recognised by the module of its class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from elias.data.readers.base import split_alias
from elias.data.readers.label_cells import is_missing
from elias.errors import DataError, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow


_ARROW_STREAM = "__arrow_c_stream__"
"""Method by which polars, DuckDB and other libraries export a table."""


@contextmanager
def as_parquet(source: Any) -> Iterator[Path]:
    """Write a table, or a mapping from split names to tables, to a folder of Parquet files.

    Errors that the ``with`` block raises name the type of ``source`` instead of the file.

    Raises:
        DataError: If ``source`` is not a table, or has a column that mixes types.
    """
    from pyarrow import parquet

    name = type(source).__name__
    tables: Mapping[str, Any] = {"data": source}
    if isinstance(source, Mapping) and source and all(map(split_alias, source)):
        tables = {str(split_alias(split)): table for split, table in source.items()}
    with TemporaryDirectory(prefix="elias-") as folder:
        path = Path(folder, name)
        path.mkdir()
        for split, table in tables.items():
            file = path / f"{split}.parquet"
            # uncompressed, because the reader refuses files that expand to many times their size
            options: Any = {"compression": "none", "use_dictionary": False}
            parquet.write_table(_to_arrow(table), file, **options)
        try:
            yield path
        except DataError as error:
            message = str(error).replace(f"{path}/data.parquet", name).replace(str(path), name)
            raise DataError(message) from None


def list_table(texts: Sequence[str], labels: Any) -> dict[str, list[Any]]:
    """Return texts and their labels as columns. A string is one label; a list holds several.

    Raises:
        DataError: If a text is not a string, or the lengths differ.
    """
    if labels is None or isinstance(labels, str):
        raise DataError("labels= must be a list with the labels of each of the texts")
    if isinstance(texts, str):
        raise DataError("texts= is a single text; give a list of texts")
    rows, cells = list(texts), list(labels)
    if len(rows) != len(cells):
        raise DataError(f"texts= has {len(rows)} texts, but labels= has labels for {len(cells)}")
    if not rows:
        raise DataError("texts= is empty; give at least one text")
    for i, text in enumerate(rows):
        if not isinstance(text, str):
            raise DataError(f"texts[{i}] is {type(text).__name__}, not a string")
    for i, cell in enumerate(cells):
        if isinstance(cell, str) or not hasattr(cell, "__iter__"):
            cell = [] if is_missing(cell) else [cell]
        cells[i] = [str(label) for label in cell]
    return {"text": rows, "labels": cells}


def _to_arrow(table: Any) -> pyarrow.Table:
    import pyarrow

    module = type(table).__module__.partition(".")[0]
    try:
        if module == "datasets" and hasattr(table, "with_format"):
            return _named_classes(table.with_format("arrow")[:], table.features)
        if module == "pandas" and hasattr(table, "columns"):
            return _from_pandas(table)
        if isinstance(table, Mapping):
            return pyarrow.table({str(name): list(column) for name, column in table.items()})
        if isinstance(table, Sequence) and all(isinstance(row, Mapping) for row in table):
            names = dict.fromkeys(name for row in table for name in row)  # not every row has all
            return pyarrow.table({str(name): [row.get(name) for row in table] for name in names})
        is_table = hasattr(table, "columns") or hasattr(table, "schema")  # not a Series
        if is_table and (isinstance(table, pyarrow.RecordBatch) or hasattr(table, _ARROW_STREAM)):
            return pyarrow.table(table)
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        problem = f"cannot be converted to Arrow ({quoted(error)})"
        raise DataError(f"{type(table).__name__}: {problem}") from error
    raise DataError(
        f"cannot read a corpus from {type(table).__name__}; give a path, a DataFrame, an Arrow "
        "table, a datasets.Dataset, a list of dictionaries, or texts= and labels="
    )


def _from_pandas(frame: Any) -> pyarrow.Table:
    """Convert a frame. Sets become lists, and cells of mixed types become strings."""
    import pyarrow

    arrays = []
    for position in range(len(frame.columns)):
        cells = frame.iloc[:, position]
        if cells.dtype == object:
            cells = [sorted(v, key=str) if isinstance(v, set | frozenset) else v for v in cells]
        try:
            arrays.append(pyarrow.array(cells, from_pandas=True))
        except (pyarrow.ArrowException, TypeError, ValueError):
            strings = [None if is_missing(cell) else str(cell) for cell in cells]
            arrays.append(pyarrow.array(strings))
    return pyarrow.Table.from_arrays(arrays, names=[str(name) for name in frame.columns])


def _named_classes(table: pyarrow.Table, features: Any) -> pyarrow.Table:
    """Replace class numbers of a `datasets.Dataset` by class names."""
    import pyarrow

    for position, name in enumerate(table.column_names):
        feature = features[name]
        names = getattr(getattr(feature, "feature", feature), "names", None)
        if names is None:
            continue
        cells = [
            [names[i] for i in cell]
            if isinstance(cell, list)
            else None
            if cell is None
            else names[cell]
            for cell in table.column(name).to_pylist()
        ]
        table = table.set_column(position, name, pyarrow.array(cells))
    return table
