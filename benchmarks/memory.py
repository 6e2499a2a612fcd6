#!/usr/bin/env python
"""Memory of a training run on one process, per way of recomputing: counted, not estimated.

Takes the flags of pretrain_gpt.py. Builds the run on the CPU, takes steps on random tokens, and
counts the tensors that are alive; what a GPU would hold is the same but for its kernels' own
workspace and for attention kernels that keep no scores.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import torch
from live_tensors import LiveTensors

from megatron.common import logging as log
from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError
from megatron.config.config import parse_config
from megatron.config.plan.plan import plan
from megatron.engine.deepspeed import distributed
from megatron.objectives.gpt import GPT, gpt_batch
from megatron.training.process.device import prepare_process
from megatron.training.setup import build_engine, build_process_groups, choose

VOCAB_SIZE = 50257
FULL = ("--recompute-granularity", "full", "--recompute-method")


@dataclass(frozen=True)
class Memory:
    """Bytes of one run."""

    weights: int
    state: int  # what the optimizer and DeepSpeed keep between steps
    kept: int  # what the forward pass of a micro-batch keeps for backward
    peak: int  # most at any time inside a step, beyond weights and state


def main(argv: Sequence[str]) -> None:
    """Print a line for each way of recomputing.

    Raises:
        ConfigError: the flags need more than one process, or contradict each other.
    """
    log.configure(rank=0)
    layers = parse_config([*argv, "--data-path", "none"])[0].model.num_layers
    ways = {
        "nothing": (),
        "selective": ("--recompute-granularity", "selective"),
        f"block, {-(-layers // 2)} of {layers}": (
            *FULL,
            "block",
            "--recompute-num-layers",
            str(-(-layers // 2)),
        ),
        "uniform, one by one": (*FULL, "uniform", "--recompute-num-layers", "1"),
        "uniform, in pairs": (*FULL, "uniform", "--recompute-num-layers", "2"),
    }
    for name, flags in ways.items():
        memory = measure([*argv, *flags])
        if name == "nothing":
            print(f"weights: {memory.weights} bytes | state between steps: {memory.state} bytes")
        print(f"{name}: kept {memory.kept} bytes | peak of a step {memory.peak} bytes", flush=True)


def measure(argv: Sequence[str]) -> Memory:
    """Return the memory of a run with these flags."""
    config, _ = parse_config([*argv, "--data-path", "none", "--device", "cpu"])
    launch, device = prepare_process(config.parallel)
    if launch.world_size > 1:
        raise ConfigError("memory is measured in one process: start this tool without a launcher")
    decided = plan(config, world_size=1, vocab_size=VOCAB_SIZE, device=device.type)
    if not torch.distributed.is_initialized():
        distributed.start("gloo")
    kernels, _ = choose(decided, device)
    engine = build_engine(decided, build_process_groups(decided), GPT(), kernels)
    shape = (decided.batch.micro_batch_size, decided.model.seq_length + 1)
    tokens = torch.randint(VOCAB_SIZE, shape)
    batches = iter(lambda: gpt_batch(tokens), None)

    with LiveTensors() as made:
        engine.train_batch(batches)
    state = made.alive_bytes()
    kept: list[int] = []
    with LiveTensors(peak=True) as made:
        hook = engine.module.register_forward_hook(lambda *_: kept.append(made.alive_bytes()))
        engine.train_batch(batches)
    hook.remove()
    return Memory(
        weights=sum(p.numel() * p.element_size() for p in engine.module.parameters()),
        state=state,
        kept=kept[0],
        peak=made.peak_bytes,
    )


if __name__ == "__main__":
    run_tool(main)
