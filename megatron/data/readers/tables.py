"""Rows of tables in pieces that are sent between processes. Needs pyarrow, on use only."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.common.errors import needed_for

_NAMES = b"columns of the file"
_EXCERPT = 80  # characters


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


def require_pyarrow(kind: str) -> None:
    """Import pyarrow, with the parts that tables need.

    Args:
        kind: of the files, for the message.

    Raises:
        DataError: it is not installed.
    """
    with needed_for(f"reading {kind} files", "pyarrow"):
        import pyarrow.compute
        import pyarrow.parquet  # noqa: F401


def grouped_rows(
    batches: Iterator[Any],
    names: list[str],
    *,
    most_bytes: int,
    most_rows: int,
    most_row_bytes: int,
) -> Iterator[Rows]:
    """Yield the rows of record batches in larger pieces, or of a long row its start.

    Args:
        batches: of at most `most_bytes`, or of a single row.
        names: of all columns of the file.
        most_bytes: of rows that come together, unless one alone has more.
        most_rows: that come together.
        most_row_bytes: a longer row is not given, but reported.
    """
    held: list[Any] = []
    num_rows = num_bytes = 0
    for batch in batches:
        size = batch.nbytes
        is_full = num_bytes + size > most_bytes or num_rows + batch.num_rows > most_rows
        if held and (is_full or size > most_row_bytes):
            yield Rows(num_rows, num_bytes, _pack(held, names))
            held, num_rows, num_bytes = [], 0, 0
        if batch.num_rows == 1 and size > most_row_bytes:
            yield Rows(1, size, _start_of(batch), is_too_long=True)
            continue
        held.append(batch)
        num_rows += batch.num_rows
        num_bytes += size
    if held:
        yield Rows(num_rows, num_bytes, _pack(held, names))


def columns_of(data: bytes, keys: Sequence[str]) -> tuple[dict[str, list[Any]], list[str]]:
    """Return {key: values} for each of `keys` in the file, and the file's column names."""
    import pyarrow

    table = pyarrow.ipc.open_stream(data).read_all()
    present = {key: table.column(key).to_pylist() for key in keys if key in table.column_names}
    return present, json.loads(table.schema.metadata[_NAMES])


def small_batches(batch: Any, most_bytes: int) -> Iterator[Any]:
    """Yield the rows of a record batch in halves, until each has few bytes or a single row."""
    yield from _halve(_without_dictionaries(batch), most_bytes)


def _halve(batch: Any, most_bytes: int) -> Iterator[Any]:
    if batch.nbytes <= most_bytes or batch.num_rows == 1:
        yield batch
    else:
        middle = batch.num_rows // 2
        yield from _halve(batch[:middle], most_bytes)
        yield from _halve(batch[middle:], most_bytes)


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


def _pack(batches: list[Any], names: list[str]) -> bytes:
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
