"""Rows of a Parquet file, in pieces that are sent between processes. Needs pyarrow, on use only."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.common.errors import DataError

MAGIC = b"PAR1"
_NAMES = b"columns of the file"
_READ_BYTES = 1 << 18
_EXCERPT = 80  # characters
_READS_A_PIECE = 4  # so that a piece has about the bytes that it may have


@dataclass(frozen=True)
class Rows:
    """Consecutive rows.

    Args:
        num_bytes: that they have in memory.
        data: the rows as an Arrow stream, for `columns_of`; of one that is too long, its start.
    """

    num_rows: int
    num_bytes: int
    data: bytes
    is_too_long: bool = False


def row_group_starts(path: str) -> list[int]:
    """Return the first row of each row group, and the number of rows at the end."""
    starts = [0]
    with _opened(path) as file:
        for i in range(file.num_row_groups):
            starts.append(starts[-1] + file.metadata.row_group(i).num_rows)
    return starts


def column_names(path: str) -> list[str]:
    """Return the names of all columns."""
    with _opened(path) as file:
        names: list[str] = file.schema_arrow.names
    return names


def read_rows(
    path: str,
    start: int,
    end: int | None,
    keys: Sequence[str] | None,
    *,
    most_bytes: int,
    most_rows: int,
    most_row_bytes: int,
) -> Iterator[Rows]:
    """Yield the rows from `start` to `end` with the columns `keys`, or all columns if None.

    Memory holds a page of each column and a few rows, and neither a row group nor a column.

    Args:
        most_bytes: of rows that come together, unless one alone has more.
        most_rows: that come together.
        most_row_bytes: a longer row is not given, but reported.
    """
    with _opened(path) as file:
        names = file.schema_arrow.names
        end = file.metadata.num_rows if end is None else end
        columns = [name for name in names if keys is None or name in keys]
        held: list[Any] = []
        num_rows = num_bytes = 0
        sizes = {"most_bytes": most_bytes, "most_rows": most_rows, "most_decoded": most_row_bytes}
        for batch in _batches(path, file, columns, start, end, **sizes):
            size = batch.nbytes
            is_full = num_bytes + size > most_bytes or num_rows + batch.num_rows > most_rows
            if held and (is_full or size > most_row_bytes):
                yield Rows(num_rows, num_bytes, _packed(held, names))
                held, num_rows, num_bytes = [], 0, 0
            if batch.num_rows == 1 and size > most_row_bytes:
                yield Rows(1, size, _start_of(batch), is_too_long=True)
                continue
            held.append(batch)
            num_rows += batch.num_rows
            num_bytes += size
        if held:
            yield Rows(num_rows, num_bytes, _packed(held, names))


def columns_of(data: bytes, keys: Sequence[str]) -> tuple[dict[str, list[Any]], list[str]]:
    """Return {key: values} for those of `keys` that the file has, and the names of its columns."""
    import pyarrow

    table = pyarrow.ipc.open_stream(data).read_all()
    present = {key: table.column(key).to_pylist() for key in keys if key in table.column_names}
    return present, json.loads(table.schema.metadata[_NAMES])


def _batches(
    path: str,
    file: Any,
    columns: list[str],
    start: int,
    end: int,
    *,
    most_bytes: int,
    most_rows: int,
    most_decoded: int,
) -> Iterator[Any]:
    """Yield the rows in batches of at most `most_bytes`, or of a single row.

    Args:
        most_decoded: bytes that the rows read at once may become.
    """
    first = 0
    for i in range(file.num_row_groups):
        group = file.metadata.row_group(i)
        row, first = first, first + group.num_rows
        if row == first or row >= end or first <= start:
            continue
        parts = _parts(group, columns)
        mean = sum(part.total_uncompressed_size for part in parts) // group.num_rows
        rows = min(
            most_bytes // (_READS_A_PIECE * max(mean, 1)),
            most_decoded // max(_longest_repeated(path, file.metadata, i, parts), 1),
            most_rows,
        )
        for batch in file.iter_batches(
            max(rows, 1), row_groups=[i], columns=columns, use_threads=False
        ):
            low, high = max(start - row, 0), min(end - row, batch.num_rows)
            row += batch.num_rows
            if low < high:
                yield from _halved(_without_dictionaries(batch[low:high]), most_bytes)


def _parts(group: Any, columns: list[str]) -> list[Any]:
    """Return the metadata of these columns in a row group."""
    parts = [group.column(k) for k in range(group.num_columns)]
    return [part for part in parts if part.path_in_schema.partition(".")[0] in columns]


def _longest_repeated(path: str, metadata: Any, group: int, parts: list[Any]) -> int:
    """Return the bytes of the longest text that any number of rows of a row group may share.

    Only the dictionaries show it: of a row group of a kilobyte all rows may have a megabyte.
    """
    import pyarrow

    texts = [
        part.path_in_schema
        for part in parts
        if part.has_dictionary_page and part.physical_type == "BYTE_ARRAY"
    ]
    if not texts:
        return 0
    with _opened(path, metadata=metadata, read_dictionary=texts) as file:
        rows = next(file.iter_batches(1, row_groups=[group], columns=texts, use_threads=False))
    longest = 0
    for column in rows.columns:
        if pyarrow.types.is_dictionary(column.type):
            found = pyarrow.compute.max(pyarrow.compute.binary_length(column.dictionary)).as_py()
            longest += found or 0
    return longest


def _halved(batch: Any, most_bytes: int) -> Iterator[Any]:
    if batch.nbytes <= most_bytes or batch.num_rows == 1:
        yield batch
    else:
        middle = batch.num_rows // 2
        yield from _halved(batch[:middle], most_bytes)
        yield from _halved(batch[middle:], most_bytes)


def _without_dictionaries(batch: Any) -> Any:
    """Return the rows with the values themselves, whose size is known."""
    import pyarrow

    if not any(map(pyarrow.types.is_dictionary, batch.schema.types)):
        return batch
    columns = [
        column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column
        for column in batch.columns
    ]
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _packed(batches: list[Any], names: list[str]) -> bytes:
    """Return the rows as an Arrow stream, with the names of all columns of their file."""
    import pyarrow

    table = pyarrow.Table.from_batches(batches).combine_chunks()
    table = table.replace_schema_metadata({_NAMES: json.dumps(names)})
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()


def _start_of(row: Any) -> bytes:
    """Return the start of the longest text of a row."""
    import pyarrow

    longest = max(row.columns, key=lambda column: column.nbytes)
    if longest.type not in (pyarrow.string(), pyarrow.large_string()):
        return b""
    return pyarrow.compute.utf8_slice_codeunits(longest, 0, _EXCERPT)[0].as_py().encode()


def _opened(path: str, **options: Any) -> Any:
    try:
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("to read Parquet files, install pyarrow: pip install pyarrow") from error
    # Otherwise all of a row group's columns would be read at once.
    in_pieces = {"buffer_size": _READ_BYTES, "pre_buffer": False}
    return pyarrow.parquet.ParquetFile(path, **in_pieces, **options)
