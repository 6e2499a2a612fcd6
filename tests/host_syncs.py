"""What makes the host wait for a GPU, counted on a CPU: syncs, and attention by cuDNN."""

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"}
_WAITING = {"nonzero", "masked_select", "unique", "repeat_interleave", "is_nonzero", "equal"}


class HostSyncs(TorchFunctionMode):
    """Counts reads of tensors by the host, and copies from the host that are not asynchronous."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._below = _Below(self.found)

    def __enter__(self) -> "HostSyncs":
        self._below.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._below.__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READS:
            self.found[name] += 1
        if name == "to" and torch.device in map(type, args) and not kwargs.get("non_blocking"):
            self.found["to"] += 1
        if func is torch.tensor:
            self.found["tensor on the device"] += kwargs.get("device") is not None
            self._below.expects_host_memory += 1
        return func(*args, **kwargs)


class _Below(TorchDispatchMode):
    """Counts what only shows in the operations themselves."""

    def __init__(self, found: Counter[str]):
        super().__init__()
        self.found, self.expects_host_memory = found, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "lift_fresh":
            # Of torch.tensor, which makes host memory; or of a list or number as an operand.
            self.found["host memory as operand"] += not self.expects_host_memory
            self.expects_host_memory = 0
        if name in _WAITING and (kwargs or {}).get("output_size") is None:
            self.found[name] += 1
        if name in ("index", "index_put", "index_put_"):
            indices = [x for x in args[1] if isinstance(x, Tensor)]
            self.found["boolean index"] += any(x.dtype == torch.bool for x in indices)
        return func(*args, **(kwargs or {}))


class CudnnAttention(TorchFunctionMode):
    """Records for each call of scaled_dot_product_attention whether cuDNN may compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: list[bool] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return func(*args, **(kwargs or {}))
