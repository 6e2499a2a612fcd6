"""Search for parallel layouts that fit a number of GPUs: the fastest first, and why others do not fit."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron.common.errors import ConfigError, raise_if_any
from megatron.common.progress import with_progress
from megatron.config.config import Config
from megatron.config.data.objective import ObjectiveName
from megatron.config.optimization.training import global_batch_size_of
from megatron.config.parallelism.pipeline import LAYERS, even_parts
from megatron.config.plan.plan import Plan, plan
from megatron.planner.devices import GIB, Device
from megatron.planner.layouts import Axis, Layout, in_chunks, layouts_of, places
from megatron.planner.memory import memory_of_stages
from megatron.planner.speed import Speed, speed_of
from megatron.planner.stages import stages_of

_STAGES = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)
"""Fields of the parallel layout that divide layers for one number of stages alone."""

DECIDED = {
    "parallel": (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "ds_sequence_parallel_size",
        "context_parallel_size",
        *_STAGES,
        "sequence_parallel",
    ),
    "experts": ("moe_expert_parallel_size", "expert_tensor_parallel_size"),
    "training": ("micro_batch_size",),
    "deepspeed": ("zero_stage",),
    "recompute": (
        "recompute_granularity",
        "recompute_activations",
        "checkpoint_activations",
        "recompute_method",
        "recompute_num_layers",
        "distribute_saved_activations",
        "contiguous_checkpointing",
        "checkpoint_in_cpu",
    ),
}
"""Fields of a Config, by section, that a search sets; their values are ignored."""

_WORTHWHILE = 0.01  # part of a step below which two are equally long
_ROOMY = 0.95  # of the usable memory, above which a layout is the second choice
_TIGHT = 0.05  # part of a step that a layout in more memory than that must save to come first


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """A layout that can be run."""

    layout: Layout
    speed: Speed
    peak_bytes: int  # of the fullest rank
    is_tight: bool = False  # whether estimates are not exact enough to be sure that it fits

    @property
    def ranked_s(self) -> float:
        """Time of a step by which it is ranked."""
        return self.speed.step_s * (1 + _TIGHT * self.is_tight)


@dataclass(frozen=True)
class Refusal:
    """Why some layouts cannot be run.

    Args:
        why: the reason that they share.
        where: what they have in common, such as "tp 16", in the order of the search.
        partly: the same where other layouts of that kind fit, with what those that do not have
            alone, such as "tp 1 pp 2 with micro-batch 8".
        count: how many there are.
    """

    why: str
    where: tuple[str, ...]
    partly: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Found:
    """Result of a search: layouts that fit, the fastest first (see `ranked`), and refusals."""

    fitting: tuple[Fitting, ...]
    refused: tuple[Refusal, ...]


def search(
    config: Config,
    *,
    num_gpus: int,
    vocab_size: int,
    device: Device,
    gpus_per_node: int = 8,
    objective: ObjectiveName = "gpt",
    slowdown: float = 1.0,
) -> Found:
    """Try every layout of `num_gpus` devices for what `config` trains.

    The layout of `config` itself is ignored, see DECIDED; tensor-parallel ranks
    divide the sequence as well.

    Args:
        gpus_per_node: tensor parallelism stays within a node.
        slowdown: of computation relative to the roofline.

    Raises:
        ConfigError: something is wrong that no layout can fix.
    """
    if config.precision.bf16 and not device.has_bf16:
        raise ConfigError(_no_bf16(device))
    layouts = _all_layouts(config, num_gpus)
    fitting: list[Fitting] = []
    refused = defaultdict[tuple[Axis, str], list[Layout]](list)
    attempt = partial(
        _attempt,
        decide=lambda layout: plan(
            _config_of(config, layout),
            world_size=num_gpus,
            vocab_size=vocab_size,
            device="cuda",
            objective=objective,
        ),
        device=device,
        estimate=partial(speed_of, device=device, gpus_per_node=gpus_per_node, slowdown=slowdown),
    )
    uneven = partial(
        _uneven_reason,
        batch=global_batch_size_of(config.training, {}),
        gpus_per_node=gpus_per_node,
    )
    for layout, found in _outcomes(layouts, attempt, uneven):
        if isinstance(found, Fitting):
            fitting.append(found)
        else:
            refused[found].append(layout)
    fitting = ranked([*fitting, *_in_chunks(fitting, config.model.num_layers, attempt)])
    fit = [one.layout for one in fitting]
    refusals = (_refusal(*key, those, fit, layouts) for key, those in refused.items())
    return Found(tuple(fitting), tuple(refusals))


def _all_layouts(config: Config, num_gpus: int) -> list[Layout]:
    num_experts = math.gcd(*(count for count in config.experts.num_experts or () if count > 1))
    return [*layouts_of(num_gpus, config.model.num_layers, max(1, num_experts))]


def _outcomes(
    layouts: Sequence[Layout],
    attempt: Callable[[Layout], Fitting | str],
    uneven: Callable[[Layout], tuple[Axis, str] | None],
) -> Iterator[tuple[Layout, Fitting | tuple[Axis, str]]]:
    """Yield each layout with its estimate, or with the axis by which it does not run and why.

    Raises:
        ConfigError: training itself refuses all of them for the same reason.
    """
    obstacles: dict[Layout, str] = {}  # of layouts that larger micro-batches do not help
    problems: list[tuple[str, ...]] = []  # what training itself refuses of each layout
    for layout in with_progress(layouts, "search", len(layouts), "layouts"):
        smallest = replace(layout, micro_batch_size=1)
        if reason := uneven(layout):
            yield layout, reason
            continue
        if known := obstacles.get(smallest):
            yield layout, ("tp pp", known)
            continue
        try:
            found = attempt(layout)
        except ConfigError as error:
            problems.append(error.problems)
            yield layout, ("tp pp", error.problems[0])
            continue
        problems.append(())
        if isinstance(found, Fitting):
            yield layout, found
        else:
            obstacles[smallest] = found
            yield layout, ("tp pp", found)
    if problems:
        raise_if_any(p for p in problems[0] if all(p in others for others in problems))


def _attempt(
    layout: Layout,
    *,
    decide: Callable[[Layout], Plan],
    device: Device,
    estimate: Callable[[Plan], Speed],
) -> Fitting | str:
    """Return a layout with its estimate, or why it does not run on `device`."""
    decided = decide(layout)
    if reason := _hardware_obstacle(decided, device):
        return reason
    peak_bytes = _peak_bytes(decided)
    if reason := _excess(peak_bytes, device):
        return reason
    return Fitting(
        layout=layout,
        speed=estimate(decided),
        peak_bytes=peak_bytes,
        is_tight=_is_tight(peak_bytes, device),
    )


def _peak_bytes(plan: Plan) -> int:
    """Return the memory of the fullest rank."""
    return max(memory.total for memory in memory_of_stages(plan))


def _is_tight(peak_bytes: int, device: Device) -> bool:
    """Whether estimates are not exact enough to be sure that so much fits."""
    return peak_bytes > _ROOMY * device.usable_bytes


def _has_room(plan: Plan, device: Device) -> bool:
    """Whether `plan` is sure to run on GPUs of this kind."""
    return not (_hardware_obstacle(plan, device) or _is_tight(_peak_bytes(plan), device))


def _in_chunks(
    fitting: Sequence[Fitting], num_layers: int, attempt: Callable[[Layout], Fitting | str]
) -> Iterator[Fitting]:
    """Yield pipelines with several chunks on each rank, where these could be the fastest layout.

    Chunks shorten the bubble alone: a pipeline that would not be the fastest one without any is
    passed over.
    """
    least = min((one.ranked_s for one in fitting), default=0.0) * (1 + _WORTHWHILE)
    pipelines = [one for one in fitting if one.speed.step_s * (1 - one.speed.bubble) < least]
    tries = [each for one in pipelines for each in in_chunks(one.layout, num_layers)]
    for layout in with_progress(tries, "search of chunks", len(tries), "layouts"):
        try:
            found = attempt(layout)
        except ConfigError:  # such as a number of micro-batches that the ranks do not divide
            continue
        if isinstance(found, Fitting):
            yield found


def ranked(fitting: list[Fitting]) -> list[Fitting]:
    """Return layouts, the fastest first, of equally fast ones those of the lowest ZeRO stage.

    Equal are those less than 1 % slower than the fastest of them, as estimates are not that exact.
    Those that leave little memory free are ranked as if they were 5 % slower.
    """

    fitting = sorted(fitting, key=lambda one: (one.ranked_s, one.peak_bytes, one.layout))
    group = least = 0.0
    keys: dict[Layout, tuple[float, int]] = {}
    for one in fitting:
        if one.ranked_s > least * (1 + _WORTHWHILE):
            group, least = group + 1, one.ranked_s
        keys[one.layout] = (group, one.layout.zero_stage)
    return sorted(fitting, key=lambda one: keys[one.layout])


def _refusal(
    axis: Axis, why: str, those: list[Layout], fit: list[Layout], layouts: list[Layout]
) -> Refusal:
    found = [*places(those, fit, layouts, axis)]
    where = tuple(value for value, apart in found if not apart)
    partly = tuple(f"{value} with {apart}" for value, apart in found if apart)
    return Refusal(why, where, partly, len(those))


def faster_micro_batch(
    config: Config,
    decided: Plan,
    device: Device,
    *,
    decide: Callable[[Config], Plan],
    estimate: Callable[[Plan], Speed],
) -> tuple[int, Speed] | None:
    """Return the fastest larger micro-batch that fits with room, by doubling; None where none is faster.

    Args:
        config: what `decided` was planned from.
        decide: plans a config.
        estimate: the throughput of a plan.
    """
    best, batch = None, decided.batch
    least, size = estimate(decided).step_s * (1 - _WORTHWHILE), 2 * batch.micro_batch_size
    while size * batch.data_parallel_size <= batch.global_batch_size:
        training = replace(config.training, micro_batch_size=size)
        try:
            larger = decide(replace(config, training=training))
        except ConfigError:  # another flag sets it, or a batch is not a multiple of it
            break
        if not _has_room(larger, device):
            break
        speed = estimate(larger)
        if speed.step_s < least:
            least, best = speed.step_s, (size, speed)
        size *= 2
    return best


def faster_partition(
    config: Config,
    decided: Plan,
    device: Device,
    *,
    decide: Callable[[Config], Plan],
    estimate: Callable[[Plan], Speed],
) -> tuple[str, Speed] | None:
    """Return the fastest division into stages that fits with room, with fewer layers beside the head.

    Args:
        config, decide, estimate: see `faster_micro_batch`.

    Returns:
        The flags that ask for it, in place of all others that divide the layers; None where none is
        faster.
    """
    chunks = decided.parallel.chunks
    best, least = None, estimate(decided).step_s * (1 - _WORTHWHILE)
    for layers in _with_fewer_beside_the_head(decided):
        method = LAYERS + ",".join(map(str, layers))
        try:
            other = decide(_with_method(config, method, chunks))
        except ConfigError:  # such as adapters, which need a layer on each stage
            continue
        speed = estimate(other)
        if speed.step_s < least and _has_room(other, device):
            flags = f"--pp-partition-method {method}"
            if chunks > 1:
                flags += f" --num-virtual-stages-per-pipeline-rank {chunks}"
            best, least = (flags, speed), speed.step_s
    return best


def _with_fewer_beside_the_head(decided: Plan) -> Iterator[list[int]]:
    """Yield numbers of layers of each stage, or chunk, that are even but for fewer in the last one."""
    stages = [[len(part.layers) for part in stage.parts] for stage in stages_of(decided)]
    parts = [count for chunk in zip(*stages, strict=True) for count in chunk]
    if len(parts) == 1 or decided.parallel.split_rank:
        return
    for last in reversed(range(parts[-1])):
        # Later stages hold fewer micro-batches, and take the layers that are left over.
        yield [*reversed(even_parts(sum(parts) - last, len(parts) - 1)), last]


def _with_method(config: Config, method: str, chunks: int) -> Config:
    changes: dict[str, Any] = dict.fromkeys(_STAGES) | {
        "pp_partition_method": method,
        "num_virtual_stages_per_pipeline_rank": chunks,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
    }
    return replace(config, parallel=replace(config.parallel, **changes))


def _uneven_reason(
    layout: Layout, batch: int | None, gpus_per_node: int
) -> tuple[Axis, str] | None:
    """Return why `layout` is not even planned, and by which axis; None when it is."""
    if layout.tensor > gpus_per_node:
        return "tp", f"more than the {gpus_per_node} GPUs of a node"
    if batch and batch % (layout.data * layout.micro_batch_size):
        return "dp", f"global batch size {batch} is not a multiple of micro-batch * replicas"
    return None


def obstacle(plan: Plan, device: Device) -> str | None:
    """Return why `plan` does not run on GPUs of this kind; None when it does."""
    return _hardware_obstacle(plan, device) or _excess(_peak_bytes(plan), device)


def _hardware_obstacle(plan: Plan, device: Device) -> str | None:
    """Return why `plan` does not run on GPUs of this kind, apart from memory; None when it does."""
    if plan.precision.dtype == "bf16" and not device.has_bf16:
        return _no_bf16(device)
    for stage in stages_of(plan):
        if not stage.entries:
            return f"stage {stage.index} would have no layer"
    return None


def _excess(peak_bytes: int, device: Device) -> str | None:
    usable = device.usable_bytes
    if peak_bytes > usable:
        return f"needs more than the {usable / GIB:.1f} GiB of a {device.name} that a run can use"
    return None


def _no_bf16(device: Device) -> str:
    return f"{device.name} has no bf16; write --fp16"


def _config_of(config: Config, layout: Layout) -> Config:
    full = layout.recompute == "full"
    stages: dict[str, Any] = dict.fromkeys(_STAGES)
    if layout.chunks > 1:
        stages["num_virtual_stages_per_pipeline_rank"] = layout.chunks
    return replace(
        config,
        parallel=replace(
            config.parallel,
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            ds_sequence_parallel_size=1,
            context_parallel_size=1,
            enable_zbh1_pipeline=config.parallel.enable_zbh1_pipeline and layout.pipeline > 1,
            sequence_parallel=layout.tensor > 1,
            **stages,
        ),
        experts=replace(
            config.experts,
            moe_expert_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor or None,
        ),
        training=replace(config.training, micro_batch_size=layout.micro_batch_size),
        deepspeed=replace(config.deepspeed, zero_stage=layout.zero_stage),
        recompute=replace(
            config.recompute,
            recompute_granularity=None,
            recompute_activations=layout.recompute == "selective",
            checkpoint_activations=full,
            recompute_method="uniform" if full else None,
            recompute_num_layers=1 if full else None,
            distribute_saved_activations=False,
            contiguous_checkpointing=False,
            checkpoint_in_cpu=False,
        ),
    )
