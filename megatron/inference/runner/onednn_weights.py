"""Linear weights in oneDNN's blocked layout, for faster decode steps on CPUs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.tensor_parallel.embedding import VocabParallelEmbedding
from megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

_REORDERED = ("_reorder_linear_weight", "_linear_pointwise")
"""Private torch operators that are needed; without them nothing is packed."""


class PackedWeight(nn.Parameter):
    """A weight with a copy in oneDNN's blocked layout, which F.linear uses.

    A matrix product with few rows is bound by reading the weight, which is up to three times as
    fast in this layout. All other operations use the original tensor.
    """

    packed: Tensor

    def __new__(cls, weight: Tensor) -> "PackedWeight":
        """Return `weight` with a packed copy."""
        packed = torch.Tensor._make_subclass(cls, weight.detach(), False)
        packed.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        return packed

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`; F.linear is replaced by oneDNN's product."""
        if func is F.linear:
            return _product(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _product(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight.packed, bias, "none", [], "")


def pack_weights(model: nn.Module) -> None:
    """Pack the linear and the word embedding weights of `model` that are on CPUs.

    The unpacked copy of a linear layer's weight is freed.
    """
    if not torch.backends.mkldnn.is_available() or not all(
        hasattr(torch.ops.mkldnn, name) for name in _REORDERED
    ):
        return
    packed = [torch.float32]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():  # by the processor's instructions
        packed.append(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            if module.weight.device.type != "cpu" or module.weight.dtype not in packed:
                continue
            weight = PackedWeight(module.weight)
            if not isinstance(module, VocabParallelEmbedding):
                weight.data = weight.new_empty(1).expand(weight.shape)
            module.weight = weight
