#!/usr/bin/env python
"""Training speed of one process on CPUs, beside a plain PyTorch loop of the same model.

All sides take turns in one process, so that whatever else the machine does falls on all. Compare
the ratios by CPU time: wall time depends on the neighbours.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import torch
from plain_loop import PlainLoop
from timed_steps import random_batches, timed

from megatron.common import logging as log
from megatron.common.cli import ToolParser, run_tool
from megatron.config.config import parse_config
from megatron.config.plan.plan import plan
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
    parser.add_argument(
        "--compile",
        action="store_true",
        help="add compiled sides: ours, and the plain loop by blocks and as a whole",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of both sides")
    args = parser.parse_args(argv)
    log.configure(rank=0)
    for dtype in args.dtypes:
        sides = build_sides(dtype, args.batch, args.attention_impl, compiles=args.compile)
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


def build_sides(
    dtype: str, batch: int, attention: str, *, compiles: bool
) -> dict[str, Callable[[], object]]:
    """Return, by name, what takes one step."""
    flags = (
        "--num-layers 6 --hidden-size 384 --num-attention-heads 6 --seq-length 256 "
        f"--micro-batch-size {batch} --lr 1e-4 --train-iters 1000 --clip-grad 1.0 --device cpu "
        f"--attention-dropout 0 --hidden-dropout 0 --data-path none --attention-impl {attention}"
    ).split()
    flags += ["--bf16"] if dtype == "bf16" else []
    sides = {
        "megatron": our_side(flags, batch),
        "plain PyTorch": plain_side(flags, dtype, batch),
    }
    if compiles:
        sides |= {
            "megatron --compile": our_side([*flags, "--compile"], batch),
            "plain, compiled blocks": plain_side(
                flags, dtype, batch, compiles=True, by_blocks=True
            ),
            "plain, compiled": plain_side(flags, dtype, batch, compiles=True),
        }
    return sides


def our_side(flags: Sequence[str], batch: int) -> Callable[[], object]:
    """Return what takes one step of the engine of pretrain_gpt.py."""
    config, _ = parse_config(flags)
    _, device = prepare_process(config.parallel)
    decided = plan(config, world_size=1, vocab_size=VOCAB_SIZE, device=device.type)
    if not torch.distributed.is_initialized():
        distributed.start("gloo")
    kernels, _ = choose(decided, device)
    engine = build_engine(decided, build_process_groups(decided), GPT(), kernels)
    engine.set_lr(1e-4)
    batches = random_batches(decided, batch)
    return lambda: float(engine.train_batch(batches))


def plain_side(
    flags: Sequence[str], dtype: str, batch: int, **compiled: bool
) -> Callable[[], object]:
    """Return what takes one step of the plain loop."""
    config, _ = parse_config(flags)
    decided = plan(config, world_size=1, vocab_size=VOCAB_SIZE, device="cpu")
    batches = random_batches(decided, batch)
    loop = PlainLoop(decided.model, dtype, lr=1e-4, device=torch.device("cpu"), **compiled)

    def step() -> float:
        given = next(batches)
        return loop.step(given["tokens"], given["labels"])

    return step


def line(dtype: str, clock: str, tokens_per_s: dict[str, list[float]]) -> str:
    """Return the median of each side, and its ratio to that of the plain loop."""
    medians = {name: statistics.median(speeds) for name, speeds in tokens_per_s.items()}
    plain = medians["plain PyTorch"]
    sides = ", ".join(
        f"{name} {speed:.0f} ({speed / plain:.3f})" for name, speed in medians.items()
    )
    return f"{dtype} | tokens per {clock} second: {sides}"


if __name__ == "__main__":
    run_tool(main)
