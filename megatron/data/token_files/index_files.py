"""Index files (.idx) of token sequences: headers read and indexes written, in both formats."""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.data.token_files.pair_files import require_length

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


def read_mmap_header(idx_path: Path) -> tuple[np.dtype, int, int]:
    """Return the dtype of the tokens and the numbers of sequences and of document entries.

    Raises:
        DataError: the file is not an index of `--dataset-impl mmap`, or has another length.
    """
    version, code, num_sequences, num_entries = _read_header(
        idx_path, "mmap", MMAP_MAGIC, MMAP_HEADER
    )
    dtype = _dtype_of(idx_path, version, code)
    require_length(idx_path, MMAP_HEADER.size + 12 * num_sequences + 8 * num_entries)
    return dtype, num_sequences, num_entries


def read_legacy_header(idx_path: Path) -> tuple[np.dtype, int, int]:
    """Return the dtype of the tokens and the numbers of sequences and of document entries.

    Raises:
        DataError: the file is not an index of `--dataset-impl lazy` and `cached`, or has another
            length.
    """
    version, code, itemsize, num_sequences, num_sizes, num_entries = _read_header(
        idx_path, "lazy or cached", LEGACY_MAGIC, LEGACY_HEADER
    )
    dtype = _dtype_of(idx_path, version, code)
    if dtype.itemsize != itemsize:
        raise DataError(
            f"{idx_path} has {itemsize} bytes a token, but its data type code {code} has "
            f"{dtype.itemsize}; make the file again"
        )
    if num_sizes != num_sequences:
        raise DataError(
            f"{idx_path} holds {num_sizes} dimensions for {num_sequences} sequences; only "
            "sequences of one dimension are token files"
        )
    require_length(idx_path, LEGACY_HEADER.size + 8 * (3 * num_sequences + 2 + num_entries))
    return dtype, num_sequences, num_entries


def _read_header(idx_path: Path, impl: str, magic: bytes, header: struct.Struct) -> list[int]:
    """Return the header fields after the magic bytes."""
    with idx_path.open("rb") as file:
        content = file.read(header.size)
    if content[: len(magic)] != magic[: len(content)]:
        raise DataError(
            f"{idx_path} is not an index of --dataset-impl {impl}: it starts with "
            f"{content[: len(magic)]!r}, expected {magic!r}; leave --dataset-impl out, or make the "
            "file again with tools/preprocess_data.py"
        )
    if len(content) < header.size:
        raise DataError(f"{idx_path} is truncated: {len(content)} of {header.size} header bytes")
    return [*header.unpack(content)[1:]]


def _dtype_of(idx_path: Path, version: int, code: int) -> np.dtype:
    if version != VERSION:
        raise DataError(f"{idx_path} has format version {version}; this code reads {VERSION}")
    if code not in DTYPES:
        raise DataError(f"{idx_path} has unknown data type code {code}; known are 1 to 8")
    return DTYPES[code]


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
