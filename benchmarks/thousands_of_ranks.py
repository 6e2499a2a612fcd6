#!/usr/bin/env python
"""File operations, bytes and messages of a run's ranks, counted in worlds of up to thousands of ranks.

No process is started. For rank 0 and a few others the functions of a run are called, with a process
group and a rendezvous store that count, and files of all ranks in a temporary directory. What another
rank would have put into the store is what this one has put there.
"""

import json
import math
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import torch

from megatron.checkpointing.manifest import (
    FileRecord,
    Manifest,
    damage,
    published_tags,
    record_file,
)
from megatron.checkpointing.resharding import layouts
from megatron.checkpointing.resharding.sharded_tensor import ParameterState, fill_from
from megatron.checkpointing.resharding.unpickle import FragmentAddress
from megatron.checkpointing.train_state import TrainState
from megatron.checkpointing.writer import SynchronousExecutor
from megatron.common.cli import ToolParser, run_tool
from megatron.config.config import parse_config
from megatron.config.plan.plan import plan
from megatron.engine.deepspeed import distributed
from megatron.tensor_parallel import rendezvous
from megatron.tensor_parallel.master_address import MasterAddress
from megatron.tensor_parallel.sharding import Shard
from megatron.training.checkpoints import system_info
from megatron.training.checkpoints.checkpoint_choice import chosen_by_rank_0, newest_readable
from megatron.training.checkpoints.emergency_save import PendingSave
from megatron.training.checkpoints.resume import damage_of
from megatron.training.checkpoints.save import Checkpoints
from megatron.training.loop.collectives import (
    any_rank,
    from_rank_0,
    gather_findings,
    post,
    scatter,
)
from megatron.training.process import watchdog
from megatron.training.process.dead_ranks import Peer, Peers, by_host
from megatron.training.process.failure import FailureFile
from megatron.training.process.watchdog import Hangs, Watchdog

PER_NODE = 8
TENSOR, STAGES, LAYERS, WIDTH = 8, 4, 8, 128
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {WIDTH} --num-attention-heads {TENSOR} --seq-length 8 "
    f"--tensor-model-parallel-size {TENSOR} --pipeline-model-parallel-size {STAGES} --zero-stage 1 "
    "--untie-embeddings-and-output-weights --micro-batch-size 1 --lr 1 --train-iters 1 "
    "--data-path corpus --vocab-file none"
).split()


