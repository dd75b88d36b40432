"""Read Parquet files in batches of rows, and refuse files that unpack to implausible sizes.

A Parquet file may store a repeated value once, in a dictionary, and compress it. A few hundred
bytes can thus stand for terabytes. The unpacked size is therefore computed before values are
unpacked, from the metadata and the lengths of the dictionary's values.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from elias.data.readers import files
from elias.data.readers.files import data_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path


_ROWS = 1024  # maximum number of rows read at a time
_BATCH_BYTES = 32 << 20  # approximate maximum size of these rows, if their cells are no lists
_POINTER = 8  # bytes that a value takes at least
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
        n_rows = _check_size(path, file, wanted)
        for batch in file.iter_batches(batch_size=n_rows, columns=list(wanted)):
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


def _check_size(path: Path, file: Any, wanted: Sequence[str]) -> int:
    """Return the number of rows to read at a time.

    Raises:
        CompressionRatioError: If the wanted columns unpack to an implausible size.
    """
    metadata, schema, packed = file.metadata, file.schema, path.stat().st_size
    leaves = [
        number
        for number in range(metadata.num_columns)
        if any(f"{schema.column(number).path}.".startswith(f"{name}.") for name in wanted)
    ]
    strings = [n for n in leaves if schema.column(n).physical_type == "BYTE_ARRAY"]
    names = [schema.column(number).path for number in strings]
    coded = open_parquet(path, read_dictionary=names)  # values of a dictionary stay there
    unpacked, most, longest = 0, 0, 1
    for group in range(metadata.num_row_groups):
        for number in leaves:
            column, width = metadata.row_group(group).column(number), schema.column(number).length
            stored, n_values = column.total_uncompressed_size, column.num_values
            if number in strings:
                width = _longest_value(coded, group, schema.column(number).path)
                most += n_values * (width + _POINTER)
                unpacked += stored
            else:
                unpacked += max(stored, n_values * max(width, _POINTER))
            longest = max(longest, width)
    n_rows = max(1, min(_ROWS, _BATCH_BYTES // longest))
    files.check_ratio(_DATA, packed, unpacked)
    if files.is_implausible(packed, most):  # if all values were as long
        unpacked = 0
        for batch in coded.iter_batches(batch_size=n_rows, columns=names):
            unpacked += sum(map(_string_bytes, _leaf_arrays(batch.columns)))
            files.check_ratio(_DATA, packed, unpacked)
    return n_rows


def _longest_value(coded: Any, group: int, leaf: str) -> int:
    """Return the number of bytes of the longest value in the dictionary of a row group."""
    import pyarrow.compute as pc

    for batch in coded.iter_batches(batch_size=_ROWS, row_groups=[group], columns=[leaf]):
        for array in _leaf_arrays(batch.columns):
            if len(array.dictionary):  # empty before the first value, for example in empty lists
                return int(pc.max(pc.binary_length(array.dictionary)).as_py() or 0)
    return 0


def _string_bytes(array: Any) -> int:
    """Return the number of bytes that an array takes without its dictionary."""
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
