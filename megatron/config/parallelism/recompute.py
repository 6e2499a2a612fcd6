"""Activation checkpointing (recomputation): flags, resolution and checks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron.config.parallelism.layout import ParallelPlan
from megatron.config.parallelism.recompute_plan import NOTHING, RecomputePlan
from megatron.config.parsing.declaration import flags_of, range_problems, setting

_BLOCK = "activation_checkpointing."


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Activation checkpointing (recomputation)."""

    recompute_granularity: Literal["selective", "full"] | None = None
    """What is computed again in the backward pass: attention itself (selective: little work for
    much memory where scores are kept), or full layers (full)."""

    recompute_activations: bool = False
    """Megatron's spelling of --recompute-granularity selective."""

    checkpoint_activations: bool = False
    """Keep only the input of every transformer layer and compute the rest again in the backward
    pass: less memory for about a third more computation. Older spelling of --recompute-granularity
    full --recompute-method uniform."""

    recompute_method: Literal["uniform", "block"] | None = None
    """Which layers are recomputed: all of them, in groups of --recompute-num-layers of which the first
    input is kept (uniform), or the first --recompute-num-layers of each stage or model chunk, one by one (block)."""

    recompute_num_layers: int | None = setting(None, at_least=1, older=("--checkpoint-num-layers",))
    """Layers per group (uniform), or recomputed layers of each stage (block)."""

    distribute_saved_activations: bool = setting(
        False,
        older=("--distribute-checkpointed-activations", "--partition-activations"),
        ds_key=f"{_BLOCK}partition_activations",
    )
    """Partition the saved inputs of full recomputation over the tensor-parallel ranks."""

    contiguous_checkpointing: bool = setting(
        False,
        older=("--contigious-checkpointing",),
        ds_key=f"{_BLOCK}contiguous_memory_optimization",
    )
    """Copy the partitions of --partition-activations into one buffer, to avoid memory
    fragmentation."""

    checkpoint_in_cpu: bool = setting(False, ds_key=f"{_BLOCK}cpu_checkpointing")
    """Offload the saved inputs of full recomputation to host memory."""

    synchronize_each_layer: bool = setting(False, ds_key=f"{_BLOCK}synchronize_checkpoint_boundary")
    """Synchronize with the device before and after every checkpointed group of layers."""

    profile_backward: bool = setting(False, ds_key=f"{_BLOCK}profile")
    """Log the forward and backward time of every checkpointed group of layers."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Resolved settings of DeepSpeed's `activation_checkpointing` section, with problems and notices."""

    block: dict[str, Any]
    problems: tuple[str, ...]
    notices: tuple[str, ...]


def plan_recompute(recompute: RecomputeConfig, *, num_layers: int, pipeline: int) -> RecomputePlan:
    """Return the parts that are recomputed.

    Args:
        num_layers: of the network.
        pipeline: number of stages, virtual ones counted.
    """
    if recompute.checkpoint_activations or recompute.recompute_granularity == "full":
        method, group = recompute.recompute_method or "uniform", recompute.recompute_num_layers or 1
        in_blocks = min(1.0, group * max(1, pipeline) / max(1, num_layers))
        return RecomputePlan(
            granularity="full",
            method=method,
            num_layers=group,
            share=in_blocks if method == "block" else 1.0,
        )
    if recompute.recompute_activations or recompute.recompute_granularity == "selective":
        return replace(NOTHING, granularity="selective")
    return NOTHING


def recompute_problems(recompute: RecomputeConfig) -> Iterator[str]:
    """Yield every contradiction between the flags of recomputation."""
    granularity = recompute.recompute_granularity
    selective = [
        *(["--recompute-activations"] if recompute.recompute_activations else []),
        *(["--recompute-granularity selective"] if granularity == "selective" else []),
    ]
    full = [
        *(["--checkpoint-activations"] if recompute.checkpoint_activations else []),
        *(["--recompute-granularity full"] if granularity == "full" else []),
    ]
    if selective and full:
        yield f"{selective[0]} and {full[0]} contradict each other: take one of them out"
    details = [
        *(
            [f"--recompute-method {recompute.recompute_method}"]
            if recompute.recompute_method
            else []
        ),
        *(
            [f"--recompute-num-layers {recompute.recompute_num_layers}"]
            if recompute.recompute_num_layers is not None
            else []
        ),
    ]
    if details and not full:
        why = f"{selective[0]} recomputes no full layers" if selective else "nothing is recomputed"
        yield f"{' and '.join(details)}: {why}; add --recompute-granularity full, or leave it out"
    yield from range_problems(recompute)
    missing = {
        "--recompute-method uniform or block": not recompute.recompute_method,
        "--recompute-num-layers": recompute.recompute_num_layers is None,
    }
    lacks = " and ".join(flag for flag, is_missing in missing.items() if is_missing)
    if full == ["--recompute-granularity full"] and lacks:
        yield f"--recompute-granularity full needs {lacks}"


