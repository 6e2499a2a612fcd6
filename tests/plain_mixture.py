"""A layer's experts in plain torch: every expert computes every token, and a loop decides.

Parameters have the names of ours, so that the same seed fills both alike.
"""

import math

import torch
import torch.nn.functional as F
from tiny import with_changes
from torch import nn

from megatron.model.layers.activations import activation_of
from megatron.model.layers.mlp import ParallelMLP
from megatron.tensor_parallel.sharding import mark_initial


class Stack(nn.Module):
    """A matrix and perhaps a bias for each expert."""

    def __init__(self, experts, inner, outer, bias, values="matrix"):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, inner, outer))
        mark_initial(self.weight, values)
        if bias:
            bias = nn.Parameter(torch.zeros(experts, bias))
            self.bias = mark_initial(bias, "constructed")


class PlainMixture(nn.Module):
    """Adds its balance loss to `terms`. Without `capacity` no token is left over."""

    def __init__(
        self,
        spec,
        parts,
        *,
        number,
        terms,
        capacity=math.inf,
    ):
        super().__init__()
        self.spec, self.terms, self.capacity = spec, terms, capacity
        self.k, self.count = spec.moe.experts_per_token, spec.moe.num_experts[number - 1]
        h, f = spec.hidden_size, spec.expert_width
        gated = f * (2 if spec.mlp.is_gated else 1)
        self.router = nn.Linear(h, self.count, bias=False)
        if spec.moe.router_bias:
            self.router.register_buffer("expert_bias", torch.zeros(self.count))
        self.experts = nn.ModuleDict(
            {
                "dense_h_to_4h": Stack(self.count, gated, h, gated * spec.mlp.linear_bias),
                "dense_4h_to_h": Stack(self.count, f, h, h * spec.mlp.linear_bias, "residual"),
            }
        )
        self.activate = activation_of(spec.mlp, parts.kernels)
        width = spec.moe.shared_expert_ffn_hidden_size
        if width:
            shared = with_changes(spec, ffn_hidden_size=width)
            self.shared_experts = ParallelMLP(shared, parts)
        if spec.moe.shared_expert_gate:
            self.shared_expert_gate = nn.Linear(h, 1, bias=False)
        if spec.moe.residual_experts:
            self.residual_mlp = ParallelMLP(spec, parts)
            self.coefficient = nn.Linear(h, 2)
            nn.init.zeros_(self.coefficient.bias)

    def forward(self, x_sbh):
        x = x_sbh.flatten(0, 1)
        logits = x @ self.router.weight.T
        sigmoid = self.spec.moe.router_score == "sigmoid"
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        choice = scores + self.router.expert_bias if self.spec.moe.router_bias else scores
        best = choice.topk(self.k).indices
        chances = scores / scores.sum(-1, keepdim=True)
        self.terms.append(self.balance(chances, best))
        weights = scores.gather(1, best) * self.kept(best)
        if self.spec.moe.router_normalises:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
        weights = weights * self.spec.moe.router_scale
        answers = torch.stack([self.answer(expert, x) for expert in range(self.count)], 1)
        chosen = answers.gather(1, best[..., None].expand(-1, -1, x.size(1)))
        y = (weights[..., None] * chosen).sum(1)
        if hasattr(self, "shared_experts"):
            shared = whole(self.shared_experts, x)
            if hasattr(self, "shared_expert_gate"):
                shared = self.shared_expert_gate(x).sigmoid() * shared
            y = y + shared
        if hasattr(self, "residual_mlp"):
            mix = self.coefficient(x).softmax(-1)
            y = y * mix[:, :1] + whole(self.residual_mlp, x) * mix[:, 1:]
        return y.view_as(x_sbh), None

    def answer(self, expert, x):
        up, down = self.experts["dense_h_to_4h"], self.experts["dense_4h_to_h"]
        bias = up.bias[expert] if hasattr(up, "bias") else None
        inner = self.activate(F.linear(x, up.weight[expert], bias), None)
        y = inner @ down.weight[expert]
        return y + down.bias[expert] if hasattr(down, "bias") else y

    def balance(self, chances, best):
        share = F.one_hot(best, self.count).to(chances).mean(1).mean(0)
        return self.count * (chances.mean(0) * share).sum()

    def kept(self, best):
        taken, kept = [0] * self.count, torch.zeros_like(best)
        for choice in range(self.k):
            for token, expert in enumerate(best[:, choice].tolist()):
                kept[token, choice] = taken[expert] < self.capacity
                taken[expert] += 1
        return kept


def whole(mlp, x):
    y, bias = mlp(x)
    return y if bias is None else y + bias
