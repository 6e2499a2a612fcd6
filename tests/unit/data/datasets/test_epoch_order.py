"""Shuffled epochs are those of torch's distributed sampler, and each sample is evaluated once."""

import numpy as np
import pytest
import torch
from problems import problem
from torch.utils.data import DistributedSampler

from megatron.common.errors import WrongDataError
from megatron.data.datasets.epoch_order import EachOnce, ShuffledEpochs
from megatron.data.sampling.batch_sampler import micro_batches
from megatron.data.sampling.epoch_plan import EpochPlan


class Numbers:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return {"number": np.array(i)}


def epochs_of(samples, *, micro=1, replicas=1, accumulated=1, keeps_last=True):
    plan = EpochPlan(
        samples=samples,
        micro_batch_size=micro,
        replicas=replicas,
        global_batch_size=micro * replicas * accumulated,
        keeps_last=keeps_last,
    )
    return ShuffledEpochs(Numbers(samples), plan, seed=1234)


def read(source, *, micro, replicas, batches, consumed=0):
    """Return for each replica its samples and their weights."""
    found = []
    for rank in range(replicas):
        rows = micro_batches(
            source,
            consumed_samples=consumed,
            micro_batch_size=micro,
            data_rank=rank,
            data_size=replicas,
        )
        mine = [next(rows) for _ in range(batches)]
        numbers, weights = (
            np.concatenate([batch[name] for batch in mine]).tolist() for name in ("index", "weight")
        )
        found.append([(n, w) for n, w in zip(numbers, weights, strict=True) if w])
    return found


def numbers_of(found):
    return [[number for number, _ in of_rank] for of_rank in found]


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        (1, [[5, 4, 8, 2, 6, 9, 1, 7, 0, 3]]),
        (2, [[5, 8, 6, 1, 0], [4, 2, 9, 7, 3]]),
        (3, [[5, 2, 1, 3], [4, 6, 7, 5], [8, 9, 0, 4]]),
    ],
)
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_the_first_epoch_of_10_samples_has_this_order(replicas, expected, micro):
    source = epochs_of(10, micro=micro, replicas=replicas)
    found = read(source, micro=micro, replicas=replicas, batches=source.plan.steps)
    assert numbers_of(found) == expected


def test_the_second_epoch_has_another_order_and_can_be_begun_anywhere():
    source = epochs_of(10)
    second = [3, 2, 4, 9, 0, 7, 1, 5, 6, 8]
    assert numbers_of(read(source, micro=1, replicas=1, batches=10, consumed=10)) == [second]
    assert numbers_of(read(source, micro=1, replicas=1, batches=3, consumed=17)) == [second[7:]]


@pytest.mark.parametrize(("samples", "replicas", "micro"), [(23, 4, 3), (2, 5, 1), (12, 3, 4)])
def test_every_epoch_is_that_of_the_distributed_sampler(samples, replicas, micro):
    source = epochs_of(samples, micro=micro, replicas=replicas)
    steps = source.plan.steps
    for epoch in range(3):
        consumed = epoch * steps * micro * replicas
        found = read(source, micro=micro, replicas=replicas, batches=steps, consumed=consumed)
        for rank, numbers in enumerate(numbers_of(found)):
            sampler = DistributedSampler(
                range(samples), num_replicas=replicas, rank=rank, shuffle=True, seed=0
            )
            sampler.set_epoch(1234 + epoch)
            assert numbers == [*sampler]


def test_a_smaller_last_batch_is_left_out_or_has_the_mean_of_its_own():
    assert epochs_of(10, micro=2, replicas=2, keeps_last=False).plan.steps == 2
    source = epochs_of(10, micro=2, replicas=2)
    assert source.plan.steps == 3
    found = read(source, micro=2, replicas=2, batches=3)
    assert [[weight for _, weight in each] for each in found] == [[1, 1, 1, 1, 2]] * 2
    # The sum over a batch is its size, whatever is accumulated.
    source = epochs_of(10, micro=2, replicas=1, accumulated=4)
    ((*_, last),) = read(source, micro=2, replicas=1, batches=8)
    assert last[1] * 2 == 8


def test_an_epoch_without_a_batch_is_refused():
    with problem("3 samples … 4 … --global-batch-size … --keep-last-batch", WrongDataError):
        epochs_of(3, micro=4, keeps_last=False)


@pytest.mark.parametrize(("samples", "replicas", "micro"), [(7, 2, 2), (8, 2, 2), (1, 3, 2)])
def test_each_sample_is_evaluated_once(samples, replicas, micro):
    source = EachOnce(Numbers(samples), turn=micro * replicas)
    batches = len(source) // (micro * replicas)
    found = read(source, micro=micro, replicas=replicas, batches=batches)
    assert sorted(sum(numbers_of(found), [])) == [*range(samples)]


def test_the_permutation_does_not_depend_on_the_default_generator():
    state = torch.get_rng_state()
    epochs_of(10)[3]
    assert torch.equal(torch.get_rng_state(), state)
