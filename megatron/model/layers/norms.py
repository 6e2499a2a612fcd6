"""Norms of features, computed by the chosen kernels."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.common.registry import NORMS
from megatron.config.network.model_spec import ModelSpec
from megatron.fused_kernels.reference.dispatch import REFERENCE, Kernels
from megatron.model.layers.layer_list import Layer
from megatron.tensor_parallel.collectives import (
    copy_to_tensor_parallel,
    reduce_from_tensor_parallel,
)
from megatron.tensor_parallel.sharding import (
    exact_quotient,
    mark_partial_gradient,
    mark_sharded,
)


class Norm(nn.Module):
    """Base class of norms over the last dimension; plugins override `forward`.

    Args:
        width: number of features.
        eps: added to the variance.
        around_one: the weight is kept as its difference from 1.
        group: ranks that norm different features with the same weight; its gradient is their sum.
        kernels: what computes it.
        flags: the plugin's section of flags, if it was registered with one.

    Communication: none forward; with a group, an all-reduce of each parameter's gradient backward.
    """

    has_bias: bool

    def __init__(
        self,
        width: int,
        *,
        eps: float,
        around_one: bool = False,
        group: dist.ProcessGroup | None = None,
        kernels: Kernels = REFERENCE,
        flags: Any = None,
    ):
        super().__init__()
        self.flags = flags
        self.width, self.eps, self.around_one, self.kernels = width, eps, around_one, kernels
        self.weight = nn.Parameter(torch.full((width,), 0.0 if around_one else 1.0))
        if self.has_bias:
            self.bias = nn.Parameter(torch.zeros(width))
        if group is not None:
            for parameter in self.parameters():
                mark_partial_gradient(parameter, group)

    def extra_repr(self) -> str:
        """Return the size, and what differs from the plain norm."""
        around = ", around_one=True" if self.around_one else ""
        return f"{self.width}, eps={self.eps}{around}"

    def scale(self, dtype: torch.dtype) -> Tensor:
        """Return the factors of the normed features, [h]: the weight, or 1 + weight in `dtype`."""
        return self.weight.to(dtype) + 1 if self.around_one else self.weight


@NORMS.register("LayerNorm")
class LayerNorm(Norm):
    """Layer norm over the last dimension.

    With `sums` it returns the sum x + y + y_bias too, without y x itself: see `fuses_sum`.

    Shapes: x, y [..., h], y_bias [h] -> [..., h], in the weight's dtype whatever x's is;
        with `sums` (sum [..., h], that).
    """

    has_bias, centred = True, True

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        y_bias: Tensor | None = None,
        *,
        sums: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        factors, bias = self.scale(x.dtype), self.bias if self.has_bias else None
        if sums and self.kernels.add_norm:
            total, normed = self.kernels.add_norm(
                x, y, y_bias, factors, bias, self.eps, self.centred
            )
            return total, normed.to(self.weight.dtype)
        if self.centred:
            normed = self.kernels.layer_norm(x, factors, bias, self.eps)
        else:
            normed = self.kernels.rms_norm(x, factors, self.eps)
        return normed.to(self.weight.dtype)


@NORMS.register("RMSNorm")
class RMSNorm(LayerNorm):
    """Root-mean-square norm over the last dimension: no mean, no bias; else like LayerNorm."""

    has_bias, centred = False, False


class NormAcrossRanks(nn.Module):
    """Root-mean-square norm of features that ranks divide, each with its part of the weight.

    Args:
        width: number of features over all ranks.
        eps: added to the mean square.
        around_one: the weight is kept as its difference from 1.
        group: the ranks.

    Shapes: x [..., width / ranks] -> the same, in the weight's dtype.
    Communication: one all-reduce of a number for each row forward, one backward.
    """

    def __init__(self, width: int, *, eps: float, around_one: bool, group: dist.ProcessGroup):
        super().__init__()
        self.width, self.eps, self.around_one, self.group = width, eps, around_one, group
        own = exact_quotient(width, group.size(), "width")
        weight = nn.Parameter(torch.full((own,), 0.0 if around_one else 1.0))
        self.weight = mark_sharded(weight, 0, group)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = reduce_from_tensor_parallel(wide.square().sum(-1, keepdim=True), self.group)
        # The sum reaches all ranks' features, so its gradient is a sum over them too.
        mean = copy_to_tensor_parallel(squares, self.group) / self.width
        factors = self.weight.to(wide.dtype) + (1 if self.around_one else 0)
        return (wide * (mean + self.eps).rsqrt() * factors).to(self.weight.dtype)


def fuses_sum(norm: nn.Module) -> bool:
    """Whether `norm` takes `sums`: its kernels do, and it is no plugin's, also none derived."""
    if not isinstance(norm, LayerNorm) or type(norm) not in (LayerNorm, RMSNorm):
        return False
    return norm.kernels.add_norm is not None


def residual_and_norm(
    norm: nn.Module, x: Tensor, pending: tuple[Tensor, Tensor | None] | None = None
) -> tuple[Tensor, Tensor]:
    """Return `x` for the residual, and its norm; where kernels can, one pass adds their gradients.

    Args:
        pending: a tensor and its bias to add to `x` first, if `fuses_sum` of the norm.
    """
    if not fuses_sum(norm):
        if pending:
            raise ValueError(
                "the norm was replaced: it does not add what the layer before left to it"
            )
        return x, norm(x)
    residual, normed = norm(x, *(pending or ()), sums=True)
    return residual, normed


def norm_layer(
    spec: ModelSpec,
    *,
    kernels: Kernels,
    width: int | None = None,
    eps: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> Layer:
    """Return the norm of a network, of `width` features or of the residual stream."""
    return Layer(
        NORMS.get(spec.norm.normalization, spec.own_flags),
        {
            "width": width or spec.hidden_size,
            "eps": eps or spec.norm.norm_epsilon,
            "around_one": spec.norm.layernorm_1p,
            "group": group,
            "kernels": kernels,
        },
    )


def query_key_norms(
    spec: ModelSpec, group: dist.ProcessGroup, kernels: Kernels
) -> tuple[nn.Module, nn.Module]:
    """Return the norms of queries and of keys: of each head with one weight, or of all heads."""
    if not spec.norm.qk_norm_across_heads:
        norm = norm_layer(spec, width=spec.attention.head_dim, group=group, kernels=kernels)
        return norm.build(), norm.build()
    queries, keys = (
        NormAcrossRanks(
            width, eps=spec.norm.norm_epsilon, around_one=spec.norm.layernorm_1p, group=group
        )
        for width in (spec.attention.query_features, spec.attention.key_features)
    )
    return queries, keys
