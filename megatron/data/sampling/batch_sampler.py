"""Batch sampler: the samples this rank reads next, from the number of consumed samples."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError

Sample = Mapping[str, NDArray]
"""Arrays by the names of their fields; `tokens` is one of them."""


class SampleSource(Protocol):
    """Anything that holds a known number of samples of the same fields and shapes."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Sample: ...


def micro_batches(
    dataset: SampleSource,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_rank: int,
    data_size: int,
) -> Iterator[dict[str, NDArray]]:
    """Yield this rank's micro batches, in the order of the dataset, from `consumed_samples` on.

    Each turn takes `micro_batch_size * data_size` samples, and rank r the r-th part of them,
    so the position is one number that holds for every layout.

    Args:
        consumed_samples: by all ranks together, since the start of training.

    Raises:
        DataError: the next turn needs more samples than are left.

    Shapes: each field of a sample with a dimension of b in front.
    """
    if not 0 <= data_rank < data_size:
        raise ValueError(f"data_rank {data_rank} of data_size {data_size}")
    turn_size = micro_batch_size * data_size
    position = consumed_samples
    while position + turn_size <= len(dataset):
        first = position + data_rank * micro_batch_size
        samples = [dataset[i] for i in range(first, first + micro_batch_size)]
        yield {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        position += turn_size
    raise DataError(
        f"out of data: the dataset has {len(dataset)} samples, {position} are consumed, and the "
        f"next micro batches need {turn_size} (--micro-batch-size {micro_batch_size} * "
        f"{data_size} replicas); train for fewer --train-iters or --train-samples, or on more text"
    )
