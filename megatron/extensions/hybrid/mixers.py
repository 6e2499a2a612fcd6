"""Layers that mix tokens by a recurrent state in place of attention: Mamba-2 and Gated DeltaNet."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.network.model_spec import ModelSpec
from megatron.extensions.hybrid.convolution import CausalConvolution
from megatron.extensions.hybrid.flags import HybridSpec
from megatron.extensions.hybrid.scan import gated_delta_rule, state_space_scan
from megatron.model.layers.mlp import adapter_of
from megatron.model.layers.parts import DecodeState, LayerParts
from megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.tensor_parallel.sharding import (
    Initial,
    exact_quotient,
    mark_initial,
    mark_partial_gradient,
    mark_sharded,
)


class Mamba2(nn.Module):
    """Mamba-2: a selective state space, the same for all features of a head.

    Rows of the input projection are [groups, {gate, x, B, C, dt}], channels of the convolution
    [groups, {x, B, C}], so that the shards of any number of ranks, side by side, are the full weight.
    The recurrence is computed in 32 bits. In generation its state and the convolution's are kept.

    Args:
        spec: the network; its groups are a multiple of the tensor-parallel size.
        parts: what its layers are built with.

    Shapes: x_sbh [s, b, h], first_bs [b, s] or None -> [s, b, h].
    Communication: one all-reduce of [s, b, h] forward, one backward; with sequence parallelism an
        all-gather and a reduce-scatter in their place.
    Source: arXiv:2405.21060, section 7; https://github.com/state-spaces/mamba for initial values.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts):
        super().__init__()
        hybrid = self.hybrid = spec.part(HybridSpec)
        heads, groups = hybrid.mamba_num_heads, hybrid.mamba_num_groups
        self.local_groups = exact_quotient(groups, parts.group.size(), "mamba_num_groups")
        self.group_heads = exact_quotient(heads, groups, "mamba_num_heads")
        self.features = self.group_heads * hybrid.mamba_head_dim
        self.channels = self.features + 2 * hybrid.mamba_state_dim
        self.in_proj = ColumnParallelLinear(
            spec.hidden_size,
            groups * (self.features + self.channels + self.group_heads),
            has_bias=False,
            adapter=adapter_of(spec, "query_key_value", parts.rng),
            product=parts.kernels.linear,
            **parts.division,
        )
        self.convolution = CausalConvolution(
            groups * self.channels, hybrid.linear_conv_kernel_dim, parts, has_bias=True
        )
        self.A_log = _of_heads(heads, parts, _log_of_1_to_16)
        self.dt_bias = _of_heads(heads, parts, _inverse_softplus_of_steps)
        self.D = _of_heads(heads, parts, torch.ones_like)
        self.norm = GatedGroupNorm(
            self.features, self.local_groups, eps=spec.norm.norm_epsilon, parts=parts
        )
        self.out_proj = RowParallelLinear(
            groups * self.features,
            spec.hidden_size,
            has_bias=False,
            adapter=adapter_of(spec, "dense", parts.rng),
            product=parts.kernels.linear,
            **parts.division,
        )
        local_heads = self.local_groups * self.group_heads
        self.state = parts.state(
            local_heads, hybrid.mamba_head_dim, hybrid.mamba_state_dim, dtype=torch.float32
        )

    def forward(self, x_sbh: Tensor, first_bs: Tensor | None = None) -> Tensor:
        """Return the mixed tokens.

        Args:
            first_bs: position of the first token of each token's document; None for one document.
        """
        n, groups = self.hybrid.mamba_state_dim, self.local_groups
        projected = self.in_proj(x_sbh).unflatten(-1, (groups, -1))
        gate, mixed, dt = projected.split([self.features, self.channels, self.group_heads], -1)
        mixed = self.convolution(mixed.flatten(2), first_bs).unflatten(-1, (groups, -1))
        x, key, query = mixed.split([self.features, n, n], -1)
        wide = torch.promote_types(x_sbh.dtype, torch.float32)
        dt = F.softplus(dt.flatten(2).to(wide) + self.dt_bias.to(wide))
        if self.hybrid.mamba_dt_min:
            dt = dt.clamp(min=self.hybrid.mamba_dt_min)
        dt = _before_padding(dt, self.state).permute(1, 2, 0)
        x = _by_head(x.unflatten(-1, (self.group_heads, -1)).flatten(2, 3), wide)
        y, state = state_space_scan(
            x * dt[..., None],
            -dt * self.A_log.to(wide).exp()[:, None],
            _by_head(key, wide),
            _by_head(query, wide),
            before=self.state.read() if self.state else None,
            first_bs=first_bs,
        )
        if self.state:
            self.state.write(state)
        y = y + self.D.to(wide)[:, None, None] * x
        output: Tensor = self.out_proj(self.norm(y.permute(2, 0, 1, 3).flatten(2), gate.flatten(2)))
        return output


