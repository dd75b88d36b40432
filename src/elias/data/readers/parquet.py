"""Read Parquet files, and tables in memory: data frames, Arrow tables, `datasets` and lists.

A Parquet file is read in batches of rows. It may store a repeated value once, in a dictionary, and
compress it. A few hundred bytes can thus stand for terabytes. The unpacked size is therefore
computed before values are unpacked, from the metadata and the lengths of the dictionary's values.

A table in memory is written to a temporary Parquet file, so that it is read exactly like a file.
The other packages are not imported: a pandas frame, for instance, is recognised by the module of
its class.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from elias.data.readers import files
from elias.data.readers.base import split_alias
from elias.data.readers.files import data_error
from elias.data.readers.label_cells import is_missing
from elias.errors import DataError, check_strings, quoted

if TYPE_CHECKING:
    import pyarrow

_ROWS = 1024  # maximum number of rows read at a time
_BATCH_BYTES = 32 << 20  # approximate maximum size of these rows, except for cells that are lists
_POINTER = 8  # minimum number of bytes of a value
_DATA = "the Parquet data"


def open_parquet(path: Path, **options: Any) -> Any:
    """Open a Parquet file. The options are those of `pyarrow.parquet.ParquetFile`."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    source: Any = path
    if files.is_gzip(path):
        with files.open_bytes(path) as stream:
            source = io.BytesIO(stream.read())
    try:
        return ParquetFile(source, **options)
    except (ArrowException, ValueError, OSError) as error:
        raise data_error(path, f"not a complete Parquet file ({error}); copy it again") from None


def parquet_rows(path: Path, wanted: Sequence[str]) -> Iterator[tuple[int, list[Any]]]:
    """Yield the row number and the wanted cells of each row of a Parquet file."""
    file, line = open_parquet(path), 0
    try:
        for group, n_rows in _checked_groups(path, file, wanted):
            for batch in file.iter_batches(n_rows, row_groups=[group], columns=list(wanted)):
                columns = [batch.column(name).to_pylist() for name in wanted]
                for cells in zip(*columns, strict=True):
                    line += 1
                    yield line, list(cells)
    except UnicodeDecodeError:
        raise data_error(path, "a string column is not UTF-8; save it as UTF-8") from None
    except files.CompressionRatioError as error:
        raise data_error(path, str(error)) from None
    except (OSError, ValueError) as error:
        problem = f"the Parquet data is broken ({error}); copy it again"
        raise data_error(path, problem) from None


def _checked_groups(path: Path, file: Any, wanted: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the index of each row group, and the number of its rows to read at a time.

    Raises:
        CompressionRatioError: If the wanted columns unpack to an implausible size. The size is
            checked before each row group is yielded.
    """
    schema, packed = file.schema, path.stat().st_size
    columns = [schema.column(index) for index in range(len(schema.names))]
    leaves = {
        index: column
        for index, column in enumerate(columns)
        if any(f"{column.path}.".startswith(f"{name}.") for name in wanted)
    }
    strings = [leaf.path for leaf in leaves.values() if leaf.physical_type == "BYTE_ARRAY"]
    coded = open_parquet(path, read_dictionary=strings)  # strings stay in their dictionaries
    unpacked = 0  # bytes, without the strings of the groups that are not counted yet
    max_string_bytes = 0  # upper bound of the bytes of these strings
    first = 0  # index of the first group whose strings are not counted yet
    for group in range(file.num_row_groups):
        longest = 1
        for index, leaf in leaves.items():
            column, width = file.metadata.row_group(group).column(index), leaf.length
            stored, n_values = column.total_uncompressed_size, column.num_values
            if leaf.path in strings:
                width = _longest_value(coded, group, leaf.path)
                max_string_bytes += n_values * (width + _POINTER)
                unpacked += stored
            else:
                unpacked += max(stored, n_values * max(width, _POINTER))
            longest = max(longest, width)
        n_rows = max(1, min(_ROWS, _BATCH_BYTES // longest))
        files.check_ratio(_DATA, packed, unpacked)
        if files.is_implausible(packed, unpacked + max_string_bytes):
            groups = list(range(first, group + 1))
            for batch in coded.iter_batches(n_rows, row_groups=groups, columns=strings):
                unpacked += sum(map(_string_bytes, _leaf_arrays(batch.columns)))
                files.check_ratio(_DATA, packed, unpacked)
            max_string_bytes, first = 0, group + 1
        yield group, n_rows


def _longest_value(coded: Any, group: int, leaf: str) -> int:
    """Return the number of bytes of the longest value in the dictionary of a row group."""
    import pyarrow.compute as pc

    for batch in coded.iter_batches(batch_size=_ROWS, row_groups=[group], columns=[leaf]):
        for array in _leaf_arrays(batch.columns):
            if len(array.dictionary):  # empty before the first value, for example in empty lists
                return int(pc.max(pc.binary_length(array.dictionary)).as_py() or 0)
    return 0


def _string_bytes(array: Any) -> int:
    """Return the number of bytes of all strings in an array that stores them in a dictionary."""
    import pyarrow.compute as pc

    lengths = pc.binary_length(array.dictionary).take(array.indices)
    return int(pc.sum(lengths).as_py() or 0) + _POINTER * len(array)


def _leaf_arrays(arrays: Iterable[Any]) -> Iterator[Any]:
    """Yield the arrays inside lists, structures and maps."""
    from pyarrow import types

    for array in arrays:
        if types.is_struct(array.type):
            yield from _leaf_arrays(array.flatten())
        elif types.is_map(array.type):
            yield from _leaf_arrays([array.keys, array.items])
        elif types.is_nested(array.type):
            yield from _leaf_arrays([array.flatten()])
        else:
            yield array


_ARROW_STREAM = "__arrow_c_stream__"
"""Method by which polars, DuckDB and other libraries export a table."""


@contextmanager
def as_parquet(source: Any) -> Iterator[Path]:
    """Write a table, or a table per split, to Parquet files, and yield their temporary folder.

    Errors in the ``with`` block name the type of ``source`` instead of a file.

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
        raise DataError(
            "labels= must be a list with one item per text: a label, or a list of labels"
        )
    if isinstance(texts, str):
        raise DataError("texts= is a single text; give a list of texts")
    rows, cells = list(texts), list(labels)
    if len(rows) != len(cells):
        problem = f"texts= has {len(rows)} texts, but labels= has labels for {len(cells)}"
        raise DataError(f"{problem}; give one item of labels= for each text")
    if not rows:
        raise DataError("texts= is empty; give at least one text")
    check_strings("texts", rows)
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
            # a row may lack some of the columns
            names = dict.fromkeys(name for row in table for name in row)
            return pyarrow.table({str(name): [row.get(name) for row in table] for name in names})
        is_table = hasattr(table, "columns") or hasattr(table, "schema")  # not a Series
        if is_table and (isinstance(table, pyarrow.RecordBatch) or hasattr(table, _ARROW_STREAM)):
            return pyarrow.table(table)
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        problem = f"cannot be converted to Arrow ({quoted(error)}); use columns of plain values"
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
    """Replace the class ids in the columns of a `datasets.Dataset` by class names."""
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
