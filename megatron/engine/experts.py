"""Layers with experts: DeepSpeed's mixture around our MLP."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

from megatron.config.network.experts import ExpertPlan
from megatron.config.network.model_spec import ModelSpec
from megatron.engine.deepspeed.patches.runtime import replace_token_gather
from megatron.fused_kernels.reference.dispatch import REFERENCE, Kernels
from megatron.model.layers.mlp import MixtureBuilder, ParallelMLP
from megatron.model.moe_aux_loss import AuxiliaryLoss
from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.sharding import ExpertShare, mark_expert

_NOISE = {"none": None, "jitter": "Jitter", "rsample": "RSample"}


def mixture_builder(
    plan: ExpertPlan, groups: Groups, *, replicas: int, auxiliary: AuxiliaryLoss
) -> MixtureBuilder:
    """Return a function that builds the experts of a layer.

    Args:
        replicas: how many neighbouring ones share them.
        auxiliary: takes the loss that keeps experts evenly busy.
    """
    replace_token_gather(partial(_gather_tokens, group=groups.tensor))
    return partial(
        MixtureOfExperts,
        plan=plan,
        place=groups.data_rank % replicas,
        replicas=replicas,
        auxiliary=auxiliary,
    )


def _gather_tokens(x: Tensor, dim: int = 0, *, group: dist.ProcessGroup) -> Tensor:
    """All-gather `x` over the ranks of `group` along `dim`."""
    x = x.contiguous()
    pieces = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(pieces, x, group=group)
    return torch.cat(pieces, dim)


class Expert(ParallelMLP):
    """An MLP in the form that DeepSpeed copies and calls: one tensor in, one out, bias and all.

    A copy is a new one: it is initialised afterwards, and process groups cannot be copied.
    """

    def __init__(self, spec: ModelSpec, *, group: dist.ProcessGroup, kernels: Kernels = REFERENCE):
        super().__init__(spec, group=group, kernels=kernels)
        self._build = partial(Expert, spec, group=group, kernels=kernels)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Expert":
        return self._build()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return [..., h] for [..., h]."""
        y, bias = super().forward(x)
        return y if bias is None else y + bias


class MixtureOfExperts(MoE):
    """What each token's best experts make of it, weighted by the router's confidence in them.

    Each replica routes its own tokens; those that share experts exchange them. Experts are
    divided over the tensor-parallel ranks like an ordinary MLP.

    Args:
        spec: the network.
        number: the layer's, from 1 on.
        group: the tensor-parallel ranks.
        kernels: what computes the activation.
        plan: how tokens are routed.
        place: which part of the experts this rank keeps.
        replicas: in how many parts they are divided.
        auxiliary: takes the loss that keeps experts evenly busy.

    Shapes: x_sbh [s, b, h] -> (y_sbh [s, b, h], None).
    Communication: two all-to-alls of tokens between the replicas forward and backward; over
        `group` what an MLP takes, and two all-gathers of tokens.
    Randomness: in training, which tokens are left over where an expert is full, the second of two
        experts, and the noise draw from the ordinary stream; evaluation draws nothing.
    Source: arXiv:2006.16668, algorithm 1; arXiv:2201.05596 for the residual form.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        number: int,
        group: dist.ProcessGroup,
        kernels: Kernels,
        plan: ExpertPlan,
        place: int,
        replicas: int,
        auxiliary: AuxiliaryLoss,
    ):
        super().__init__(
            spec.hidden_size,
            Expert(spec, group=group, kernels=kernels),
            num_experts=spec.experts_of(number),
            ep_size=replicas,
            k=spec.experts_per_token,
            capacity_factor=plan.train_capacity,
            eval_capacity_factor=plan.eval_capacity,
            min_capacity=plan.min_capacity,
            use_residual=spec.residual_experts,
            noisy_gate_policy=_NOISE[plan.noise],
            drop_tokens=plan.drops_tokens,
            top2_2nd_expert_sampling=plan.samples_second,
            enable_expert_tensor_parallelism=group.size() > 1,
        )
        self._number, self._auxiliary = number, auxiliary
        self._samples_second, self._tensor_ranks = plan.samples_second, group.size()
        gate = self.deepspeed_moe.gate
        gate.register_forward_pre_hook(self._draw_in_training_alone)
        gate.register_forward_hook(self._round_capacity)
        first = place * self.num_local_experts
        for local, expert in enumerate(self.deepspeed_moe.experts.deepspeed_experts):
            for parameter in expert.parameters():
                mark_expert(parameter, ExpertShare(first + local, replicas))
        if spec.residual_experts:
            nn.init.zeros_(self.coefficient.bias)

    def forward(self, x_sbh: Tensor) -> tuple[Tensor, None]:
        """Return the output, and no bias that were left to the caller."""
        y_sbh, term, _ = super().forward(x_sbh)
        return self._auxiliary.join(y_sbh, term, place=self._number), None

    def _draw_in_training_alone(self, gate: Any, _: Any) -> None:
        gate.use_rts = gate.training
        gate.top2_2nd_expert_sampling = gate.training and self._samples_second

    def _round_capacity(self, gate: Any, _: Any, routed: tuple[Any, ...]) -> tuple[Any, ...]:
        """Pad the capacity of experts to a multiple of the tensor-parallel ranks."""
        loss, capacity, *rest = routed
        rounded = -(-int(capacity) // self._tensor_ranks) * self._tensor_ranks
        return loss, rounded, *rest
