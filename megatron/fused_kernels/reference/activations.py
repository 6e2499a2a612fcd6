"""Activations of the MLP with its bias: GELU, and gated linear units (SwiGLU, GEGLU, ReGLU, LiGLU).

Features of gated ones come in pairs, [f, {gate, up}]: a rank's slice of the rows of the widening weight holds
full pairs, so that concatenated slices of any number of ranks are the full weight.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from megatron.config.network.model import GatedActivation

GeluForm = Literal["tanh", "erf"]
"""tanh: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); erf: x times the normal distribution."""

GluKind = GatedActivation
"""What the gate goes through: GELU in its erf form or its tanh form, nothing, x sigmoid(1.702 x), ReLU,
or SiLU."""

GATES: Mapping[GluKind, Callable[[Tensor], Tensor]] = {
    "geglu": F.gelu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
    "liglu": lambda gate: gate,
    "quick_geglu": lambda gate: gate * (1.702 * gate).sigmoid(),
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


def glu(
    x: Tensor, bias: Tensor | None, kind: GluKind, *, clamp: float = 0.0, offset: float = 0.0
) -> Tensor:
    """Return activation(gate) * (up + offset) of every pair of features.

    Args:
        clamp: bound of gates from above, of ups on both sides; 0 for none.

    Shapes: x [..., 2f], bias [2f] or None when x has it already -> [..., f]; the last dimension
    is read as [f, {gate, up}].
    Source: arXiv:2002.05202, section 2; arXiv:2508.10925, section 2.3, for clamp and offset.
    """
    x = x if bias is None else x + bias
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
    if clamp:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return GATES[kind](gate) * (up + offset if offset else up)
