"""Common code of benchmarks of single steps: batches without data, and two clocks."""

import time
from collections.abc import Callable, Iterator

import torch

from megatron.config.plan.plan import Plan
from megatron.objectives.gpt import gpt_batch
from megatron.tensor_parallel.broadcast import Batch


def random_batches(decided: Plan, batch: int) -> Iterator[Batch]:
    """Yield micro-batches of random tokens without end."""
    generator = torch.Generator().manual_seed(1)
    shape = (batch, decided.model.seq_length + 1)
    while True:
        yield gpt_batch(
            torch.randint(decided.model.vocabulary.vocab_size, shape, generator=generator)
        )


def timed(step: Callable[[], object], times: int) -> tuple[float, float]:
    """Return the CPU and wall seconds of so many steps."""
    cpu_at, wall_at = time.process_time(), time.perf_counter()
    for _ in range(times):
        step()
    return time.process_time() - cpu_at, time.perf_counter() - wall_at
