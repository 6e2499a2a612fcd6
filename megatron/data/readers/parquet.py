"""Parquet files as tables: row groups, column names, and rows page by page. Needs pyarrow, on use only."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.common.remote_files import is_url, open_input
from megatron.data.readers.tables import Rows, grouped_rows, require_pyarrow, small_batches

MAGIC = b"PAR1"
_READ_BYTES = 1 << 18
_REMOTE_BYTES = 1 << 21  # of one request to a URL
_READS_A_PIECE = 4  # so that a piece has about the bytes that it may have


def row_group_starts(path: str) -> list[int]:
    """Return the first row of each row group, and the number of rows at the end."""
    starts = [0]
    with _open(path) as file:
        for i in range(file.num_row_groups):
            starts.append(starts[-1] + file.metadata.row_group(i).num_rows)
    return starts


def column_names(path: str) -> list[str]:
    """Return the names of all columns."""
    with _open(path) as file:
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
    with _open(path) as file:
        names = file.schema_arrow.names
        end = file.metadata.num_rows if end is None else end
        columns = [name for name in names if keys is None or name in keys]
        sizes = {"most_bytes": most_bytes, "most_rows": most_rows}
        batches = _batches(path, file, columns, start, end, most_decoded=most_row_bytes, **sizes)
        yield from grouped_rows(batches, names, most_row_bytes=most_row_bytes, **sizes)


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
                yield from small_batches(batch[low:high], most_bytes)


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
    with _open(path, metadata=metadata, read_dictionary=texts) as file:
        rows = next(file.iter_batches(1, row_groups=[group], columns=texts, use_threads=False))
    longest = 0
    for column in rows.columns:
        if pyarrow.types.is_dictionary(column.type):
            found = pyarrow.compute.max(pyarrow.compute.binary_length(column.dictionary)).as_py()
            longest += found or 0
    return longest


def _open(path: str, **options: Any) -> Any:
    require_pyarrow("Parquet")
    import pyarrow.parquet

    # Otherwise all of a row group's columns would be read at once.
    source = open_input(path, _REMOTE_BYTES) if is_url(path) else path
    buffer_bytes = _REMOTE_BYTES if is_url(path) else _READ_BYTES
    in_pieces = {"buffer_size": buffer_bytes, "pre_buffer": False}
    return pyarrow.parquet.ParquetFile(source, **in_pieces, **options)
