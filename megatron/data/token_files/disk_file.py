"""File reads with pread, and file digests; a file that is cut or whose disk fails is named.

A mapped file would save a microsecond a read, but there the process dies of SIGBUS without a
message.
"""

import errno
import os
import resource
import weakref
from pathlib import Path

from xxhash import xxh3_128

from megatron.common.errors import DataError

_HASHED_BYTES = 1 << 18  # at a time, which stay in the processor's cache


class DiskFile:
    """A file that stays open, and of which slices are read into memory.

    Args:
        remedy: how to repair a truncated file, for the error.

    Raises:
        DataError: on opening, the file cannot be read; on reading, it was cut, or the disk fails.
    """

    def __init__(self, path: Path, *, remedy: str = "copy it again, and start again"):
        self.path, self._remedy = path, remedy
        self.descriptor = _open(path)
        weakref.finalize(self, os.close, self.descriptor)
        self.num_bytes = os.fstat(self.descriptor).st_size

    def read(self, first: int, count: int) -> bytes:
        """Return `count` bytes from byte `first` on."""
        try:
            content = os.pread(self.descriptor, count, first)
            while len(content) < count:  # pread ends at 2 GiB, too
                more = os.pread(self.descriptor, count - len(content), first + len(content))
                if not more:
                    raise self._truncated_error()
                content += more
        except OSError as error:
            raise self.unreadable(first, count, error) from error
        return content

    def unreadable(self, first: int, count: int, error: OSError) -> DataError:
        """Return the error for bytes that the disk does not give."""
        return DataError(
            f"cannot read bytes {first} to {first + count} of {self.path}: "
            f"{error.strerror or error}; see whether its disk is healthy"
        )

    def _truncated_error(self) -> DataError:
        found = os.fstat(self.descriptor).st_size
        return cut_under_the_reader(self.path, self.num_bytes, found, self._remedy)


def file_digest(path: Path) -> str:
    """Return the XXH3 digest (128 bits) of a file.

    Raises:
        DataError: the file cannot be read.
    """
    digest, buffer = xxh3_128(), bytearray(_HASHED_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    return digest.hexdigest()


def cut_under_the_reader(path: Path, opened: int, found: int, remedy: str) -> DataError:
    """Return the error for a file that lost bytes after it was opened."""
    return DataError(
        f"{path} was truncated while it was read: it had {opened} bytes when it was opened, and has "
        f"{found} now; {remedy}"
    )


def cannot_open(path: str | Path, error: OSError) -> DataError:
    """Return the error for a file of the data, or a pair of them, that does not open."""
    hint = ""
    if error.errno == errno.EMFILE:
        hint = "; a run keeps all token files of --data-path open: allow more with ulimit -n"
    return DataError(f"cannot read {path}: {error.strerror or error}{hint}")


def _open(path: Path) -> int:
    """Return a descriptor of `path`; raise the limit of open files before half of them are open.

    A blend of a thousand corpora has as many files open, and shells allow 1024 by default.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise cannot_open(path, error) from error
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != most and descriptor >= limit // 2:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return descriptor
