"""The tokens of a .bin: read with pread, each block compared with its digest when first read."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.data.token_files.block_digests import (
    BLOCK_BYTES,
    BlockDigests,
    digests_path,
    mend_hint,
)
from megatron.data.token_files.disk_file import DiskFile
from megatron.data.token_files.remote_pairs import FetchedDigests, origin_of

_SHIFT = BLOCK_BYTES.bit_length() - 1


class TokenFile:
    """An array of tokens that stays on disk; slices of it are read into new arrays.

    Blocks of a file that stands for one at a URL are downloaded when they are first read.

    Args:
        path: a .bin; `path`.xxh3 holds the digests of its blocks, or is not there.
        dtype: of a token.

    Raises:
        DataError: on opening, a file cannot be read, or the digests belong to another file;
            on reading, the file was truncated, a block is damaged, or the disk fails.

    Shapes: tokens[start:stop] -> [stop - start], read-only.
    """

    def __init__(self, path: Path, dtype: np.dtype):
        self.path, self.dtype = path, dtype
        self._itemsize = dtype.itemsize
        self._file = DiskFile(path)
        self.num_bytes = self._file.num_bytes
        self._length = self.num_bytes // dtype.itemsize
        self._origin = origin_of(path, self.num_bytes)
        self._digests: BlockDigests | FetchedDigests | None = None
        if digests_path(path).exists():
            self._digests = BlockDigests(path, self.num_bytes)
        elif self._origin:
            self._digests = FetchedDigests(path, self.num_bytes)
        self._is_checked = bytearray(0 if self._digests is None else len(self._digests))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, tokens: slice) -> NDArray:
        start, stop = tokens.start or 0, tokens.stop
        if stop is None or stop > self._length:
            stop = self._length
        first, count = start * self._itemsize, (stop - start) * self._itemsize
        if count <= 0:
            return np.empty(0, self.dtype)
        self._check(first >> _SHIFT, first + count - 1 >> _SHIFT)
        return np.frombuffer(self._file.read(first, count), self.dtype)

    def gather(self, starts: Sequence[int], stops: Sequence[int]) -> NDArray:
        """Return the tokens from each of `starts` to each of `stops`, one piece after the other.

        Shapes: -> [sum of stops - starts], read-only.
        """
        # In few operations for each piece: samples from short documents have many.
        itemsize, is_checked, descriptor = self._itemsize, self._is_checked, self._file.descriptor
        has_digests, pread = self._digests is not None, os.pread
        total, pieces = 0, []
        for start, stop in zip(starts, stops, strict=True):
            first, count = start * itemsize, (stop - start) * itemsize
            if has_digests and count:
                block, last = first >> _SHIFT, first + count - 1 >> _SHIFT
                if not (is_checked[block] and last - block < 2 and is_checked[last]):
                    self._check(block, last)
            try:
                pieces.append(pread(descriptor, count, first))
            except OSError as error:
                raise self._file.unreadable(first, count, error) from error
            total += count
        content = b"".join(pieces)
        if len(content) < total:
            ranges = zip(starts, stops, strict=True)
            return np.concatenate([self[start:stop] for start, stop in ranges])
        return np.frombuffer(content, self.dtype)

    @property
    def has_digests(self) -> bool:
        """Whether damage to the file is found."""
        return self._digests is not None

    @property
    def num_blocks(self) -> int:
        """Blocks that have a digest; 0 where the file has none."""
        return len(self._is_checked)

    def verify(self) -> None:
        """Compare all blocks with their digests, if there are any.

        Raises:
            DataError: naming the first block that is damaged, and how many are.
        """
        damaged = list(self._damaged_blocks())
        if damaged:
            raise self._damage(damaged[0], f" ({len(damaged)} of {self.num_blocks} blocks are)")

    def _damaged_blocks(self) -> Iterator[int]:
        for block in range(self.num_blocks):
            if not self._is_checked[block] and not self._is_sound(block):
                yield block

    def _check(self, first: int, last: int) -> None:
        """Compare the blocks `first` to `last` with their digests, unless that was done before."""
        if self._digests is None:
            return
        for block in range(first, last + 1):
            if not self._is_checked[block] and not self._is_sound(block):
                raise self._damage(block)

    def _is_sound(self, block: int) -> bool:
        """Compare a block with its digest, and remember that it is sound; download a missing one."""
        first = block << _SHIFT
        content = self._file.read(first, min(BLOCK_BYTES, self.num_bytes - first))
        if self._digests is None:
            return False
        sound = [block] if self._digests.is_of(block, content) else []
        if self._origin and not sound:
            sound = self._origin.fetch(block, self._digests)
        for each in sound:
            self._is_checked[each] = True
        return bool(self._is_checked[block])

    def _damage(self, block: int, more: str = "") -> DataError:
        first = block << _SHIFT
        where = f"bytes {first} to {min(first + BLOCK_BYTES, self.num_bytes)}"
        if self._origin:
            url = self._origin.url
            return DataError(
                f"{url} is damaged, or {url}.xxh3 is: they differ at {where}{more}; upload both "
                "again from an intact copy"
            )
        if isinstance(self._digests, BlockDigests) and self._digests.is_damaged():
            return DataError(
                f"{digests_path(self.path)} is damaged, or {self.path} is as well: they differ at "
                f"{where}{more}; {mend_hint(self.path)}"
            )
        return DataError(
            f"{self.path} is damaged: {where} are not what was written{more}; "
            f"{mend_hint(self.path)}"
        )
