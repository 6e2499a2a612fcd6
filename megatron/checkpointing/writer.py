"""The files of a checkpoint on their way to disk: hashed while they are written, then flushed."""

import io
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch

from megatron.checkpointing.host_copy import HostCopies
from megatron.checkpointing.manifest import FileHash, FileRecord, blocks
from megatron.common.errors import CheckpointError

T = TypeVar("T")


class AtOnce(Executor):
    """Does what it is given before it returns; errors wait in the result, as with a thread."""

    def submit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Do `work`."""
        done: Future[T] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class StateWriter:
    """Writes one checkpoint's files of this rank; no error is raised before its result is taken.

    DeepSpeed's ranks wait for each other while a checkpoint is saved: one that raised there would
    leave the others waiting.

    Args:
        executor: writes the files, one after the other.
        copies: takes the states when they are given, for an executor that writes later; None for
            one that writes at once.
    """

    def __init__(self, executor: Executor, copies: HostCopies | None = None):
        self._executor = executor
        self._copies = copies
        self.files: list[Future[FileRecord]] = []
        if copies:
            copies.begin()

    def write(self, state: Any, file: Path) -> None:
        """Write `state` to `file` as torch.save does; what becomes of it stands in `files`."""
        kept = self._copies.of(state) if self._copies else state
        self.files.append(self._executor.submit(write_state, kept, file))

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Write nothing in the background inside the block: who copies would wait for it."""
        if self._copies is None:
            yield
            return
        is_copied = threading.Event()
        self._executor.submit(is_copied.wait)
        try:
            yield
        finally:
            is_copied.set()


def write_state(state: Any, file: Path) -> FileRecord:
    """Write `state` to `file` as torch.save does, flush it to disk, and return what was written.

    Raises:
        CheckpointError: the disk does not take it.
    """
    try:
        with file.open("wb", buffering=0) as stream:
            hashed = _Hashed(stream)
            torch.save(state, cast(IO[bytes], hashed))
            if hashed.error:
                raise hashed.error
            os.fsync(stream.fileno())
    except OSError as error:
        raise CheckpointError(f"{file.name}: {error.strerror or error}") from error
    return FileRecord(file.name, hashed.size, str(hashed.hash))


class _Hashed(io.RawIOBase):
    """Hashes what is written to `stream`, block by block on its way to the kernel.

    A failed write is kept in `error`, and what follows is dropped: an exception would pass through
    torch's archive, which then tells of its own trouble.
    """

    def __init__(self, stream: io.FileIO):
        self._stream = stream
        self.hash = FileHash()
        self.size = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        """Whether it is written to."""
        return True

    def write(self, block: Any) -> int:
        """Hash and write `block`; return its size in bytes."""
        view = memoryview(block).cast("B")
        if self.error is None:
            try:
                for part in blocks(view):
                    self.hash.update(part)
                    _write_all(self._stream, part)
            except OSError as error:
                self.error = error
            self.size += len(view)
        return len(view)


def _write_all(stream: io.FileIO, view: memoryview) -> None:
    """Write everything: the kernel may take less in one go."""
    while len(view):
        view = view[stream.write(view) :]
