"""Arrow files as tables, such as `datasets`' save_to_disk writes: record batches and their rows.

Needs pyarrow, on use only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.common.remote_files import is_url, open_input
from megatron.data.readers.tables import Rows, grouped_rows, require_pyarrow, small_batches

_FILE = b"ARROW1"
_STREAM = b"\xff\xff\xff\xff"
MAGICS = (_FILE, _STREAM)
"""Beginnings of Arrow's file format and of its stream format, which save_to_disk writes."""

_STREAM_END = _STREAM + bytes(4)
_REMOTE_BYTES = 1 << 21  # of one request to a URL


def row_group_starts(path: str) -> list[int]:
    """Return the first row of each record batch, and the number of rows at the end."""
    starts = [0]
    with _open(path) as (_, batches):
        for batch in batches:
            starts.append(starts[-1] + batch.num_rows)
    return starts


def column_names(path: str) -> list[str]:
    """Return the names of all columns."""
    with _open(path) as (names, _):
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
    """Yield the rows from `start` to `end`, as `parquet.read_rows` does."""
    with _open(path) as (names, batches):
        columns = [name for name in names if keys is None or name in keys]
        rows = _rows(batches, columns, start, end, most_bytes=most_bytes, most_rows=most_rows)
        sizes = {"most_bytes": most_bytes, "most_rows": most_rows, "most_row_bytes": most_row_bytes}
        yield from grouped_rows(rows, names, **sizes)


def _rows(
    batches: Iterator[Any],
    columns: list[str],
    start: int,
    end: int | None,
    *,
    most_bytes: int,
    most_rows: int,
) -> Iterator[Any]:
    first = 0
    for batch in batches:
        row, first = first, first + batch.num_rows
        if end is not None and row >= end:
            return
        stop = batch.num_rows if end is None else min(end - row, batch.num_rows)
        for low in range(max(start - row, 0), stop, most_rows):
            part = batch[low : min(low + most_rows, stop)].select(columns)
            yield from small_batches(part, most_bytes)


def _source(path: str) -> Any:
    import pyarrow

    if is_url(path):
        return pyarrow.PythonFile(open_input(path, _REMOTE_BYTES))
    return pyarrow.memory_map(path)


@contextmanager
def _open(path: str) -> Iterator[tuple[list[str], Iterator[Any]]]:
    """Yield the names of the columns, and an iterator of the record batches.

    The file is mapped, so that batches and columns that are not used are not read.

    Raises:
        ValueError: the file is damaged or incomplete.
    """
    require_pyarrow("Arrow")
    import pyarrow

    with open_input(path, _REMOTE_BYTES) as plain:
        is_stream = plain.read(len(_STREAM)) == _STREAM
        plain.seek(max(plain.seek(0, 2) - len(_STREAM_END), 0))
        if is_stream and plain.read() != _STREAM_END:
            raise ValueError("its end is missing")
    with _source(path) as file:
        if is_stream:
            reader = pyarrow.ipc.open_stream(file)
            yield reader.schema.names, iter(reader)
        else:
            reader = pyarrow.ipc.open_file(file)
            yield (
                reader.schema.names,
                (reader.get_batch(i) for i in range(reader.num_record_batches)),
            )
