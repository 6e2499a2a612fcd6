"""FP8 products of linear layers by torchao: 8-bit floats with a scale for each tensor or row."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

_CAPABILITY = (8, 9)


def unsupported_reason(device: torch.device) -> str | None:
    """Return why `device` cannot multiply fp8 matrices; None if it can."""
    if device.type != "cuda":
        return "fp8 needs a GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= _CAPABILITY:
        return None
    needed = ".".join(map(str, _CAPABILITY))
    return f"fp8 needs compute capability {needed}, and this GPU has {major}.{minor}"


def fp8_linear(
    fp8_format: str, recipe: str, *, emulate: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return (x, weight) -> x W^T, computed in fp8 as its gradients are.

    Scales are computed from the values at each product. Sums are 32-bit numbers; the result has the
    dtype of x.

    Args:
        fp8_format: "e4m3", or "hybrid" for e5m2 gradients.
        recipe: what has a scale of its own: "tensorwise" or "rowwise".
        emulate: round to fp8 and multiply in 32 bits, on any device.
    """
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    config = Float8LinearConfig.from_recipe_name(recipe)
    gradient: Any = config.cast_config_grad_output
    if fp8_format == "e4m3":
        gradient = replace(gradient, target_dtype=torch.float8_e4m3fn)
    # Rows of activations are tokens, of any number: they are padded to a multiple of 16.
    config = replace(
        config,
        cast_config_grad_output=gradient,
        cast_config_grad_output_for_grad_weight=gradient,
        pad_inner_dim=True,
        emulate=emulate,
    )
    # The layer derives the settings of the three products from the config.
    products = Float8Linear(16, 16, bias=False, device="meta", config=config).linear_mm_config

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        y = matmul_with_hp_or_float8_args.apply(x, weight.t(), products, config)
        # torchao returns a view, which layers could not add a bias to in place. This is none.
        fresh: Tensor = torch.ops.aten._unsafe_view(y, y.shape)
        return fresh

    return linear
