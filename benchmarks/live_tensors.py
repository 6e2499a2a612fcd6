"""Measure the memory of live tensors, such as activations kept for the backward pass."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Tracks the tensors created inside the `with` block, including autograd's.

    After a forward pass `alive_bytes()` is the memory that the backward pass needs, held by
    autograd, by activation checkpointing or by the caller. Earlier memory is not counted.

    Args:
        peak: whether to update `peak_bytes`, which visits all tensors at every operation.
    """

    def __init__(self, *, peak: bool = False) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._tracks_peak = peak
        self._sizes: dict[StorageWeakRef, int] = {}

    def alive_bytes(self) -> int:
        """Return the bytes of all tensors that were created and not freed."""
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        return sum(self._sizes.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the operation; record the storages of its results."""
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            # On the device meta a tensor has a size and no memory.
            if not isinstance(leaf, Tensor) or leaf.is_meta:
                continue
            if (ref := _storage(leaf)) not in given:
                self._sizes[ref] = leaf.untyped_storage().nbytes()
        if self._tracks_peak:
            self.peak_bytes = max(self.peak_bytes, self.alive_bytes())
        return made


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
