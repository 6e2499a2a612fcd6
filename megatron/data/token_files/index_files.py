"""Index files (.idx) of token sequences, written in both formats with bounded memory."""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 16  # entries of an index handled at a time: memory stays bounded, and in the cache

VERSION = 1
MMAP_MAGIC = b"MMIDIDX\0\0"
MMAP_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document entries
LEGACY_MAGIC = b"TNTIDX\0\0"
LEGACY_HEADER = struct.Struct("<8s6Q")  # magic, version, dtype code, token bytes, N, S, D
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f8"),
    8: np.dtype("<u2"),
}
"""Data type of the tokens, by its code in the header."""

Pieces = Callable[[], Iterator[NDArray]]


@dataclass(frozen=True, kw_only=True)
class IndexContent:
    """Content of an index. `sizes` and `document_starts` give the arrays anew at every call."""

    dtype: np.dtype
    num_sequences: int
    num_documents: int
    sizes: Pieces  # tokens of each sequence
    document_starts: Pieces  # first sequence of each document, and their number at the end


def dtype_code(dtype: np.dtype) -> int:
    """Return the code of `dtype` in a header."""
    return {known: code for code, known in DTYPES.items()}[dtype]


def write_mmap_index(file: BinaryIO, content: IndexContent) -> None:
    """Write the index of `--dataset-impl mmap`."""
    code = dtype_code(content.dtype)
    counts = (content.num_sequences, content.num_documents + 1)
    file.write(MMAP_HEADER.pack(MMAP_MAGIC, VERSION, code, *counts))
    for sizes in content.sizes():
        file.write(sizes.astype("<i4").tobytes())
    for starts, _ in starts_and_ends(content.sizes()):
        file.write((starts * content.dtype.itemsize).tobytes())
    for entries in content.document_starts():
        file.write(entries.astype("<i8").tobytes())


def write_legacy_index(file: BinaryIO, content: IndexContent) -> None:
    """Write the index of `--dataset-impl lazy` and `cached`."""
    code, itemsize = dtype_code(content.dtype), content.dtype.itemsize
    counts = (content.num_sequences, content.num_sequences, content.num_documents + 1)
    file.write(LEGACY_HEADER.pack(LEGACY_MAGIC, VERSION, code, itemsize, *counts))
    for numbers in counting(content.num_sequences + 1):
        file.write(numbers.tobytes())
    file.write(bytes(8))
    for _, ends in starts_and_ends(content.sizes()):
        file.write(ends.tobytes())
    for values in (content.sizes, content.document_starts):
        for entries in values():
            file.write(entries.astype("<i8").tobytes())


INDEX_WRITERS: dict[str, Callable[[BinaryIO, IndexContent], None]] = {
    "lazy": write_legacy_index,
    "cached": write_legacy_index,
    "mmap": write_mmap_index,
}
"""Writer of the index, by the word of `--dataset-impl`."""


def starts_and_ends(sizes: Iterator[NDArray]) -> Iterator[tuple[NDArray, NDArray]]:
    """Yield for each piece of sizes where its sequences start and end, in tokens."""
    end = 0
    for piece in sizes:
        if piece.size:
            ends = np.cumsum(piece, dtype="<i8") + end
            yield ends - piece, ends
            end = int(ends[-1])


def counting(stop: int, start: int = 0) -> Iterator[NDArray]:
    """Yield the numbers `start` to `stop`, without the latter, in pieces."""
    for first in range(start, stop, CHUNK):
        yield np.arange(first, min(first + CHUNK, stop), dtype="<i8")


def pieces_of(array: NDArray) -> Iterator[NDArray]:
    """Yield `array` in pieces, so that only one of them need be in memory."""
    for first in range(0, len(array), CHUNK):
        yield array[first : first + CHUNK]


def pieces_of_file(
    path: Path, dtype: np.dtype, count: int | None = None, *, offset: int = 0
) -> Iterator[NDArray]:
    """Yield `count` entries of a file from byte `offset` on in pieces; default: to its end."""
    with path.open("rb") as file:
        file.seek(offset)
        while count is None or count > 0:
            piece = np.fromfile(file, dtype, CHUNK if count is None else min(CHUNK, count))
            if not piece.size:
                return
            yield piece
            count = None if count is None else count - piece.size
