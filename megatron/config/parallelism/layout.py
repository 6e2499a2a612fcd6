"""Parallel layout (tensor, pipeline, sequence, data, experts): flags, resolution and checks."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.optimization.batch_size import BatchPlan
from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallel layout: tensor, pipeline, sequence and data parallelism."""

    world_size: Annotated[int | None, Spelling("--world-size", ("--num-gpus",))] = None
    """Number of processes, which must be that of the launcher (default: as many as it starts). Tools
    that start none plan for so many (default: the fewest that the layout allows)."""

    elastic: bool = False
    """Train on the largest number of replicas that divides --global-batch-size, if the launcher has
    started more processes; those beyond wait for the end. A run then continues with fewer nodes, or
    with more, on the same samples (default: other numbers of processes are an error)."""

    tensor_model_parallel_size: Annotated[
        int, Spelling("--tensor-model-parallel-size", ("--model-parallel-size",))
    ] = 1
    """Number of processes that share each layer."""

    pipeline_model_parallel_size: int = 1
    """Number of stages that the layers are divided into."""

    sequence_parallel: bool = False
    """Let the tensor-parallel processes divide the sequence where they would all compute the same:
    norms, dropout and the residual stream."""

    ds_sequence_parallel_size: int = 1
    """Number of processes that divide every sample's sequence (Ulysses): in attention each takes
    a part of the heads, elsewhere a part of the tokens."""

    num_layers_per_virtual_pipeline_stage: int | None = None
    """Interleave the pipeline schedule: so many transformer layers in each model chunk, of which every
    stage gets num-layers / stages / this number (default: one chunk a stage, 1F1B)."""

    num_virtual_stages_per_pipeline_rank: int | None = None
    """Number of model chunks that every pipeline stage has: above 1 their schedule is interleaved. The
    same as --num-layers-per-virtual-pipeline-stage, counted the other way."""

    enable_zbh1_pipeline: bool = False
    """Use the zero-bubble pipeline schedule (ZB-H1): stages compute weight gradients of linear layers when
    they would wait for others, which makes the bubble a third as long."""

    pp_partition_method: str = "type:transformer"
    """How DeepSpeed cuts the layers into stages: type:REGEX balances the layers whose class name
    matches, uniform balances their number, parameters their weights."""

    pipeline_model_parallel_split_rank: int | None = None
    """First stage of the decoder (pretrain_t5.py): the stages before it divide the encoder's layers
    evenly, it and those behind it the decoder's (default: --pp-partition-method decides)."""

    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication backend (default: nccl on GPUs and gloo on CPUs)."""

    distributed_timeout_minutes: int | None = None
    """Timeout of one collective of a process group, in minutes (default: the library's own: 30 on gloo,
    10 on nccl in most groups)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto takes the GPUs when there are any, and refuses those that PyTorch cannot
    use."""

    local_rank: Annotated[int | None, Spelling("--local_rank", ("--local-rank",))] = None
    """Number of this process on its node; launchers set it."""


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Sizes of the four axes; their product is the number of processes."""

    tensor: int
    pipeline: int
    sequence: int  # ranks that divide a sample between them (Ulysses)
    data: int
    sequence_parallel: bool  # whether tensor-parallel ranks divide the sequence between regions
    partition_method: str
    zero_stage: int
    expert: int = 1  # neighbouring replicas that share the experts of a layer
    split_rank: int = 0  # first stage of a decoder behind an encoder; 0: as the method cuts
    chunks: int = 1  # of the model on each pipeline rank; above 1 the schedule is interleaved
    splits_backward: bool = False  # into gradients of activations, and of weights (zero bubble)

    @property
    def has_own_schedule(self) -> bool:
        """Whether the pipeline schedule is another than DeepSpeed's 1F1B."""
        return self.chunks > 1 or self.splits_backward

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tensor * self.pipeline * self.sequence * self.data


def replica_size(parallel: ParallelConfig) -> int:
    """Return the number of processes that work on the same samples, at least 1."""
    return (
        max(1, parallel.tensor_model_parallel_size)
        * max(1, parallel.pipeline_model_parallel_size)
        * max(1, parallel.ds_sequence_parallel_size)
    )


def sequence_parts(parallel: ParallelConfig) -> int:
    """Return the number that the tokens of a sample must be a multiple of."""
    tensor = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return max(1, tensor) * max(1, parallel.ds_sequence_parallel_size)


