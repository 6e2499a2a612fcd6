#!/usr/bin/env python
"""One measurement of train_gpu.py in a process of its own: the card, our engine or the plain loop.

    python benchmarks/gpu_side.py JOB

JOB is a `Job` as JSON; the last line of stdout is the result as JSON. What a process leaves in the
GPU's memory, and its compiled functions, cannot disturb the next measurement.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import numpy as np
import torch
from plain_loop import PlainLoop
from timed_steps import random_batches
from torch.profiler import ProfilerActivity, profile

from megatron.common import logging as log
from megatron.common.cli import run_tool
from megatron.config.config import parse_config
from megatron.config.plan.plan import Plan, plan
from megatron.data.token_files.index_files import IndexContent, write_mmap_index
from megatron.engine.deepspeed import distributed
from megatron.fused_kernels.registry import Choice
from megatron.objectives.gpt import GPT
from megatron.tensor_parallel.broadcast import Batch
from megatron.tensor_parallel.process_groups import Groups
from megatron.training import setup
from megatron.training.process.device import prepare_process

VOCAB_SIZE = 50257
LR = 1e-4
ATTENTION = ("flash", "cudnn", "fmha", "efficient_attention", "flex", "causal_softmax")
"""Parts of the names of kernels that compute attention."""
TOP = 25
"""Kernels of a step that are listed."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is measured.

    Args:
        side: "device" for the name, memory and matrix rate of the card; "megatron"; "plain".
        flags: network, dtype and other flags of training.
        files: whether tokens come from token files through the data path of a run.
        compiles: what torch.compile compiles of the plain loop: "blocks", "whole" or "none".
    """

    side: str
    device: str
    flags: tuple[str, ...] = ()
    seq_length: int = 2048
    batch: int = 1
    files: bool = False
    rounds: int = 5
    steps: int = 5
    compiles: str = "blocks"


def main(argv: Sequence[str]) -> None:
    """Measure one job and print the result."""
    words = json.loads(argv[0])
    job = Job(**words | {"flags": tuple(words.get("flags", ()))})
    log.configure(rank=0)
    measure = {"device": measure_device, "megatron": measure_engine, "plain": measure_plain}
    try:
        result = measure[job.side](job)
    except torch.OutOfMemoryError as error:
        result = {"error": f"out of memory: {str(error).splitlines()[0]}"}
    print(json.dumps(result), flush=True)


def measure_device(job: Job) -> dict[str, Any]:
    """Return name, memory and rate of bf16 matrix products of the device."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    device = torch.device(job.device)
    if job.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"name": properties.name, "memory_bytes": properties.total_memory}
    else:
        found |= {"name": "CPU", "memory_bytes": None}
    size = 8192 if job.device == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = min(times_of(lambda: a @ b, job))
    copied_s = min(times_of(lambda: b.copy_(a), job))
    return found | {
        "matmul_flops": 2 * size**3 / seconds,
        "copy_bytes_per_s": 2 * a.nbytes / copied_s,
    }


def measure_engine(job: Job) -> dict[str, Any]:
    """Return speed and memory of our engine, and the kernels that it ran."""
    with tempfile.TemporaryDirectory() as folder:
        source = ["--data-path", "none"]
        if job.files:
            write_random_corpus(Path(folder), job)
            source = ["--data-path", f"{folder}/corpus", "--split", "1,0,0"]
        decided, groups, device = start(job, source)
        kernels, choices = setup.choose(decided, device)
        engine = setup.build_engine(decided, groups, GPT(), kernels)
        engine.set_lr(LR)
        if job.files:
            train = setup.read_datasets(decided).train
            batches = setup.batches_of(
                train, 0, plan=decided, objective=GPT(), eod=None, groups=groups, device=device
            )
        else:
            batches = resident_batches(decided, device)
        losses: list[float] = []
        seconds = times_of(lambda: losses.append(float(engine.train_batch(batches))), job)
        kernels_of_step = profile_step(lambda: float(engine.train_batch(batches)), job)
        return {
            "seconds": statistics.median(seconds),
            "loss": losses[-1],
            "peak_bytes": peak_bytes(job),
            "kernels": source_of(choices),
            "attention": attention_of(kernels_of_step),
            "kernels_of_step": kernels_of_step[:TOP],
        }


