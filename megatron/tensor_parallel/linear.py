"""Tensor-parallel linear layers, sharded over the ranks, with LoRA adapters.

A layer with an adapter computes y = x W^T + scale (x A^T) B^T. A is [rank, in] and B [out, rank]; B
starts as 0. They are parameters of the layer itself, so the weight keeps its name and checkpoints
without adapters load. Source: arXiv:2106.09685, section 4.1.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.tensor_parallel.collectives import (
    all_gather,
    copy_to_tensor_parallel,
    gather_sequence,
    reduce_from_tensor_parallel,
    scatter_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.tensor_parallel.rng import RngTracker
from megatron.tensor_parallel.sharding import (
    exact_quotient,
    layout_of,
    mark_initial,
    mark_residual,
    mark_sharded,
)

Product = Callable[[Tensor, Tensor], Tensor]
"""Computes x W^T of x [..., in] and W [out, in], with its gradients, in place of torch's product."""

Defer = Callable[[Callable[[], Tensor]], None]
"""Puts the product that is the gradient of a certain weight aside."""

DeferGradient = Callable[[nn.Parameter, Callable[[], Tensor]], None]
"""The same for any weight; see WeightGradients."""

DOWN, UP = "lora_A", "lora_B"
"""Names of an adapter's two matrices, as in PEFT."""


@dataclass(frozen=True)
class Adapter:
    """Hyperparameters of a LoRA adapter.

    Args:
        rank: features between the two matrices.
        scale: factor of their product.
        dropout: probability of dropping a feature of x before A.
        rng: RNG state that differs between tensor-parallel ranks.
    """

    rank: int
    scale: float
    dropout: float
    rng: RngTracker


def is_adapter(name: str) -> bool:
    """Whether a parameter name belongs to a LoRA adapter."""
    return name.endswith((f".{DOWN}", f".{UP}"))


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the output features divided over the tensor-parallel ranks.

    Args:
        in_features: width of x, the same on every rank.
        out_features: width of y over all ranks; a multiple of the group's size.
        group: the tensor-parallel ranks.
        has_bias: whether there is a bias at all.
        adds_bias: whether y has the bias already; if not it is left to the caller.
        sequence_parallel: whether the ranks divide the sequence outside of the layer.
        adapter: of LoRA: A is replicated, B sharded like the weight.
        product: computes x W^T, such as in fp8; None for torch's.

    Shapes: x [..., in_features] -> y [..., out_features / t], t the group's size. When the ranks
        divide the sequence: x [s/t, ...] -> y [s, ...].
    Communication: none forward; one all-reduce of x's gradient backward. When the ranks divide
        the sequence: an all-gather of x forward, backward another and a reduce-scatter. With an
        adapter the same of [s, b, rank].
    Randomness: dropout of an adapter draws from the default RNG state: ranks with the same tokens
        drop the same features.
    """

    bias: nn.Parameter | None
    defer_gradient: DeferGradient | None = None
    """Puts the product for a weight's gradient aside in backward; None: backward computes it."""

    sums_bias = True
    """Whether backward computes the gradient of the bias; if not, that is left to what reads y."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: dist.ProcessGroup,
        has_bias: bool = True,
        adds_bias: bool = True,
        sequence_parallel: bool = False,
        adapter: Adapter | None = None,
        product: Product | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.group, self.sequence_parallel = group, sequence_parallel
        self.adds_bias, self.adapter, self.product = adds_bias, adapter, product
        local_features = exact_quotient(out_features, group.size(), "out_features")
        self.weight = mark_sharded(nn.Parameter(torch.empty(local_features, in_features)), 0, group)
        bias = (
            mark_sharded(nn.Parameter(torch.zeros(local_features)), 0, group) if has_bias else None
        )
        self.register_parameter("bias", bias)
        if adapter:
            down, up = _adapter_matrices(in_features, local_features, adapter)
            self.lora_A, self.lora_B = down, mark_sharded(up, 0, group)

    def forward(self, x: Tensor) -> Tensor:
        bias: Tensor | None = self.bias if self.adds_bias else None
        if bias is not None and not self.sums_bias:
            bias = bias.detach()
        if not self.adapter:
            return self._base(x, bias)
        down = F.linear(F.dropout(x, self.adapter.dropout, self.training), self.lora_A)
        up = self._product(down, self.lora_B, None)
        return self._base(x, bias) + self.adapter.scale * up

    def _base(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's result without an adapter."""
        if self.product is None:
            return self._product(x, self.weight, bias)
        if self.sequence_parallel:
            y = gathering_product(self.product, x, self.weight, dim=0, group=self.group)
        else:
            y = self.product(copy_to_tensor_parallel(x, self.group), self.weight)
        return y if bias is None else y + bias

    def _product(self, x: Tensor, weight: nn.Parameter, bias: Tensor | None) -> Tensor:
        defer = _deferring(self.defer_gradient, x, weight)
        if self.sequence_parallel:
            return gathering_linear(x, weight, bias, dim=0, group=self.group, defer=defer)
        return copying_linear(x, weight, bias, group=self.group, defer=defer)

    def extra_repr(self) -> str:
        """Return the sizes over all ranks, and the parallel layout."""
        # Not from the weight, which is empty between steps with ZeRO-3.
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {layout_of(self)}"


