"""DeepSpeed: checks of ZeRO and offload, and of the keys of its JSON."""

import json
from collections.abc import Iterator

from megatron.config.checks.start import Start
from megatron.config.parallelism.deepspeed_json import ABSENT
from megatron.config.parallelism.zero import OPTIMIZER_BLOCK, WEIGHTS_BLOCK
from megatron.config.parsing.declaration import range_problems
from megatron.config.parsing.json_tree import value_at


def zero_problems(start: Start) -> Iterator[str]:
    """Yield settings that DeepSpeed would refuse, or accept and ignore."""
    plan, stage = start.zero, start.zero.stage
    if start.config.optimizer.use_distributed_optimizer and plan.given_stage == 0:
        yield "--use-distributed-optimizer is ZeRO stage 1: take stage 0 out, or write --zero-stage 1"
    yield from range_problems(start.config.deepspeed)
    yield from _offload_problems(start)
    yield from _pipeline_problems(start)
    yield from _plus_plus_problems(start)
    if start.optimizer.name == "muon":
        if stage == 3:
            yield (
                "--optimizer muon needs full matrices, which --zero-stage 3 cuts into pieces; write "
                "--zero-stage 2"
            )
        if plan.offloads:
            yield "--optimizer muon gathers its matrices between GPUs: take the offload out"


def _pipeline_problems(start: Start) -> Iterator[str]:
    """Yield where DeepSpeed's pipelines would keep the gradients of one micro-batch alone.

    ZeRO's optimizer does so in a pipeline when it adds 16-bit gradients up in 32 bits; bf16
    without offload has another optimizer.
    """
    precision, pipeline = start.precision, start.config.parallel.pipeline_model_parallel_size
    if pipeline == 1 or not precision.is_mixed:
        return
    gradient_dtype = "fp32" if precision.fp32_gradients else precision.dtype
    if value_at(start.deepspeed, "data_types.grad_accum_dtype", gradient_dtype) != "fp32":
        return
    if precision.dtype == "fp16":
        yield (
            "fp16 gradients are not added up in 32 bits with --pipeline-model-parallel-size "
            f"{pipeline}, where DeepSpeed would lose some of them: leave out "
            "--accumulate-allreduce-grads-in-fp32 (data_types.grad_accum_dtype in the JSON), or "
            "write --bf16"
        )
    elif start.zero.optimizer_device != "none":
        yield (
            "an offloaded optimizer does not work in bf16 with --pipeline-model-parallel-size "
            f"{pipeline}, where DeepSpeed would lose some gradients: write --fp16, or take "
            "--cpu-optimizer (offload_optimizer in the JSON) out"
        )


def _offload_problems(start: Start) -> Iterator[str]:
    plan, user = start.zero, start.deepspeed
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
    for block, device in (
        (OPTIMIZER_BLOCK, plan.optimizer_device),
        (WEIGHTS_BLOCK, plan.weights_device),
    ):
        if device not in ("none", "cpu", "nvme"):
            yield f"{block}.device of the JSON is {device!r}, not one of none, cpu, nvme"
        elif device == "nvme":
            if plan.stage < 3:
                yield f"{block}: only ZeRO stage 3 offloads to nvme; write cpu, or --zero-stage 3"
            if not value_at(user, f"{block}.nvme_path"):
                yield f"{block}: nvme needs {block}.nvme_path in the JSON, the folder of a fast disk"
    if start.config.deepspeed.use_pin_memory and not plan.offloads:
        yield "--use-pin-memory is for what is offloaded: give --cpu-optimizer or --remote-device too"


def _plus_plus_problems(start: Start) -> Iterator[str]:
    """Yield settings that ZeRO++ (arXiv:2306.10209) does not support here."""
    user, data = start.deepspeed, start.replicas
    for name in ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"):
        key = f"zero_optimization.{name}"
        value = value_at(user, key)
        # One rank per secondary partition is none; True equals 1, and is another matter.
        if not value or (value == 1 and value is not True):
            continue
        if start.zero.stage < 3:
            yield f"{key} of the JSON works at ZeRO stage 3 alone: write --zero-stage 3, or take it out"
        elif name == "zero_hpz_partition_size" and data % value:
            yield f"{key} {value} does not divide the {data} replicas"


def json_problems(start: Start) -> Iterator[str]:
    """Yield every key of the JSON that contradicts its flag."""
    user, file = start.deepspeed, start.config.deepspeed.deepspeed_config
    batch = start.steps.batch
    for twin in start.owned_keys:
        given = value_at(user, twin.key, ABSENT)
        # With a ramp, scripts write the final size where DeepSpeed needs the first one.
        final = twin.key == "train_batch_size" and given == batch.global_batch_size
        if given is ABSENT or given == twin.value or final:
            continue
        yield (
            f"{file}: {twin.key} is {json.dumps(given)}, but {twin.flag} is {twin.value}; "
            "make them equal, or take the key out of the JSON"
        )
    if start.config.parallel.pipeline_model_parallel_size > 1:
        for key in ("wall_clock_breakdown", "flops_profiler.enabled"):
            if value_at(user, key):
                yield f"{file}: {key} does not work in DeepSpeed's pipelines: take it out of the JSON"
    if value_at(user, "scheduler") is not None:
        yield (
            f"{file}: scheduler: the learning rate is set by --lr, --min-lr and the --lr-… flags; "
            "take the key out of the JSON"
        )
