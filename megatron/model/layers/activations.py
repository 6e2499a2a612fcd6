"""Activations of the MLP: GELU, ReLU, gated linear units; registered by name in ACTIVATIONS."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron.common.registry import ACTIVATIONS, OwnFlags
from megatron.config.network.model import MLPSpec
from megatron.fused_kernels.reference.activations import GATES, GluKind, glu
from megatron.fused_kernels.reference.dispatch import Kernels

Activate = Callable[[Tensor, Tensor | None], Tensor]
"""(x, bias or None) -> activation(x + bias); a gated one halves the last dimension."""


def activation_of(mlp: MLPSpec, kernels: Kernels, own_flags: OwnFlags = ()) -> Activate:
    """Return the activation of an MLP, computed by `kernels` where they have it.

    Args:
        own_flags: the flags of a plugin's activation.
    """
    if mlp.changes_pairs:
        kind: Any = mlp.activation
        return lambda x, bias: glu(x, bias, kind, clamp=mlp.glu_clamp, offset=mlp.glu_offset)
    activation = ACTIVATIONS.get(mlp.activation, own_flags)
    return lambda x, bias: activation(x, bias, kernels)


@ACTIVATIONS.register("gelu_tanh")
def gelu_tanh(x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
    """Return GELU in its tanh form."""
    return kernels.bias_gelu(x, bias, "tanh")


@ACTIVATIONS.register("gelu_erf")
def gelu_erf(x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
    """Return GELU in its exact form."""
    return kernels.bias_gelu(x, bias, "erf")


@ACTIVATIONS.register("relu")
def relu(x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
    """Return relu(x + bias)."""
    return F.relu(x if bias is None else x + bias)


@ACTIVATIONS.register("squared_relu")
def squared_relu(x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
    """Return relu(x + bias) squared.

    Source: arXiv:2109.08668, section 4.
    """
    return relu(x, bias, kernels).square()


def _register_gated(kind: GluKind) -> None:
    @ACTIVATIONS.register(kind)
    def gated(x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        return kernels.glu(x, bias, kind)


for _kind in GATES:  # geglu, geglu_tanh, liglu, quick_geglu, reglu, swiglu
    _register_gated(_kind)
