"""Random streams: saved, restored, and independent of each other."""

import random

import numpy as np
import pytest
import torch

from megatron.engine.deepspeed.recompute import restore_streams, start_streams, stream_states


@pytest.fixture
def tracker(alone):
    return start_streams(alone, seed=5, activation_checkpointing={})


def draw(tracker):
    with tracker.fork():
        forked = torch.rand(3).tolist()
    normals = [random.gauss(0, 1), np.random.standard_normal()]  # each keeps a second one back
    return [random.random(), *normals, np.random.rand(), torch.rand(3).tolist(), forked]


def test_the_same_seed_starts_the_same_streams(alone, tracker):
    first = draw(tracker)
    assert draw(tracker) != first
    assert draw(start_streams(alone, seed=5, activation_checkpointing={})) == first
    other = draw(start_streams(alone, seed=6, activation_checkpointing={}))
    assert not any(own == theirs for own, theirs in zip(first, other, strict=True))


def test_streams_go_on_where_they_were_saved(tracker, tmp_path):
    draw(tracker)
    torch.save(stream_states(), tmp_path / "rng.pt")
    expected = [draw(tracker), draw(tracker)]
    restore_streams(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert [draw(tracker), draw(tracker)] == expected


def test_saved_states_stay_as_they_are(tracker):
    states = stream_states()
    first = draw(tracker)
    for _ in range(2):
        restore_streams(states)
        assert draw(tracker) == first


def test_the_tensor_parallel_stream_leaves_the_ordinary_one_alone(tracker):
    states = stream_states()
    expected = torch.rand(3)
    restore_streams(states)
    with tracker.fork():
        assert not torch.equal(torch.rand(3), expected)
    assert torch.equal(torch.rand(3), expected)
