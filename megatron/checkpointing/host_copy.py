"""A state as it is at one moment, copied to the memory of this process."""

import copy
from typing import Any

import torch
from torch import Tensor, UntypedStorage

_Place = tuple[torch.device, int, int]
"""Where the bytes of a storage lie: device, address and number of bytes."""


class HostCopies:
    """Copies states, one at a time, into memory that is kept for the next one.

    Touching new memory takes several times as long as copying, so it is done once.
    """

    def __init__(self) -> None:
        self._lent: list[UntypedStorage] = []
        self._free: dict[int, list[UntypedStorage]] = {}

    def begin(self) -> None:
        """Take back all memory: the copies made so far are not needed any more."""
        self._free = {}
        for storage in self._lent:
            self._free.setdefault(storage.nbytes(), []).append(storage)
        self._lent = []

    def of(self, state: Any) -> Any:
        """Return a copy of nested containers, tensors and small objects.

        Tensors that share memory share it in the copy too; they lie on the CPU. An object that
        stands in several places does so in the copy: its file has the same bytes.
        """
        return self._copied(state, {}, {})

    def _copied(
        self, value: Any, made: dict[_Place, UntypedStorage], copies: dict[int, Any]
    ) -> Any:
        if id(value) not in copies:
            copies[id(value)] = self._copy(value, made, copies)
        return copies[id(value)]

    def _copy(self, value: Any, made: dict[_Place, UntypedStorage], copies: dict[int, Any]) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value.detach(), made).requires_grad_(value.requires_grad)
        if isinstance(value, dict):
            # A subclass keeps its attributes, such as the versions in a module's state.
            copied = copy.copy(value)
            for key, item in value.items():
                copied[key] = self._copied(item, made, copies)
            return copied
        if type(value) in (list, tuple):
            return type(value)(self._copied(item, made, copies) for item in value)
        return copy.deepcopy(value)

    def _tensor(self, tensor: Tensor, made: dict[_Place, UntypedStorage]) -> Tensor:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return copy.deepcopy(tensor)
        source = tensor.untyped_storage()
        place = (tensor.device, source.data_ptr(), source.nbytes())
        if place not in made:
            made[place] = self._room(source.nbytes(), pinned=tensor.is_cuda)
            made[place].copy_(source)
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(made[place], tensor.storage_offset(), tensor.size(), tensor.stride())

    def _room(self, num_bytes: int, *, pinned: bool) -> UntypedStorage:
        free = self._free.get(num_bytes)
        # A GPU writes to pinned memory several times as fast.
        storage = (
            free.pop()
            if free
            else torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
        )
        self._lent.append(storage)
        return storage
