"""What a rank does at start, step, save, load, reshape and in a hang does not grow with the ranks."""

import json
import time
from collections import Counter
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from counted_world import PER_HOST, World
from forks import exit_codes
from tiny import tiny_config
from zero_files import ZeroFiles

from megatron.checkpointing.resharding import sharded_index
from megatron.checkpointing.resharding.layouts import sharded_index as index_of
from megatron.checkpointing.train_state import TrainState
from megatron.config.plan.plan import plan as plan_of
from megatron.training.checkpoints.checkpoint_choice import choose_checkpoint
from megatron.training.checkpoints.resume import damage_of
from megatron.training.guards.stop import build_requests
from megatron.training.loop.collectives import from_rank_0, post, scatter
from megatron.training.loop.loop import Hook
from megatron.training.process.dead_ranks import Peer, Peers, by_host
from megatron.training.process.environment import Launch
from megatron.training.process.failure import FailureFile
from megatron.training.process.stack_dump import Stacks, groups_of_ranks, write_stacks
from megatron.training.process.watchdog import Watchdog
from megatron.training.run import Run
from megatron.training.setup import build_process_groups

SIZES = (64, 512, 2048)
PHASES = ("start", "step", "save", "load", "reshape", "hang")
KINDS = ("files", "messages", "bytes", "groups")
TIMEOUT_S = 300
FLAGS = (
    *("--num-layers", "8", "--hidden-size", "128", "--num-attention-heads", "8"),
    *("--tensor-model-parallel-size", "8", "--pipeline-model-parallel-size", "4"),
    *("--zero-stage", "1", "--untie-embeddings-and-output-weights", "--train-iters", "2"),
    *("--exit-signal-handler", "--micro-batch-size", "1"),
)


class OneFileEngine:
    """Takes steps at once, and saves a file of each rank: on rank 0 those of all ranks."""

    grad_norm, loss_scale, skipped_steps, has_loss_terms = 1.0, 1.0, 0, False

    def __init__(self, world: World, rank: int):
        self._world, self._rank = world, rank

    def __getattr__(self, name: str) -> Any:
        if name.startswith("set_"):
            return lambda value: None
        raise AttributeError(name)

    def train_batch(self, batches: Any) -> float:
        return 1.0

    def partition_dims(self) -> dict[str, int]:
        return {}

    def save(
        self, directory: Path, tag: str, client_state: Any, *, write: Any, **parts: bool
    ) -> None:
        file = directory / tag / f"of_rank_{self._rank:05d}"
        write({"weight": torch.ones(2)}, file)
        with self._world.uncounted():
            for other in range(self._world.size) if self._rank == 0 else ():
                if other:
                    file.with_name(f"of_rank_{other:05d}").write_bytes(file.read_bytes())


class Steps(Hook):
    """Call `before` before each step."""

    def __init__(self, before: Any):
        self._before = before

    def before_step(self, state: TrainState) -> None:
        self._before(state.iteration)


def count(size: int, folder: Path) -> None:
    """Write what rank 0 does in each phase, and the most that another rank does."""
    world = World(size, folder / "run")
    write_hang(world)
    ranks = {rank: live(world, rank) for rank in sorted({0, 1, PER_HOST, size // 2 + 3, size - 1})}
    first = ranks.pop(0)
    most = {phase: Counter() for phase in PHASES}
    for counts in ranks.values():
        for phase in PHASES:
            most[phase] |= counts[phase]
    (folder / f"{size}.json").write_text(json.dumps([first, most]))


def write_hang(world: World) -> None:
    for rank in range(world.size):
        stacks = Stacks(rank=rank, host="host", pid=1, stage="step", place="all_reduce", threads={})
        write_stacks(stacks, world.folder / "hang")


def live(world: World, rank: int) -> dict[str, Counter[str]]:
    """Do what a rank does in a run; return the counts of each phase."""
    directory, phases = str(world.folder), dict[str, Counter[str]]()

    def end(phase: str) -> None:
        phases[phase] = world.counts.copy()
        world.counts.clear()

    flags = (*FLAGS, "--save", directory, "--load", directory)
    config = tiny_config(*flags)
    plan = plan_of(config, world_size=world.size, vocab_size=11, device="cpu")
    launch = Launch(rank, world.size, rank % PER_HOST, PER_HOST)
    with world.as_rank(rank):
        host = f"of_host_{rank // PER_HOST:05d}"
        posted = post(Peer(rank, host, 1, "1", host))
        (others,) = scatter(by_host(posted.all()) if rank == 0 else None)
        watchdog, peers = Watchdog(FailureFile(directory), rank=rank), Peers(*others)
        watchdog.set_peers(peers, world_size=world.size)
        watchdog.failures.follow(posted.of(0))
        groups = build_process_groups(plan)
        requests = build_requests(
            plan.training, save=directory, rank=rank, started_at=time.perf_counter()
        )

        def before_step(iteration: int) -> None:
            end("step" if iteration else "start")
            if rank:  # rank 0 has made it, and renamed it since
                (world.folder / "staging-global_step2").mkdir(exist_ok=True)

        run = Run(
            *(OneFileEngine(world, rank), plan, config, groups, TrainState()),
            valid={},
            test={},
            watchdog=watchdog,
            hooks=[Steps(before_step)],
        )
        run.train(lambda first: repeat({}), launch, requests)
        end("save")
        chosen = choose_checkpoint(plan)
        assert chosen and damage_of(chosen) == []
        end("load")
        files = ZeroFiles(plan, partial(world.counts.update, files=1))
        with patch.object(sharded_index, "read_tensors", files.read):
            index = from_rank_0(lambda: index_of(world.folder, files.manifest()))
            files.fill_reshaped(index.checkpoint(world.folder).parameters, rank)
        end("reshape")
        (line,) = groups_of_ranks(
            world.folder / "hang", rank=rank, world_size=world.size, patience_s=60, poll_s=1
        )
        assert line.startswith(f"{world.size} ranks")
        end("hang")
    return phases


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Counts of rank 0 and of another rank, by the number of ranks."""
    folders = {size: tmp_path_factory.mktemp(str(size)) for size in SIZES}
    codes = exit_codes(count, [*folders.items()], timeout_s=TIMEOUT_S)
    assert codes == [0] * len(SIZES)
    return {size: json.loads((at / f"{size}.json").read_text()) for size, at in folders.items()}


@pytest.mark.parametrize("phase", PHASES)
def test_no_rank_does_more_in_a_larger_world_and_rank_0_at_most_in_proportion(counts, phase):
    for before, after in zip(SIZES, SIZES[1:], strict=False):
        for kind in KINDS:
            first, other = (
                [counts[size][who][phase].get(kind, 0) for size in (before, after)]
                for who in (0, 1)
            )
            # Numbers have more digits.
            assert other[1] <= 1.2 * other[0] + 64 * (kind == "bytes"), (kind, after)
            assert first[1] <= 1.1 * after / before * max(first[0], 1), (kind, after)


def test_the_counts_are_of_something(counts):
    _, other = counts[SIZES[0]]
    assert all(other[phase]["messages"] for phase in PHASES if phase != "hang")
    assert all(other[phase]["files"] for phase in ("save", "load", "reshape", "hang"))
    assert other["start"]["groups"] > 3
