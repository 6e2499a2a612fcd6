"""PREFIX.bin.xxh3: a digest of every block of a .bin, by which damage to tokens is found."""

import os
import struct
from functools import lru_cache, partial
from pathlib import Path

from xxhash import xxh3_64_intdigest

from megatron.common.atomic_files import require_regular
from megatron.common.errors import DataError
from megatron.data.token_files.disk_file import DiskFile, cannot_open

BLOCK_BYTES = 1 << 16
"""Bytes of a .bin per digest: about the read-ahead of a disk at random access."""

SUFFIX = ".xxh3"
"""Added to the name of a .bin: its digests."""

_HEADER = struct.Struct("<8s4Q")  # magic, version, block bytes, bytes of .bin, digest of digests
_MAGIC = b"BINXXH3\0"
_VERSION = 1
_PAGE = 512  # digests read together, for 32 MiB of a .bin
_PAGES = 1024  # kept: 4 MiB of memory, for each .bin that is this large


def digests_path(bin_path: Path) -> Path:
    """Return the path of the digests of `bin_path`."""
    return bin_path.with_name(bin_path.name + SUFFIX)


def write_digests(bin_path: Path, target: Path) -> None:
    """Write the digests of all blocks of `bin_path`, which is read once, to `target`.

    Raises:
        OSError: a file cannot be read or written.
    """
    with bin_path.open("rb", buffering=0) as source:
        num_bytes = os.fstat(source.fileno()).st_size
        digests = bytearray()
        for offset in range(0, num_bytes, BLOCK_BYTES):
            block = os.pread(source.fileno(), BLOCK_BYTES, offset)
            digests += xxh3_64_intdigest(block).to_bytes(8, "little")
    header = (_MAGIC, _VERSION, BLOCK_BYTES, num_bytes, xxh3_64_intdigest(digests))
    target.write_bytes(_HEADER.pack(*header) + digests)


def mend_hint(bin_path: Path) -> str:
    """Return the advice for a .bin that differs from its digests."""
    return (
        f"copy {bin_path} and {digests_path(bin_path)} again from an intact copy, or make "
        "the files again; if the .bin was changed on purpose, write new digests with "
        f"tools/inspect_data.py {str(bin_path).removesuffix('.bin')} --write-digests"
    )


class BlockDigests:
    """Digests of the blocks of a .bin, read by pages as they are needed.

    Args:
        bin_path: the file they belong to.
        num_bytes: its length.

    Raises:
        DataError: the digests are damaged, or belong to another file.
    """

    def __init__(self, bin_path: Path, num_bytes: int):
        self._bin_path = bin_path
        self._path = digests_path(bin_path)
        try:
            require_regular(self._path)
        except OSError as error:
            raise cannot_open(self._path, error) from error
        self._file = DiskFile(self._path)
        content = self._file.read(0, min(_HEADER.size, self._file.num_bytes))
        if len(content) < _HEADER.size or not content.startswith(_MAGIC):
            raise self._not_usable(f"it starts with {content[:8]!r}, expected {_MAGIC!r}")
        _, version, block_bytes, bin_bytes, self._digest = _HEADER.unpack(content)
        if (version, block_bytes) != (_VERSION, BLOCK_BYTES):
            raise self._not_usable(
                f"it has version {version} and blocks of {block_bytes} bytes; this code reads "
                f"version {_VERSION} with {BLOCK_BYTES}"
            )
        if bin_bytes != num_bytes:
            raise self._not_usable(
                f"it is of a .bin of {bin_bytes} bytes, and {bin_path} has {num_bytes}"
            )
        self._num_blocks = -(-num_bytes // BLOCK_BYTES)
        found, expected = self._file.num_bytes, _HEADER.size + 8 * self._num_blocks
        if found != expected:
            raise self._not_usable(f"it has {found} bytes, expected {expected}")
        self._page = lru_cache(_PAGES)(partial(_read_page, self._file))

    def __len__(self) -> int:
        return self._num_blocks

    def is_of(self, block: int, content: bytes) -> bool:
        """Whether `content` equals the written block number `block`.

        Raises:
            DataError: the digests cannot be read.
        """
        page, number = divmod(block, _PAGE)
        written = self._page(page)[8 * number : 8 * number + 8]
        return xxh3_64_intdigest(content).to_bytes(8, "little") == written

    def is_damaged(self) -> bool:
        """Whether the digests themselves are damaged; reads all of them."""
        digests = self._file.read(_HEADER.size, 8 * self._num_blocks)
        return xxh3_64_intdigest(digests) != self._digest

    def _not_usable(self, reason: str) -> DataError:
        return DataError(
            f"{self._path} does not belong to {self._bin_path}: {reason}; "
            f"{mend_hint(self._bin_path)}"
        )


def _read_page(file: DiskFile, page: int) -> bytes:
    first = _HEADER.size + 8 * _PAGE * page
    return file.read(first, min(8 * _PAGE, file.num_bytes - first))
