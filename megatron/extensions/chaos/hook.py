"""Fault injection (--chaos), to test that runs recover.

Faults are a pure function of the seed, the attempt, the iteration and the rank, so that they are
reproducible, and rank 0 can report the other ranks' faults.
"""

import errno
import hashlib
import io
import logging
import os
import signal
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from megatron.checkpointing.manifest import damage, iteration_of, published_tags, read_manifest
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import CheckpointError
from megatron.common.registry import FLAG_HOOKS
from megatron.engine.engine import Engine
from megatron.extensions.chaos.flags import ChaosPlan, plan_chaos
from megatron.training.loop.collectives import from_rank_0
from megatron.training.loop.journal import Journal
from megatron.training.loop.loop import Hook, StepResult

log = logging.getLogger(__name__)

CHAOS = "chaos"
_BEFORE_A_STEP = ("kill", "stall")
_IN_A_SAVE = ("kill_save", "slow_disk", "full_disk")
_ON_DISK = ("flip", "truncate")
_NUM_FORETOLD, _LOOKS_AHEAD = 5, 1000


@FLAG_HOOKS.register("chaos")
def build_chaos(run: Any) -> Hook:
    """Return the hook that injects the faults of a `megatron.training.run.Run`, after a warning.

    Communication: every rank must call this, in step.
    """
    plan = plan_chaos(run.config)
    if not plan.is_on:
        return Hook()
    last, directory = run.plan.training.train_iters, Path(run.plan.checkpoint.save)
    chaos = Chaos(plan, directory, last=last, journal=run.journal)
    chaos.warn(run.state.iteration)
    return chaos


def draw(plan: ChaosPlan, what: str, *, attempt: int, iteration: int, rank: int = 0) -> float:
    """Return a number from 0 up to 1 that only these words decide."""
    words = f"{plan.seed} {what} {attempt} {iteration} {rank}"
    number = int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big")
    return number / 2**64


def strikes(plan: ChaosPlan, fault: str, *, attempt: int, iteration: int, rank: int = 0) -> bool:
    """Whether `fault` strikes `rank` at `iteration` of an attempt of the run."""
    chance: float = getattr(plan, fault)
    return draw(plan, fault, attempt=attempt, iteration=iteration, rank=rank) < chance


