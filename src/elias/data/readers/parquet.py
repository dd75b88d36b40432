"""Read Parquet files in batches of rows, and refuse files that unpack to implausible sizes.

A Parquet file may store a repeated value once, in a dictionary, and compress it. A few hundred
bytes can thus stand for terabytes. The unpacked size is therefore computed before values are
unpacked, from the metadata and the lengths of the dictionary's values.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from elias.data.readers import files
from elias.data.readers.files import data_error

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
    """Yield the number of each row group, and how many of its rows to read at a time.

    Raises:
        CompressionRatioError: If the wanted columns of the first groups, up to the current one,
            unpack to an implausible size.
    """
    schema, packed = file.schema, path.stat().st_size
    columns = [schema.column(number) for number in range(len(schema.names))]
    leaves = {
        number: column
        for number, column in enumerate(columns)
        if any(f"{column.path}.".startswith(f"{name}.") for name in wanted)
    }
    strings = [leaf.path for leaf in leaves.values() if leaf.physical_type == "BYTE_ARRAY"]
    coded = open_parquet(path, read_dictionary=strings)  # strings stay in their dictionaries
    unpacked = 0  # bytes, not counting the strings of the groups from ``first`` on
    most, first = 0, 0  # bytes of those strings if all were as long as the longest of their group
    for group in range(file.num_row_groups):
        longest = 1
        for number, leaf in leaves.items():
            column, width = file.metadata.row_group(group).column(number), leaf.length
            stored, n_values = column.total_uncompressed_size, column.num_values
            if leaf.path in strings:
                width = _longest_value(coded, group, leaf.path)
                most += n_values * (width + _POINTER)
                unpacked += stored
            else:
                unpacked += max(stored, n_values * max(width, _POINTER))
            longest = max(longest, width)
        n_rows = max(1, min(_ROWS, _BATCH_BYTES // longest))
        files.check_ratio(_DATA, packed, unpacked)
        if files.is_implausible(packed, unpacked + most):
            groups = list(range(first, group + 1))
            for batch in coded.iter_batches(n_rows, row_groups=groups, columns=strings):
                unpacked += sum(map(_string_bytes, _leaf_arrays(batch.columns)))
                files.check_ratio(_DATA, packed, unpacked)
            most, first = 0, group + 1
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
