"""Ranks on which something fails while a checkpoint is being written."""

import math
import os
import time
from typing import Any

WRITES_S = 0.3


def slow_writes() -> None:
    """Have each file take a while; the next step fails meanwhile."""
    from megatron.checkpointing import writer

    usual = writer.write_state

    def slow(*words: Any) -> Any:
        time.sleep(WRITES_S)
        return usual(*words)

    writer.write_state = slow


def waits(silence_s: float) -> None:
    """Wait only so long for what another rank does not write."""
    from megatron.training.checkpoints import emergency_save as rescue

    defaults = rescue.finish_alone.__kwdefaults__
    assert defaults
    defaults["silence_s"] = silence_s


def without_patience(slow: int, rank: int) -> None:
    """Do not wait long for what a killed rank has not written; one rank's files take a while."""
    from forked import without_head_start

    without_head_start(rank)
    waits(0.3)
    if rank == slow:
        slow_writes()


def fails_in_step(failing: str, struck: int, iteration: int, rank: int) -> None:
    """Make the loss NaN on all ranks, or reading data fail on one, in that step."""
    from forked import without_head_start

    from megatron.common.errors import DataError
    from megatron.training.loop import loop
    from megatron.training.loop.batch_stream import Stream

    without_head_start(rank)
    # A rank that fails alone waits for rank 0, which does not know, but none gives up too early.
    waits(4)
    slow_writes()
    take_step, read, steps = loop.take_step, Stream.__next__, []

    def step(engine: Any, batches: Any, schedule: Any, state: Any) -> Any:
        from dataclasses import replace

        steps.append(state.iteration + 1)
        taken = take_step(engine, batches, schedule, state)
        is_struck = failing == "loss" and steps[-1] == iteration
        return replace(taken, loss=math.nan) if is_struck else taken

    def read_or_fail(stream: Stream) -> Any:
        if failing == "data" and rank == struck and steps[-1] == iteration:
            raise DataError("no such sample")
        return read(stream)

    loop.take_step, Stream.__next__ = step, read_or_fail


def has_no_finite_loss_from(first: int, number: int | None, rank: int) -> None:
    """Have the loss be NaN from step `first` on; this process gets signal `number` a step later."""
    from dataclasses import replace

    from megatron.training.loop import loop

    take_step = loop.take_step

    def step(engine: Any, batches: Any, schedule: Any, state: Any) -> Any:
        taken = take_step(engine, batches, schedule, state)
        if number and state.iteration == first:
            os.kill(os.getpid(), number)
        return replace(taken, loss=math.nan) if state.iteration + 1 >= first else taken

    loop.take_step = step


def cut_while_read(path: str, rank: int) -> None:
    """Have the token file `path` be cut before rank 1 reads from it for the tenth time."""
    from forked import without_head_start

    without_head_start(rank)
    usual, reads = os.pread, []

    def read(descriptor: int, count: int, offset: int) -> bytes:
        reads.append(offset)
        if rank == 1 and len(reads) == 10:
            os.truncate(path, 2)
        return usual(descriptor, count, offset)

    os.pread = read
