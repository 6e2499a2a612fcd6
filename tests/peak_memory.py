"""Memory of the tensors that code makes, counted."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors that are made and alive, at most at once."""

    def __init__(self, *known):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.made, self.peak = [], 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        found = op(*args, **(kwargs or {}))
        self.made += [weakref.ref(t) for t in tree_leaves(found) if torch.is_tensor(t)]
        alive = [tensor for made in self.made if (tensor := made()) is not None]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
        new = sum(size for place, size in storages.items() if place not in self.known)
        self.peak = max(self.peak, new)
        return found
