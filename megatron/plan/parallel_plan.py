"""How many processes share what."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Sizes of the three axes; their product is the number of processes."""

    tensor: int
    pipeline: int
    data: int
    partition_method: str
    zero_stage: int

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tensor * self.pipeline * self.data


def plan_parallel(parallel: ParallelConfig, *, world_size: int, zero_stage: int) -> ParallelPlan:
    """Return the decided layout of `world_size` processes."""
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    return ParallelPlan(
        tensor=tensor,
        pipeline=pipeline,
        data=max(1, world_size // (tensor * pipeline)),
        partition_method=parallel.pp_partition_method,
        zero_stage=zero_stage,
    )


def parallel_problems(
    parallel: ParallelConfig, *, world_size: int, num_layers: int, zero_stage: int
) -> Iterator[str]:
    """Yield every reason why `world_size` processes cannot take this layout."""
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if tensor < 1 or pipeline < 1:
        yield (
            f"--tensor-model-parallel-size {tensor} and --pipeline-model-parallel-size {pipeline} "
            "must be at least 1"
        )
    elif world_size % (tensor * pipeline):
        yield (
            f"{world_size} processes cannot hold whole replicas of {tensor * pipeline} "
            f"(--tensor-model-parallel-size {tensor} * --pipeline-model-parallel-size {pipeline}); "
            "start a multiple of that, or lower one of the two"
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
    yield from _partition_problems(parallel.pp_partition_method)


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