class Chaos(Hook):
    """Injects the faults of the plan, and logs each before it happens: rank 0 for all ranks.

    Args:
        directory: of the checkpoints.
        last: the iteration that the run ends at; its checkpoint is left as it is.
        journal: rank 0's, before this attempt starts.

    Communication: every rank must build one, in step.
    """

    def __init__(
        self, plan: ChaosPlan, directory: Path, *, last: int, journal: Journal | None
    ) -> None:
        self._plan, self._directory, self._last = plan, directory, last
        self._journal = journal
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._attempt = from_rank_0(lambda: journal.attempt + 1 if journal else 0)
        self._seen = set(published_tags(directory))

    def warn(self, iteration: int) -> None:
        """Warn at the start, after `iteration`, of the faults to come, and of the first of them."""
        log.warning(
            "--chaos: THIS RUN KILLS, STALLS AND DAMAGES ITSELF to prove that it survives (seed "
            "%d, attempt %d); its checkpoints in %s are at risk",
            *(self._plan.seed, self._attempt, self._directory),
        )
        ahead = range(iteration + 1, min(self._last, iteration + _LOOKS_AHEAD) + 1)
        faults = (
            f"{fault} at iteration {number} on {where}"
            for number in ahead
            for fault, where in self._due(_BEFORE_A_STEP, number)
        )
        first = list(islice(faults, _NUM_FORETOLD))
        log.warning("--chaos: before steps come %s", "; ".join(first) or "no faults in sight")

    def before_step(self, state: TrainState) -> None:
        """Hang or die, if that fault is due."""
        iteration = state.iteration + 1
        if iteration > self._last:
            return
        self._announce(_BEFORE_A_STEP, iteration)
        if self._strikes("stall", iteration):
            time.sleep(self._plan.stall_s)
        if self._strikes("kill", iteration):
            _die()

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Damage a checkpoint published since the last step, if that fault is due."""
        if self._rank or not (self._plan.flip or self._plan.truncate):
            return
        tags = published_tags(self._directory)
        new, self._seen = set(tags[:1]) - self._seen, set(tags)
        for tag in new:
            iteration = iteration_of(tag) or 0
            due = [fault for fault in _ON_DISK if self._strikes(fault, iteration)]
            # An undamaged one has to be left, and the run's last state is never damaged.
            if due and iteration < self._last and self._is_any_whole(tags[1:]):
                self._damage(due[0], tag, iteration)

    def for_saves(self, engine: Engine) -> Engine:
        """Return `engine` for saving to a disk that has faults."""
        return cast(Engine, _OnFaultyDisk(engine, self))

    def faulty(self, file: Path, iteration: int) -> Path:
        """Return `file` as the disk will have it in the save of `iteration`."""
        due = {fault for fault in _IN_A_SAVE if self._strikes(fault, iteration)}
        delay_s = self._plan.slow_disk_s if "slow_disk" in due else 0.0
        return _FaultyFile(file).with_faults(due, delay_s) if due else file

    def announce_save(self, iteration: int) -> None:
        """Log the faults of the save of `iteration`."""
        self._announce(_IN_A_SAVE, iteration)

    def _strikes(self, fault: str, iteration: int) -> bool:
        return strikes(
            self._plan, fault, attempt=self._attempt, iteration=iteration, rank=self._rank
        )

    def _due(self, faults: tuple[str, ...], iteration: int) -> Iterator[tuple[str, str]]:
        """Yield each of `faults` that is due on any rank, with that rank."""
        for fault in faults:
            for rank in range(self._num_ranks if getattr(self._plan, fault) else 0):
                words = {"attempt": self._attempt, "iteration": iteration, "rank": rank}
                if strikes(self._plan, fault, **words):
                    yield fault, f"rank {rank}"

    def _announce(self, faults: tuple[str, ...], iteration: int) -> None:
        if self._rank == 0:
            for fault, where in self._due(faults, iteration):
                self._record(fault, iteration, where)

    def _record(self, fault: str, iteration: int, where: str) -> None:
        log.warning("--chaos: %s at iteration %d: %s", fault, iteration, where)
        if self._journal:
            record = {"iteration": iteration, "attempt": self._attempt, "fault": fault}
            self._journal.write(CHAOS, {**record, "where": where})

    def _damage(self, fault: str, tag: str, iteration: int) -> None:
        """Damage one file of the checkpoint `tag`, without notice before it is read."""
        files = sorted(file for file in (self._directory / tag).iterdir() if file.stat().st_size)
        fraction = draw(self._plan, "place", attempt=self._attempt, iteration=iteration)
        file = files[int(fraction * len(files))]
        size = file.stat().st_size
        self._record(fault, iteration, str(file))
        with file.open("r+b") as stream:
            if fault == "truncate":
                stream.truncate(size // 2)
            else:
                stream.seek(int(fraction * size))
                (byte,) = stream.read(1)
                stream.seek(-1, io.SEEK_CUR)
                stream.write(bytes([byte ^ 1]))

    def _is_any_whole(self, tags: list[str]) -> bool:
        for tag in tags:
            try:
                folder = self._directory / tag
                if not damage(folder, read_manifest(folder).files):
                    return True
            except CheckpointError:
                continue
        return False


class _OnFaultyDisk:
    """An engine whose saves have injected disk faults; all else is the engine's."""

    def __init__(self, engine: Engine, chaos: Chaos) -> None:
        self._engine, self._chaos = engine, chaos

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def save(
        self, directory: Path, tag: str, client_state: dict[str, Any], *, write: Any, **parts: Any
    ) -> None:
        """Save with a `write` whose files are on that disk; see Engine.save."""
        iteration = client_state["iteration"]
        self._chaos.announce_save(iteration)

        def write_faultily(state: Any, file: Path) -> None:
            write(state, self._chaos.faulty(file, iteration))

        self._engine.save(directory, tag, client_state, write=write_faultily, **parts)


class _FaultyFile(type(Path())):  # type: ignore[misc]
    """Path of a file that is written slowly, half, or by a process that dies during the write."""

    def with_faults(self, faults: set[str], delay_s: float) -> "_FaultyFile":
        """Return it with its faults."""
        self.faults, self.delay_s = faults, delay_s
        return self

    def open(self, mode: str = "r", *words: Any, **named: Any) -> Any:
        """Open the file; the faults strike who writes to it."""
        if "w" not in mode:
            return super().open(mode, *words, **named)
        time.sleep(self.delay_s)
        return _FaultyStream(str(self), mode).with_faults(self.faults)


class _FaultyStream(io.FileIO):
    """A file whose first write is truncated and followed by the fault."""

    def with_faults(self, faults: set[str]) -> "_FaultyStream":
        """Return it with its faults."""
        self.faults = faults
        return self

    def write(self, block: Any) -> int:
        """Write `block`, or half of it before the fault."""
        if not self.faults & {"kill_save", "full_disk"}:
            return super().write(block)
        view = memoryview(block).cast("B")
        super().write(view[: len(view) // 2])
        if "kill_save" in self.faults:
            _die()
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (--chaos)")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
