#!/usr/bin/env python
"""Saving, loading and reshaping of a checkpoint, beside what plain PyTorch takes for its bytes.

All sides take turns in one process, so that whatever else the machine does falls on all of them.
Compare the ratios; where other programs have the cores, those of CPU seconds.
"""

import ctypes
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import psutil
import torch
from timed_steps import random_batches

from megatron.checkpointing.manifest import read_manifest, tag_of
from megatron.checkpointing.resharding.layouts import read_sharded
from megatron.checkpointing.resharding.sharded_tensor import (
    FlatShard,
    FullCheckpoint,
    ShardedTensor,
)
from megatron.checkpointing.resharding.unpickle import read_state
from megatron.checkpointing.train_state import TrainState
from megatron.common import logging as log
from megatron.common.cli import ToolParser, run_tool
from megatron.config.config import Config, parse_config
from megatron.config.plan.plan import Plan, plan
from megatron.engine.deepspeed import distributed
from megatron.engine.engine import Engine
from megatron.objectives.gpt import GPT
from megatron.tensor_parallel.broadcast import Batch
from megatron.tensor_parallel.sharding import shard_of
from megatron.training import setup
from megatron.training.checkpoints.checkpoint_choice import choose_checkpoint
from megatron.training.checkpoints.resume import resume
from megatron.training.checkpoints.save import Checkpoints
from megatron.training.loop.loop import StepResult
from megatron.training.process.device import prepare_process

LAYERS, VOCAB_SIZE, SEQ_LENGTH = 4, 1024, 16
BUFFERS_MB = (64, 8, 1)
BYTES_PER_WEIGHT = 3 * 4  # a weight and Adam's two moments, in 32 bits
NO_STEP = StepResult(
    loss=0.0,
    lr=0.0,
    batch_size=1,
    seq_length=SEQ_LENGTH,
    seconds=0.0,
    grad_norm=None,
    loss_scale=1.0,
    skipped=False,
)


