"""From token rows to what the engine takes."""

import re

import numpy as np
import pytest
import torch
from tiny import tiny_plan, tiny_spec

from megatron.common.errors import DataError
from megatron.data.sampling.provenance import Origin, Piece
from megatron.objectives.gpt import CAUSAL_FIELDS, gpt_batch
from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.topology import Topology
from megatron.training.loop.batch import read_batches
from megatron.training.loop.batch_stream import length_of_next_step
from megatron.training.loop.state import TrainState


class Counting:
    """Sample i is the tokens i, i + 1, …, modulo `vocab_size`, plus `least`."""

    def __init__(self, vocab_size, length=8, least=0):
        self.vocab_size, self.length, self.least = vocab_size, length, least

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return {"tokens": (i + np.arange(7)) % self.vocab_size + self.least}

    def origin(self, i):
        return Origin("corpus", i, (Piece(3 * i, 0, 4), Piece(3 * i + 1, 0, 3)))


def batches(group, dataset, consumed_samples=0, length=None):
    alone = Groups(
        topology=Topology(pipeline=1, data=1, tensor=1),
        rank=0,
        tensor=group,
        sequence=group,
        data=group,
        data_and_sequence=group,
        model=group,
    )
    return read_batches(
        dataset,
        collate=gpt_batch,
        fields=CAUSAL_FIELDS,
        consumed_samples=consumed_samples,
        batch=tiny_plan().batch,
        letters={"s": 6},
        vocab_size=tiny_spec().vocab_size,
        groups=alone,
        device=torch.device("cpu"),
        length=length,
    )


def test_labels_are_the_next_tokens():
    batch = gpt_batch(torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]))
    tokens, positions, labels, loss_mask = (batch[name] for name in CAUSAL_FIELDS)
    assert tokens.tolist() == [[3, 1, 4, 1], [9, 2, 6, 5]]
    assert labels.tolist() == [[1, 4, 1, 5], [2, 6, 5, 3]]
    assert positions.tolist() == [[0, 1, 2, 3]] * 2
    assert loss_mask.tolist() == [[1.0] * 4] * 2
    assert {t.dtype for t in (tokens, positions, labels)} == {torch.int64}
    assert loss_mask.dtype == torch.float32
    assert all(t.is_contiguous() for t in (tokens, positions, labels, loss_mask))


def test_batches_go_on_at_the_consumed_samples(group):
    stream = batches(group, Counting(11), consumed_samples=4)
    assert [next(stream)["tokens"][:, 0].tolist() for _ in range(2)] == [[4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("dataset", "token", "sample"), [(Counting(12), 11, 5), (Counting(9, least=-1), -1, 0)]
)
def test_a_token_outside_the_vocabulary_is_refused_with_its_place(group, dataset, token, sample):
    where = f"corpus sample {sample} | documents {3 * sample}[0:4] {3 * sample + 1}[0:3]; the file"
    messages = f"token {token} is not in the vocabulary of 11 tokens (0 to 10): {where}"
    with pytest.raises(DataError, match=re.escape(messages)):
        [*zip(range(4), batches(group, dataset), strict=False)]


def test_the_end_of_the_samples_is_told(group):
    with pytest.raises(DataError, match="has 8 samples, 8 are consumed"):
        [*batches(group, Counting(11))]


def test_a_batch_is_cut_to_the_length_of_its_step(group):
    state = TrainState(iteration=2)
    stream = batches(group, Counting(11), length=length_of_next_step(lambda i: i, state))
    for length, first in ((3, 0), (5, 2)):
        state.iteration = length - 1
        batch = next(stream)
        assert batch["tokens"][0].tolist() == [*range(first, first + length)]
        assert batch["labels"][0].tolist() == [*range(first + 1, first + length + 1)]
        assert {tensor.shape for tensor in batch.values()} == {(2, length)}
