"""Count where a step waits for its device, on the CPU, where every tensor stands for one on a GPU.

On a GPU these calls wait until all work launched so far is done: reading a scalar, copies to the
host, results whose shape depends on values, and synchronize(). A copy to the host counts once;
what is computed from it on the host does not count again. A copy by `to` is not seen: the device of
these tests has the name of the host.
"""

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import get_accelerator
from engines import deepspeed_of
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default}
SHAPED = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default}


class Syncs:
    """Counts of waits, by the line that waits."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self.marks: list[int] = []

    def add(self, what: str) -> None:
        """Count a wait of the caller."""
        frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename]
        near = next(f for f in reversed(frames) if f.filename != __file__)
        self.lines[f"{what} at {'/'.join(near.filename.split('/')[-3:])}:{near.lineno}"] += 1

    def mark(self) -> None:
        """Note the number of waits so far."""
        self.marks.append(sum(self.lines.values()))


def host_state(engine: Any) -> Iterator[Tensor]:
    """Yield the counts of steps of torch's optimizers, which are in host memory on GPUs too."""
    for state in deepspeed_of(engine).basic_optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            yield state["step"]


@contextmanager
def counted_syncs(*, on_host: Iterable[Tensor] = ()) -> Iterator[Syncs]:
    """Count waits for the device inside the block.

    Args:
        on_host: tensors that are in host memory on a GPU too.
    """
    syncs = Syncs()
    for tensor in on_host:
        _mark(tensor)
    waits = patch.object(
        get_accelerator(), "synchronize", lambda *_, **__: syncs.add("synchronize")
    )
    with waits, _Copies(syncs), _Reads(syncs):
        yield syncs


def _mark(tensor: Tensor) -> Tensor:
    tensor.is_on_host = True  # type: ignore[attr-defined]
    return tensor


def _is_on_host(tensor: Tensor) -> bool:
    return getattr(tensor, "is_on_host", False)


class _Reads(TorchDispatchMode):
    """Sees what PyTorch calls itself; marks what is computed from tensors on the host alone."""

    def __init__(self, syncs: Syncs):
        super().__init__()
        self._syncs = syncs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        host = bool(inputs) and all(map(_is_on_host, inputs))
        if inputs and not host and (func in READS or func in SHAPED):
            self._syncs.add(func.__name__)
        result = func(*args, **(kwargs or {}))
        if host:
            for output in tree_flatten(result)[0]:
                if isinstance(output, Tensor):
                    _mark(output)
        return result


class _Copies(TorchFunctionMode):
    """Sees copies to the host, which are none on the CPU."""

    def __init__(self, syncs: Syncs):
        super().__init__()
        self._syncs = syncs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("cpu", "tolist", "numpy"):
            return self._to_host(name, func, args, kwargs)
        return func(*args, **kwargs)

    def _to_host(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if not _is_on_host(args[0]):
            self._syncs.add(name)
        result = func(*args, **kwargs)
        return _mark(result.clone()) if isinstance(result, Tensor) else result