class GatedGroupNorm(nn.Module):
    """Root-mean-square norm of y * silu(gate) in groups of features, times a weight.

    Args:
        width: features of a group.
        groups: of this rank.
        eps: added to the mean square.
        parts: what the network's layers are built with.

    Shapes: y, gate [..., features of this rank] -> the same, in the weight's dtype.
    """

    def __init__(self, width: int, groups: int, *, eps: float, parts: LayerParts):
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = mark_sharded(nn.Parameter(torch.ones(groups * width)), 0, parts.group)

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return the normed features."""
        gated = (y * F.silu(gate.to(y.dtype))).unflatten(-1, (-1, self.width))
        normed = gated * (gated.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return normed.flatten(-2).to(self.weight.dtype) * self.weight


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet: linear attention whose state forgets, and replaces what it has for a key.

    Rows of the input projection are [key heads, {query, key, values, gates, beta, decay}] with the
    value heads that each key head serves, channels of the convolution [key heads, {query, key, values}],
    so that the shards of any number of ranks, side by side, are the full weight. The recurrence is
    computed in 32 bits. In generation its state and the convolution's are kept.

    Args:
        spec: the network; its key heads are a multiple of the tensor-parallel size.
        parts: what its layers are built with.

    Shapes: x_sbh [s, b, h], first_bs [b, s] or None -> [s, b, h].
    Communication: one all-reduce of [s, b, h] forward, one backward; with sequence parallelism an
        all-gather and a reduce-scatter in their place. One all-reduce of the norm's gradient.
    Source: arXiv:2412.06464, section 3.
    """

    def __init__(self, spec: ModelSpec, parts: LayerParts):
        super().__init__()
        hybrid = spec.part(HybridSpec)
        heads, values = hybrid.linear_num_key_heads, hybrid.linear_num_value_heads
        self.local_heads = exact_quotient(heads, parts.group.size(), "linear_num_key_heads")
        self.served = exact_quotient(values, heads, "linear_num_value_heads")
        self.key_dim, self.value_dim = hybrid.linear_key_head_dim, hybrid.linear_value_head_dim
        self.features = self.served * self.value_dim
        self.eps = spec.norm.norm_epsilon
        channels = 2 * self.key_dim + self.features
        self.in_proj = ColumnParallelLinear(
            spec.hidden_size,
            heads * (channels + self.features + 2 * self.served),
            has_bias=False,
            adapter=adapter_of(spec, "query_key_value", parts.rng),
            product=parts.kernels.linear,
            **parts.division,
        )
        self.convolution = CausalConvolution(
            heads * channels, hybrid.linear_conv_kernel_dim, parts, has_bias=False
        )
        self.A_log = _of_heads(values, parts, _log_of_1_to_16)
        self.dt_bias = _of_heads(values, parts, torch.ones_like)
        # Each rank norms other heads with it.
        weight = nn.Parameter(torch.ones(self.value_dim))
        self.norm_weight = mark_partial_gradient(weight, parts.group)
        self.out_proj = RowParallelLinear(
            heads * self.features,
            spec.hidden_size,
            has_bias=False,
            adapter=adapter_of(spec, "dense", parts.rng),
            product=parts.kernels.linear,
            **parts.division,
        )
        local_values = self.local_heads * self.served
        self.state = parts.state(local_values, self.key_dim, self.value_dim, dtype=torch.float32)

    def forward(self, x_sbh: Tensor, first_bs: Tensor | None = None) -> Tensor:
        """Return the mixed tokens.

        Args:
            first_bs: position of the first token of each token's document; None for one document.
        """
        channels = 2 * self.key_dim + self.features
        projected = self.in_proj(x_sbh).unflatten(-1, (self.local_heads, -1))
        mixed, gate, beta, step = projected.split(
            [channels, self.features, self.served, self.served], -1
        )
        mixed = self.convolution(mixed.flatten(2), first_bs).unflatten(-1, (self.local_heads, -1))
        query, key, value = mixed.split([self.key_dim, self.key_dim, self.features], -1)
        wide = torch.promote_types(x_sbh.dtype, torch.float32)
        query, key = (
            _unit(_by_head(each, wide)).repeat_interleave(self.served, 1) for each in (query, key)
        )
        step = F.softplus(step.flatten(2).to(wide) + self.dt_bias.to(wide))
        log_decay = _before_padding(-step * self.A_log.to(wide).exp(), self.state)
        beta = _before_padding(beta.flatten(2).to(wide).sigmoid(), self.state)
        output, state = gated_delta_rule(
            query / math.sqrt(self.key_dim),
            key,
            _by_head(value.unflatten(-1, (self.served, -1)).flatten(2, 3), wide),
            log_decay.permute(1, 2, 0),
            beta.permute(1, 2, 0),
            before=self.state.read() if self.state else None,
            first_bs=first_bs,
        )
        if self.state:
            self.state.write(state)
        gate = gate.unflatten(-1, (self.served, -1)).flatten(2, 3)
        normed_sbap = self._norm(output.permute(2, 0, 1, 3)) * F.silu(gate.to(wide))
        mixed_sbh: Tensor = self.out_proj(normed_sbap.to(x_sbh.dtype).flatten(2))
        return mixed_sbh

    def _norm(self, y: Tensor) -> Tensor:
        """Return the root-mean-square norm of the features of each head."""
        normed = y * (y.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return normed * self.norm_weight.to(y.dtype)


def _by_head(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [s, b, heads, features] as [b, heads, s, features] in another dtype."""
    return x.to(dtype).permute(1, 2, 0, 3)


def _unit(x: Tensor) -> Tensor:
    """Return `x` divided by the norm of its last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _before_padding(x_sba: Tensor, state: DecodeState | None) -> Tensor:
    """Return `x` with 0 where padding follows shorter sequences, which then leaves states unchanged."""
    if state is None or len(x_sba) == 1:
        return x_sba
    positions = torch.arange(len(x_sba), device=x_sba.device)
    return x_sba * (positions[:, None] < state.lengths)[..., None]


def _of_heads(heads: int, parts: LayerParts, initial: Initial) -> nn.Parameter:
    """Return a number for each head of this rank.

    Args:
        heads: over all ranks.
    """
    own = exact_quotient(heads, parts.group.size(), "heads")
    return mark_sharded(mark_initial(nn.Parameter(torch.empty(own)), initial), 0, parts.group)


def _log_of_1_to_16(drawn: Tensor) -> Tensor:
    """Return the logarithm of numbers between 1 and 16, of numbers between 0 and 1."""
    return (1 + 15 * drawn).log()


def _inverse_softplus_of_steps(drawn: Tensor) -> Tensor:
    """Return biases whose softplus lies between 0.001 and 0.1, evenly on a logarithmic scale."""
    low, high = math.log(1e-3), math.log(1e-1)
    steps = (low + drawn * (high - low)).exp().clamp(min=1e-4)
    return steps + (-torch.expm1(-steps)).log()
