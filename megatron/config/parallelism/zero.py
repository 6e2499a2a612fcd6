"""ZeRO and offload: flags, resolution with DeepSpeed's JSON, and checks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.config.optimization.optimizer import OptimizerConfig
from megatron.config.parallelism.deepspeed_json import OwnedKey, given_keys
from megatron.config.parallelism.precision import PrecisionPlan
from megatron.config.parsing.declaration import setting
from megatron.config.parsing.json_tree import value_at


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """DeepSpeed's JSON, ZeRO and offload."""

    deepspeed_config: str | None = setting(None, flag="--deepspeed_config")
    """A DeepSpeed JSON file. What it repeats must agree with the flags, "auto" and what it leaves
    out is filled in from them, and keys without a flag pass through."""

    zero_stage: int | None = None
    """ZeRO stage: 0 off, 1 shards optimizer states, 2 also gradients, 3 also parameters (default: the
    JSON's stage, or else 0)."""

    zero_reduce_scatter: bool = setting(False, ds_key="zero_optimization.reduce_scatter")
    """Reduce-scatter gradients to the ranks that own them, instead of all-reduce."""

    zero_contiguous_gradients: bool = setting(
        False,
        older=("--zero-contigious-gradients",),
        ds_key="zero_optimization.contiguous_gradients",
    )
    """Copy gradients into one contiguous buffer as they are computed."""

    zero_reduce_bucket_size: int = setting(
        0, at_least=0, ds_key="zero_optimization.reduce_bucket_size"
    )
    """Elements reduced at a time; 0 leaves it to the JSON or DeepSpeed. In bf16 at ZeRO stage 1 the
    same buckets are reduced and gathered: the smaller of both sizes holds."""

    zero_allgather_bucket_size: int = setting(
        0, at_least=0, ds_key="zero_optimization.allgather_bucket_size"
    )
    """Elements gathered at a time; 0 leaves it to the JSON or DeepSpeed. In bf16 at ZeRO stage 1 see
    --zero-reduce-bucket-size."""

    remote_device: Literal["none", "cpu", "nvme"] | None = setting(
        None, ds_key="zero_optimization.offload_param.device"
    )
    """Device to which ZeRO stage 3 offloads parameters; nvme uses the folder
    zero_optimization.offload_param.nvme_path of the JSON."""

    use_pin_memory: bool = False
    """Keep offloaded states in pinned (page-locked) memory, which GPUs read faster."""


OPTIMIZER_BLOCK = "zero_optimization.offload_optimizer"

WEIGHTS_BLOCK = "zero_optimization.offload_param"


@dataclass(frozen=True, kw_only=True)
class ZeroPlan:
    """ZeRO stage, and the devices of offloaded states."""

    given_stage: int
    stage: int  # the one that runs
    optimizer_device: str  # none, cpu or nvme
    weights_device: str  # likewise

    @property
    def offloads(self) -> bool:
        """Whether anything leaves the device that the network computes on."""
        return (self.optimizer_device, self.weights_device) != ("none", "none")


def plan_zero(
    zero: DeepSpeedConfig,
    optimizer: OptimizerConfig,
    precision: PrecisionPlan,
    user: Mapping[str, Any],
) -> ZeroPlan:
    """Return the ZeRO stage that runs, and the devices of offload.

    16-bit training runs at stage 1 at least: DeepSpeed's undivided 16-bit optimizers accumulate
    in 16 bits, miscount the norm under tensor parallelism, and cannot resume a pipeline; stage 1
    computes the same step and divides its state.
    """
    divides = optimizer.use_distributed_optimizer or optimizer.cpu_optimizer
    given = zero.zero_stage
    if given is None:
        given = value_at(user, "zero_optimization.stage", int(divides))
    return ZeroPlan(
        given_stage=given,
        stage=max(1, given) if precision.is_mixed else given,
        optimizer_device="cpu" if optimizer.cpu_optimizer else _device(user, OPTIMIZER_BLOCK),
        weights_device=zero.remote_device or _device(user, WEIGHTS_BLOCK),
    )


def _device(user: Mapping[str, Any], block: str) -> str:
    # DeepSpeed reads a block without a device as offload to the CPU.
    absent = "none" if value_at(user, block) is None else "cpu"
    return value_at(user, f"{block}.device", absent)


def zero_keys(
    plan: ZeroPlan, zero: DeepSpeedConfig, optimizer: OptimizerConfig
) -> Iterator[OwnedKey]:
    """Yield the keys of DeepSpeed's JSON that these flags own; one that is not given owns nothing."""
    yield OwnedKey("zero_optimization.stage", "--zero-stage", plan.given_stage)
    yield from given_keys(zero)
    if optimizer.cpu_optimizer:
        yield OwnedKey(f"{OPTIMIZER_BLOCK}.device", "--cpu-optimizer", "cpu")
    for block, device in (
        (OPTIMIZER_BLOCK, plan.optimizer_device),
        (WEIGHTS_BLOCK, plan.weights_device),
    ):
        if zero.use_pin_memory and device != "none":
            yield OwnedKey(f"{block}.pin_memory", "--use-pin-memory", True)


def zero_notices(plan: ZeroPlan, optimizer: OptimizerConfig) -> Iterator[str]:
    """Yield notices about the interpretation of the flags."""
    if plan.stage != plan.given_stage:
        yield (
            f"16-bit training at ZeRO stage {plan.given_stage} runs as stage {plan.stage}: the same "
            "steps, with the optimizer state divided over the replicas"
        )
    if optimizer.use_distributed_optimizer:
        yield f"--use-distributed-optimizer: ZeRO stage {plan.stage} divides the optimizer's state"
