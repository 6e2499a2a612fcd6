"""Write checkpoint files: copy states to the host, hash while writing, flush to disk."""

import io
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from copy import copy as shallow_copy
from copy import deepcopy
from functools import partial
from itertools import cycle
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


PIECE_BYTES = 256 << 20


def _pinned_buffer(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class PinnedPieces:
    """Copy GPU memory to the host through two page-locked (pinned) pieces of 256 MB, in turns.

    A GPU writes to pinned memory several times as fast. Pinning full copies would lock as much
    memory as the state takes, and PyTorch rounds each block up to a power of two: up to twice that.

    Args:
        piece_bytes: a power of two.
        empty: allocates a piece.
        event: makes an event of the stream that copies.
    """

    def __init__(
        self,
        piece_bytes: int = PIECE_BYTES,
        *,
        empty: Callable[[int], Tensor] = _pinned_buffer,
        event: Callable[[], Any] = torch.cuda.Event,
    ):
        self._piece_bytes, self._empty, self._event = piece_bytes, empty, event
        self._pieces: list[Tensor] = []

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy bytes of the device to as many of the host.

        The GPU fills one piece while the host empties the other.
        """
        if not self._pieces:
            self._pieces = [self._empty(self._piece_bytes) for _ in range(2)]
        size = self._piece_bytes
        parts = zip(source.split(size), target.split(size), cycle(self._pieces), strict=False)
        arrives: Callable[[], None] = lambda: None  # noqa: E731
        for part, goal, piece in parts:
            held = piece[: len(part)]
            held.copy_(part, non_blocking=True)
            event = self._event()
            event.record()
            arrives()
            arrives = partial(_take, event, held, goal)
        arrives()


def _take(event: Any, piece: Tensor, goal: Tensor) -> None:
    event.synchronize()
    goal.copy_(piece)


class HostCopies:
    """Copy states to host memory for async saves, one at a time, in buffers that are reused.

    Touching new memory takes several times as long as copying, so it is done once.
    """

    def __init__(self) -> None:
        self._pieces = PinnedPieces()
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
            made[location] = self._buffer(source.nbytes())
            if tensor.is_cuda:
                self._pieces.copy(_bytes_of(source), _bytes_of(made[location]))
            else:
                made[location].copy_(source)
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(made[location], tensor.storage_offset(), tensor.size(), tensor.stride())

    def _buffer(self, num_bytes: int) -> UntypedStorage:
        free = self._free.get(num_bytes)
        storage = free.pop() if free else UntypedStorage(num_bytes)
        self._used.append(storage)
        return storage


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class StateWriter:
    """Write one checkpoint's files of this rank; errors are raised by the futures in `files`.

    DeepSpeed's ranks wait for each other while a checkpoint is saved: one that raised there would
    leave the other ranks waiting.

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
        (hashed,) = _write((state,), file)
    except OSError as error:
        raise CheckpointError(f"{file.name}: {error.strerror or error}") from error
    return FileRecord(file.name, hashed.size, str(hashed.hash))


def write_states(states: Iterable[Any], file: Path) -> list[int]:
    """Write states to `file`, each as torch.save does, one after another; return their sizes in bytes.

    Memory: one of them.

    Raises:
        CheckpointError: the file cannot be written.
    """
    try:
        return [hashed.size for hashed in _write(states, file)]
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or error}") from error


def _write(states: Iterable[Any], file: Path) -> list["_Hashed"]:
    with file.open("wb", buffering=0) as stream:
        # By `map`, each state is freed before the next one is made.
        written = [*map(partial(_append, stream), states)]
        os.fsync(stream.fileno())
    return written


def _append(stream: io.FileIO, state: Any) -> "_Hashed":
    hashed = _Hashed(stream)
    torch.save(state, cast(IO[bytes], hashed))
    if hashed.error:
        raise hashed.error
    return hashed


class _Hashed(io.RawIOBase):
    """Hash everything written to `stream`, block by block.

    A failed write is kept in `error`, and later writes are dropped: torch's archive writer would
    replace the exception.
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
