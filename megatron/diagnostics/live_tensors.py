"""How much memory the tensors take that were made and are still needed."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Follows the tensors that are made inside the `with` block, autograd's own too.

    After a forward pass `alive_bytes()` is what backward will need, whoever holds it: autograd,
    recomputation, or a caller. Memory that exists before the block is not counted.

    Args:
        peak: whether to keep `peak_bytes` up to date, which takes a look at all tensors at every
            operation.
    """

    def __init__(self, *, peak: bool = False) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._follows_peak = peak
        self._sizes: dict[StorageWeakRef, int] = {}

    def alive_bytes(self) -> int:
        """Return the bytes of all that has been made and not been freed."""
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        return sum(self._sizes.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the operation; note the storage of what it makes."""
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            # On the device meta a tensor has a size and no memory.
            if not isinstance(leaf, Tensor) or leaf.is_meta:
                continue
            if (ref := _storage(leaf)) not in given:
                self._sizes[ref] = leaf.untyped_storage().nbytes()
        if self._follows_peak:
            self.peak_bytes = max(self.peak_bytes, self.alive_bytes())
        return made


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
