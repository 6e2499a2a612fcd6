"""Files that are hashed on their way to disk, at once or later."""

import os
import subprocess
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from problems import problem

from megatron.checkpointing.manifest import record_file
from megatron.checkpointing.writer import (
    HostCopies,
    PinnedPieces,
    StateWriter,
    SynchronousExecutor,
    write_state,
    write_states,
)
from megatron.common.errors import CheckpointError


def a_state():
    """Small and large tensors, two that share memory, and what stands beside them."""
    flat = torch.arange(100_000.0)
    versions = OrderedDict(a=flat[:10], b=flat[10:].view(-1, 9), whole=flat)
    versions._metadata = {"version": 2}
    return {
        "module": versions,
        "steps": (torch.tensor(3), 4),
        "columns": torch.arange(6).view(2, 3).t(),
        "nothing": torch.empty(0),
        "sizes": [torch.Size([2, 3]), None, "text"],
    }


def test_the_record_of_a_file_has_its_size_and_hash(tmp_path):
    record = write_state(a_state(), tmp_path / "state.pt")
    assert record == record_file(tmp_path / "state.pt")
    read = torch.load(tmp_path / "state.pt")
    assert torch.equal(read["module"]["whole"], torch.arange(100_000.0))
    assert torch.equal(read["columns"], a_state()["columns"])


def test_a_copy_makes_the_same_file_and_does_not_follow_the_state(tmp_path):
    expected = write_state(a_state(), tmp_path / "state.pt")
    state, release = a_state(), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(release.wait)
        writer = StateWriter(thread, HostCopies())
        writer.write(state, tmp_path / "state.pt")
        state["module"]["whole"].zero_()
        state["sizes"].clear()
        release.set()
    (file,) = writer.files
    assert file.result() == expected == record_file(tmp_path / "state.pt")


class LateEvent:
    """Stands for an event of a GPU, whose copy arrives only when it is waited for."""

    arrivals: list = []

    def record(self):
        self.arrive = self.arrivals.pop()

    def synchronize(self):
        self.arrive()


class LatePiece(torch.Tensor):
    """Pinned memory that a GPU writes to later."""

    def copy_(self, source, non_blocking=False):
        assert non_blocking
        plain = self.as_subclass(torch.Tensor)
        LateEvent.arrivals.append(lambda: plain.copy_(source))
        return self


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 50])
def test_copies_of_a_gpu_go_through_two_small_pieces(size):
    sizes = []

    def empty(num_bytes):
        sizes.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8).as_subclass(LatePiece)

    pieces = PinnedPieces(8, empty=empty, event=LateEvent)
    for _ in range(2):
        source = torch.randint(255, (size,), dtype=torch.uint8)
        target = torch.zeros_like(source)
        pieces.copy(source, target)
        assert torch.equal(target, source)
    assert sizes == [8, 8]


def test_a_copy_has_the_bytes_of_the_state_in_its_file(tmp_path):
    betas, weight = (0.5, 0.25), torch.arange(6.0)
    groups = [{"betas": betas, "params": [1, 2]}, {"betas": betas, "params": [3]}]
    state = {"groups": groups, "again": groups[0], "weight": weight, "first": weight[:2]}
    records = [
        write_state(each, tmp_path / "file.pt") for each in (state, HostCopies().copy(state))
    ]
    assert records[0] == records[1]


def test_memory_of_copies_is_used_again(tmp_path):
    copies = HostCopies()
    first = copies.copy(torch.arange(1000.0))
    second = copies.copy(torch.arange(1000.0))
    assert first.data_ptr() != second.data_ptr()
    copies.begin()
    third = copies.copy(torch.arange(1000.0) + 1)
    assert third.data_ptr() in (first.data_ptr(), second.data_ptr())
    assert torch.equal(third, torch.arange(1000.0) + 1)


def test_a_full_disk_is_an_error_with_the_file_name(tmp_path):
    (tmp_path / "state.pt").symlink_to("/dev/full")
    with problem("state.pt: No space left", CheckpointError):
        write_state(a_state(), tmp_path / "state.pt")
    with problem("/state.pt: No space left", CheckpointError):
        write_states([a_state(), a_state()], tmp_path / "state.pt")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_disk_that_fills_up_within_a_tensor_is_an_error(small_disk):
    write_state(torch.zeros(100_000), small_disk / "fits.pt")
    with problem("state.pt: No space left", CheckpointError):
        write_state(torch.zeros(1_000_000), small_disk / "state.pt")
    assert os.stat(small_disk / "state.pt").st_size > 0


def test_errors_are_raised_by_the_future(tmp_path):
    writer = StateWriter(SynchronousExecutor())
    writer.write({}, Path("/dev/full"))
    writer.write({}, tmp_path / "state.pt")
    writer.write(lambda: None, tmp_path / "function.pt")
    full, whole, function = writer.files
    assert isinstance(full.exception(), CheckpointError)
    assert whole.result().name == "state.pt"
    assert "pickle" in str(function.exception())
