"""Mixture of experts (MoE): drop-less token choice with grouped products and expert parallelism."""

import math
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.network.experts import ExpertPlan, MoESpec
from megatron.config.network.model_spec import ModelSpec
from megatron.model.layers.activations import activation_of
from megatron.model.layers.expert_exchange import TakeTokens, TokenExchange
from megatron.model.layers.mlp import ParallelMLP
from megatron.model.layers.moe_aux_loss import AuxiliaryLoss
from megatron.model.layers.parts import LayerParts
from megatron.model.layers.router import Router, Routing, count_choices
from megatron.tensor_parallel.collectives import (
    all_gather,
    copy_to_tensor_parallel,
    gather_sequence,
    reduce_from_tensor_parallel,
    scatter_sequence,
)
from megatron.tensor_parallel.grouped_linear import GroupedLinear, Segments, has_kernel
from megatron.tensor_parallel.sharding import ExpertShare, exact_quotient


class Experts(nn.Module):
    """The MLPs of this rank's experts, computed together; ranks that share an expert have a part each.

    Args:
        spec: the network.
        parts: what its layers are built with.
        number: the layer's, from 1 on.
        group: the ranks that share each expert.
        expert_group: the ranks that divide the experts; None if this rank has all.

    Shapes: x [rows, h] -> this rank's term of [rows, h].
    """

    def __init__(
        self,
        spec: ModelSpec,
        parts: LayerParts,
        *,
        number: int,
        group: dist.ProcessGroup,
        expert_group: dist.ProcessGroup | None,
    ):
        super().__init__()
        ranks = expert_group.size() if expert_group else 1
        self.activate = activation_of(spec.mlp, parts.kernels, spec.own_flags)
        width = spec.expert_width
        form: dict[str, Any] = {
            "group": group,
            "num_experts": exact_quotient(spec.experts_of(number), ranks, "num_experts"),
            "share": ExpertShare(expert_group.rank(), ranks) if expert_group else None,
            "has_bias": spec.mlp.linear_bias,
        }
        gates = 2 if spec.mlp.is_gated else 1
        self.dense_h_to_4h = GroupedLinear(spec.hidden_size, gates * width, narrows=False, **form)
        self.dense_4h_to_h = GroupedLinear(spec.hidden_size, width, narrows=True, **form)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        """Return the outputs of rows that are sorted by expert."""
        inner = self.activate(self.dense_h_to_4h(x, segments), None)
        y: Tensor = self.dense_4h_to_h(inner, segments)
        return y

    def takes_padding(self, x: Tensor) -> bool:
        """Whether rows of padding may follow those of the experts."""
        layers = self.dense_h_to_4h, self.dense_4h_to_h
        return all(has_kernel(x, layer.weight) for layer in layers)


