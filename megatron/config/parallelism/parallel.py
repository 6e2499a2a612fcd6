"""How the work is divided over processes, and on which devices."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The layout, as the user asked for it."""

    world_size: Annotated[int | None, Spelling("--world-size", ("--num-gpus",))] = None
    """Number of processes, which must be that of the launcher (default: as many as it starts). Tools
    that start none plan for so many (default: the fewest that the layout allows)."""

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

    pp_partition_method: str = "type:transformer"
    """How DeepSpeed cuts the layers into stages: type:REGEX balances the layers whose class name
    matches, uniform balances their number, parameters their weights."""

    distributed_backend: Literal["nccl", "gloo"] | None = None
    """How processes talk (default: nccl on GPUs and gloo on CPUs)."""

    distributed_timeout_minutes: int | None = None
    """Minutes that a process waits for the others in one operation of a group before it fails
    (default: the library's own: 30 on gloo, 10 on nccl in most groups)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto takes the GPUs when there are any."""

    local_rank: Annotated[int | None, Spelling("--local_rank", ("--local-rank",))] = None
    """Number of this process on its node; the launcher says it."""