def main(argv: Sequence[str]) -> None:
    """Measure and print a line for each comparison."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500, help="about the state's size")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--directory", help="where checkpoints go; a temporary one by default")
    args = parser.parse_args(argv)
    log.configure(rank=1)  # the log of a run would stand between the figures
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        measure(Path(folder), args.megabytes, args.rounds)


def measure(folder: Path, megabytes: int, rounds: int) -> None:
    """Print what saving, loading and reshaping take."""
    engine, decided, config = build(folder, megabytes)
    batches = random_batches(decided, 1)
    engine.train_batch(batches)
    sides = Sides(engine, decided, config, folder, batches)
    seconds: dict[str, list[Taken]] = {}
    for turn in range(rounds + 1):
        for name, side in sides.all().items():
            taken = side(turn + 1)
            if turn:  # the first turn warms up
                seconds.setdefault(name, []).append(taken)
    manifest = read_manifest(folder / "save" / tag_of(rounds + 1))
    size = sum(record.size for record in manifest.files)
    print(f"{size / 1e6:.0f} MB in {len(manifest.files)} files, medians of {rounds} turns")
    for name, taken in seconds.items():
        print(f"{name}: {summary([t.wall for t in taken])}, CPU {summary([t.cpu for t in taken])}")
    for first, second in (
        ("torch.save and fsync", "save"),
        ("torch.load", "verify and load"),
        ("standstill in the background", "save"),
    ):
        pairs = list(zip(seconds[first], seconds[second], strict=True))
        wall = statistics.median(one.wall / other.wall for one, other in pairs)
        cpu = statistics.median(one.cpu / other.cpu for one, other in pairs)
        print(f"{first} / {second}: {wall:.2f}, CPU {cpu:.2f}")
    measure_reshaping(folder, megabytes)


@dataclass
class Taken:
    """Time that a side took, in seconds.

    Args:
        cpu: of all threads of this process, the kernel's work for them included; for a standstill,
            of the thread that trains alone.
    """

    wall: float = 0.0
    cpu: float = 0.0


def summary(seconds: Sequence[float]) -> str:
    """Return the median, and the least and the most."""
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


class Sides:
    """Sides of the comparison; each takes the number of its turn and returns its time."""

    def __init__(
        self,
        engine: Engine,
        decided: Plan,
        config: Config,
        folder: Path,
        batches: Iterator[Batch],
    ):
        self.engine, self.decided, self.folder, self.batches = engine, decided, folder, batches
        background = replace(decided.checkpoint, in_background=True, save=str(folder / "async"))
        self.saves = Checkpoints(engine, decided, config)
        self.saves_behind = Checkpoints(engine, replace(decided, checkpoint=background), config)

    def all(self) -> dict[str, Callable[[int], Taken]]:
        """Return them by name."""
        return {
            "torch.save and fsync": self.plain_save,
            "save": self.save,
            "standstill in the background": self.save_behind,
            "torch.load": self.plain_load,
            "verify and load": self.load,
        }

    def plain_save(self, turn: int) -> Taken:
        """Save the same state with torch alone."""
        file, engine = self.folder / f"plain{turn}.pt", self.engine._engine
        with timed() as taken, file.open("wb") as stream:
            state = {
                "module": engine.module.state_dict(),
                "optimizer": engine.optimizer.state_dict(),
            }
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        file.unlink()
        return taken

    def save(self, turn: int) -> Taken:
        """Save as a run does: written, hashed, flushed, published."""
        empty(self.folder / "save")
        with timed() as taken:
            self.saves.save(TrainState(iteration=turn))
        return taken

    def save_behind(self, turn: int) -> Taken:
        """Save in the background; the time for which steps stand still, until all is done."""
        empty(self.folder / "async")
        iteration = 10 * turn
        with timed(cpu=time.thread_time) as taken:
            self.saves_behind.save(TrainState(iteration=iteration))
        while self.saves_behind.is_under_way:
            self.engine.train_batch(self.batches)
            iteration += 1
            with timed(taken, cpu=time.thread_time):
                self.saves_behind.after_step(TrainState(iteration=iteration), NO_STEP)
        return taken

    def plain_load(self, turn: int) -> Taken:
        """Load the files of our checkpoint with torch alone, which runs none of their code."""
        files = sorted((self.folder / "save" / tag_of(turn)).glob("*.pt"))
        return_free_memory()
        with timed() as taken:
            for file in files:
                read_state(file, "cpu")
        return taken

    def load(self, turn: int) -> Taken:
        """Compare the files with their hashes and fill the engine, as a run does."""
        return_free_memory()
        with timed() as taken:
            chosen = choose_checkpoint(self.decided)
            assert chosen
            resume(self.engine, self.decided, TrainState(), chosen)
        return taken


def build(folder: Path, megabytes: int, *flags: str) -> tuple[Engine, Plan, Config]:
    """Return an engine whose state has about so many megabytes."""
    width = (megabytes * 1e6 / BYTES_PER_WEIGHT / 12 / LAYERS) ** 0.5
    words = (
        f"--num-layers {LAYERS} --hidden-size {max(1, round(width / 16)) * 16} "
        f"--num-attention-heads 4 --seq-length {SEQ_LENGTH} --micro-batch-size 1 --lr 1e-4 "
        f"--train-iters 1000000 --device cpu --data-path none --save {folder / 'save'} "
        f"--load {folder / 'save'} --save-interval 1000000"
    ).split()
    config, _ = parse_config([*words, *flags])
    launch, device = prepare_process(config.parallel)
    decided = plan(config, world_size=launch.world_size, vocab_size=VOCAB_SIZE, device="cpu")
    if not torch.distributed.is_initialized():
        distributed.start("gloo")
    kernels, _ = setup.choose(decided, device)
    engine = setup.build_engine(decided, setup.build_process_groups(decided), GPT(), kernels)
    return engine, decided, config


def empty(folder: Path) -> None:
    """Remove what was saved before, so that each turn finds the same disk."""
    for checkpoint in folder.glob("global_step*"):
        shutil.rmtree(checkpoint)


def return_free_memory() -> None:
    """Give memory back to the system: a run that loads has just started."""
    ctypes.CDLL(None).malloc_trim(0)


def measure_reshaping(folder: Path, megabytes: int) -> None:
    """Print the memory that loading from another layout needs beside what it fills."""
    engine, decided, _ = build(folder, megabytes, "--zero-stage", "2")
    # The optimizer's state is made by its first step.
    engine.train_batch(random_batches(decided, 1))
    (newest,) = (folder / "save").glob("global_step*")
    dims = {name: s.dim for name, p in engine.module.named_parameters() if (s := shard_of(p))}
    undivided = read_sharded(newest, read_manifest(newest))
    for layout, full in (
        ("one rank", undivided),
        ("two tensor-parallel ranks", in_halves(undivided, dims)),
    ):
        for buffer_mb in BUFFERS_MB:
            return_free_memory()
            with peak_memory() as peak:
                engine.load_full(full, buffer_bytes=buffer_mb << 20)
            print(
                f"reshape from {layout}, --reshape-buffer-mb {buffer_mb}: "
                f"{peak[0] / 2**20:.1f} MB at most beside the state"
            )


def in_halves(full: FullCheckpoint, dims: Mapping[str, int]) -> FullCheckpoint:
    """Return `full` as two tensor-parallel ranks hold it, in memory.

    Args:
        dims: of each parameter that ranks divide.
    """

    def halved(tensor: ShardedTensor, dim: int) -> ShardedTensor:
        parts = tensor.all().chunk(2, dim)
        return replace(tensor, dim=dim, shards=[FlatShard([part.reshape(-1)]) for part in parts])

    parameters = {
        name: replace(
            parameter,
            weight=halved(parameter.weight, dims[name]),
            states={key: halved(state, dims[name]) for key, state in parameter.states.items()},
        )
        if name in dims
        else parameter
        for name, parameter in full.parameters.items()
    }
    return replace(full, parameters=parameters)


@contextmanager
def timed(
    taken: Taken | None = None, *, cpu: Callable[[], float] = time.process_time
) -> Iterator[Taken]:
    """Give what the block takes, or add it to `taken`; it is there behind the block."""
    taken = taken or Taken()
    started, cpu_before = time.perf_counter(), cpu()
    yield taken
    taken.wall += time.perf_counter() - started
    taken.cpu += cpu() - cpu_before


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Give a list in which the growth of this process's own memory stands, in bytes.

    Pages of mapped files do not count: the kernel takes them back when memory runs short.
    """
    ended, found, peak = threading.Event(), [own_memory()], list[int]()

    def watch() -> None:
        while not ended.wait(0.001):
            found.append(own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield peak
    ended.set()
    watcher.join()
    peak.append(max(found) - found[0])


def own_memory() -> int:
    """Return the anonymous memory of this process: resident, and not shared or of a file."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


if __name__ == "__main__":
    run_tool(main)
