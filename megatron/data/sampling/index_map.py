"""Index map file: rows read with pread, each block verified by its digest when first read.

Opening one takes the same time and memory at any length, and damaged rows are never used.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from megatron.common.errors import DataError
from megatron.data.token_files.disk_file import DiskFile

_SHIFT = 14
BLOCK_ROWS = 1 << _SHIFT
"""Rows of a map to which one digest belongs."""


def digests_of(values: NDArray) -> NDArray:
    """Return the XXH3 digest of each block of `values`, C-contiguous. Shapes: -> [blocks] uint64."""
    blocks = range(0, len(values), BLOCK_ROWS)
    return np.array([xxh3_64_intdigest(values[i : i + BLOCK_ROWS].data) for i in blocks], "<u8")


class IndexMapFile:
    """Array of integers in a file, of which rows and slices are read with pread.

    Args:
        path: the file.
        digests: of its blocks, computed by `digests_of` when the file was written.
        dtype: of the integers.
        shape: of the array.
        offset: first byte of the array in the file.

    Raises:
        DataError: on opening, the file cannot be read; on reading, the file was cut, its disk
            fails, or a block differs from its digest: then the file is removed.

    Shapes: rows[i:j] -> [j - i, *shape[1:]], read-only.
    """

    def __init__(
        self, path: Path, digests: NDArray, *, dtype: np.dtype, shape: Sequence[int], offset: int
    ):
        self._file = DiskFile(path, remedy="the next start builds it again")
        self._digests = digests
        self._dtype, self._offset = dtype, offset
        self._num_rows, *self._row_shape = shape
        self._row_bytes = dtype.itemsize * int(np.prod(self._row_shape, dtype=np.int64))
        self._is_checked = bytearray(len(digests)) + b"\1"  # the last entry is for empty slices

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, indices: int | slice) -> Any:
        # As few operations as possible: every sample reads several rows.
        if isinstance(indices, slice):
            first, stop = indices.start or 0, indices.stop
            if stop is None or stop > self._num_rows:
                stop = self._num_rows
            stop = max(first, stop)
        else:
            first, stop = indices, indices + 1
            if not 0 <= first < self._num_rows:
                raise IndexError(f"row {first} of {self._num_rows} in {self._file.path}")
        is_checked = self._is_checked
        is_short = stop - first <= BLOCK_ROWS
        if not (is_short and is_checked[first >> _SHIFT] and is_checked[stop - 1 >> _SHIFT]):
            for block in range(first >> _SHIFT, (stop - 1 >> _SHIFT) + 1):
                self._check(block)
        rows = np.frombuffer(self._read(first, stop), self._dtype)
        if self._row_shape:
            rows = rows.reshape(-1, *self._row_shape)
        return rows if isinstance(indices, slice) else rows[0]

    def _read(self, first: int, stop: int) -> bytes:
        row_bytes = self._row_bytes
        return self._file.read(self._offset + first * row_bytes, (stop - first) * row_bytes)

    def _check(self, block: int) -> None:
        if self._is_checked[block]:
            return
        first, stop = block << _SHIFT, min(block + 1 << _SHIFT, self._num_rows)
        if xxh3_64_intdigest(self._read(first, stop)) != self._digests[block]:
            path = self._file.path
            try:
                path.unlink(missing_ok=True)
                remedy = "it is removed, and the next start builds it again"
            except OSError as error:
                remedy = f"remove it ({error.strerror}), and the next start builds it again"
            raise DataError(
                f"{path} is damaged: rows {first} to {stop} are not what was written; {remedy}"
            )
        self._is_checked[block] = True


IndexMap = NDArray | IndexMapFile
"""An index map, in memory or in a file."""