def measure_plain(job: Job) -> dict[str, Any]:
    """Return speed and memory of the plain loop; its weights stay in 32 bits under autocast."""
    decided, _, device = start(job, ("--data-path", "none"))
    loop = PlainLoop(
        decided.model,
        "bf16",
        lr=LR,
        device=device,
        compiles=job.compiles == "whole",
        by_blocks=job.compiles == "blocks",
    )
    batch = next(resident_batches(decided, device))
    losses: list[float] = []
    tokens, labels = batch["tokens"], batch["labels"]
    seconds = times_of(lambda: losses.append(float(loop.step(tokens, labels))), job)
    return {
        "seconds": statistics.median(seconds),
        "loss": losses[-1],
        "peak_bytes": peak_bytes(job),
    }


def start(job: Job, source: Sequence[str]) -> tuple[Plan, Groups, torch.device]:
    """Return the plan of the job, with process groups of this process alone."""
    common = (
        f"--micro-batch-size {job.batch} --lr {LR} --train-iters 1000 --clip-grad 1.0 "
        f"--attention-dropout 0 --hidden-dropout 0 --device {job.device} "
        f"--seq-length {job.seq_length}"
    ).split()
    config, _ = parse_config([*common, *source, *job.flags])
    _, device = prepare_process(config.parallel)
    decided = plan(config, world_size=1, vocab_size=VOCAB_SIZE, device=device.type)
    distributed.start("nccl" if device.type == "cuda" else "gloo")
    return decided, setup.build_process_groups(decided), device


def resident_batches(decided: Plan, device: torch.device) -> Iterator[Batch]:
    """Yield the same micro-batch without end, its tensors on the device."""
    batch = next(random_batches(decided, decided.batch.micro_batch_size))
    there = {name: tensor.to(device) for name, tensor in batch.items()}
    while True:
        yield there


def write_random_corpus(folder: Path, job: Job) -> None:
    """Write token files of random tokens, in documents of 600, for all steps of the job."""
    length = 600
    needed = (job.rounds + 3) * job.steps * job.batch * (job.seq_length + 1)
    count = needed // length + 2
    sizes = np.full(count, length)
    tokens = np.random.default_rng(1).integers(VOCAB_SIZE, size=count * length, dtype=np.int64)
    (folder / "corpus.bin").write_bytes(tokens.astype("<u2").tobytes())
    content = IndexContent(
        dtype=np.dtype("<u2"),
        num_sequences=count,
        num_documents=count,
        sizes=lambda: iter([sizes]),
        document_starts=lambda: iter([np.arange(count + 1)]),
    )
    with (folder / "corpus.idx").open("wb") as file:
        write_mmap_index(file, content)


def times_of(step: Callable[[], object], job: Job) -> list[float]:
    """Return the seconds of a step in each round; a first round warms up and compiles."""
    wait = torch.cuda.synchronize if job.device == "cuda" else lambda: None
    seconds = []
    for turn in range(job.rounds + 1):
        wait()
        started_at = time.perf_counter()
        for _ in range(job.steps):
            step()
        wait()
        if turn:
            seconds.append((time.perf_counter() - started_at) / job.steps)
    return seconds


def peak_bytes(job: Job) -> int | None:
    """Return the most memory that tensors had on the GPU; None on a CPU."""
    return torch.cuda.max_memory_allocated() if job.device == "cuda" else None


def source_of(choices: Sequence[Choice]) -> str:
    """Return which implementations the operations have, as in "Triton, PyTorch"."""
    return ", ".join(dict.fromkeys(c.implementation for c in choices if c.operation != "attention"))


def profile_step(step: Callable[[], object], job: Job) -> list[dict[str, Any]]:
    """Return name, calls and milliseconds of the kernels of a step, the longest first.

    On a CPU they are operators.
    """
    on_gpu = job.device == "cuda"
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as recorded:
        step()
    found = [
        {
            "name": event.key[:160],
            "calls": event.count,
            "ms": (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000,
        }
        for event in recorded.key_averages()
    ]
    return sorted(found, key=lambda kernel: -kernel["ms"])


def attention_of(kernels: Sequence[dict[str, Any]]) -> str:
    """Return the name of the kernel in which attention spends most time."""
    names = (kernel["name"] for kernel in kernels)
    found = (name[:80] for name in names if any(part in name for part in ATTENTION))
    return next(found, "none found")


if __name__ == "__main__":
    run_tool(main)
