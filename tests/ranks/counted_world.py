"""A world of thousands of ranks in one process: a backend and a store that count, for a rank at a time.

What another rank would have put into the store is what this one has put there, under that rank's
number; broadcasts are those of rank 0, which comes first.
"""

import os
import re
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron.tensor_parallel.master_address import MasterAddress
from megatron.tensor_parallel.rendezvous import rendezvous

BACKEND = "counting"
PER_HOST = 8


class World:
    """Ranks of a run, one after the other, rank 0 first; counts what the present one does.

    Args:
        folder: whose files are counted.
    """

    def __init__(self, size: int, folder: Path):
        self.size, self.folder = size, folder.resolve()
        self.counts: Counter[str] = Counter()
        self.sent: dict[str, deque[bytes]] = defaultdict(deque)
        self.broadcasts: list[torch.Tensor] = []
        dist.Backend.register_backend(BACKEND, self._group, devices=["cpu"])
        self._counts_files = False
        sys.addaudithook(self._audit)

    def count(self, size: int) -> None:
        """Count a message of so many bytes."""
        self.counts.update(messages=1, bytes=size)

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Be `rank` in the `with` block, which has met the others."""
        self.counts.clear()
        master = MasterAddress("host", 1, rank, self.size)
        own = _Store(self, rank)  # torch's part of it keeps no reference to Python's
        store = rendezvous(master, timedelta(seconds=60), store=own)
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=self.size)
        usual = os.stat

        def stat(path: Any, **options: Any) -> os.stat_result:
            self._audit("os.stat", (path,))
            return usual(path, **options)

        try:
            with patch.object(os, "stat", stat):
                self._counts_files = True
                yield
        finally:
            self._counts_files = False
            dist.destroy_process_group()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do in the `with` block what other ranks do."""
        before, self._counts_files = self._counts_files, False
        yield
        self._counts_files = before

    def _group(self, store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        self.counts["groups"] += 1
        return _Group(self, rank, size)

    def _audit(self, event: str, words: tuple[Any, ...]) -> None:
        """Count files that are opened or looked at, and entries of directories that are listed."""
        if not self._counts_files or not words or not str(words[0]).startswith(str(self.folder)):
            return
        if event in ("open", "os.stat"):
            self.counts["files"] += 1
        elif event in ("os.listdir", "os.scandir"):
            with self.uncounted():
                self.counts["files"] += 1 + len(os.listdir(words[0]))


class _Store(dist.Store):
    """The rendezvous store as one rank sees it."""

    def __init__(self, world: World, rank: int):
        super().__init__()
        self._world, self._rank = world, rank
        self._counters: Counter[str] = Counter()
        self._posted: dict[str, bytes] = {}

    def add(self, key: str, amount: int) -> int:
        self._world.count(0)
        self._counters[key] += amount
        return self._world.size if key.endswith("/come") else self._counters[key]

    def check(self, keys: Sequence[str]) -> bool:
        self._world.count(0)
        return True

    def set(self, key: str, value: bytes) -> None:
        self._world.count(len(value))
        self._posted[key] = value
        self._world.sent[key].append(value)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        self._world.count(sum(map(len, values)))
        for key, value in zip(keys, values, strict=True):
            self._world.sent[key].append(value)

    def get(self, key: str) -> bytes:
        self._world.count(len(content := self._content(key)))
        return content

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        contents = [*map(self._content, keys)]
        self._world.count(sum(map(len, contents)))
        return contents

    def has_extended_api(self) -> bool:
        return True

    def _content(self, key: str) -> bytes:
        if "posted" not in key:
            sent = self._world.sent[key]
            return sent[0] if key.endswith("/size") else sent.popleft()
        prefix, _, rank = key.rpartition("/")
        own = self._posted[f"{prefix}/{self._rank}"]
        own = re.sub(rb"of_rank_\d{5}", b"of_rank_%05d" % int(rank), own)
        return re.sub(rb"of_host_\d{5}", b"of_host_%05d" % (int(rank) // PER_HOST), own)


class _Group(dist.ProcessGroup):
    """A process group whose other ranks have what this one has."""

    def __init__(self, world: World, rank: int, size: int):
        super().__init__(rank, size)
        self._world, self._rank = world, rank
        self._broadcasts = iter(world.broadcasts)

    def getBackendName(self) -> str:
        return BACKEND

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> dist.Work:
        self._world.count(sum(tensor.nbytes for tensor in tensors))
        return _Done()

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any = None) -> dist.Work:
        for tensor in tensors:
            self._world.count(tensor.nbytes)
            if self._rank == 0:
                self._world.broadcasts.append(tensor.clone())
            else:
                tensor.copy_(next(self._broadcasts))
        return _Done()


class _Done(dist.Work):
    def wait(self, *words: Any) -> bool:
        return True
