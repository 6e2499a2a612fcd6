"""The order in which ranks read samples."""

import random
from itertools import islice

import numpy as np
import pytest
from problems import problem

from megatron.common.errors import DataError
from megatron.data.sampling.batch_sampler import micro_batches


class Numbered:
    """Sample i is the tokens i, i, i."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return {"tokens": np.full(3, i, np.int64)}


def ids(batches):
    return [batch["tokens"][:, 0].tolist() for batch in batches]


def read(length, count, **where):
    return ids(islice(micro_batches(Numbered(length), **where), count))


def test_each_rank_reads_its_part_of_every_turn():
    for rank, expected in enumerate([[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]):
        assert expected == read(
            12, 2, consumed_samples=0, micro_batch_size=2, data_rank=rank, data_size=3
        )


def test_a_micro_batch_is_int64_of_samples_by_tokens():
    batch = next(
        micro_batches(Numbered(4), consumed_samples=0, micro_batch_size=2, data_rank=0, data_size=1)
    )
    assert [*batch] == ["tokens"]
    assert (batch["tokens"].shape, batch["tokens"].dtype) == ((2, 3), np.int64)


@pytest.mark.parametrize(("micro_batch_size", "data_size"), [(1, 1), (2, 2), (4, 1), (1, 4)])
def test_reading_continues_at_the_consumed_samples_in_any_layout(micro_batch_size, data_size):
    turns = 16 // (micro_batch_size * data_size)
    ranks = [
        read(
            24,
            turns,
            consumed_samples=8,
            micro_batch_size=micro_batch_size,
            data_rank=rank,
            data_size=data_size,
        )
        for rank in range(data_size)
    ]
    in_turns = [i for turn in zip(*ranks, strict=True) for batch in turn for i in batch]
    assert in_turns == list(range(8, 24))


def published_batches(total, consumed, micro_batch_size, rank, replicas):
    """Walk the samples as Megatron-LM's pretraining sampler does, without its incomplete end."""
    batch = []
    for sample in range(consumed, total):
        batch.append(sample)
        if len(batch) == micro_batch_size * replicas:
            yield batch[rank * micro_batch_size : (rank + 1) * micro_batch_size]
            batch = []


def test_ranks_read_the_samples_of_the_published_sampler():
    draw = random.Random(3)
    incomplete = 0
    for _ in range(500):
        replicas, micro_batch_size = draw.randint(1, 8), draw.randint(1, 6)
        total, rank = draw.randint(1, 200), draw.randrange(replicas)
        consumed = draw.randint(0, total)
        expected = [*published_batches(total, consumed, micro_batch_size, rank, replicas)]
        found = micro_batches(
            Numbered(total),
            consumed_samples=consumed,
            micro_batch_size=micro_batch_size,
            data_rank=rank,
            data_size=replicas,
        )
        assert ids(islice(found, len(expected))) == expected
        with problem("out of data … --train-iters", DataError):
            next(found)
        incomplete += (total - consumed) % (micro_batch_size * replicas) > 0
    assert incomplete > 100


def test_running_out_is_an_error_with_the_numbers():
    batches = micro_batches(
        Numbered(11), consumed_samples=4, micro_batch_size=2, data_rank=1, data_size=2
    )
    assert ids([next(batches)]) == [[6, 7]]
    with problem("11 samples … 8 … 4 … --micro-batch-size 2 * 2 … --train-iters", DataError):
        next(batches)


def test_a_rank_outside_the_grid_is_refused():
    with problem("data_rank 2 of data_size 2", ValueError):
        next(
            micro_batches(
                Numbered(9), consumed_samples=0, micro_batch_size=1, data_rank=2, data_size=2
            )
        )
