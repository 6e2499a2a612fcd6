"""Index maps that stay on disk, each block compared with its digest when it is first read.

So opening one takes the same time at any length, and what is damaged is not used.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from megatron.errors import DataError

_SHIFT = 14
BLOCK_ROWS = 1 << _SHIFT
"""Rows of a map to which one digest belongs."""


def digests_of(values: NDArray) -> NDArray:
    """Return the XXH3 of each block of `values`, C-contiguous. Shapes: -> [blocks] uint64."""
    blocks = range(0, len(values), BLOCK_ROWS)
    return np.array([xxh3_64_intdigest(values[i : i + BLOCK_ROWS].data) for i in blocks], "<u8")


class CheckedMap:
    """Rows of numbers, by their places from 0 on, as `values` gives them.

    Args:
        values: mapped from the file `path`.
        digests: of its blocks, as `digests_of` made them when the file was written.

    Raises:
        DataError: on reading what is not as it was written. The file is removed then.
    """

    def __init__(self, values: NDArray, digests: NDArray, *, path: Path):
        self._values = values
        self._digests = digests
        self._path = path
        self._is_checked = bytearray(len(digests)) + b"\1"  # and nothing, which is in no block

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, places: int | slice) -> Any:
        # In few operations, since every sample comes here several times.
        if isinstance(places, slice):
            first, stop = places.start or 0, places.stop
            if stop is None or stop > len(self._values):
                stop = len(self._values)
        else:
            first, stop = places, places + 1
        is_checked = self._is_checked
        is_short = stop - first <= BLOCK_ROWS
        if not (is_short and is_checked[first >> _SHIFT] and is_checked[stop - 1 >> _SHIFT]):
            for block in range(first >> _SHIFT, (stop - 1 >> _SHIFT) + 1):
                self._check(block)
        return self._values[places]

    def _check(self, block: int) -> None:
        if self._is_checked[block]:
            return
        rows = slice(block << _SHIFT, block + 1 << _SHIFT)
        if digests_of(self._values[rows]) != self._digests[block]:
            try:
                self._path.unlink(missing_ok=True)
                mend = "it is removed, and the next start builds it again"
            except OSError as error:
                mend = f"remove it ({error.strerror}), and the next start builds it again"
            raise DataError(
                f"{self._path} is damaged: rows {rows.start} to "
                f"{min(rows.stop, len(self))} are not what was written; {mend}"
            )
        self._is_checked[block] = True


IndexMap = NDArray | CheckedMap
"""A map in memory, or one on disk."""
