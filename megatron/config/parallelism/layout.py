"""Parallel layout (tensor, pipeline, sequence, data, experts): flags, resolution and checks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.config.parallelism.pipeline import (
    PipelineConfig,
    chunks_of,
    partition_method_of,
    pipeline_notices,
    pipeline_problems,
)
from megatron.config.parsing.declaration import setting


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(PipelineConfig):
    """Parallel layout: tensor, pipeline, sequence and data parallelism."""

    world_size: int | None = setting(None, older=("--num-gpus",))
    """World size, which must equal the launcher's (the default). Tools without a
    launcher plan for this many processes (default: the fewest that the layout allows)."""

    elastic: bool = False
    """Train on the largest number of replicas that divides --global-batch-size, if the launcher has
    started more processes; those beyond wait for the end. A run then continues with fewer nodes, or
    with more, on the same samples (default: other numbers of processes are an error)."""

    tensor_model_parallel_size: int = setting(
        1, older=("--model-parallel-size",), plan="parallel.tensor"
    )
    """Tensor-parallel size: number of processes that share each layer."""

    sequence_parallel: bool = False
    """Shard norms, dropout and the residual stream over the tensor-parallel ranks, along the
    sequence."""

    ds_sequence_parallel_size: int = setting(1, plan="parallel.sequence")
    """Sequence-parallel size (Ulysses): ranks that share each sequence; in attention each has some
    of the heads, elsewhere some of the tokens."""

    context_parallel_size: int = 1
    """Context-parallel size: ranks that share each sequence; in attention they pass keys and values
    around a ring (--cp-comm-type), so heads need not be divided."""

    cp_comm_type: list[str] | None = None
    """Communication of --context-parallel-size: p2p (ring attention) or a2a (Ulysses, as
    --ds-sequence-parallel-size); default: p2p."""

    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication backend (default: nccl on GPUs and gloo on CPUs)."""

    distributed_timeout_minutes: int | None = setting(None, at_least=1, matters=False)
    """Timeout of one collective of a process group, in minutes (default: the library's own: 30 on gloo,
    10 on nccl in most groups)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses GPUs if there are any, and is an error if PyTorch cannot use them."""

    local_rank: int | None = setting(None, flag="--local_rank", older=("--local-rank",))
    """Local rank of this process; launchers set it."""


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Sizes of the four axes; their product is the number of processes."""

    tensor: int
    pipeline: int
    sequence: int  # ranks that divide a sample between them
    data: int
    sequence_parallel: bool  # whether tensor-parallel ranks divide the sequence between regions
    partition_method: str
    zero_stage: int
    expert: int = 1  # sets of neighbouring ranks of a stage that share a layer's experts
    expert_tensor: int = 0  # neighbouring ranks that share each expert; 0: the tensor-parallel ones
    split_rank: int = 0  # first stage of the decoder after an encoder; 0: as the method cuts
    chunks: int = 1  # of the model on each pipeline rank; above 1 the schedule is interleaved
    splits_backward: bool = False  # into gradients of activations, and of weights (zero bubble)
    ring: bool = False  # whether ranks that divide a sample exchange keys, not heads (Ulysses)
    bucket_size: int = 0  # most elements of a parameter group in bf16; 0: of any size

    @property
    def has_own_schedule(self) -> bool:
        """Whether the pipeline schedule is another than DeepSpeed's 1F1B."""
        return self.chunks > 1 or self.splits_backward

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tensor * self.pipeline * self.sequence * self.data

    @property
    def ranks_per_expert(self) -> int:
        """Number of ranks that share each expert."""
        return self.expert_tensor or self.tensor

    @property
    def divides_experts(self) -> bool:
        """Whether experts are divided in another way than other layers."""
        return self.expert > 1 or self.ranks_per_expert != self.tensor

    @property
    def copies_of_experts(self) -> int:
        """Number of ranks with the same shard of the same experts."""
        ranks = self.data * self.sequence * self.tensor
        return max(1, ranks // (self.expert * self.ranks_per_expert))


def replica_size(parallel: ParallelConfig) -> int:
    """Return the number of processes that work on the same samples, at least 1."""
    return (
        max(1, parallel.tensor_model_parallel_size)
        * max(1, parallel.pipeline_model_parallel_size)
        * sequence_size(parallel)
    )


def sequence_flags(parallel: ParallelConfig) -> dict[str, int]:
    """Return the flags by which processes divide a sample between them."""
    return {
        "--ds-sequence-parallel-size": parallel.ds_sequence_parallel_size,
        "--context-parallel-size": parallel.context_parallel_size,
    }


def sequence_size(parallel: ParallelConfig) -> int:
    """Return the number of processes that divide a sample between them, at least 1."""
    return max(1, parallel.ds_sequence_parallel_size) * max(1, parallel.context_parallel_size)


def replicas_with_all_experts(parallel: ParallelConfig, ranks: int) -> int:
    """Return the fewest replicas that `ranks` of a stage, which hold all experts, are a part of."""
    in_replica = max(1, parallel.tensor_model_parallel_size) * sequence_size(parallel)
    return ranks // math.gcd(ranks, in_replica) if ranks > 0 else 1


def uses_ring(parallel: ParallelConfig) -> bool:
    """Whether these processes pass keys and values around (ring attention)."""
    return parallel.context_parallel_size > 1 and _communication(parallel) != ULYSSES


def sequence_parts(parallel: ParallelConfig) -> int:
    """Return the number that the tokens of a sample must be a multiple of, lest they are padded."""
    tensor = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    chunks = 2 if uses_ring(parallel) else 1
    return math.lcm(chunks * sequence_size(parallel), max(1, tensor) * sequence_size(parallel))


def padded_length(parallel: ParallelConfig, seq_length: int) -> int:
    """Return the positions of a sample, including ring attention's padding."""
    multiple = 2 * sequence_size(parallel) if uses_ring(parallel) else 1
    return -(-seq_length // multiple) * multiple


def plan_parallel(
    parallel: ParallelConfig,
    *,
    world_size: int,
    zero_stage: int,
    num_layers: int,
    expert: int = 1,
    ranks_per_expert: int = 0,
) -> ParallelPlan:
    """Return the decided layout of `world_size` processes."""
    tensor = max(1, parallel.tensor_model_parallel_size)
    return ParallelPlan(
        tensor=tensor,
        pipeline=max(1, parallel.pipeline_model_parallel_size),
        sequence=sequence_size(parallel),
        data=max(1, world_size // replica_size(parallel)),
        sequence_parallel=(parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1),
        partition_method=partition_method_of(parallel, num_layers),
        zero_stage=zero_stage,
        expert=expert,
        expert_tensor=0 if ranks_per_expert == tensor else ranks_per_expert,
        split_rank=parallel.pipeline_model_parallel_split_rank or 0,
        chunks=chunks_of(parallel, num_layers),
        splits_backward=parallel.enable_zbh1_pipeline,
        ring=uses_ring(parallel),
    )


def parallel_notices(parallel: ParallelConfig, *, seq_length: int) -> Iterator[str]:
    """Yield a notice for every flag that has no effect in this layout, and for padded samples."""
    if parallel.cp_comm_type and parallel.context_parallel_size == 1:
        yield "--cp-comm-type has no effect with --context-parallel-size 1"
    elif parallel.cp_comm_type and _BOTH in parallel.cp_comm_type:
        yield f"--cp-comm-type {_BOTH}: all ranks exchange keys, as with {RING}: results are the same"
    yield from pipeline_notices(parallel)
    padded = padded_length(parallel, seq_length)
    if padded > seq_length:
        size = parallel.context_parallel_size
        yield (
            f"samples of --seq-length {seq_length} are padded to {padded} positions, a multiple of 2 * "
            f"--context-parallel-size {size}: {padded - seq_length} of them compute nothing of use"
        )
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        yield (
            "--sequence-parallel has no effect with one tensor-parallel rank: it divides the "
            "sequence over several"
        )


def parallel_problems(
    parallel: ParallelConfig, *, world_size: int, num_layers: int, depths: int, zero_stage: int
) -> Iterator[str]:
    """Yield every reason why `world_size` processes cannot take this layout.

    Args:
        depths: of multi-token prediction.
    """
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    sizes = {
        "--tensor-model-parallel-size": tensor,
        "--pipeline-model-parallel-size": pipeline,
        **{flag: size for flag, size in sequence_flags(parallel).items() if size != 1},
    }
    replica = math.prod(sizes.values())
    if not parallel.elastic and (wrong := [*world_size_problems(parallel, world_size)]):
        yield from wrong
    elif min(sizes.values()) < 1:
        yield f"{' and '.join(f'{k} {v}' for k, v in sizes.items())} must be at least 1"
    elif world_size % replica:
        less = world_size - world_size % replica
        counts = " or ".join(str(count) for count in (less, less + replica) if count)
        starts = f"start them with `deepspeed --num_gpus {replica} …`"
        yield (
            f"{' * '.join(f'{k} {v}' for k, v in sizes.items())} = {replica} needs a multiple of "
            f"{replica} processes, got {world_size}; "
            f"{f'write --num-gpus {counts}' if parallel.world_size else starts}, or lower one of them"
        )
    if zero_stage not in range(4):
        yield f"--zero-stage {zero_stage} is not one of 0, 1, 2, 3"
    if pipeline > 1 and zero_stage >= 2:
        yield (
            f"--zero-stage {zero_stage} does not work with --pipeline-model-parallel-size "
            f"{pipeline}: a pipeline accumulates gradients over its micro-batches, so they cannot "
            "be divided over ranks; write --zero-stage 1, or one pipeline stage"
        )
    yield from pipeline_problems(parallel, num_layers, depths=depths)


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


RING, ULYSSES = "p2p", "a2a"
_BOTH = "a2a+p2p"
"""Megatron-LM's form in which some ranks exchange heads and others keys; the same attention."""


def _communication(parallel: ParallelConfig) -> str:
    """Return what all layers have of --cp-comm-type, which may name the type of each."""
    return _same_attention((parallel.cp_comm_type or [RING])[0])


def _same_attention(kind: str) -> str:
    """Return the type that is run for one of Megatron-LM's."""
    return RING if kind == _BOTH else kind


def context_problems(parallel: ParallelConfig) -> Iterator[str]:
    """Yield problems of the flags of context parallelism."""
    types = parallel.cp_comm_type or [RING]
    words = f"--cp-comm-type {' '.join(types)}"
    others = [each for each in types if each not in (RING, ULYSSES, _BOTH)]
    if others:
        reasons = {
            "all_gather": "it would keep the keys of all tokens on every rank",
            "allgather": "it would keep the keys of all tokens on every rank",
        }
        why = f" ({reasons[others[0]]})" if others[0] in reasons else ""
        yield f"{words}: {others[0]} is not supported{why}; write {RING} or {ULYSSES}"
    elif len({*map(_same_attention, types)}) > 1:
        yield f"{words}: all layers communicate alike; write {RING} or {ULYSSES}"
    if parallel.context_parallel_size > 1 and parallel.ds_sequence_parallel_size > 1:
        yield (
            f"--context-parallel-size {parallel.context_parallel_size} and "
            f"--ds-sequence-parallel-size {parallel.ds_sequence_parallel_size} both divide the "
            "sequence: take one of them out"
        )
