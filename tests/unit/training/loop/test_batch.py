"""From token rows to what the engine takes."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from problems import problem
from tiny import tiny_plan, tiny_spec
from torch import Tensor

from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import DataError
from megatron.data.sampling.provenance import Origin, Piece
from megatron.objectives.gpt import CAUSAL_FIELDS, gpt_batch
from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.topology import Topology
from megatron.training.loop.batch import read_batches
from megatron.training.loop.batch_stream import Stream, length_of_next_step
from megatron.training.loop.read_ahead import DeviceCopies


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
        vocab_size=tiny_spec().vocabulary.vocab_size,
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
    where = f"corpus sample {sample} | documents {3 * sample}[0:4] {3 * sample + 1}[0:3]"
    with problem(f"token {token} … 11 tokens … {where}", DataError):
        [*zip(range(4), batches(group, dataset), strict=False)]


def test_the_end_of_the_samples_is_told(group):
    with problem("8 samples … --micro-batch-size 2 … --train-iters", DataError):
        [*batches(group, Counting(11))]


class Watched(Counting):
    """Notes which samples are read, by which thread."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.reads = []

    def __getitem__(self, i):
        self.reads.append((i, threading.current_thread().name))
        return super().__getitem__(i)


def settled(dataset):
    """Return the samples that were read when the thread has nothing left to do."""
    while True:
        seen = len(dataset.reads)
        time.sleep(0.05)
        if seen and len(dataset.reads) == seen:
            return [number for number, _ in dataset.reads]


@pytest.mark.parametrize("curriculum", [None, lambda: 4])
def test_two_micro_batches_are_read_ahead_in_a_thread(group, curriculum):
    dataset = Watched(11, length=40)
    stream = batches(group, dataset, consumed_samples=4, length=curriculum)
    assert dataset.reads == []
    next(stream)
    assert settled(dataset) == [*range(4, 10)]  # the first one taken, and two of two samples
    next(stream)
    assert settled(dataset) == [*range(4, 12)]
    assert {name for _, name in dataset.reads} == {"read-ahead_0"}
    stream.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("read-ahead")]
    assert settled(dataset) == [*range(4, 12)]


def test_what_is_read_ahead_and_not_taken_does_no_harm(group):
    damaged = Counting(12)  # token 11 is in sample 5
    stream = batches(group, damaged)
    assert [next(stream)["tokens"][:, 0].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    stream.close()
    stream = batches(group, damaged)
    next(stream), next(stream)
    with problem("token 11", DataError):
        next(stream)


def test_a_position_is_that_of_the_samples_taken(group):
    dataset = Counting(11, length=40)
    stream = Stream(lambda samples: batches(group, dataset, samples), 6)
    assert next(stream)["tokens"][:, 0].tolist() == [6, 7]
    stream.seek(8)
    assert [next(stream)["tokens"][0, 0].item() for _ in range(2)] == [8, 10]
    stream.seek(2)
    assert next(stream)["tokens"][0, 0].item() == 2
    stream.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("read-ahead")]


class Gpu:
    """Stands for torch.cuda: notes the order of what is called."""

    def __init__(self, calls):
        self.calls = calls

    def set_device(self, device):
        self.calls.append("set_device")

    @contextmanager
    def stream(self, stream):
        self.calls.append("stream of copies")
        yield
        self.calls.append("end")

    def Stream(self, device):
        return SimpleNamespace(record_event=lambda: self.calls.append("record") or "event")

    def current_stream(self, device):
        return SimpleNamespace(wait_event=lambda event: self.calls.append(f"wait for {event}"))


def test_copies_to_a_gpu_are_not_waited_for(monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "cuda", Gpu(calls))
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: calls.append("keep"))

    def to(tensor, device, *, non_blocking):
        assert non_blocking
        calls.append(f"copy to {device}")
        return tensor

    monkeypatch.setattr(Tensor, "to", to)
    copies = DeviceCopies(torch.device("cuda", 1))
    assert copies.pins
    copies.begin()
    copy = copies.start(torch.arange(3))
    assert copies.finish(copy).tolist() == [0, 1, 2]
    started = ["set_device", "stream of copies", "copy to cuda:1", "record", "end"]
    assert calls == [*started, "wait for event", "keep"]


def test_a_batch_is_cut_to_the_length_of_its_step(group):
    state = TrainState(iteration=2)
    stream = batches(group, Counting(11), length=length_of_next_step(lambda i: i, state))
    for length, first in ((3, 0), (5, 2)):
        state.iteration = length - 1
        batch = next(stream)
        assert batch["tokens"][0].tolist() == [*range(first, first + length)]
        assert batch["labels"][0].tolist() == [*range(first + 1, first + length + 1)]
        assert {tensor.shape for tensor in batch.values()} == {(2, length)}