class MixtureOfExperts(nn.Module):
    """Sum of the outputs of each token's experts, times the router's weights.

    Each replica routes its own tokens; ranks that divide experts exchange them, as many as there
    are, and each tensor-parallel rank its part. Otherwise experts are divided over the
    tensor-parallel ranks like an ordinary MLP. An expert with a capacity drops tokens that exceed it:
    they pass on the residual stream. In addition there may be an MLP for every token: shared experts,
    with or without a gate, or a residual MLP, which a learned weight mixes with the experts.

    Args:
        spec: the network.
        parts: what its layers are built with.
        number: the layer's, from 1 on.
        plan: how tokens are routed in training; None for inference, which drops none.
        expert_group: the ranks that divide the experts of a layer; None if each has all.
        expert_tensor_group: with it, the ranks that share each expert.
        sequence_group: the ranks that divide a sample's sequence throughout; None for one rank.
        data_group: the replicas; None for one.
        auxiliary: takes the balancing losses and the loads; None for inference.

    Shapes: x_sbh [s, b, h] -> (y_sbh [s, b, h], None).
    Communication: without `expert_group` that of a ParallelMLP over `group`, and one all-reduce of the
        weights' gradient. With it that of a TokenExchange, and unless the ranks divide the sequence
        also that of a ParallelMLP.
    Source: arXiv:2211.15841 for grouped products; arXiv:2401.06066 for shared and fine-grained
        experts; arXiv:2201.05596 for the residual form.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parts: LayerParts,
        *,
        number: int,
        plan: ExpertPlan | None = None,
        expert_group: dist.ProcessGroup | None = None,
        expert_tensor_group: dist.ProcessGroup | None = None,
        sequence_group: dist.ProcessGroup | None = None,
        data_group: dist.ProcessGroup | None = None,
        auxiliary: AuxiliaryLoss | None = None,
    ):
        super().__init__()
        self.number, self.plan = number, plan
        self.moe = moe = spec.part(MoESpec)
        self.num_experts = spec.experts_of(number)  # also read by DeepSpeed
        self.group, self.sequence_parallel = parts.group, parts.sequence_parallel
        self._expert_group, self._auxiliary = expert_group, auxiliary
        self._expert_tensor_group = expert_tensor_group or parts.group
        divided = sequence_group is not None and sequence_group.size() > 1
        self.router = Router(
            spec,
            number=number,
            plan=plan,
            token_groups=[
                *([parts.group] if parts.sequence_parallel else []),
                *([sequence_group] if sequence_group and divided else []),
            ],
            copies=sequence_group.size() if sequence_group and divided else 1,
            data_group=data_group,
            auxiliary=auxiliary,
        )
        self.experts = Experts(
            spec,
            parts,
            number=number,
            group=self._expert_tensor_group,
            expert_group=expert_group,
        )
        if moe.shared_expert_ffn_hidden_size:
            shared = replace(spec.mlp, ffn_hidden_size=moe.shared_expert_ffn_hidden_size)
            self.shared_experts = ParallelMLP(replace(spec, mlp=shared), parts)
        if moe.shared_expert_gate:
            self.shared_expert_gate = nn.Linear(spec.hidden_size, 1, bias=False)
        if moe.residual_experts:
            self.residual_mlp = ParallelMLP(spec, parts)
            self.coefficient = nn.Linear(spec.hidden_size, 2)
            nn.init.zeros_(self.coefficient.bias)

    def forward(self, x_sbh: Tensor) -> tuple[Tensor, None]:
        """Return the output; no bias is left to the caller."""
        y_sbh = self._route_and_mix(x_sbh)
        if self.moe.shared_expert_ffn_hidden_size:
            shared_sbh = _with_bias(self.shared_experts, x_sbh)
            if self.moe.shared_expert_gate:
                shared_sbh = self.shared_expert_gate(x_sbh).sigmoid() * shared_sbh
            y_sbh = y_sbh + shared_sbh
        if self.moe.residual_experts:
            mix_sb2 = self.coefficient(x_sbh).softmax(-1)
            all_sbh = _with_bias(self.residual_mlp, x_sbh)
            y_sbh = y_sbh * mix_sb2[..., :1] + all_sbh * mix_sb2[..., 1:]
        return y_sbh, None

    def _route_and_mix(self, x_sbh: Tensor) -> Tensor:
        """Return the sum of the chosen experts' outputs."""
        routing = self.router(x_sbh)
        if self._drops_tokens:
            routing = self._drop_tokens(routing)
        if self.sequence_parallel:
            if self._expert_group:
                return self._exchange(x_sbh.flatten(0, 1), routing).view_as(x_sbh)
            routing = Routing(*(gather_sequence(each, 0, self.group) for each in routing))
            x_sbh = gather_sequence(x_sbh, 0, self.group)
            y_sbh = self._compute(x_sbh.flatten(0, 1), routing).view_as(x_sbh)
            return scatter_sequence(y_sbh, 0, self.group)
        # Each rank has a term of the outputs, and so a term of the weights' gradient.
        weights = copy_to_tensor_parallel(routing.weights, self.group)
        routing = routing._replace(weights=weights)
        x = copy_to_tensor_parallel(x_sbh, self.group).flatten(0, 1)
        y = self._exchange_part(x, routing) if self._expert_group else self._compute(x, routing)
        return reduce_from_tensor_parallel(y.view_as(x_sbh), self.group)

    def _exchange_part(self, x: Tensor, routing: Routing) -> Tensor:
        """Return the outputs of this tensor-parallel rank's part of the tokens [tokens, h]; else zeros."""
        rank, ranks = self.group.rank(), self.group.size()
        low, high = (len(x) * number // ranks for number in (rank, rank + 1))
        own = Routing(*(each[low:high] for each in routing))
        return F.pad(self._exchange(x[low:high], own), (0, 0, low, len(x) - high))

    def _exchange(self, x: Tensor, routing: Routing) -> Tensor:
        """Return the outputs of tokens [tokens, h] of this rank alone, from the experts of all ranks."""
        order, counts = self._sort_by_expert(routing)
        exchange = TokenExchange(
            counts,
            cast(dist.ProcessGroup, self._expert_group),
            self._expert_tensor_group if self._expert_tensor_group.size() > 1 else None,
        )
        order = order[: exchange.num_sent]
        rows = exchange.compute(self.experts, TakeTokens.apply(x, order, routing.experts.size(1)))
        return _mix(rows, order, routing.weights.to(x.dtype))

    def _compute(self, x: Tensor, routing: Routing) -> Tensor:
        """Return this tensor-parallel rank's term for tokens [tokens, h]."""
        k, is_padded = routing.experts.size(1), False
        order, counts = self._sort_by_expert(routing)
        if self._drops_tokens:
            # Dropped choices are padding, numbered as one after the last: there are as many rows as
            # all experts have room for, which the host knows without waiting for the device.
            order = order[: self._capacity(len(x)) * self.num_experts]
            is_dropped = routing.experts.flatten()[order] == self.num_experts
            order = order.masked_fill(is_dropped, routing.experts.numel())
        segments = Segments(counts, len(order))
        if self._drops_tokens and not (is_padded := self.experts.takes_padding(x)):
            segments = segments.without_padding()
            order = order[: segments.rows]
        rows = self.experts(TakeTokens.apply(x, order, k, is_padded), segments)
        return _mix(rows, order, routing.weights.to(x.dtype))

    def _sort_by_expert(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Return the choices sorted by expert, dropped ones last, and how many each expert has."""
        experts = routing.experts.flatten()
        counts = count_choices(experts, self.num_experts + 1)[: self.num_experts]
        return experts.argsort(stable=True), counts

    def _drop_tokens(self, routing: Routing) -> Routing:
        """Return the choices with the number of experts in place of one that has no room."""
        is_kept = self._find_kept(routing)
        if self._auxiliary and torch.is_grad_enabled():
            self._auxiliary.add(
                self.number,
                assigned=is_kept.new_zeros(self.num_experts, dtype=torch.long),
                dropped=(~is_kept).sum(),
                loss=routing.weights.new_zeros(()),
            )
        return routing._replace(
            experts=routing.experts.masked_fill(~is_kept, self.num_experts),
            weights=self._rescale(routing.weights, is_kept),
        )

    def _find_kept(self, routing: Routing) -> Tensor:
        """Return whether an expert has room for a choice among those of the micro-batch: [tokens, k]."""
        experts, priority = routing.experts, routing.priority
        if self.sequence_parallel:
            experts, priority = (all_gather(each, 0, self.group) for each in (experts, priority))
        capacity = self._capacity(len(experts))
        experts, priority = experts.flatten(), priority.flatten()
        counts = count_choices(experts, self.num_experts)
        by_priority = priority.argsort(stable=True)
        order = by_priority[experts[by_priority].argsort(stable=True)]
        starts = counts.cumsum(0) - counts
        position = torch.arange(len(order), device=order.device) - starts[experts[order]]
        is_kept = torch.empty_like(order, dtype=torch.bool).index_copy(
            0, order, position < capacity
        )
        own = (
            is_kept.chunk(self.group.size())[self.group.rank()]
            if self.sequence_parallel
            else is_kept
        )
        return own.view_as(routing.experts)

    @property
    def _drops_tokens(self) -> bool:
        return self.plan is not None and self.plan.drops_tokens

    def _capacity(self, tokens: int) -> int:
        """Return how many of the choices of `tokens` an expert has room for, in training with a capacity."""
        plan = cast(ExpertPlan, self.plan)
        factor = plan.train_capacity if self.training else plan.eval_capacity
        share = tokens * self.moe.experts_per_token / self.num_experts
        return max(math.ceil(share * factor), plan.min_capacity)

    def _rescale(self, weights: Tensor, is_kept: Tensor) -> Tensor:
        """Scale the weights of a token to the sum that they had before others were dropped."""
        if not self.moe.router_normalises:
            return weights
        left = weights * is_kept
        return left / left.sum(-1, keepdim=True).clamp(min=1e-9) * self.moe.router_scale


def _mix(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Sum the rows of each token's choices times their weights: -> [tokens, h].

    Args:
        rows: outputs [rows, h] of the choices `order`, of which the one after the last is padding.
        weights: [tokens, k].
    """
    tokens, k = weights.shape
    # Rows of dropped choices stay zero.
    outputs = rows.new_zeros(tokens * k + 1, rows.size(1)).index_copy(0, order, rows)[:-1]
    return torch.bmm(weights[:, None], outputs.view(tokens, k, -1)).squeeze(1)


def build_mlp(spec: ModelSpec, parts: LayerParts, *, number: int) -> nn.Module:
    """Return the MLP of the layer `number`, or its experts."""
    if spec.experts_of(number) == 1:
        return ParallelMLP(spec, parts)
    return (parts.build_mixture or MixtureOfExperts)(spec, parts, number=number)


def _with_bias(mlp: ParallelMLP, x_sbh: Tensor) -> Tensor:
    y_sbh, bias = mlp(x_sbh)
    return y_sbh if bias is None else y_sbh + bias
