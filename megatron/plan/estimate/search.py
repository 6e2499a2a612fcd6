"""Which layouts fit a number of GPUs, the fastest first, and why the others do not."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.config.config import Config
from megatron.errors import ConfigError
from megatron.plan.estimate.devices import GIB, RESERVED_BYTES, Device
from megatron.plan.estimate.memory import memory_of_stages
from megatron.plan.estimate.speed import speed_of
from megatron.plan.estimate.stages import stages_of
from megatron.plan.objective_plan import ObjectiveName
from megatron.plan.plan import Plan, plan

_RECOMPUTED = ("none", "selective", "full")


@dataclass(frozen=True, order=True, kw_only=True)
class Layout:
    """One way to divide the work."""

    tensor: int
    pipeline: int
    data: int
    zero_stage: int
    micro_batch_size: int
    recompute: str  # none, selective or full

    def __str__(self) -> str:
        return (
            f"tp {self.tensor} pp {self.pipeline} dp {self.data} | ZeRO {self.zero_stage} | "
            f"micro-batch {self.micro_batch_size} | recompute {self.recompute}"
        )

    def flags(self) -> str:
        """Return the flags that ask for it."""
        words = (
            f"--tensor-model-parallel-size {self.tensor} "
            f"--pipeline-model-parallel-size {self.pipeline} --zero-stage {self.zero_stage} "
            f"--micro-batch-size {self.micro_batch_size}"
        )
        if self.tensor > 1:
            words += " --sequence-parallel"
        if self.recompute == "selective":
            words += " --recompute-activations"
        return words + (" --checkpoint-activations" if self.recompute == "full" else "")


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """A layout that can be run."""

    layout: Layout
    step_s: float
    mfu: float
    peak_bytes: int  # of the fullest rank


@dataclass(frozen=True)
class Refusal:
    """Why some layouts cannot be run.

    Args:
        why: the reason that they share.
        where: what they have in common, such as "tp 16", in the order of the search.
        count: how many there are.
    """

    why: str
    where: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Found:
    """What a search has found: what can be run, the fastest first, and why the rest cannot."""

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
) -> Found:
    """Try every layout of `num_gpus` devices for what `config` trains.

    What `config` itself says of the layout is not looked at; tensor-parallel ranks divide the
    sequence as well.

    Args:
        gpus_per_node: tensor parallelism stays within a node.

    Raises:
        ConfigError: something is wrong that no layout mends.
    """
    fitting, refused = [], defaultdict[str, Counter[str]](Counter)
    batch = config.training.global_batch_size
    for layout in _layouts(num_gpus, config.model.num_layers):
        if layout.tensor > gpus_per_node:
            refused[f"more than the {gpus_per_node} GPUs of a node"][f"tp {layout.tensor}"] += 1
            continue
        if batch and batch % (layout.data * layout.micro_batch_size):
            uneven = f"--global-batch-size {batch} is not a multiple of micro-batch * replicas"
            refused[uneven][f"dp {layout.data}"] += 1
            continue
        try:
            decided = plan(
                _asked(config, layout),
                world_size=num_gpus,
                vocab_size=vocab_size,
                device="cuda",
                objective=objective,
            )
        except ConfigError as error:
            refused[error.problems[0]][f"tp {layout.tensor} pp {layout.pipeline}"] += 1
            continue
        if why := obstacle(decided, device):
            refused[why][f"tp {layout.tensor} pp {layout.pipeline}"] += 1
            continue
        speed = speed_of(decided, device, gpus_per_node=gpus_per_node)
        peak = max(memory.total for memory in memory_of_stages(decided))
        fitting.append(Fitting(layout=layout, step_s=speed.step_s, mfu=speed.mfu, peak_bytes=peak))
    fitting.sort(key=lambda found: (found.step_s, found.peak_bytes, found.layout))
    return Found(
        tuple(fitting),
        tuple(Refusal(why, tuple(where), where.total()) for why, where in refused.items()),
    )


def obstacle(plan: Plan, device: Device) -> str | None:
    """Return why `plan` does not run on GPUs of this kind; None when it does."""
    if plan.precision.dtype == "bf16" and not device.has_bf16:
        return f"{device.name} has no bf16; write --fp16"
    for stage in stages_of(plan):
        if not stage.layers:
            return f"stage {stage.index} would have no transformer layer"
    usable = device.memory_gib - RESERVED_BYTES / GIB
    if max(memory.total for memory in memory_of_stages(plan)) > usable * GIB:
        return f"needs more than the {usable:.1f} GiB of a {device.name} that a run can use"
    return None


def _layouts(num_gpus: int, num_layers: int) -> Iterator[Layout]:
    for tensor in _powers_of_two(16):
        if num_gpus % tensor:
            continue
        for pipeline in range(1, min(num_layers, num_gpus // tensor) + 1):
            if num_gpus // tensor % pipeline:
                continue
            for zero_stage in (1,) if pipeline > 1 else (1, 2, 3):
                for micro in _powers_of_two(8):
                    for recompute in _RECOMPUTED:
                        yield Layout(
                            tensor=tensor,
                            pipeline=pipeline,
                            data=num_gpus // tensor // pipeline,
                            zero_stage=zero_stage,
                            micro_batch_size=micro,
                            recompute=recompute,
                        )


def _powers_of_two(most: int) -> Iterator[int]:
    number = 1
    while number <= most:
        yield number
        number *= 2


def _asked(config: Config, layout: Layout) -> Config:
    full = layout.recompute == "full"
    return replace(
        config,
        parallel=replace(
            config.parallel,
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            ds_sequence_parallel_size=1,
            sequence_parallel=layout.tensor > 1,
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