def chunks_of(parallel: ParallelConfig, num_layers: int) -> int:
    """Return the number of model chunks of each pipeline stage; 1 where the flags make no sense."""
    size = parallel.num_layers_per_virtual_pipeline_stage
    if size is None:
        return max(1, parallel.num_virtual_stages_per_pipeline_rank or 1)
    return max(1, num_layers // max(1, size * parallel.pipeline_model_parallel_size))


def plan_parallel(
    parallel: ParallelConfig,
    *,
    world_size: int,
    zero_stage: int,
    num_layers: int,
    expert: int = 1,
) -> ParallelPlan:
    """Return the decided layout of `world_size` processes."""
    return ParallelPlan(
        tensor=max(1, parallel.tensor_model_parallel_size),
        pipeline=max(1, parallel.pipeline_model_parallel_size),
        sequence=max(1, parallel.ds_sequence_parallel_size),
        data=max(1, world_size // replica_size(parallel)),
        sequence_parallel=(parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1),
        partition_method=parallel.pp_partition_method,
        zero_stage=zero_stage,
        expert=expert,
        split_rank=parallel.pipeline_model_parallel_split_rank or 0,
        chunks=chunks_of(parallel, num_layers),
        splits_backward=parallel.enable_zbh1_pipeline,
    )


def parallel_notices(parallel: ParallelConfig) -> Iterator[str]:
    """Yield a notice for every flag that has no effect in this layout."""
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        yield (
            "--sequence-parallel has no effect with one tensor-parallel rank: it divides the "
            "sequence over several"
        )


def parallel_problems(
    parallel: ParallelConfig, *, world_size: int, num_layers: int, zero_stage: int
) -> Iterator[str]:
    """Yield every reason why `world_size` processes cannot take this layout."""
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    sequence = parallel.ds_sequence_parallel_size
    sizes = {
        "--tensor-model-parallel-size": tensor,
        "--pipeline-model-parallel-size": pipeline,
        **({"--ds-sequence-parallel-size": sequence} if sequence != 1 else {}),
    }
    replica = math.prod(sizes.values())
    if not parallel.elastic and (wrong := [*world_size_problems(parallel, world_size)]):
        yield from wrong
    elif min(sizes.values()) < 1:
        yield f"{' and '.join(f'{k} {v}' for k, v in sizes.items())} must be at least 1"
    elif world_size % replica:
        yield (
            f"{_processes(world_size)} cannot hold full replicas of {replica} "
            f"({' * '.join(f'{k} {v}' for k, v in sizes.items())}); "
            f"start a multiple of {replica}, as `deepspeed --num_gpus {replica} …` does, or lower "
            "one of them"
        )
    if pipeline > num_layers:
        yield (
            f"--pipeline-model-parallel-size {pipeline} is more than --num-layers {num_layers}: "
            "a stage would have no layer"
        )
    if zero_stage not in range(4):
        yield f"--zero-stage {zero_stage} is none of 0, 1, 2, 3"
    if pipeline > 1 and zero_stage >= 2:
        yield (
            f"--zero-stage {zero_stage} does not work with --pipeline-model-parallel-size "
            f"{pipeline}: a pipeline accumulates gradients over its micro-batches, so they cannot "
            "be divided over ranks; write --zero-stage 1, or one pipeline stage"
        )
    yield from _chunk_problems(parallel, num_layers)
    yield from _partition_problems(parallel.pp_partition_method)


def _chunk_problems(parallel: ParallelConfig, num_layers: int) -> Iterator[str]:
    """Yield why the layers cannot be divided into model chunks."""
    flags = {
        "--num-layers-per-virtual-pipeline-stage": parallel.num_layers_per_virtual_pipeline_stage,
        "--num-virtual-stages-per-pipeline-rank": parallel.num_virtual_stages_per_pipeline_rank,
    }
    given = {flag: value for flag, value in flags.items() if value is not None}
    words = " and ".join(f"{flag} {value}" for flag, value in given.items())
    pipeline = max(1, parallel.pipeline_model_parallel_size)
    if not given:
        return
    if len(given) == 2:
        yield f"{words} set the same number in two ways: take one of them out"
    elif min(given.values()) < 1:
        yield f"{words} must be at least 1"
    elif pipeline == 1:
        yield (
            f"{words} divides the stages of a pipeline, and there is one stage: add "
            "--pipeline-model-parallel-size 2 or more, or leave it out"
        )
    elif (size := parallel.num_layers_per_virtual_pipeline_stage) and num_layers % (
        pipeline * size
    ):
        yield (
            f"{words}: --num-layers {num_layers} is not a multiple of it times "
            f"--pipeline-model-parallel-size {pipeline} = {pipeline * size}"
        )
    elif (chunks := chunks_of(parallel, num_layers)) * pipeline > num_layers:
        yield (
            f"{words}: {chunks} chunks of {pipeline} stages are more than --num-layers {num_layers}: "
            "a chunk would have no layer"
        )


def split_backward_problems(parallel: ParallelConfig, others: Mapping[str, bool]) -> Iterator[str]:
    """Yield why weight gradients cannot be computed in passes of their own (zero bubble).

    Args:
        others: whether each flag is given whose products or gradients are not split.
    """
    if not parallel.enable_zbh1_pipeline:
        return
    if parallel.pipeline_model_parallel_size < 2:
        yield (
            "--enable-zbh1-pipeline is a schedule of pipeline stages, and there is one: add "
            "--pipeline-model-parallel-size 2 or more, or leave it out"
        )
    for flag, is_given in others.items():
        if is_given:
            yield (
                f"--enable-zbh1-pipeline does not go with {flag}: weight gradients cannot be put off "
                "there; leave one of the two out"
            )


def interleaving_problems(
    parallel: ParallelConfig, batch: BatchPlan, *, num_layers: int
) -> Iterator[str]:
    """Yield the batch sizes of a run that the interleaved schedule cannot take.

    With other numbers of micro-batches it would deadlock.
    """
    pipeline, chunks = parallel.pipeline_model_parallel_size, chunks_of(parallel, num_layers)
    if chunks == 1 or pipeline < 2:
        return
    sizes = [batch.global_batch_size]
    if batch.ramp_samples:
        sizes = [*range(batch.ramp_start, batch.global_batch_size + 1, batch.ramp_increment)]
    uneven = [size for size in sizes if batch.num_micro_batches(size) % pipeline]
    if uneven:
        unit = batch.micro_batch_size * batch.data_parallel_size * pipeline
        yield (
            f"the interleaved pipeline schedule ({chunks} chunks a stage) needs a number of "
            f"micro-batches that is a multiple of --pipeline-model-parallel-size {pipeline}, and a "
            f"global batch of {uneven[0]} samples has {batch.num_micro_batches(uneven[0])}: write "
            f"multiples of {unit} in --global-batch-size and --rampup-batch-size"
        )


def world_size_problems(parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    """Yield why --world-size is not the number of processes that the launcher has started."""
    wanted = parallel.world_size
    if wanted is not None and wanted < 1:
        yield f"--world-size {wanted} must be at least 1"
    elif wanted not in (None, world_size):
        yield (
            f"--world-size {wanted}, but the launcher has started {_processes(world_size)}: start "
            f"{wanted}, as `deepspeed --num_gpus {wanted} …` does, or leave the flag out"
        )


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def sequence_problems(
    parallel: ParallelConfig, *, seq_length: int, num_attention_heads: int, num_groups: int
) -> Iterator[str]:
    """Yield every reason why the sequence cannot be divided.

    Args:
        num_groups: keys and values per token.
    """
    tensor, sequence = parallel.tensor_model_parallel_size, parallel.ds_sequence_parallel_size
    if parallel.sequence_parallel and tensor > 1 and seq_length % tensor:
        yield (
            f"--sequence-parallel: --seq-length {seq_length} is not a multiple of "
            f"--tensor-model-parallel-size {tensor}"
        )
    if sequence <= 1:
        return
    flag = f"--ds-sequence-parallel-size {sequence}"
    if seq_length % sequence:
        yield f"{flag}: --seq-length {seq_length} is not a multiple of it"
    for name, heads in (
        ("--num-attention-heads", num_attention_heads),
        ("--num-query-groups", num_groups),
    ):
        if heads % (tensor * sequence):
            yield (
                f"{flag}: {name} {heads} is not a multiple of {tensor * sequence} "
                f"(--tensor-model-parallel-size {tensor} * {sequence}); in attention every rank "
                "takes full heads"
            )
            break
    if parallel.sequence_parallel:
        yield f"{flag} and --sequence-parallel both divide the sequence: take one of them out"
    if parallel.pipeline_model_parallel_size > 1:
        yield (
            f"{flag} does not work with --pipeline-model-parallel-size "
            f"{parallel.pipeline_model_parallel_size}: DeepSpeed's pipeline reduces gradients over "
            "replicas only, not over the ranks that share a sample; write one pipeline stage"
        )


def _partition_problems(method: str) -> Iterator[str]:
    if method.startswith("type:"):
        if ":" in method.removeprefix("type:"):
            yield f"--pp-partition-method {method}: DeepSpeed takes no second colon"
        try:
            re.compile(method.removeprefix("type:"))
        except re.error as error:
            yield f"--pp-partition-method {method}: not a regular expression ({error})"
    elif method not in ("uniform", "parameters"):
        yield f"--pp-partition-method {method} is none of type:REGEX, uniform, parameters"
