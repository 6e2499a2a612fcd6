"""Signals that a rank gets at a chosen moment of its run."""

import os
import time
from signal import SIGTERM
from threading import Event
from typing import Any

MOMENTS = {
    "loading": ("megatron.engine.engine:Engine", "load"),
    "forward": ("megatron.model.layers.layer_list:SequentialModel", "forward"),
    "data": ("megatron.training.loop.batch_stream:Stream", "__next__"),
    "evaluation": ("megatron.engine.data_parallel_engine:DataParallelEngine", "evaluate"),
    "save": ("megatron.checkpointing.writer", "write_state"),
}
"""What is done at each: a class or a module, and its function."""


STORM = 200
"""How often each rank gets SIGTERM once it has saved and leaves: launchers are not patient."""


def signal_in(moment: str, struck: int, number: int, rank: int) -> None:
    """Have the rank `struck` get the signal `number` when it is first at `moment`, and be slow."""
    from pkgutil import resolve_name

    from megatron.training.checkpoints.save import Checkpoints

    _storm_at_the_end()
    if rank != struck:
        return
    where, name = MOMENTS[moment]
    owner = resolve_name(where)
    usual, save, is_struck = getattr(owner, name), Checkpoints.save, Event()

    def struck_first(*words: Any, **named: Any) -> Any:
        if not is_struck.is_set():
            os.kill(os.getpid(), number)
            is_struck.set()
            time.sleep(0.2)
        return usual(*words, **named)

    def wait_and_save(*words: Any) -> None:
        save(*words)
        # The thread that writes in the background may begin after the next step.
        assert is_struck.wait(30)

    setattr(owner, name, struck_first)
    if moment == "save":
        Checkpoints.save = wait_and_save


def _storm_at_the_end() -> None:
    import torch.distributed as dist

    from megatron.training.loop.journal import Journal

    leave, write = dist.destroy_process_group, Journal.write

    def storm() -> None:
        for _ in range(STORM):
            os.kill(os.getpid(), SIGTERM)

    def leave_in_a_storm() -> None:
        storm()
        leave()

    def write_in_a_storm(journal: Journal, event: str, record: dict[str, Any]) -> None:
        if event == "end":
            storm()
        write(journal, event, record)

    dist.destroy_process_group, Journal.write = leave_in_a_storm, write_in_a_storm
