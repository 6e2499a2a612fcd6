"""What stands in for what a run must not do inside a process that others follow in, or cannot here.

Process groups outlive it, nothing is compiled, and a plan for GPUs runs on the CPU.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import cpu_adam

from megatron.training import pretrain


@contextmanager
def stood_in(*, as_gpu: bool) -> Iterator[None]:
    """Let process groups outlive the run, and a plan for GPUs run on the CPU."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "destroy_process_group", lambda: None))
        stack.enter_context(patch.object(cpu_adam, "CPUAdamBuilder", _NotCompiled))
        # Three thousand times a disk would be waited for, and no run outlives this machine.
        stack.enter_context(patch.object(os, "fsync", lambda descriptor: None))
        build_requests = pretrain.build_requests

        def hours_ago(*words: Any, started_at: float, **named: Any) -> Any:
            return build_requests(*words, started_at=started_at - 7200, **named)

        stack.enter_context(patch.object(pretrain, "build_requests", hours_ago))
        if as_gpu:
            supports: Callable[[], bool] = lambda: True  # noqa: E731
            stack.enter_context(patch.object(get_accelerator(), "is_fp16_supported", supports))
            stack.enter_context(patch.object(pretrain, "validate", _for_gpu(pretrain.validate)))
        yield


class _NotCompiled:
    """In place of DeepSpeed's operator of Adam for CPUs, which a compiler needs a minute for."""

    def load(self) -> Any:
        """Return the operator."""
        return self

    def create_adam(self, *words: Any) -> None:
        """Begin."""

    def destroy_adam(self, *words: Any) -> None:
        """End."""

    def adam_update(self, number: int, step: int, lr: float, *words: Any) -> None:
        """Take a plain step along the gradient."""
        weight, gradient = words[5:7]
        weight.sub_(gradient, alpha=lr)


def _for_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*words: Any, **named: Any) -> Any:
        return partial(function, *words, **named)(device="cuda")

    return called
