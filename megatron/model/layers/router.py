"""Router of a mixture of experts (MoE): scores, choice of experts, balancing."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.network.experts import ExpertPlan, MoESpec
from megatron.config.network.model_spec import ModelSpec
from megatron.model.layers.moe_aux_loss import AuxiliaryLoss

_TINY = 1e-20


class Routing(NamedTuple):
    """Chosen experts of tokens, k of each: all tensors are [tokens, k].

    A tuple, in which ZeRO stage 3 finds the tensor whose gradient begins the router's backward pass.

    Args:
        experts: their numbers.
        weights: factors of their outputs, in fp32.
        priority: where an expert has a capacity, its choices with the lowest values come first.
    """

    experts: Tensor
    weights: Tensor
    priority: Tensor


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    """Count how often each expert is chosen: [...] -> [num_experts]."""
    chosen = experts.flatten()
    counts = chosen.new_zeros(num_experts)
    return counts.scatter_add_(0, chosen, torch.ones_like(chosen))


class Router(nn.Module):
    """Choose the experts of each token by the product of the token with a row for each expert, and a bias.

    Scores are computed in fp32. With `expert_bias`, experts are chosen by their scores plus a bias
    that has no gradient: each step raises it for experts with less than an even share of the
    tokens and lowers it for the rest.

    Args:
        spec: the network.
        number: the layer's, from 1 on.
        plan: noise and balancing in training; None for inference.
        token_groups: the ranks that divide the tokens of a micro-batch among them: one group for
            each way to divide.
        copies: by how many ranks the gradients of these losses are divided when they are averaged.
        data_group: the replicas, over which global_aux_loss counts; None for one replica.
        auxiliary: takes the losses and the loads; None for inference.

    Shapes: x_sbh [s, b, h] -> Routing of s * b tokens.
    Communication: with balancing losses one all-reduce of a number per expert over each of
        `token_groups`, with global_aux_loss over `data_group` too; with sinkhorn one in each of its
        iterations.
    Randomness: in training, the noise that the plan has, from the default stream.
    Source: arXiv:2101.03961, section 2.2, and arXiv:2006.16668 for the auxiliary loss;
        arXiv:2202.08906, equation 5, for the z-loss; arXiv:2408.15664, algorithm 1, for the bias;
        arXiv:2412.19437, section 2.1.2, for sigmoid scores and groups; arXiv:2103.16716, section
        3.1, and sinkhorn for balanced assignment; arXiv:2501.11873 for the loss of a global batch.
    """

    expert_bias: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        spec: ModelSpec,
        *,
        number: int,
        plan: ExpertPlan | None = None,
        token_groups: Sequence[dist.ProcessGroup] = (),
        copies: int = 1,
        data_group: dist.ProcessGroup | None = None,
        auxiliary: AuxiliaryLoss | None = None,
    ):
        super().__init__()
        self.moe, self.number, self.plan = spec.part(MoESpec), number, plan
        self.num_experts = spec.experts_of(number)
        self._token_groups, self._copies, self._auxiliary = token_groups, copies, auxiliary
        self._data_group = data_group
        self._step_choices: Tensor | float = 0.0  # of the micro-batches of the step, summed
        self._step_micro_batches = 0
        self.weight = nn.Parameter(torch.empty(self.num_experts, spec.hidden_size))
        self.bias = None
        if self.moe.router_linear_bias:
            self.bias = nn.Parameter(torch.zeros(self.num_experts))
        if self.moe.router_bias:
            self.register_buffer("expert_bias", torch.zeros(self.num_experts))

    def forward(self, x_sbh: Tensor) -> Routing:
        x_sbh = x_sbh.float()
        if self.training and self.plan and self.plan.jitter:
            reach = self.plan.jitter
            x_sbh = x_sbh * torch.empty_like(x_sbh).uniform_(1 - reach, 1 + reach)
        bias = None if self.bias is None else self.bias.float()
        logits_sbe = F.linear(x_sbh, self.weight.float(), bias)
        logits = logits_sbe.flatten(0, 1)
        with torch.no_grad():
            experts = self._choose(logits)
        weights = self._weights(logits, experts)
        if self._auxiliary and torch.is_grad_enabled():
            loss = self._loss(logits_sbe, experts)
            if loss is not None:
                weights = self._auxiliary.join(weights, self._copies * loss)
            self._auxiliary.add(
                self.number,
                assigned=count_choices(experts, self.num_experts),
                dropped=weights.new_zeros(()),
                loss=weights.new_zeros(()) if loss is None else loss.detach(),
            )
        return Routing(experts, weights, self._priority(weights))

    @torch.no_grad()
    def finish_step(self, assigned: Tensor) -> None:
        """Change the bias by the loads of a step: [experts], the same on all ranks."""
        self._step_choices, self._step_micro_batches = 0.0, 0
        if self.moe.router_bias and self.plan and self.weight.requires_grad:
            loads = assigned[: self.num_experts].to(self.expert_bias)
            self.expert_bias += self.plan.bias_rate * (loads.mean() - loads).sign()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Keep the bias in 32 bits in a network of 16: its steps are small."""
        bias = self.expert_bias if self.moe.router_bias else None
        super()._apply(fn, recurse)
        if bias is not None:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def _choose(self, logits: Tensor) -> Tensor:
        k, plan = self.moe.experts_per_token, self.plan
        if self.training and plan:
            if plan.balancing == "sinkhorn":
                return self._sinkhorn(logits).topk(k).indices
            if plan.samples_first and k == 1:
                return (logits + _gumbel(logits)).argmax(-1, keepdim=True)
            if plan.samples_second and k == 2:
                first = logits.argmax(-1, keepdim=True)
                others = (logits + _gumbel(logits)).scatter(1, first, -torch.inf)
                return torch.cat([first, others.argmax(-1, keepdim=True)], 1)
        scores = self._scores(logits)
        if self.moe.router_bias:
            scores = scores + self.expert_bias
        if self.moe.router_groups:
            scores = self._in_best_groups(scores)
        return scores.topk(k).indices

    def _in_best_groups(self, scores: Tensor) -> Tensor:
        """Exclude the experts of all groups except the groups with the best experts."""
        moe = self.moe
        by_group = scores.unflatten(1, (moe.router_groups, -1))
        share = moe.experts_per_token // moe.router_groups_per_token
        counted = moe.router_group_best or share
        group_scores = by_group.topk(counted).values.sum(-1)
        best = group_scores.topk(moe.router_groups_per_token).indices
        kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, best, True)
        return by_group.masked_fill(~kept[..., None], -torch.inf).flatten(1)

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.moe.router_score == "sigmoid" else logits.softmax(-1)

    def _weights(self, logits: Tensor, experts: Tensor) -> Tensor:
        moe = self.moe
        if moe.router_normalises and moe.router_score == "softmax":
            weights = logits.gather(1, experts).softmax(-1)
        else:
            weights = self._scores(logits).gather(1, experts)
            if moe.router_normalises:
                weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        return weights if moe.router_scale == 1 else weights * moe.router_scale

    def _priority(self, weights: Tensor) -> Tensor:
        policy = self.plan.drop_policy if self.plan else "position"
        if policy == "probs":
            return -weights.detach()
        if policy == "random" and self.training:
            return torch.rand_like(weights)
        k = weights.size(1)
        return torch.arange(k, device=weights.device, dtype=weights.dtype).expand_as(weights)

    def _loss(self, logits_sbe: Tensor, experts: Tensor) -> Tensor | None:
        """Return this rank's part of the layer's losses."""
        plan = self.plan
        if plan is None:
            return None
        terms = []
        if plan.loss_coefficient:
            terms.append(plan.loss_coefficient * self._balancing_loss(logits_sbe, experts))
        if plan.z_loss_coefficient:
            tokens = logits_sbe[..., 0].numel() * self._parts
            z_loss = logits_sbe.logsumexp(-1).square().sum() / tokens
            terms.append(plan.z_loss_coefficient * z_loss)
        return sum(terms[1:], terms[0]) if terms else None

    def _balancing_loss(self, logits_sbe: Tensor, experts: Tensor) -> Tensor:
        """Return experts * sum of (share of choices * mean probability), 1 where all are equal."""
        s, b, count = logits_sbe.shape
        scores = self._scores(logits_sbe)
        if self.moe.router_score == "sigmoid":
            scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
        k = experts.size(1)
        if self.plan and self.plan.balancing == "seq_aux_loss":
            chosen_bk = experts.view(s, b, k).transpose(0, 1).reshape(b, s * k)
            choices = chosen_bk.new_zeros(b, count).scatter_add_(
                1, chosen_bk, torch.ones_like(chosen_bk)
            )
            tokens, sums = s * self._parts, scores.sum(0)
        else:
            choices = count_choices(experts, count)
            tokens, sums = s * b * self._parts, scores.flatten(0, 1).sum(0)
        self._all_reduce(choices)
        if self.plan and self.plan.balancing == "global_aux_loss":
            choices = self._mean_choices(choices)
        products = (choices.to(sums) / (k * tokens) * sums / tokens).sum(-1)
        return count * products.mean()

    def _mean_choices(self, choices: Tensor) -> Tensor:
        """Return the mean choices of a micro-batch, over all replicas and the step so far."""
        choices = choices.float()
        if self._data_group:
            dist.all_reduce(choices, group=self._data_group)
            choices /= self._data_group.size()
        self._step_choices = self._step_choices + choices
        self._step_micro_batches += 1
        return self._step_choices / self._step_micro_batches

    def _sinkhorn(self, logits: Tensor, tolerance: float = 1e-4) -> Tensor:
        """Return scores that give every expert the same share of all tokens."""
        cost = logits.exp()
        tokens = len(cost) * self._parts
        rows, columns = cost.new_ones(len(cost)), cost.new_ones(cost.size(1))
        error = 1e9
        while error > tolerance:
            rows = 1 / (tokens * ((cost * columns).sum(1) + 1e-8))
            totals = (cost * rows[:, None]).sum(0)
            self._all_reduce(totals)
            new = 1 / (self.num_experts * (totals + 1e-8))
            error, columns = float((new - columns).abs().mean()), new
        return columns * cost * rows[:, None]

    @property
    def _parts(self) -> int:
        """Into how many parts the tokens of a micro-batch are divided."""
        parts = 1
        for group in self._token_groups:
            parts *= group.size()
        return parts

    def _all_reduce(self, counts: Tensor) -> None:
        for group in self._token_groups:
            dist.all_reduce(counts, group=group)

    def extra_repr(self) -> str:
        """Return the sizes."""
        k = self.moe.experts_per_token
        return f"num_experts={self.num_experts}, experts_per_token={k}"


def _gumbel(like: Tensor) -> Tensor:
    """Draw noise with which the largest logit is a sample of the softmax."""
    noise: Any = torch.empty_like(like).exponential_()
    return -noise.clamp(min=_TINY).log()