@dataclass
class World:
    """A simulated run, as one rank after the other sees it, rank 0 first."""

    size: int
    folder: Path
    rank: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    sent: dict[str, bytes] = field(default_factory=dict)
    broadcasts: list[torch.Tensor] = field(default_factory=list)
    taken: int = 0

    # The store.
    def add(self, key: str, amount: int) -> int:
        """Count a request; every counter has its last value."""
        self.counts["messages"] += 1
        return self.size if key == "come" else 1

    def check(self, keys: Sequence[str]) -> bool:
        """Count a request."""
        self.counts["messages"] += 1
        return True

    def set(self, key: str, value: Any) -> None:
        """Keep what a rank sends."""
        content = value if isinstance(value, bytes) else str(value).encode()
        self._count(content)
        self.sent[key] = content

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Keep several values of one request."""
        self.counts["messages"] += 1
        for key, value in zip(keys, values, strict=True):
            self.counts["bytes"] += len(value)
            self.sent[key] = value

    def get(self, key: str) -> bytes:
        """Return what its rank has sent, or what this one has, under that rank's number."""
        content = self.sent[key] if key in self.sent else self._of_another(key)
        self._count(content)
        return content

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values by one request."""
        self.counts["messages"] += 1 - len(keys)
        return [*map(self.get, keys)]

    # The process group.
    def all_reduce(self, tensor: torch.Tensor, **options: Any) -> None:
        """Count one message; the others have what this rank has."""
        self._count(bytes(tensor.numel() * tensor.element_size()))

    def broadcast(self, tensor: torch.Tensor, **options: Any) -> None:
        """Give other ranks what rank 0 has."""
        if self.rank == 0:
            self.broadcasts.append(tensor.clone())
        else:
            tensor.copy_(self.broadcasts[self.taken])
        self._count(tensor.numpy().tobytes())
        self.taken += 1

    def _count(self, content: bytes | memoryview) -> None:
        self.counts["messages"] += 1
        self.counts["bytes"] += len(content)

    def _of_another(self, key: str) -> bytes:
        prefix, _, rank = key.rpartition("/")
        own = self.sent[f"{prefix}/{self.rank}"]
        own = re.sub(rb"of_rank_\d{5}", b"of_rank_%05d" % int(rank), own)
        return re.sub(rb"of_node_\d{5}", b"of_node_%05d" % (int(rank) // PER_NODE), own)

    @contextmanager
    def counting(self, rank: int) -> Iterator[Counter[str]]:
        """Be `rank` in the `with` block, and count what it does."""
        self.rank, self.taken, self.counts = rank, 0, Counter()
        usual, group = os.stat, torch.distributed

        def stat(*words: Any, **options: Any) -> os.stat_result:
            self.counts["files"] += 1
            return usual(*words, **options)

        changes = {
            "get_rank": lambda *group: self.rank,
            "get_world_size": lambda *group: self.size,
            "get_backend": lambda *group: "gloo",
            "all_reduce": self.all_reduce,
            "broadcast": self.broadcast,
        }
        with ExitStack() as stack:
            for name, function in changes.items():
                stack.enter_context(patch.object(group, name, function))
            stack.enter_context(patch.object(distributed, "store", lambda: self))
            stack.enter_context(patch.object(os, "stat", stat))
            _counted.append(self)
            try:
                yield self.counts
            finally:
                _counted.remove(self)


_counted: list[World] = []


def _audit(event: str, words: tuple[Any, ...]) -> None:
    """Count files that are opened, and entries of directories that are listed."""
    if not _counted or not words or not str(words[0]).startswith(str(_counted[0].folder)):
        return
    world = _counted.pop()  # what follows is not counted
    if event == "open":
        world.counts["files"] += 1
    elif event in ("os.listdir", "os.scandir"):
        world.counts["files"] += 1 + len(os.listdir(words[0]))
    _counted.append(world)


def start(world: World) -> Callable[[], None]:
    """Meet: rendezvous, processes of this host, system information."""

    def act() -> None:
        rank, node = world.rank, f"of_node_{world.rank // PER_NODE:05d}"
        master = MasterAddress("host", 1, rank, world.size)
        meeting = rendezvous._Rendezvous(
            master, timedelta(seconds=60), lambda: None, rendezvous.Patience()
        )
        size = str(world.size).encode()
        with (
            patch.object(rendezvous, "PrefixStore", lambda name, store: store),
            patch.object(World, "get", lambda *words: size),
        ):
            meeting._check_in(world)  # type: ignore[arg-type]
        posted = post(Peer(rank, node, 1, "1", node))
        (others,) = scatter(by_host(posted.all()) if rank == 0 else None)
        Peers(*others)
        posted.of(0)
        with patch.object(system_info, "gethostname", lambda: node):
            system_info.system_info()

    return act


def save(world: World) -> Callable[[], None]:
    """Write one file of each rank; publish them; read one back."""
    staging = world.folder / "staging-global_step1"
    staging.mkdir()
    for rank in range(world.size):
        (staging / f"of_rank_{rank:05d}").write_bytes(b"state")
    one = record_file(staging / "of_rank_00000")

    def act() -> None:
        checkpoints = Checkpoints.__new__(Checkpoints)
        checkpoints._directory, checkpoints._executor = world.folder, SynchronousExecutor()
        checkpoints._url, checkpoints._claiming = "", threading.Lock()
        checkpoints._plan = SimpleNamespace(  # type: ignore[assignment]
            checkpoint=SimpleNamespace(keep_last=0)
        )
        checkpoints._saved, checkpoints._not_uploaded = 1, ""
        written: Future[FileRecord] = Future()
        written.set_result(replace(one, name=f"of_rank_{world.rank:05d}"))
        checkpoints._pending = PendingSave(world.folder, MANIFEST, [written])
        gather_findings([])
        for futures in checkpoints._publish(MANIFEST, [written]):
            assert all(future.done() for future in futures)
            gather_findings([])
        assert damage(checkpoints._newest, checkpoints._unverified) == []

    return act


def load(world: World) -> Callable[[], None]:
    """Choose the checkpoint that was saved, and verify its files."""
    save_one = save(world)
    with world.counting(0):
        save_one()
    world.broadcasts.clear()

    def act() -> None:
        chosen = chosen_by_rank_0(
            lambda: newest_readable(world.folder, published_tags(world.folder))
        )
        assert chosen and damage_of(chosen) == []

    return act


def reshape(world: World) -> Callable[[], None]:
    """Fill a rank's weights and moments from half as many replicas and twice the tensor ranks."""
    data = world.size // (TENSOR * STAGES)
    files = _ReshapedFiles(world, data)
    manifest = replace(MANIFEST, plan=files.plan, partition_dims=files.dims, files=files.records())

    def act() -> None:
        with patch.object(layouts, "read_tensors", files.read):
            index = from_rank_0(lambda: layouts.sharded_index(world.folder, manifest))
            parameters = index.checkpoint(world.folder).parameters
            tensor, rest = world.rank % (TENSOR // 2), world.rank // (TENSOR // 2)
            replica, stage = rest % (2 * data), rest // (2 * data)
            _fill(parameters, stage, tensor, replica, 2 * data)

    return act


def _fill(
    parameters: Mapping[str, ParameterState], stage: int, tensor: int, replica: int, replicas: int
) -> None:
    """Fill one replica's partition of the parameters of a stage."""
    names, count = _names(stage), TENSOR // 2
    numel = WIDTH * WIDTH // count
    size = len(names) * numel // replicas
    for number, name in enumerate(names):
        low, high = (min(max(x - number * numel, 0), numel) for x in _span(replica, size))
        if low < high:
            dim = _dim(name)
            shape = [WIDTH, WIDTH]
            shape[dim] //= count
            for whole in parameters[name].tensors.values():
                target = torch.empty(high - low)
                fill_from(target, whole, Shard(dim, tensor, count), shape, low)


def _span(replica: int, size: int) -> tuple[int, int]:
    return replica * size, (replica + 1) * size


def _names(stage: int) -> list[str]:
    each = LAYERS // STAGES
    return [f"{n}.{kind}" for n in range(stage * each, (stage + 1) * each) for kind in "rc"]


def _dim(name: str) -> int:
    return 0 if name.endswith("r") else 1


class _ReshapedFiles:
    """Files of a ZeRO-1 checkpoint, made when they are opened."""

    def __init__(self, world: World, data: int):
        self.world, self.data = world, data
        self.plan = plan(
            parse_config(FLAGS)[0],
            world_size=TENSOR * STAGES * data,
            vocab_size=WIDTH,
            device="cpu",
        ).to_dict()
        self.dims = {name: _dim(name) for stage in range(STAGES) for name in _names(stage)}

    def records(self) -> tuple[FileRecord, ...]:
        """Return the files of all ranks."""
        ranks = range(TENSOR * STAGES)
        names = [f"mp_rank_{rank:02d}_model_states.pt" for rank in ranks]
        names += [
            f"bf16_zero_pp_rank_{replica}_mp_rank_{rank:02d}_optim_states.pt"
            for rank in ranks
            for replica in range(self.data)
        ]
        names += [
            f"layer_{number:02d}-model_{tensor:02d}-model_states.pt"
            for number in range(LAYERS)
            for tensor in range(TENSOR)
        ]
        return tuple(FileRecord(name, 1, "xxh3_128:0") for name in names)

    def read(self, file: Path) -> Any:
        """Return the content of a file, and count it."""
        self.world.counts["files"] += 1
        name, numel = file.name, WIDTH * WIDTH // TENSOR
        shapes = {0: (WIDTH // TENSOR, WIDTH), 1: (WIDTH, WIDTH // TENSOR)}
        if name.startswith("layer"):
            return {kind: torch.zeros(shapes[_dim(kind)]) for kind in "rc"}
        rank = int(name.partition("mp_rank_")[2][:2])
        own = _names(rank // TENSOR)
        if name.startswith("mp"):
            counters = dict.fromkeys(("global_steps", "global_samples", "skipped_steps"), 1)
            of_stage = {name: shapes[_dim(name)] for name in own}
            return {"module": None, "optimizer": None, "param_shapes": [of_stage], **counters}
        size = len(own) * numel // self.data
        first, last = _span(int(name.split("_")[4]), size)
        spans = {}
        for number, each in enumerate(own):
            low, high = max(number * numel, first), min((number + 1) * numel, last)
            if low < high:
                spans[each] = address = FragmentAddress()
                address.start, address.numel = low - first, high - low
        state = {"exp_avg": torch.zeros(size), "exp_avg_sq": torch.zeros(size), "step": 1}
        return {
            "optimizer_state_dict": {
                "base_optimizer_state": {"state": {0: state}, "param_groups": [{}]},
                "single_partition_of_fp32_groups": [torch.zeros(size)],
                "param_slice_mappings": [spans],
            }
        }


def watch(world: World) -> Callable[[], None]:
    """Look for hung and failed ranks for an hour; the counts are those of a minute."""

    def act() -> None:
        now = [0.0]
        polling = Watchdog(FailureFile(str(world.folder)), rank=world.rank)
        world.counts.clear()
        polling.follows_peers = True
        with patch.object(watchdog.time, "monotonic", lambda: now[0]):
            polling.arm(Hangs(600.0, world.folder / "hang", world.size))

            def pass_time(seconds: float) -> None:
                now[0] += seconds
                if now[0] > 3600:
                    polling._ended.set()

            with patch.object(polling, "_receive", pass_time):
                polling._poll()
        world.counts["files"] = math.ceil(world.counts["files"] / 60)

    return act


def stop(world: World) -> Callable[[], None]:
    """Agree on requests; then report a hang, whose stacks all ranks have written."""
    folder = world.folder / "hang"
    folder.mkdir()
    for rank in range(world.size):
        text = json.dumps({"rank": rank, "place": "all_reduce"})
        (folder / f"rank-{rank}.json").write_text(text)

    def act() -> None:
        any_rank([False] * 4)
        polling = Watchdog(FailureFile(str(world.folder)), rank=world.rank)
        with patch.object(watchdog, "_POLL_S", 0.01):
            (line,) = polling._groups_of_ranks(Hangs(1.0, folder, world.size))
        assert line.startswith(f"{world.size} ranks")

    return act


PHASES = {each.__name__: each for each in (start, save, load, reshape, watch, stop)}
MANIFEST = Manifest(
    state=TrainState(iteration=1), plan={}, config={}, versions={}, partition_dims={}, files=()
)


def counted(phase: str, size: int) -> tuple[Counter[str], Counter[str]]:
    """Return what rank 0 does in a phase, and the most that another rank does.

    Args:
        size: number of ranks; a multiple of 64.
    """
    with tempfile.TemporaryDirectory() as name:
        world = World(size, Path(name).resolve())
        act = PHASES[phase](world)
        counts = []
        for rank in sorted({0, 1, PER_NODE, size // 2 + 3, size - 1}):
            with world.counting(rank) as own:
                act()
            counts.append(Counter(own))
        first, *others = counts
        most: Counter[str] = Counter()
        for other in others:
            most |= other
        return first, most


def main(argv: Sequence[str]) -> None:
    """Print a table: for each phase and size what rank 0, another rank and all ranks together do."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 16384])
    sizes = parser.parse_args(argv).ranks
    print(
        "| phase | ranks | file operations: rank 0 | another | messages: rank 0 | another |", end=""
    )
    print(" bytes: rank 0 | another |\n|---|---|---|---|---|---|---|---|")
    for phase in PHASES:
        for size in sizes:
            first, other = counted(phase, size)
            cells = [f"{each[kind]:,}" for kind in KINDS for each in (first, other)]
            print(f"| {phase} | {size:,} | {' | '.join(cells)} |", flush=True)


KINDS = ("files", "messages", "bytes")

sys.addaudithook(_audit)

if __name__ == "__main__":
    run_tool(main)