def recompute_notices(
    recompute: RecomputePlan, *, attention: str, device: str, ring: bool
) -> Iterator[str]:
    """Yield a notice when selective recomputation costs time and saves next to no memory.

    Args:
        attention: the planned implementation.
        ring: whether it computes the blocks of ring attention.
    """
    if recompute.granularity == "selective" and ring:
        yield (
            "selective recomputation sends keys and values around the ring once more and saves next to no "
            "memory: ring attention keeps no scores; leave it out, or take --recompute-granularity full"
        )
        return
    keeps_no_scores = attention in ("sdpa", "flash", "flex") and device != "cpu"
    if recompute.granularity == "selective" and keeps_no_scores:
        yield (
            f"selective recomputation computes attention twice and saves next to no memory: {attention} "
            "keeps no scores on GPUs; leave it out, or take --recompute-granularity full"
        )


def plan_storage(
    recompute: RecomputeConfig,
    user: Mapping[str, Any],
    parallel: ParallelPlan,
    *,
    num_layers: int,
    device: str,
) -> Storage:
    """Resolve how the inputs of recomputed layers are stored.

    A flag that cannot be honoured is a problem; a switch that only the JSON sets stays off, with
    a notice, because one JSON serves many layouts.
    """
    parts = parallel.pipeline * parallel.chunks
    plan = plan_recompute(recompute, num_layers=num_layers, pipeline=parts)
    block = dict(user.get("activation_checkpointing", {}))
    problems, notices = [], []
    for switch in (flag for flag in flags_of(RecomputeConfig) if flag.setting.ds_key):
        key, flag = switch.setting.ds_key.removeprefix(_BLOCK), switch.options[0]
        given = getattr(recompute, switch.name)
        if given and block.get(key) is False:
            problems.append(
                f"{flag}: activation_checkpointing.{key} of the DeepSpeed JSON is false"
            )
        wanted = given or block.get(key) is True
        obstacle = _obstacle(key, plan, parallel, block, device=device) if wanted else None
        if wanted:
            block[key] = obstacle is None
        if obstacle and given:
            problems.append(f"{flag}: {obstacle}")
        elif obstacle:
            notices.append(
                f"activation_checkpointing.{key} of the DeepSpeed JSON stays off: {obstacle}"
            )
    if block.get("contiguous_memory_optimization"):
        block["number_checkpoints"] = len(plan.groups(num_layers))
    return Storage(block=block, problems=tuple(problems), notices=tuple(notices))


def _obstacle(
    key: str,
    plan: RecomputePlan,
    parallel: ParallelPlan,
    decided: Mapping[str, Any],
    *,
    device: str,
) -> str | None:
    """Return why the switch cannot be honoured, given those before it; None when it can."""
    if plan.granularity == "none":
        return "nothing is recomputed; add --checkpoint-activations"
    if key in ("synchronize_checkpoint_boundary", "profile"):
        return None
    if plan.granularity != "full":
        return (
            "it changes how the inputs of recomputed layers are kept, and selective recomputation "
            "keeps none; write --checkpoint-activations"
        )
    if key == "partition_activations":
        if parallel.tensor == 1:
            return "there is one tensor-parallel rank, so there is nothing to divide over"
        if parallel.sequence_parallel:
            return "with --sequence-parallel a rank holds no more than its part already"
    elif key == "contiguous_memory_optimization":
        if not decided.get("partition_activations"):
            return "it needs --partition-activations"
        if parallel.pipeline > 1:
            return "DeepSpeed's buffer holds one micro-batch, and a pipeline has several under way"
    elif device == "cpu" and not decided.get("partition_activations"):
        return "this run is on CPUs, where activations are in that memory already"
    return None
