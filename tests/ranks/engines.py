"""Engines of the smallest network over several gloo ranks, built from flags as a run builds them."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from shared_groups import end_engines
from tiny import VOCAB_SIZE, tiny_plan

from megatron.config.plan.plan import Plan
from megatron.engine.deepspeed import distributed
from megatron.engine.engine import Engine
from megatron.objectives.gpt import GPT, SPAN_FIELDS, gpt_batch
from megatron.tensor_parallel.broadcast import Batch, sequence_shard
from megatron.tensor_parallel.process_groups import Groups
from megatron.training.setup import build_engine, build_process_groups, choose

DOCUMENTS = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
EOD = 3


def deepspeed_of(engine: Any) -> Any:
    """Return DeepSpeed's engine, whose state nothing else shows."""
    return engine._engine


def engine_of(
    *flags: str, compile_backend: str = "inductor", vocab_size: int = VOCAB_SIZE
) -> tuple[Engine, Plan, Groups]:
    """Return the engine that `flags` ask for, over all ranks; it ends the one before.

    Args:
        compile_backend: of torch.compile, if `flags` have it.
    """
    end_engines()
    distributed.start("gloo")
    flags = ("--init-method-std", "0.3", "--lr", "0.05", *flags)
    device = "cuda" if "--fp16" in flags else "cpu"  # a plan for CPUs refuses it
    ranks = dist.get_world_size()
    plan = tiny_plan(*flags, world_size=ranks, device=device, vocab_size=vocab_size)
    groups = build_process_groups(plan)
    kernels, _ = choose(plan, torch.device("cpu"))
    engine = build_engine(plan, groups, GPT(), kernels, compile_backend=compile_backend)
    return engine, plan, groups


def batches_of(plan: Plan, groups: Groups) -> Iterator[Batch]:
    """Yield this rank's micro-batches: the same samples whatever the layout."""
    generator = torch.Generator().manual_seed(0)
    length = plan.model.seq_length + 1
    while True:
        for data_rank in range(groups.topology.data):
            rows = torch.randint(11, (plan.batch.micro_batch_size, length), generator=generator)
            if data_rank == groups.data_rank:
                whole = gpt_batch(rows, plan.masks, EOD)
                yield sequence_shard(whole, SPAN_FIELDS, groups)


def trained(
    *flags: str, steps: int = 2, compile_backend: str = "inductor"
) -> dict[str, torch.Tensor]:
    """Return losses, gradient norms and this rank's weights after `steps` steps."""
    engine, plan, groups = engine_of(*flags, compile_backend=compile_backend)
    batches = batches_of(plan, groups)
    losses, norms = [], []
    for _ in range(steps):
        losses.append(engine.train_batch(batches).detach().reshape(()).clone())
        norms.append(torch.tensor(engine.grad_norm))
    named = dict(engine.module.named_parameters())
    # With ZeRO-3 a rank holds no whole weight between steps.
    divided = [p for p in named.values() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(divided):
        weights = {name: p.detach().clone() for name, p in named.items()}
    return {"losses": torch.stack(losses), "norms": torch.stack(norms)} | weights
