#!/usr/bin/env python
"""Training speed of one process on CPUs, beside a plain PyTorch loop of the same model.

Both take turns in one process, so that whatever else the machine does falls on both. Compare the
ratios by CPU time: wall time depends on the neighbours.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

import torch
from plain_gpt import PlainLoop
from timed_steps import random_batches, timed

from megatron.common import logging as log
from megatron.common.cli import ToolParser, run_tool
from megatron.config.config import parse_config
from megatron.config.plan import plan
from megatron.engine.deepspeed import distributed
from megatron.objectives.gpt import GPT
from megatron.training.process.device import prepare_process
from megatron.training.setup import build_engine, build_process_groups, choose

VOCAB_SIZE = 8192


def main(argv: Sequence[str]) -> None:
    """Measure every given precision and print one line each."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--steps", type=int, default=3, help="steps per turn")
    parser.add_argument("--batch", type=int, default=8, help="samples per step")
    parser.add_argument(
        "--attention-impl",
        choices=("sdpa", "fused-softmax", "reference"),
        default="sdpa",
        help="attention of our side; the plain loop has sdpa",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of both sides")
    args = parser.parse_args(argv)
    log.configure(rank=0)
    for dtype in args.dtypes:
        sides = build_sides(dtype, args.batch, args.attention_impl)
        torch.set_num_threads(args.threads)
        tokens_per_turn = args.steps * args.batch * 256
        cpu: dict[str, list[float]] = {name: [] for name in sides}
        wall: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(args.rounds + 1):
            for name, step in sides.items():
                cpu_s, wall_s = timed(step, args.steps)
                if turn:  # the first turn warms up
                    cpu[name].append(tokens_per_turn / cpu_s)
                    wall[name].append(tokens_per_turn / wall_s)
        print(line(dtype, "CPU", cpu), line(dtype, "wall", wall), sep="\n", flush=True)


def build_sides(dtype: str, batch: int, attention: str) -> dict[str, Callable[[], object]]:
    """Return, by name, what takes one step."""
    flags = (
        "--num-layers 6 --hidden-size 384 --num-attention-heads 6 --seq-length 256 "
        f"--micro-batch-size {batch} --lr 1e-4 --train-iters 1000 --clip-grad 1.0 --device cpu "
        f"--attention-dropout 0 --hidden-dropout 0 --data-path none --attention-impl {attention}"
    ).split()
    config, _ = parse_config([*flags, "--bf16"] if dtype == "bf16" else flags)
    launch, device = prepare_process(config.parallel)
    decided = plan(config, world_size=1, vocab_size=VOCAB_SIZE, device=device.type)
    if not torch.distributed.is_initialized():
        distributed.start("gloo")
    kernels, _ = choose(decided, device)
    engine = build_engine(decided, build_process_groups(decided), GPT(), kernels)
    engine.set_lr(1e-4)
    batches = random_batches(decided, batch)
    loop = PlainLoop(decided.model, dtype, lr=1e-4, device=device)

    def plain_step() -> float:
        batch = next(batches)
        tokens, labels = batch["tokens"], batch["labels"]
        return loop.step(tokens, labels)

    return {"megatron": lambda: float(engine.train_batch(batches)), "plain": plain_step}


def line(dtype: str, clock: str, tokens_per_s: dict[str, list[float]]) -> str:
    """Return medians and their ratio."""
    ours, plain = (statistics.median(tokens_per_s[name]) for name in ("megatron", "plain"))
    return (
        f"{dtype} | tokens per {clock} second: megatron {ours:.0f}, plain PyTorch {plain:.0f} | "
        f"ratio {ours / plain:.3f}"
    )


if __name__ == "__main__":
    run_tool(main)
