"""HDF5 files of Retro preprocessing, through h5py: memory-mapped arrays and blocks of rows."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron.common.atomic_files import replacing
from megatron.common.errors import DataError, WrongDataError
from megatron.data.token_files.publish import write_errors_name

_BLOCK = re.compile(r"(\d+)-(\d+)\.hdf5")


def import_h5py() -> ModuleType:
    """Import h5py, which is needed for Retro alone.

    Raises:
        WrongDataError: it is not installed.
    """
    try:
        return import_module("h5py")
    except ImportError as error:
        raise WrongDataError(
            f"Retro's database and neighbors are HDF5 files, which need the package h5py: {error}; "
            "install it with: pip install h5py"
        ) from error


def read_array(file: Path, key: str) -> NDArray:
    """Return the array `key` of an HDF5 file: mapped into memory if it is contiguous, else read.

    Raises:
        DataError: the file cannot be read, or has no such array.
    """
    h5py = import_h5py()
    try:
        with h5py.File(file, "r") as opened:
            if key not in opened:
                raise DataError(f"{file} has no array {key}, but {', '.join(opened) or 'none'}")
            array = opened[key]
            offset = array.id.get_offset()
            if offset is None:
                return np.asarray(array[...])
            return np.memmap(file, array.dtype, "r", offset, array.shape)
    except OSError as error:
        raise DataError(
            f"{file} cannot be read as HDF5: {error}; if preprocessing was killed while it wrote this "
            "file, run it again"
        ) from error


def write_arrays(file: Path, arrays: Mapping[str, NDArray]) -> None:
    """Write an HDF5 file, which appears complete or not at all.

    Raises:
        DataError: it cannot be written.
    """
    h5py = import_h5py()
    with write_errors_name(file), replacing(file) as temporary, h5py.File(temporary, "w") as made:
        for key, array in arrays.items():
            made.create_dataset(key, data=array)


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
            array = read_array(self._files[number], self._key)
            stop = [*self._starts[1:], self._size][number]
            if array.ndim != 2 or len(array) != stop - self._starts[number]:
                raise DataError(
                    f"{self._files[number]}: {self._key} has shape {list(array.shape)}, and the name "
                    f"of the file is that of {stop - self._starts[number]} rows: run preprocessing "
                    "again"
                )
            self._arrays[number] = array
        return self._arrays[number]
