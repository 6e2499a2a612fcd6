"""Rows of a Parquet file, in pieces that travel between processes. Needs pyarrow, on use only."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.errors import DataError

MAGIC = b"PAR1"


def row_group_starts(path: str) -> list[int]:
    """Return the first row of each row group, and the number of rows at the end."""
    starts = [0]
    with _opened(path) as file:
        for i in range(file.num_row_groups):
            starts.append(starts[-1] + file.metadata.row_group(i).num_rows)
    return starts


def read_rows(
    path: str, start: int, end: int | None, max_bytes: int, max_rows: int
) -> Iterator[tuple[bytes, int, float]]:
    """Yield (rows, how many, share of the file read so far) from row `start` to `end`."""
    with _opened(path) as file:
        import pyarrow

        total, first = file.metadata.num_rows, 0
        end = total if end is None else end
        for i in range(file.num_row_groups):
            group = file.metadata.row_group(i)
            last = first + group.num_rows
            if first < end and last > start:
                rows = max_bytes * group.num_rows // max(group.total_byte_size, 1)
                row = first
                for batch in file.iter_batches(min(max(rows, 1), max_rows), row_groups=[i]):
                    skipped = min(max(start - row, 0), batch.num_rows)
                    row += batch.num_rows
                    if skipped < batch.num_rows:
                        kept = batch.slice(skipped)
                        sink = pyarrow.BufferOutputStream()
                        with pyarrow.ipc.new_stream(sink, kept.schema) as stream:
                            stream.write_batch(kept)
                        yield sink.getvalue().to_pybytes(), kept.num_rows, row / max(total, 1)
            first = last


def columns_of(data: bytes, keys: Sequence[str]) -> tuple[dict[str, list[Any]], list[str]]:
    """Return {key: values} for those of `keys` that the rows have, and the names of all columns."""
    import pyarrow

    table = pyarrow.ipc.open_stream(data).read_all()
    present = {key: table.column(key).to_pylist() for key in keys if key in table.column_names}
    return present, table.column_names


def _opened(path: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("to read Parquet files, install pyarrow: pip install pyarrow") from error
    return pyarrow.parquet.ParquetFile(path)