class RowParallelLinear(nn.Module):
    """y = x W^T with the input features divided over the tensor-parallel ranks.

    It ends a sublayer: y is added to the residual stream, which decides its initial weights. The
    bias is replicated and left to the caller, which adds it together with dropout and the residual.

    Args:
        in_features: width of x over all ranks; a multiple of the group's size.
        out_features: width of y, the same on every rank.
        group: the tensor-parallel ranks.
        has_bias: whether there is a bias.
        sequence_parallel: whether the ranks divide the sequence outside of the layer.
        adapter: of LoRA: A is sharded like the weight, B replicated.
        product: computes x W^T, such as in fp8; None for torch's.

    Shapes: x [..., in_features / t] -> y [..., out_features], t the group's size. When the ranks
        divide the sequence: x [s, ...] -> y [s/t, ...].
    Communication: one all-reduce of y forward; none backward. When the ranks divide the sequence:
        a reduce-scatter forward, an all-gather backward. With an adapter the same of [s, b, rank].
    Randomness: dropout of an adapter draws from its own RNG state, because each rank has other
        features.
    """

    bias: nn.Parameter | None
    defer_gradient: DeferGradient | None = None
    """Puts the product for a weight's gradient aside in backward; None: backward computes it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: dist.ProcessGroup,
        has_bias: bool = True,
        sequence_parallel: bool = False,
        adapter: Adapter | None = None,
        product: Product | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.group, self.sequence_parallel = group, sequence_parallel
        self.adapter, self.product = adapter, product
        local_features = exact_quotient(in_features, group.size(), "in_features")
        weight = nn.Parameter(torch.empty(out_features, local_features))
        self.weight = mark_residual(mark_sharded(weight, 1, group))
        bias = nn.Parameter(torch.zeros(out_features)) if has_bias else None
        self.register_parameter("bias", bias)
        if adapter:
            down, up = _adapter_matrices(local_features, out_features, adapter)
            self.lora_A, self.lora_B = mark_sharded(down, 1, group), up

    def forward(self, x: Tensor) -> Tensor:
        if not self.adapter:
            return self._sum(self._base(x))
        share = self.adapter.dropout if self.training else 0.0
        with self.adapter.rng.fork() if share else nullcontext():
            down = F.linear(F.dropout(x, share), self.lora_A)
        up = F.linear(self._sum(down), self.lora_B)
        return self._sum(self._base(x)) + self.adapter.scale * up

    def _base(self, x: Tensor) -> Tensor:
        """Return this rank's term of the result without an adapter."""
        if self.product:
            return self.product(x, self.weight)
        defer = _deferring(self.defer_gradient, x, self.weight)
        return copying_linear(x, self.weight, None, group=None, defer=defer)

    def _sum(self, y: Tensor) -> Tensor:
        """Sum `y` over the ranks; with sequence parallelism return this rank's part of the sequence."""
        if self.sequence_parallel:
            return scatter_sequence(y, 0, self.group)
        return reduce_from_tensor_parallel(y, self.group)

    def extra_repr(self) -> str:
        """Return the sizes over all ranks, and the parallel layout."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {layout_of(self)}"


def _adapter_matrices(
    in_features: int, out_features: int, adapter: Adapter
) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the matrices A, which is drawn, and B, which stays 0."""
    down = nn.Parameter(torch.empty(adapter.rank, in_features))
    up = nn.Parameter(torch.zeros(out_features, adapter.rank))
    return mark_initial(down, "adapter"), mark_initial(up, "constructed")


def _deferring(
    defer_gradient: DeferGradient | None, x: Tensor, weight: nn.Parameter
) -> Defer | None:
    """Return what puts the gradient of `weight` aside; None where backward computes it at once.

    Without a gradient of x nothing would call backward.
    """
    if defer_gradient is None or not (x.requires_grad and weight.requires_grad):
        return None
    return partial(defer_gradient, weight)


