"""ZeRO and offload: flags, resolution with DeepSpeed's JSON, and checks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.config.optimization.optimizer import OptimizerConfig
from megatron.config.parallelism.deepspeed_json import Twin
from megatron.config.parallelism.precision import PrecisionPlan
from megatron.config.parsing.declaration import range_problems, setting
from megatron.config.parsing.json_tree import value_at


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """DeepSpeed's JSON, ZeRO and offload."""

    deepspeed_config: str | None = setting(None, flag="--deepspeed_config")
    """A DeepSpeed JSON file. What it repeats must agree with the flags, "auto" and what it leaves
    out is filled in from them, and keys without a flag pass through."""

    zero_stage: int | None = None
    """What ZeRO divides over the data-parallel ranks: 0 nothing, 1 optimizer state, 2 gradients
    too, 3 weights too (default: the JSON's stage, or else 0)."""

    zero_reduce_scatter: bool = False
    """Reduce gradients only to the rank that keeps them."""

    zero_contiguous_gradients: bool = setting(False, older=("--zero-contigious-gradients",))
    """Copy gradients into one buffer as they come."""

    zero_reduce_bucket_size: int = setting(0, at_least=0)
    """Elements reduced at a time; 0 leaves it to the JSON or DeepSpeed."""

    zero_allgather_bucket_size: int = setting(0, at_least=0)
    """Elements gathered at a time; 0 leaves it to the JSON or DeepSpeed."""

    remote_device: Literal["none", "cpu", "nvme"] | None = None
    """Where ZeRO stage 3 keeps the weights that are not in use; nvme takes its folder from
    zero_optimization.offload_param.nvme_path of the JSON."""

    use_pin_memory: bool = False
    """Keep what is offloaded in page-locked memory, which GPUs read faster."""


_OPTIMIZER = "zero_optimization.offload_optimizer"

_WEIGHTS = "zero_optimization.offload_param"


@dataclass(frozen=True, kw_only=True)
class ZeroPlan:
    """The stage of ZeRO and the devices of what is not kept beside the network."""

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
        optimizer_device="cpu" if optimizer.cpu_optimizer else _device(user, _OPTIMIZER),
        weights_device=zero.remote_device or _device(user, _WEIGHTS),
    )


def _device(user: Mapping[str, Any], block: str) -> str:
    # A block without a device offloads to the CPU in DeepSpeed's own reading.
    absent = "none" if value_at(user, block) is None else "cpu"
    return value_at(user, f"{block}.device", absent)


def zero_twins(plan: ZeroPlan, zero: DeepSpeedConfig, optimizer: OptimizerConfig) -> Iterator[Twin]:
    """Yield the keys of DeepSpeed's JSON that these flags own; one that is not given owns nothing."""
    yield Twin("zero_optimization.stage", "--zero-stage", plan.given_stage)
    if zero.zero_reduce_scatter:
        yield Twin("zero_optimization.reduce_scatter", "--zero-reduce-scatter", True)
    if zero.zero_contiguous_gradients:
        yield Twin("zero_optimization.contiguous_gradients", "--zero-contiguous-gradients", True)
    for key, flag, size in (
        ("reduce_bucket_size", "--zero-reduce-bucket-size", zero.zero_reduce_bucket_size),
        ("allgather_bucket_size", "--zero-allgather-bucket-size", zero.zero_allgather_bucket_size),
    ):
        if size:
            yield Twin(f"zero_optimization.{key}", flag, size)
    if optimizer.cpu_optimizer:
        yield Twin(f"{_OPTIMIZER}.device", "--cpu-optimizer", "cpu")
    if zero.remote_device is not None:
        yield Twin(f"{_WEIGHTS}.device", "--remote-device", zero.remote_device)
    for block, device in ((_OPTIMIZER, plan.optimizer_device), (_WEIGHTS, plan.weights_device)):
        if zero.use_pin_memory and device != "none":
            yield Twin(f"{block}.pin_memory", "--use-pin-memory", True)


def zero_notices(plan: ZeroPlan, optimizer: OptimizerConfig) -> Iterator[str]:
    """Yield what a user should know about how the flags were read."""
    if plan.stage != plan.given_stage:
        yield (
            f"16-bit training at ZeRO stage {plan.given_stage} runs as stage {plan.stage}: the same "
            "steps, with the optimizer state divided over the replicas"
        )
    if optimizer.use_distributed_optimizer:
        yield f"--use-distributed-optimizer: ZeRO stage {plan.stage} divides the optimizer's state"


