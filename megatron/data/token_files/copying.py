"""Copies byte ranges between files in the kernel; sparse holes stay holes."""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.common.errors import DataError
from megatron.data.token_files.publish import write_errors_name

_BUFFER_BYTES = 8 << 20
_CANNOT = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


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


def part_of(extents: Sequence[Extent], part: int, num_parts: int) -> list[Extent]:
    """Return the ranges that part `part` of `num_parts` copies; all parts are about equal."""
    total = sum(extent.num_bytes for extent in extents)
    first, last = total * part // num_parts, total * (part + 1) // num_parts
    found = []
    for extent in extents:
        skipped = max(first - extent.target_offset, 0)
        num_bytes = min(extent.num_bytes, last - extent.target_offset) - skipped
        if num_bytes > 0:
            found.append(
                Extent(
                    extent.source,
                    extent.source_offset + skipped,
                    extent.target_offset + skipped,
                    num_bytes,
                )
            )
    return found


def copy_extents(extents: Sequence[Extent], target: Path, *, workers: int = 1) -> None:
    """Write `extents` into the file `target`, which is made when it is not there.

    Raises:
        DataError: a source is too short, or the target cannot be written.
        MegatronError: a process was killed.
    """
    end = max((extent.target_offset + extent.num_bytes for extent in extents), default=0)
    with write_errors_name(target):
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            # Its length at once: a hole at the end is never written.
            if os.fstat(descriptor).st_size < end:
                os.truncate(descriptor, end)
            if workers == 1:
                for extent in extents:
                    _copy(extent, descriptor)
        finally:
            os.close(descriptor)
    if workers > 1:
        # Imported here: it takes as long as copying 100 MB, and one process does without.
        from megatron.common.processes import run_in_processes

        parts = [part_of(extents, part, workers) for part in range(workers)]
        run_in_processes([partial(_copy_part, part, target) for part in parts], _nothing_to_report)


def _copy_part(extents: Sequence[Extent], target: Path, report: Callable[..., None]) -> None:
    copy_extents(extents, target)


def _nothing_to_report(*message: object) -> None:
    pass


def _copy(extent: Extent, descriptor: int) -> None:
    shift = extent.target_offset - extent.source_offset
    end = extent.source_offset + extent.num_bytes
    with extent.source.open("rb") as file:
        source, position = file.fileno(), extent.source_offset
        while position < end:
            data, hole = _next_data(source, position, end)
            _copy_data(extent.source, source, descriptor, data, hole, shift)
            position = hole


def _next_data(source: int, position: int, end: int) -> tuple[int, int]:
    """Return start and stop of the next stretch without holes (sparse files)."""
    try:
        data = os.lseek(source, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO and os.fstat(source).st_size >= end:
            return end, end  # a hole to the end
        return position, end
    return min(data, end), min(os.lseek(source, data, os.SEEK_HOLE), end)


def _copy_data(name: Path, source: int, target: int, position: int, end: int, shift: int) -> None:
    in_kernel = True
    while position < end:
        count = min(end - position, _BUFFER_BYTES)
        if in_kernel:
            try:
                copied = os.copy_file_range(source, target, count, position, position + shift)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
                copied = 0
            in_kernel = copied > 0
        if not in_kernel:
            data = os.pread(source, count, position)
            if not data:
                raise DataError(
                    f"{name} ended at byte {position}, {end} expected: it changed while being "
                    "copied"
                )
            copied = os.pwrite(target, data, position + shift)
        # The disk begins to write while the next piece is copied; the flush at the end then waits
        # for little.
        os.posix_fadvise(target, position + shift, copied, os.POSIX_FADV_DONTNEED)
        position += copied
