"""A layer's experts in plain torch: every expert computes every token, and a loop decides.

Parameters have the names of ours, so that the same seed fills both alike.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.layers.mlp import ParallelMLP


class PlainMixture(nn.Module):
    """Adds its balance loss to `terms`. Without `capacity` no token is left over."""

    def __init__(self, spec, *, number, group, kernels, terms, capacity=math.inf):
        super().__init__()
        self.k, self.terms, self.capacity = spec.experts_per_token, terms, capacity
        self.count = spec.num_experts[number - 1]
        mlps = [ParallelMLP(spec, group=group, kernels=kernels) for _ in range(self.count)]
        self.deepspeed_moe = nn.ModuleDict(
            {
                "gate": nn.ModuleDict({"wg": nn.Linear(spec.hidden_size, self.count, bias=False)}),
                "experts": nn.ModuleDict({"deepspeed_experts": nn.ModuleList(mlps)}),
            }
        )
        if spec.residual_experts:
            self.mlp = ParallelMLP(spec, group=group, kernels=kernels)
            self.coefficient = nn.Linear(spec.hidden_size, 2)
            nn.init.zeros_(self.coefficient.bias)

    def forward(self, x_sbh):
        x = x_sbh.flatten(0, 1)
        chances = (x @ self.deepspeed_moe["gate"]["wg"].weight.T).softmax(-1)
        best = chances.topk(self.k).indices
        self.terms.append(self.balance(chances, best))
        weights = chances.gather(1, best) * self.kept(best)
        if self.k > 1:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
        experts = self.deepspeed_moe["experts"]["deepspeed_experts"]
        answers = torch.stack([whole(expert, x) for expert in experts], 1)
        chosen = answers.gather(1, best[..., None].expand(-1, -1, x.size(1)))
        y = (weights[..., None] * chosen).sum(1)
        if hasattr(self, "mlp"):
            mix = self.coefficient(x).softmax(-1)
            y = y * mix[:, :1] + whole(self.mlp, x) * mix[:, 1:]
        return y.view_as(x_sbh), None

    def balance(self, chances, best):
        """For one or two experts the first choice counts, for more all of them."""
        counted = best if self.k > 2 else best[:, :1]
        share = F.one_hot(counted, self.count).to(chances).mean(1).mean(0)
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
