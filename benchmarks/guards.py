#!/usr/bin/env python
"""Cost of guards: their CPU and wall time beside that of the steps they look at, in one run.

Alone, or on several ranks: `python -m torch.distributed.run --nproc_per_node 2 guards.py`.
A guard that is off is no object of a run, and takes nothing.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from timed_steps import random_batches, timed

from megatron.checkpointing.train_state import TrainState
from megatron.common import logging as log
from megatron.common.cli import ToolParser, run_tool
from megatron.config.config import parse_config
from megatron.config.plan.plan import plan
from megatron.engine.deepspeed import distributed
from megatron.objectives.gpt import GPT
from megatron.training.guards.loss_spikes import SpikeGuard, Watched
from megatron.training.guards.nan_guard import NanGuard
from megatron.training.guards.replica_check import ReplicaCheck
from megatron.training.loop.journal import Journal
from megatron.training.loop.loop import Hook, StepResult
from megatron.training.process.device import prepare_process
from megatron.training.setup import build_engine, build_process_groups, choose
from megatron.training.telemetry.step_records import StepRecords

VOCAB_SIZE = 8192

FLAGS = [
    "--num-layers",
    "6",
    "--hidden-size",
    "384",
    "--num-attention-heads",
    "6",
    "--seq-length",
    "256",
    "--lr",
    "1e-4",
    "--micro-batch-size",
    "8",
    "--train-iters",
    "1000",
    "--device",
    "cpu",
    "--data-path",
    "none",
    "--save",
    "none",
    "--save-interval",
    "1000",
    "--spike-policy",
    "zscore=1e9,norm=1e9",
]


def main(argv: Sequence[str]) -> None:
    """Take steps, call each guard behind each, and print one line per guard."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    parser.add_argument("--interval", type=int, default=100, help="of --replica-check-interval")
    args = parser.parse_args(argv)
    config, _ = parse_config(FLAGS)
    launch, device = prepare_process(config.parallel)
    log.configure(launch.rank)
    distributed.start("gloo")
    decided = plan(config, world_size=launch.world_size, vocab_size=VOCAB_SIZE, device=device.type)
    groups = build_process_groups(decided)
    kernels, _ = choose(decided, device)
    engine = build_engine(decided, groups, GPT(), kernels)
    engine.set_lr(1e-4)
    batches = random_batches(decided, decided.batch.micro_batch_size)
    before = [Watched(9.0 + i / 100, 1.0 + i / 100) for i in range(decided.guards.spikes.window)]
    with TemporaryDirectory() as folder:
        guards: dict[str, tuple[Hook, int]] = {
            "NaN": (NanGuard(5, seeks_scale=False), 1),
            "spikes": (SpikeGuard(decided.guards.spikes, before), 1),
            "journal of steps": (StepRecords(Journal(Path(folder))), 1),
            f"replicas, every {args.interval}": (
                ReplicaCheck(engine, groups, interval=1, streams_per_tensor_rank=False),
                args.interval,
            ),
        }
        step_cpu_s = step_wall_s = 0.0
        cpu_s, wall_s = dict.fromkeys(guards, 0.0), dict.fromkeys(guards, 0.0)
        for number in range(args.steps + 1):
            loss: list[float] = []
            cpu, wall = timed(lambda into=loss: into.append(float(engine.train_batch(batches))), 1)
            state, step = TrainState(iteration=number + 1), result(loss[0], engine.grad_norm, wall)
            for name, (guard, every) in guards.items():
                took = timed(lambda g=guard, s=state, r=step: g.after_step(s, r), 1)
                if number:  # the first step warms up
                    cpu_s[name] += took[0] / every
                    wall_s[name] += took[1] / every
            if number:
                step_cpu_s, step_wall_s = step_cpu_s + cpu, step_wall_s + wall
    if launch.rank == 0:
        print(f"a step: {step_cpu_s / args.steps:.3f} s of CPU, {step_wall_s / args.steps:.3f} s")
        for name in guards:
            print(
                f"{name}: {1e3 * wall_s[name] / args.steps:.3f} ms a step | "
                f"{100 * cpu_s[name] / step_cpu_s:.3f} % of the CPU time, "
                f"{100 * wall_s[name] / step_wall_s:.3f} % of the wall time"
            )


def result(loss: float, norm: float | None, seconds: float) -> StepResult:
    """Return the result of a step."""
    return StepResult(
        loss=loss,
        lr=1e-4,
        batch_size=8,
        seq_length=256,
        seconds=seconds,
        grad_norm=norm,
        loss_scale=1.0,
        skipped=False,
    )


if __name__ == "__main__":
    run_tool(main)
