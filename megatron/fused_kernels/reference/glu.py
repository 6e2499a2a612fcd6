"""Gated linear units (SwiGLU, GEGLU, ReGLU, LiGLU): one half of the features gates the other.

Features come in pairs, [f, {gate, up}]: a rank's slice of the rows of the widening weight holds
full pairs, so that concatenated slices of any number of ranks are the full weight.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.fused_kernels.reference.limits import unsupported_dtype

GluKind = Literal["geglu", "geglu_tanh", "liglu", "reglu", "swiglu"]
"""What the gate goes through: GELU in its erf form or its tanh form, nothing, ReLU, or SiLU."""

GATES: Mapping[GluKind, Callable[[Tensor], Tensor]] = {
    "geglu": F.gelu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
    "liglu": lambda gate: gate,
    "reglu": F.relu,
    "swiglu": F.silu,
}
"""What each gate goes through."""


def glu(x: Tensor, bias: Tensor | None, kind: GluKind) -> Tensor:
    """Return activation(gate) * up of every pair of features.

    Shapes: x [..., 2f], bias [2f] or None when x has it already -> [..., f]; the last dimension
    is read as [f, {gate, up}].
    Source: arXiv:2002.05202, section 2.
    """
    x = x if bias is None else x + bias
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
    return GATES[kind](gate) * up


def unsupported(dtype: torch.dtype) -> str | None:
    """Return why the Triton kernels do not support `dtype`; None if they do."""
    return unsupported_dtype(dtype)
