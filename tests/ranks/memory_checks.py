"""What the planner expects in memory, against the tensors that a step has."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from engines import batches_of
from live_tensors import LiveTensors
from tiny import tiny_plan

from megatron.common.registry import OBJECTIVES
from megatron.config.plan.plan import Plan
from megatron.engine.deepspeed import distributed
from megatron.planner.memory import memory_of_stages
from megatron.tensor_parallel.broadcast import Batch
from megatron.tensor_parallel.process_groups import Groups
from megatron.training.setup import build_engine, build_process_groups, choose

SIZES = [
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--make-vocab-size-divisible-by", "256"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--zero-reduce-bucket-size", "1000"),
]
BOTH = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")


def agrees(
    *flags: str,
    objective: str = "gpt",
    batches_for: Callable[[Plan, Groups], Iterator[Batch]] = batches_of,
) -> None:
    """Compare at the end of the last forward pass of the second step."""
    distributed.start("gloo")
    ranks = dist.get_world_size()
    sizes = (*SIZES, "--global-batch-size", str(4 * ranks))
    plan = tiny_plan(*sizes, *flags, world_size=ranks, objective=objective)
    groups = build_process_groups(plan)
    kernels, _ = choose(plan, torch.device("cpu"))
    fullest = 0
    with LiveTensors() as made:
        engine = build_engine(plan, groups, OBJECTIVES.get(objective)(), kernels)
        batches = batches_for(plan, groups)
        engine.train_batch(batches)
        gc.collect()

        def look(*_: object) -> None:
            nonlocal fullest
            fullest = max(fullest, made.alive_bytes())

        engine.module.register_forward_hook(look)
        engine.train_batch(batches)
    expected = memory_of_stages(plan, device="cpu")[groups.stage]
    assert expected.kept == pytest.approx(fullest, rel=0.05), (expected, fullest)
