"""What stands between the two matrices of an MLP."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from megatron.common.registry import ACTIVATIONS, OwnFlags
from megatron.config.network.model_spec import Activation
from megatron.fused_kernels.reference.dispatch import Kernels

Activate = Callable[[Tensor, Tensor | None], Tensor]
"""(x, bias or None) -> activation(x + bias); a gated one halves the last dimension."""


def activation_of(name: Activation, kernels: Kernels, own_flags: OwnFlags = ()) -> Activate:
    """Return the activation of that name, computed by `kernels` where they have it.

    Args:
        own_flags: the flags of a plugin's activation.
    """
    match name:
        case "gelu_tanh":
            return lambda x, bias: kernels.bias_gelu(x, bias, "tanh")
        case "gelu_erf":
            return lambda x, bias: kernels.bias_gelu(x, bias, "erf")
        case "relu":
            return relu
        case "squared_relu":
            return squared_relu
        case str() if name in ACTIVATIONS:
            return ACTIVATIONS.get(name, own_flags)
        case _:
            return lambda x, bias: kernels.glu(x, bias, name)


def squared_relu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return relu(x + bias) squared.

    Source: arXiv:2109.08668, section 4.
    """
    return relu(x, bias).square()


def relu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return relu(x + bias)."""
    return F.relu(x if bias is None else x + bias)
