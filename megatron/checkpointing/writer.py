"""Write checkpoint files: copy states to the host, hash while writing, flush to disk."""

import io
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from copy import copy as shallow_copy
from copy import deepcopy
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
from torch import Tensor, UntypedStorage

from megatron.checkpointing.manifest import FileHash, FileRecord, blocks
from megatron.common.errors import CheckpointError

T = TypeVar("T")


class SynchronousExecutor(Executor):
    """An executor without threads: `submit` runs the work and keeps errors in the future."""

    def submit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run `work`."""
        done: Future[T] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


_Location = tuple[torch.device, int, int]
"""Device, address and number of bytes of a storage."""


class HostCopies:
    """Copy states to host memory for async saves, one at a time, in buffers that are reused.

    Touching new memory takes several times as long as copying, so it is done once.
    """

    def __init__(self) -> None:
        self._used: list[UntypedStorage] = []
        self._free: dict[int, list[UntypedStorage]] = {}

    def begin(self) -> None:
        """Reuse all memory: the copies made so far are not needed any more."""
        self._free = {}
        for storage in self._used:
            self._free.setdefault(storage.nbytes(), []).append(storage)
        self._used = []

    def copy(self, state: Any) -> Any:
        """Copy nested containers, tensors (to the CPU) and small objects.

        Tensors that share memory share it in the copy too, and an object that occurs several times
        is copied once: the file of the copy has the same bytes.
        """
        return self._copy_once(state, {}, {})

    def _copy_once(
        self, value: Any, made: dict[_Location, UntypedStorage], copies: dict[int, Any]
    ) -> Any:
        if id(value) not in copies:
            copies[id(value)] = self._copy(value, made, copies)
        return copies[id(value)]

    def _copy(
        self, value: Any, made: dict[_Location, UntypedStorage], copies: dict[int, Any]
    ) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value.detach(), made).requires_grad_(value.requires_grad)
        if isinstance(value, dict):
            # A subclass keeps its attributes, such as the versions in a module's state.
            copied = shallow_copy(value)
            for key, item in value.items():
                copied[key] = self._copy_once(item, made, copies)
            return copied
        if type(value) in (list, tuple):
            return type(value)(self._copy_once(item, made, copies) for item in value)
        return deepcopy(value)

    def _tensor(self, tensor: Tensor, made: dict[_Location, UntypedStorage]) -> Tensor:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return deepcopy(tensor)
        source = tensor.untyped_storage()
        location = (tensor.device, source.data_ptr(), source.nbytes())
        if location not in made:
            made[location] = self._buffer(source.nbytes(), pinned=tensor.is_cuda)
            made[location].copy_(source)
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(made[location], tensor.storage_offset(), tensor.size(), tensor.stride())

    def _buffer(self, num_bytes: int, *, pinned: bool) -> UntypedStorage:
        free = self._free.get(num_bytes)
        # A GPU writes to pinned memory several times as fast.
        storage = (
            free.pop()
            if free
            else torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
        )
        self._used.append(storage)
        return storage


class StateWriter:
    """Write one checkpoint's files of this rank; errors are raised by the futures in `files`.

    DeepSpeed's ranks wait for each other while a checkpoint is saved: one that raised there would
    leave the others waiting.

    Args:
        executor: writes the files, one after the other.
        copies: copies each state first, for an executor that writes later; None for one that
            writes at once.
    """

    def __init__(self, executor: Executor, copies: HostCopies | None = None):
        self._executor = executor
        self._copies = copies
        self.files: list[Future[FileRecord]] = []
        if copies:
            copies.begin()

    def write(self, state: Any, file: Path) -> None:
        """Write `state` to `file` as torch.save does; its future is added to `files`."""
        kept = self._copies.copy(state) if self._copies else state
        self.files.append(self._executor.submit(write_state, kept, file))

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Pause background writing inside the block: copying would wait for it."""
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
    """Write `state` to `file` as torch.save does, flush it to disk, and return its record.

    Raises:
        CheckpointError: the file cannot be written.
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
    """Hash what is written to `stream`, block by block.

    A failed write is kept in `error`, and what follows is dropped: torch's archive writer would
    replace an exception by its own.
    """

    def __init__(self, stream: io.FileIO):
        self._stream = stream
        self.hash = FileHash()
        self.size = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        """Return True."""
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
    """Write all of `view`: one system call may write less."""
    while len(view):
        view = view[stream.write(view) :]
