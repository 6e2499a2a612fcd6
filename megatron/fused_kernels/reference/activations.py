"""Activations of the MLP with its bias: GELU, and gated linear units (SwiGLU, GEGLU, ReGLU, LiGLU).

Features of gated ones come in pairs, [f, {gate, up}]: a rank's slice of the rows of the widening weight holds
full pairs, so that concatenated slices of any number of ranks are the full weight.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

GeluForm = Literal["tanh", "erf"]
"""tanh: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); erf: x times the normal distribution."""

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


def bias_gelu(x: Tensor, bias: Tensor | None, form: GeluForm) -> Tensor:
    """Return GELU(x + bias).

    Shapes: x [..., f], bias [f] or None when x has it already -> [..., f].
    Source: arXiv:1606.08415, section 2.
    """
    x = x if bias is None else x + bias
    return F.gelu(x, approximate="tanh" if form == "tanh" else "none")


def glu(x: Tensor, bias: Tensor | None, kind: GluKind) -> Tensor:
    """Return activation(gate) * up of every pair of features.

    Shapes: x [..., 2f], bias [2f] or None when x has it already -> [..., f]; the last dimension
    is read as [f, {gate, up}].
    Source: arXiv:2002.05202, section 2.
    """
    x = x if bias is None else x + bias
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
    return GATES[kind](gate) * up
