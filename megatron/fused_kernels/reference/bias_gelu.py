"""Bias and GELU of the MLP in one operation."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.fused_kernels.reference.limits import unsupported_dtype

GeluForm = Literal["tanh", "erf"]
"""tanh: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); erf: x times the normal distribution."""


def bias_gelu(x: Tensor, bias: Tensor | None, form: GeluForm) -> Tensor:
    """Return GELU(x + bias).

    Shapes: x [..., f], bias [f] or None when x has it already -> [..., f].
    Source: arXiv:1606.08415, section 2.
    """
    x = x if bias is None else x + bias
    return F.gelu(x, approximate="tanh" if form == "tanh" else "none")


def unsupported(dtype: torch.dtype) -> str | None:
    """Return why the Triton kernels do not support `dtype`; None if they do."""
    return unsupported_dtype(dtype)
