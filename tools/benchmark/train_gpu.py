#!/usr/bin/env python
"""Training speed of one GPU in bf16, beside a plain PyTorch loop of the same model.

The loop is compiled, with PyTorch's own attention and fused AdamW. Both take turns in one process.
The rate of the card is that of large bf16 matrix products in the same run; utilisation is the
model's floating-point operations, nothing counted twice, over that.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

import torch
from plain_gpt import PlainLoop

from megatron.common import logging as log
from megatron.common.cli import ToolParser, run_tool
from megatron.config.config import parse_config
from megatron.config.plan import Plan, plan
from megatron.engine.deepspeed import distributed
from megatron.objectives.gpt import GPT, gpt_batch
from megatron.training.process.device import prepare_process
from megatron.training.setup import build_engine, build_process_groups, choose

VOCAB_SIZE = 50257
SIZES = {
    "tiny": "--num-layers 2 --hidden-size 64 --num-attention-heads 2",
    "345m": "--num-layers 24 --hidden-size 1024 --num-attention-heads 16",
    "1.3b": "--num-layers 24 --hidden-size 2048 --num-attention-heads 16",
    "2.7b": "--num-layers 32 --hidden-size 2560 --num-attention-heads 32",
}


def main(argv: Sequence[str]) -> None:
    """Measure every given size and print one line each."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["345m", "1.3b", "2.7b"])
    parser.add_argument("--seq-length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--batch", type=int, default=8, help="samples per step")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--steps", type=int, default=5, help="steps per turn")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it")
    parser.add_argument("--no-compile", action="store_true", help="leave the plain loop as it is")
    parser.add_argument("--flags", default="", help="more flags of training, in one word")
    args = parser.parse_args(argv)
    log.configure(rank=0)
    product = 8192 if args.device == "cuda" else 512
    for size in args.sizes:
        flags = [*SIZES[size].split(), "--seq-length", str(args.seq_length), *args.flags.split()]
        decided, sides = build_sides(flags, args.batch, args.device, compiles=not args.no_compile)
        rate = matrix_rate(torch.device(args.device), product)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(args.rounds + 1):
            for name, step in sides.items():
                taken = timed(step, args.steps, args.device)
                if turn:  # the first turn warms up and compiles
                    seconds[name].append(taken / args.steps)
        print(line(size, decided, args.batch, seconds, rate), flush=True)
        del sides
        gc.collect()


def build_sides(
    model_flags: Sequence[str], batch: int, device_name: str, *, compiles: bool
) -> tuple[Plan, dict[str, Callable[[], object]]]:
    """Return the plan of our side and, by name, what takes one step."""
    flags = (
        f"--micro-batch-size {batch} --lr 1e-4 --train-iters 1000 --clip-grad 1.0 --bf16 "
        f"--attention-dropout 0 --hidden-dropout 0 --data-path none --device {device_name}"
    ).split()
    config, _ = parse_config([*flags, *model_flags])
    launch, device = prepare_process(config.parallel)
    decided = plan(config, world_size=1, vocab_size=VOCAB_SIZE, device=device.type)
    if not torch.distributed.is_initialized():
        distributed.start("nccl" if device.type == "cuda" else "gloo")
    kernels, _ = choose(decided, device)
    engine = build_engine(decided, build_process_groups(decided), GPT(), kernels)
    engine.set_lr(1e-4)
    shape = (batch, decided.model.seq_length + 1)
    tokens = torch.randint(VOCAB_SIZE, shape, device=device)
    micro_batch = gpt_batch(tokens)
    loop = PlainLoop(decided.model, "bf16", lr=1e-4, device=device, compiles=compiles)
    (inputs, _), (labels, _) = micro_batch
    return decided, {
        "megatron": lambda: engine.train_batch(iter([micro_batch])),
        "plain": lambda: loop.step(inputs, labels),
    }


def matrix_rate(device: torch.device, size: int) -> float:
    """Return the floating-point operations a second of bf16 matrix products."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    timed(lambda: a @ b, 5, device.type)
    return 20 * 2 * size**3 / timed(lambda: a @ b, 20, device.type)


def timed(step: Callable[[], object], times: int, device: str) -> float:
    """Return the seconds of so many steps."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    started_at = time.perf_counter()
    for _ in range(times):
        step()
    wait()
    return time.perf_counter() - started_at


def line(size: str, decided: Plan, batch: int, seconds: dict[str, list[float]], rate: float) -> str:
    """Return tokens a second, their ratio, and utilisation of the card's matrix rate."""
    flops = batch * decided.model.flops_per_sample(recompute=decided.recompute)
    ours, plain = (statistics.median(seconds[name]) for name in ("megatron", "plain"))
    tokens = batch * decided.model.seq_length
    return (
        f"{size} | tokens per second: megatron {tokens / ours:.0f}, plain PyTorch "
        f"{tokens / plain:.0f} | ratio {plain / ours:.3f} | model FLOPs utilisation: megatron "
        f"{flops / ours / rate:.1%}, plain {flops / plain / rate:.1%} of {rate / 1e12:.1f} TFLOP/s"
    )


if __name__ == "__main__":
    run_tool(main)
