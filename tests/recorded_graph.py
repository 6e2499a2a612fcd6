"""A stand-in for CUDA graphs on CPUs: records the operations of a function, and replays them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

REFUSED = {"_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "item"}
"""Operations that wait for the device, or read host memory: a capture fails with them."""


class Recorder(TorchDispatchMode):
    """Records each operation with its arguments and its result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in REFUSED:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


def record(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return what runs the operations of `function` again, without a line of its Python.

    Tensors that `function` did not create keep their memory; so does the result.
    """
    with Recorder() as recorder:
        output = function()

    @torch.inference_mode()
    def replay() -> Tensor:
        made: dict[int, Tensor] = {}
        for func, args, kwargs, out in recorder.calls:
            args, kwargs = tree_map_only(Tensor, lambda x: made.get(id(x), x), (args, kwargs))
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor):
                    made[id(old)] = new
        return output.copy_(made[id(output)])

    return replay
