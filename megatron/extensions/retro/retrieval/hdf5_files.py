"""HDF5 files of Retro preprocessing, through h5py: memory-mapped arrays and blocks of rows."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron.common.atomic_files import replacing
from megatron.common.errors import DataError, needed_for
from megatron.data.token_files.publish import write_errors_name

_BLOCK = re.compile(r"(\d{1,18})-(\d{1,18})\.hdf5")

_KINDS = {"iu": "integers", "iuf": "numbers"}
"""Words for kinds of dtypes."""

_MOST_COMPRESSED = 1032
"""The ratio that DEFLATE reaches at most; a larger array has parts that were never written."""

_AGAIN = "the file is damaged, or of another program; run preprocessing again"


def import_h5py() -> ModuleType:
    """Import h5py, which is needed for Retro alone.

    Raises:
        ConfigError: it is not installed.
    """
    with needed_for("Retro, whose database and neighbors are HDF5 files,", "h5py"):
        return import_module("h5py")


def read_array(file: Path, key: str, *, kinds: str = "iu", columns: int | None = None) -> NDArray:
    """Return the table `key` of an HDF5 file: mapped into memory if it is contiguous, else read.

    Args:
        kinds: of numpy's dtypes: i and u are integers, f is floating point.
        columns: None: any number.

    Raises:
        DataError: the file cannot be read, has no such table, or refers to other files.

    Shapes: -> [rows, columns].
    """
    h5py = import_h5py()
    try:
        if not file.is_file():  # a pipe would be waited for
            raise FileNotFoundError("there is no such file")
        with h5py.File(file, "r") as opened:
            if key not in opened:
                raise DataError(f"{file} has no array {key}, but {', '.join(opened) or 'none'}")
            # Its own array: a link, or storage elsewhere, can be of any file of this machine.
            is_own = isinstance(opened.get(key, getlink=True), h5py.HardLink)
            array = opened[key] if is_own else None
            if not isinstance(array, h5py.Dataset) or array.external or array.is_virtual:
                raise DataError(f"{file}: {key} is not an array of this file, but of another one")
            _require_table(array, f"{file}: {key}", kinds, columns)
            return _content(array, file)
    except DataError:
        raise
    except Exception as error:  # h5py raises errors of any kind for damaged files
        raise DataError(
            f"{file} cannot be read as HDF5: {error}; if preprocessing was killed while it wrote this "
            "file, run it again"
        ) from error


def _require_table(array: Any, name: str, kinds: str, columns: int | None) -> None:
    """Raise DataError unless dtype and shape fit a table, and the file can hold its size."""
    dtype, shape = array.dtype, array.shape
    # Other kinds can be Python objects, whose addresses would come from the file.
    if dtype.kind not in kinds or shape is None or len(shape) != 2:
        found = f"{dtype} of shape {list(shape or ())}"
        raise DataError(f"{name} is {found} instead of a table of {_KINDS[kinds]}: {_AGAIN}")
    if columns is not None and shape[1] != columns:
        raise DataError(f"{name} has shape {list(shape)} instead of [n, {columns}]: {_AGAIN}")
    stored = array.id.get_storage_size()
    if array.nbytes > _MOST_COMPRESSED * stored:
        raise DataError(f"{name} has shape {list(shape)} and {stored} bytes in the file: {_AGAIN}")


def _content(array: Any, file: Path) -> NDArray:
    offset = array.id.get_offset()
    # Integers and floats with unusual bits have to be converted.
    is_plain = array.id.get_type() == import_h5py().h5t.py_create(array.dtype)
    if offset is None or not is_plain:
        return np.asarray(array[...])
    return np.memmap(file, array.dtype, "r", offset, array.shape)


def write_arrays(file: Path, arrays: Mapping[str, NDArray]) -> None:
    """Write an HDF5 file, which appears complete or not at all.

    Raises:
        DataError: it cannot be written.
    """
    write_streams(file, {key: Streamed(a.shape, a.dtype, [a]) for key, a in arrays.items()})


@dataclass(frozen=True)
class Streamed:
    """Array whose rows come in pieces, so that memory need not hold all."""

    shape: tuple[int, ...]
    dtype: DTypeLike
    pieces: Iterable[NDArray]


def write_streams(file: Path, arrays: Mapping[str, Streamed]) -> None:
    """Write an HDF5 file of streamed arrays, which appears complete or not at all.

    Raises:
        DataError: it cannot be written.
    """
    h5py = import_h5py()
    with write_errors_name(file), replacing(file) as temporary, h5py.File(temporary, "w") as made:
        for key, streamed in arrays.items():
            array = made.create_dataset(key, streamed.shape, streamed.dtype)
            start = 0
            for piece in streamed.pieces:
                array[start : start + len(piece)] = piece
                start += len(piece)


class BlockedRows:
    """Rows of a table in files START-END.hdf5 of one folder, END exclusive.

    Args:
        key: name of the array in each file.

    Raises:
        DataError: the files do not follow each other from row 0 on.
    """

    def __init__(self, folder: Path, key: str):
        self.folder, self._key = folder, key
        matches = [match for file in folder.iterdir() if (match := _BLOCK.fullmatch(file.name))]
        blocks = sorted((int(match[1]), int(match[2]), match[0]) for match in matches)
        self._starts: list[int] = []
        self._files: list[Path] = []
        self._size = 0
        for start, stop, name in blocks:
            if start != self._size or stop <= start:
                raise DataError(
                    f"{folder / name} begins with row {start} and the files before it end with row "
                    f"{self._size}: a block is missing or there twice; run preprocessing again"
                )
            self._starts.append(start)
            self._files.append(folder / name)
            self._size = stop
        self._arrays: dict[int, NDArray] = {}
        self._width: int | None = None  # of the first block that is read

    def __len__(self) -> int:
        return self._size

    def rows(self, start: int, stop: int) -> NDArray:
        """Return the rows from `start` to `stop`, which may be of several blocks.

        Raises:
            DataError: a block is damaged, or has other rows than its name states.
        """
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, stop, side="left"))
        parts: Sequence[NDArray] = [
            self._block(block)[max(0, start - self._starts[block]) : stop - self._starts[block]]
            for block in range(first, last)
        ]
        return np.concatenate(parts)

    def _block(self, number: int) -> NDArray:
        if number not in self._arrays:
            array = read_array(self._files[number], self._key, columns=self._width)
            stop = [*self._starts[1:], self._size][number]
            if len(array) != stop - self._starts[number]:
                raise DataError(
                    f"{self._files[number]}: {self._key} has shape {list(array.shape)}, and the name "
                    f"of the file means {stop - self._starts[number]} rows: run preprocessing again"
                )
            self._arrays[number], self._width = array, array.shape[1]
        return self._arrays[number]