def zero_problems(
    plan: ZeroPlan,
    zero: DeepSpeedConfig,
    user: Mapping[str, Any],
    *,
    optimizer: str,
    uses_distributed_optimizer: bool,
    precision: PrecisionPlan,
    pipeline: int,
    data: int,
) -> Iterator[str]:
    """Yield what DeepSpeed would refuse, and what it would take and not do.

    Args:
        optimizer: name of the decided optimizer.
        uses_distributed_optimizer: whether the flag of that name is given.
        data: number of replicas.
    """
    stage = plan.stage
    if uses_distributed_optimizer and plan.given_stage == 0:
        yield "--use-distributed-optimizer is ZeRO stage 1: take stage 0 out, or write --zero-stage 1"
    yield from range_problems(zero)
    yield from _offload_problems(plan, zero, user)
    yield from _pipeline_problems(plan, user, precision, pipeline=pipeline)
    yield from _plus_plus_problems(user, stage=stage, data=data)
    if optimizer == "muon":
        if stage == 3:
            yield (
                "--optimizer muon needs full matrices, which --zero-stage 3 cuts into pieces; write "
                "--zero-stage 2"
            )
        if plan.offloads:
            yield "--optimizer muon gathers its matrices between GPUs: take the offload out"
        if stage and pipeline > 1:
            yield (
                "--optimizer muon with ZeRO needs a pipeline of one stage: its groups of weights "
                "differ between stages, and DeepSpeed's gradient norm would wait for a group that a "
                "stage has not; write --optimizer adam, or --pipeline-model-parallel-size 1"
            )


def _pipeline_problems(
    plan: ZeroPlan, user: Mapping[str, Any], precision: PrecisionPlan, *, pipeline: int
) -> Iterator[str]:
    """Yield where DeepSpeed's pipelines would keep the gradients of one micro-batch alone.

    ZeRO's optimizer does so in a pipeline when it adds 16-bit gradients up in 32 bits; bf16
    without offload has another optimizer.
    """
    if pipeline == 1 or not precision.is_mixed:
        return
    own = "fp32" if precision.fp32_gradients else precision.dtype
    if value_at(user, "data_types.grad_accum_dtype", own) != "fp32":
        return
    if precision.dtype == "fp16":
        yield (
            "fp16 gradients are not added up in 32 bits with --pipeline-model-parallel-size "
            f"{pipeline}, where DeepSpeed would lose some of them: leave out "
            "--accumulate-allreduce-grads-in-fp32 (data_types.grad_accum_dtype in the JSON), or "
            "write --bf16"
        )
    elif plan.optimizer_device != "none":
        yield (
            "an offloaded optimizer does not work in bf16 with --pipeline-model-parallel-size "
            f"{pipeline}, where DeepSpeed would lose some gradients: write --fp16, or take "
            "--cpu-optimizer (offload_optimizer in the JSON) out"
        )


def _offload_problems(
    plan: ZeroPlan, zero: DeepSpeedConfig, user: Mapping[str, Any]
) -> Iterator[str]:
    if plan.optimizer_device != "none" and plan.stage == 0:
        yield (
            "the optimizer's state is offloaded by ZeRO from stage 1 on: write --zero-stage 1, or "
            "take --cpu-optimizer (offload_optimizer in the JSON) out"
        )
    if plan.weights_device != "none" and plan.stage < 3:
        yield (
            f"weights are offloaded by ZeRO stage 3 alone, not by stage {plan.stage}: write "
            "--zero-stage 3, or take --remote-device (offload_param in the JSON) out"
        )
    for block, device in ((_OPTIMIZER, plan.optimizer_device), (_WEIGHTS, plan.weights_device)):
        if device not in ("none", "cpu", "nvme"):
            yield f"{block}.device of the JSON is {device!r}, not one of none, cpu, nvme"
        elif device == "nvme":
            if plan.stage < 3:
                yield f"{block}: only ZeRO stage 3 offloads to nvme; write cpu, or --zero-stage 3"
            if not value_at(user, f"{block}.nvme_path"):
                yield f"{block}: nvme needs {block}.nvme_path in the JSON, the folder of a fast disk"
    if zero.use_pin_memory and not plan.offloads:
        yield "--use-pin-memory is for what is offloaded: give --cpu-optimizer or --remote-device too"


def _plus_plus_problems(user: Mapping[str, Any], *, stage: int, data: int) -> Iterator[str]:
    """Yield what ZeRO++ (arXiv:2306.10209) cannot do here."""
    for name in ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"):
        key = f"zero_optimization.{name}"
        value = value_at(user, key)
        # One rank per secondary partition is none; True equals 1, and is another matter.
        if not value or (value == 1 and value is not True):
            continue
        if stage < 3:
            yield f"{key} of the JSON works at ZeRO stage 3 alone: write --zero-stage 3, or take it out"
        elif name == "zero_hpz_partition_size" and data % value:
            yield f"{key} {value} does not divide the {data} replicas"
