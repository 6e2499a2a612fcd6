"""Reading batches: data loader of a replica, from a number of consumed samples on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.config.optimization.batch_size import BatchPlan
from megatron.data.sampling.batch_sampler import Sample, micro_batches
from megatron.data.sampling.provenance import TracedSource, describe
from megatron.objectives.objective import Collate
from megatron.tensor_parallel.broadcast import (
    Batch,
    Fields,
    broadcast_batch,
    pack_batch,
    sequence_shard,
)
from megatron.tensor_parallel.process_groups import Groups
from megatron.training.loop.read_ahead import Copy, DeviceCopies, ReadAhead


def read_batches(
    dataset: TracedSource,
    *,
    collate: Collate,
    fields: Fields,
    consumed_samples: int,
    batch: BatchPlan,
    letters: Mapping[str, int],
    vocab_size: int,
    groups: Groups,
    device: torch.device,
    token_fields: Sequence[str] = ("tokens",),
    length: Callable[[], int] | None = None,
) -> Iterator[Batch]:
    """Yield this replica's micro-batches from `consumed_samples` on, prefetching the next two.

    Tensor rank 0 reads and collates, in a thread; the ranks that share its layers receive. Ranks
    that divide the sequence each take their part of it. Where lengths change between steps
    (curriculum), the thread reads samples, and they are cut and collated when they are taken.

    Args:
        collate: makes the batch of samples.
        fields: what a batch holds.
        letters: sizes of the letters in the shapes of `fields`, without b; s is the length of
            samples.
        token_fields: the fields of a sample that hold tokens, which must be in the vocabulary.
        length: returns how many positions of the samples of the next batch are taken; all if None.

    Raises:
        DataError: the samples have run out, or a token is not in the vocabulary. Only tensor rank 0
            raises it for a token.

    Communication: one broadcast of a batch over the tensor group per micro-batch.
    """
    copies = DeviceCopies(device)

    def sizes(s: int) -> dict[str, int]:
        return {**letters, "b": batch.micro_batch_size, "s": s, "S": s}

    def collated(samples: Sample, s: int) -> Copy:
        batch = collate(**{name: torch.from_numpy(v) for name, v in samples.items()})
        return copies.start(pack_batch(batch, fields, sizes(s), pinned=copies.pins))

    def prefetched() -> Iterator[Any]:
        rows = _checked_rows(dataset, token_fields, vocab_size, consumed_samples, batch, groups)
        return rows if length else (collated(samples, letters["s"]) for samples in rows)

    ahead = ReadAhead(prefetched(), begin=copies.begin) if groups.tensor_rank == 0 else None
    try:
        for read in ahead or repeat(None):
            s = length() if length else letters["s"]
            if read is not None and length:
                read = collated(_shorten(read, s), s)
            packed = None if read is None else copies.finish(read)
            full = broadcast_batch(packed, fields, sizes(s), groups, device)
            yield sequence_shard(full, fields, groups)
    finally:
        if ahead:
            ahead.close()


def _shorten(samples: Sample, s: int) -> Sample:
    """Return the first `s` positions of samples, with the token after them: the last label."""
    return {name: values[..., : s + 1] for name, values in samples.items()}


def _checked_rows(
    dataset: TracedSource,
    token_fields: Sequence[str],
    vocab_size: int,
    consumed_samples: int,
    batch: BatchPlan,
    groups: Groups,
) -> Iterator[Sample]:
    """Yield this replica's samples of each micro-batch, their tokens within the vocabulary."""
    rows = micro_batches(
        dataset,
        consumed_samples=consumed_samples,
        micro_batch_size=batch.micro_batch_size,
        data_rank=groups.data_rank,
        data_size=groups.topology.data,
    )
    first_sample = consumed_samples + groups.data_rank * batch.micro_batch_size
    for first, samples in zip(
        count(first_sample, batch.micro_batch_size * groups.topology.data), rows, strict=False
    ):
        for name in token_fields:
            _require_vocabulary(samples[name], vocab_size, dataset, first)
        yield samples


def _require_vocabulary(
    tokens: NDArray[np.int64], vocab_size: int, dataset: TracedSource, first: int
) -> None:
    """Refuse token ids outside the vocabulary, on the CPU.

    A GPU would stop with a message that names nothing, and tensor-parallel ranks would take a
    negative id for one of another rank's rows.

    Args:
        first: number of the first row's sample in `dataset`.

    Raises:
        DataError: names the token, and the sample with its file and documents.
    """
    # As unsigned numbers the negative ones are too large as well.
    wrong = tokens.view(np.uint64) >= vocab_size
    if not wrong.any():
        return
    place = tuple(np.argwhere(wrong)[0])
    where = describe(dataset.origin(first + int(place[0])))
    raise DataError(
        f"token {tokens[place]} is not in the vocabulary of {vocab_size} tokens (0 to "
        f"{vocab_size - 1}): {where}; the file is damaged, or was made with another tokenizer than "
        "the one of this run"
    )
