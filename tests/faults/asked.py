"""Signals that a rank gets at a chosen moment of its run."""

import os
import time
from typing import Any

MOMENTS = {
    "loading": ("megatron.engine.engine:Engine", "load"),
    "forward": ("megatron.model.layers:SequentialModel", "forward"),
    "data": ("megatron.training.stream:Stream", "__next__"),
    "evaluation": ("megatron.engine.engine:PlainEngine", "evaluate"),
    "save": ("megatron.checkpoint.writer", "write_state"),
}
"""What is done at each: a class or a module, and its function."""


def signal_in(moment: str, struck: int, number: int, rank: int) -> None:
    """Have the rank `struck` get the signal `number` when it is first at `moment`, and be slow."""
    from pkgutil import resolve_name

    if rank != struck:
        return
    where, name = MOMENTS[moment]
    owner = resolve_name(where)
    usual, calls = getattr(owner, name), []

    def struck_first(*words: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            os.kill(os.getpid(), number)
            time.sleep(0.2)
        return usual(*words, **named)

    setattr(owner, name, struck_first)
