"""Prefetching of micro-batches: read in a thread, copied to the GPU on a separate stream."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_END: Any = object()
_DEPTH = 2


class ReadAhead(Iterator[T]):
    """Iterate over `items` in a thread that is two items ahead.

    An error is raised where the item that caused it is taken: what is read and never taken has no
    effect.

    Args:
        begin: called once in the thread, before the first item.
    """

    def __init__(self, items: Iterator[T], *, begin: Callable[[], None] = lambda: None):
        self._items = items
        self._thread = ThreadPoolExecutor(1, "read-ahead", initializer=begin)
        self._coming: deque[Future[T]] = deque()
        for _ in range(_DEPTH):
            self._read()

    def _read(self) -> None:
        self._coming.append(self._thread.submit(next, self._items, _END))

    def __next__(self) -> T:
        """Return the next item; wait for the thread if it is not ready."""
        if not self._coming:
            raise StopIteration
        item = self._coming.popleft().result()
        if item is _END:
            raise StopIteration
        self._read()
        return item

    def close(self) -> None:
        """End the thread, after the item that it is reading."""
        self._thread.shutdown(cancel_futures=True)


class Copy(NamedTuple):
    """A copy on its way to the device, and the event that ends it; None: it is there."""

    tensor: Tensor
    event: Any


class DeviceCopies:
    """Asynchronous copies of pinned host memory to a GPU; on the CPU, a tensor stays as it is."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self) -> None:
        """Choose the GPU in the calling thread: each thread of a process starts with the first."""
        if self._stream:
            torch.cuda.set_device(self._device)

    @property
    def pins(self) -> bool:
        """Whether memory to copy from should be page-locked: other memory is waited for."""
        return self._stream is not None

    def start(self, host: Tensor) -> Copy:
        """Start to copy a tensor on the stream of copies."""
        if self._stream is None:
            return Copy(host, None)
        with torch.cuda.stream(self._stream):
            tensor = host.to(self._device, non_blocking=True)
            return Copy(tensor, self._stream.record_event())

    def finish(self, copy: Copy) -> Tensor:
        """Let the stream that computes wait for the copy; the host does not wait."""
        if copy.event is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(copy.event)
            # Its memory belongs to the other stream, which must not reuse it too early.
            copy.tensor.record_stream(computing)
        return copy.tensor