class CopyingLinear(torch.autograd.Function):
    """x W^T + b whose backward sums x's gradient over the ranks while it computes the weight's.

    Communication: none forward; one all-reduce of x's gradient backward, without a group none.
    Source: arXiv:1909.08053, figure 3 (`f`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup | None,
        defer: Defer | None,
    ) -> Tensor:
        """Return the product."""
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.defer = group, defer
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, of the weight and of the bias."""
        x, weight = ctx.saved_tensors
        (grad,) = grads
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        input_grad = (grad @ weight).contiguous() if needs_x else None
        wait = (
            start_all_reduce(input_grad, ctx.group)
            if input_grad is not None and ctx.group
            else None
        )
        # Detached: a product that is put aside must not keep the graph of x.
        rows, columns = grad.flatten(0, -2), x.detach().flatten(0, -2)
        parameter_grads = (
            _now_or_later(lambda: rows.mT @ columns, ctx.defer, needs_weight),
            rows.sum(0) if needs_bias else None,
        )
        return wait() if wait else input_grad, *parameter_grads, None, None


class GatheringLinear(torch.autograd.Function):
    """All-gather x, then x W^T + b; saves only this rank's x and gathers again in backward.

    Backward gathers while it computes x's gradient, and scatters that while it computes the weight's.
    Where the weight's gradient is put aside, x is gathered when that is computed.

    Communication: an all-gather of x forward; backward another and a reduce-scatter.
    Source: arXiv:2205.05198, section 4.2.2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dim: int,
        group: dist.ProcessGroup,
        defer: Defer | None,
    ) -> Tensor:
        """Return the product with all ranks' `x`, concatenated along `dim`."""
        ctx.save_for_backward(x, weight)
        ctx.dim, ctx.group, ctx.defer = dim, group, defer
        return F.linear(all_gather(x, dim, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of this rank's x, of the weight and of the bias."""
        x, weight = ctx.saved_tensors
        (grad,) = grads
        dim, group = ctx.dim, ctx.group
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        full = start_all_gather(x, dim, group) if needs_weight else None
        input_grad = start_reduce_scatter(grad @ weight, dim, group) if needs_x else None
        # Detached: a product that is put aside must not keep the graph of x.
        rows, own_x = grad.flatten(0, -2), x.detach()

        def product() -> Tensor:
            gathered = full() if full else all_gather(own_x, dim, group)
            return rows.mT @ gathered.flatten(0, -2)

        parameter_grads = (
            _now_or_later(product, ctx.defer, needs_weight),
            rows.sum(0) if needs_bias else None,
        )
        return input_grad() if input_grad else None, *parameter_grads, None, None, None


def _now_or_later(
    product: Callable[[], Tensor], defer: Defer | None, is_needed: bool
) -> Tensor | None:
    """Return the gradient of a weight; None where it is put aside, or not needed."""
    if defer is not None:
        defer(product)
    return product() if is_needed else None


def _in_graph(weight: Tensor, defer: Defer | None) -> Tensor:
    """Return `weight` as autograd should see it.

    Where its gradient is put aside, the backward pass must not call hooks of the weight.
    """
    return weight if defer is None else weight.detach()


def copying_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    group: dist.ProcessGroup | None,
    defer: Defer | None = None,
) -> Tensor:
    """Return x W^T + b of an `x` that is the same on all ranks of `group`; with None, on one rank.

    Args:
        defer: puts the weight's gradient aside.
    """
    summed = group if group is not None and group.size() > 1 else None
    if summed is None and defer is None:
        return F.linear(x, weight, bias)
    return CopyingLinear.apply(x, _in_graph(weight, defer), bias, summed, defer)


def gathering_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    dim: int,
    group: dist.ProcessGroup,
    defer: Defer | None = None,
) -> Tensor:
    """All-gather `x` along `dim` and return x W^T + b.

    Args:
        defer: puts the weight's gradient aside.
    """
    return GatheringLinear.apply(x, _in_graph(weight, defer), bias, dim, group, defer)


def gathering_product(
    product: Product, x: Tensor, weight: Tensor, *, dim: int, group: dist.ProcessGroup
) -> Tensor:
    """All-gather `x` along `dim` and return its product with `weight`.

    As in `GatheringLinear`, autograd saves only this rank's x, which backward gathers again.
    """
    own, full = x.detach(), gather_sequence(x, dim, group)
    # Not the tensor: the hooks live as long as what they save.
    address, shape = full.data_ptr(), full.shape

    def pack(saved: Tensor) -> Tensor | None:
        return None if (saved.data_ptr(), saved.shape) == (address, shape) else saved

    def unpack(saved: Tensor | None) -> Tensor:
        return all_gather(own, dim, group) if saved is None else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return product(full, weight)
