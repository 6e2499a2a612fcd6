"""The start of a run: a config on its processes, and what follows from it before there is a plan."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron.common.registry import OPTIMIZERS, SCHEDULES
from megatron.config.config import Config
from megatron.config.data.objective import ObjectiveName
from megatron.config.network_contract import Network, network_in
from megatron.config.objectives import Declaration, declaration_of
from megatron.config.optimization.batch_size import NO_PROGRESS, Progress
from megatron.config.optimization.lr_schedule import SchedulePlan, plan_schedule
from megatron.config.optimization.optimizer import OptimizerPlan, plan_optimizer
from megatron.config.optimization.training import StepsPlan, plan_steps
from megatron.config.parallelism.deepspeed_json import OwnedKey, step_keys
from megatron.config.parallelism.layout import (
    plan_parallel,
    replica_size,
    replicas_with_all_experts,
)
from megatron.config.parallelism.precision import (
    PrecisionPlan,
    plan_precision,
    precision_keys,
)
from megatron.config.parallelism.recompute import Storage, plan_storage
from megatron.config.parallelism.zero import ZeroPlan, plan_zero, zero_keys
from megatron.config.run.evaluation import takes_steps


@dataclass(frozen=True, kw_only=True)
class Start:
    """A config on the processes that train it; each part is resolved once, when it is asked for.

    Args:
        deepspeed: the JSON of --deepspeed_config; {} without one.
        device: "cpu" or "cuda".
        objective: what the entry script trains.
        done: of the checkpoint that the run resumes from.
    """

    config: Config
    deepspeed: dict[str, Any]
    world_size: int
    device: str
    objective: ObjectiveName = "gpt"
    done: Progress = NO_PROGRESS

    @cached_property
    def declaration(self) -> Declaration:
        """What the objective reads and trains."""
        return declaration_of(self.objective)

    @cached_property
    def network(self) -> Network:
        """The network that is trained."""
        return network_in(self.config, self.objective)

    @cached_property
    def num_layers(self) -> int:
        """Layers that pipeline stages divide."""
        return self.network.num_layers(self.config)

    @cached_property
    def has_experts(self) -> bool:
        """Whether some layer has several experts."""
        return max(self.config.experts.num_experts or [1]) > 1

    @cached_property
    def trains(self) -> bool:
        """Whether the run takes steps; otherwise it evaluates alone."""
        return takes_steps(self.config.evaluation)

    @cached_property
    def replicas(self) -> int:
        """Replicas; of a wrong number of processes the least that is possible."""
        replicas, left_over = divmod(self.world_size, replica_size(self.config.parallel))
        if left_over:
            ranks = self.config.ranks_with_all_experts
            replicas = replicas_with_all_experts(self.config.parallel, ranks)
        return max(1, replicas)

    @cached_property
    def precision(self) -> PrecisionPlan:
        """Dtypes of weights and of gradient sums."""
        return plan_precision(self.config.precision)

    @cached_property
    def zero(self) -> ZeroPlan:
        """ZeRO's stage and offload, from flags and DeepSpeed's JSON."""
        return plan_zero(
            self.config.deepspeed, self.config.optimizer, self.precision, self.deepspeed
        )

    @cached_property
    def optimizer(self) -> OptimizerPlan:
        """The optimizer."""
        optimizer = self.config.optimizer
        return plan_optimizer(
            optimizer,
            on_cpu=self.zero.optimizer_device != "none",
            own_flags=OPTIMIZERS.flags_of(optimizer.optimizer, self.config.extensions),
            embeddings_apart=self.config.schedule.decoupled_lr is not None,
        )

    @cached_property
    def storage(self) -> Storage:
        """How the activations that recomputation keeps are stored."""
        parallel = plan_parallel(
            self.config.parallel,
            world_size=self.world_size,
            zero_stage=0,
            num_layers=self.num_layers,
        )
        return plan_storage(
            self.config.recompute,
            self.deepspeed,
            parallel,
            num_layers=self.num_layers,
            device=self.device,
        )

    @cached_property
    def steps(self) -> StepsPlan:
        """The steps, if `length_problems` finds nothing."""
        return plan_steps(
            self.config.training,
            self.deepspeed,
            data=self.replicas,
            seq_length=self.config.model.seq_length,
            saves=self.trains and self.config.checkpoint.save is not None,
            done=self.done,
        )

    @cached_property
    def schedule(self) -> SchedulePlan:
        """The learning-rate schedule, of a run with a step."""
        schedule, length = self.config.schedule, self.config.model.seq_length
        own_flags = SCHEDULES.flags_of(schedule.lr_decay_style, self.config.extensions)
        return replace(plan_schedule(schedule, self.steps, seq_length=length), own_flags=own_flags)

    @cached_property
    def owned_keys(self) -> list[OwnedKey]:
        """The keys of DeepSpeed's JSON that flags own, with their values."""
        optimizer = self.config.optimizer
        return [
            *step_keys(batch=self.steps.batch, clip_grad=optimizer.clip_grad),
            *precision_keys(self.config.precision, self.deepspeed),
            *zero_keys(self.zero, self.config.deepspeed, optimizer),
        ]
