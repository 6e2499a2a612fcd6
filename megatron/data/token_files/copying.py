"""Copies byte ranges between files by threads; sparse holes stay holes."""

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.common.errors import DataError
from megatron.common.progress import Progress
from megatron.data.token_files.publish import write_errors_name


@dataclass(frozen=True)
class Extent:
    """A byte range of one file and its offset in another."""

    source: Path
    source_offset: int
    target_offset: int
    num_bytes: int


def lay_end_to_end(sources: Sequence[Path]) -> list[Extent]:
    """Return the output range of each full file when they follow one another."""
    extents, end = [], 0
    for source in sources:
        num_bytes = source.stat().st_size
        extents.append(Extent(source, 0, end, num_bytes))
        end += num_bytes
    return extents


def copy_extents(
    extents: Sequence[Extent],
    target: Path,
    *,
    workers: int = 1,
    piece_bytes: int = 64 << 20,
    buffer_bytes: int = 1 << 20,
) -> None:
    """Write `extents` into the file `target`, which is made if it does not exist.

    Args:
        workers: threads that copy; the system calls run without Python's lock.
        piece_bytes: bytes that a thread copies before it takes the next piece.
        buffer_bytes: bytes of one system call; they stay in the processor's cache.

    Raises:
        DataError: a source is too short, or the target cannot be written.
    """
    end = max((extent.target_offset + extent.num_bytes for extent in extents), default=0)
    with write_errors_name(target):
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            # Its full length first: a hole at the end is never written.
            if os.fstat(descriptor).st_size < end:
                os.truncate(descriptor, end)
            copy = partial(_copy, target=descriptor, buffer_bytes=buffer_bytes)
            pieces = [*_split(extents, piece_bytes)]
            num_bytes = sum(piece.num_bytes for piece in pieces)
            with (
                ThreadPoolExecutor(workers) as threads,
                Progress(f"copy to {target}", num_bytes, "B") as progress,
            ):
                for piece, _ in zip(pieces, threads.map(copy, pieces), strict=True):
                    progress.add(piece.num_bytes)  # an error of a thread is raised here
        finally:
            os.close(descriptor)


def _split(extents: Iterable[Extent], piece_bytes: int) -> Iterator[Extent]:
    """Yield the extents in pieces, so that threads share the work and stop soon on an error."""
    for extent in extents:
        for first in range(0, extent.num_bytes, piece_bytes):
            yield Extent(
                extent.source,
                extent.source_offset + first,
                extent.target_offset + first,
                min(extent.num_bytes - first, piece_bytes),
            )


def _copy(extent: Extent, target: int, buffer_bytes: int) -> None:
    shift = extent.target_offset - extent.source_offset
    end = extent.source_offset + extent.num_bytes
    # Not copy_file_range, which takes 1.5 times as long from memory to memory.
    buffer = memoryview(bytearray(min(buffer_bytes, extent.num_bytes)))
    with extent.source.open("rb") as file:
        source, hole = file.fileno(), extent.source_offset
        while hole < end:
            position, hole = _next_data(source, hole, end)
            while position < hole:
                count = os.preadv(source, [buffer[: hole - position]], position)
                if not count:
                    raise DataError(
                        f"{extent.source} ended at byte {position}, {hole} expected: it changed "
                        "while being copied"
                    )
                position += os.pwrite(target, buffer[:count], position + shift)
    # The disk begins to write while the next piece is copied; the flush at the end then waits for
    # little.
    os.posix_fadvise(target, extent.target_offset, extent.num_bytes, os.POSIX_FADV_DONTNEED)


def _next_data(source: int, position: int, end: int) -> tuple[int, int]:
    """Return start and stop of the next stretch without holes (sparse files)."""
    try:
        data = os.lseek(source, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO and os.fstat(source).st_size >= end:
            return end, end  # a hole to the end
        return position, end
    return min(data, end), min(os.lseek(source, data, os.SEEK_HOLE), end)
