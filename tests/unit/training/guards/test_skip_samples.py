"""Iterations that are passed over, and the stream of data behind them."""

from dataclasses import replace

import pytest
from tiny import tiny_plan

from megatron.checkpointing.train_state import TrainState
from megatron.training.guards.skip_samples import Skip
from megatron.training.guards.stop import Stop
from megatron.training.loop.batch_stream import Stream
from megatron.training.loop.loop import Schedule, train

RANGES = ((1, 1), (4, 6), (7, 7), (11, 40))


class Engine:
    """Remembers which sample each step began with."""

    loss_scale, skipped_steps, grad_norm = 1.0, 0, None

    def __init__(self):
        self.taken = []

    def set_lr(self, lr):
        pass

    def set_weight_decay(self, decay):
        pass

    def set_global_batch_size(self, samples):
        self.size = samples

    def set_seq_length(self, tokens):
        pass

    def train_batch(self, batches):
        samples = [next(batches) for _ in range(self.size)]
        self.taken.append(samples[0])
        return 1.0


def growing(samples):
    return 2 if samples < 8 else 3


def run(state, ranges=RANGES, train_iters=12):
    engine = Engine()
    stream = Stream(lambda samples: iter(range(samples, 1000)), state.samples)
    plan = replace(tiny_plan().training, train_iters=train_iters)
    train(
        engine,
        stream,
        schedule=Schedule(
            lr=lambda state: 0.0,
            weight_decay=lambda samples: 0.0,
            batch_size=growing,
            seq_length=lambda iteration: 5,
        ),
        state=state,
        hooks=[Skip(ranges, train_iters=train_iters, batch_size=growing, stream=stream)],
        stop=Stop(plan, started_from=state.iteration),
    )
    return engine.taken


def test_samples_of_skipped_iterations_are_consumed_and_not_trained_on(messages):
    state = TrainState()
    taken = run(state)
    # Steps 2, 3, 8, 9 and 10, each where a run without skips would be.
    whole = run(TrainState(), ranges=())
    assert taken == [whole[i - 1] for i in (2, 3, 8, 9, 10)]
    assert (state.iteration, state.samples) == (12, 8 + 8 * 3)
    assert state.tokens == 5 * (2 + 2 + 3 + 3 + 3)
    assert messages == [
        f"Skipped iterations {a} to {b} due to --skip-train-iteration-range flag."
        for a, b in ((1, 1), (4, 6), (7, 7), (11, 12))
    ]


@pytest.mark.parametrize("stopped_at", [1, 3, 6, 9])
def test_a_run_that_stops_and_goes_on_skips_the_same(stopped_at):
    state = TrainState()
    first = run(state, train_iters=stopped_at)
    assert first + run(state) == run(TrainState())


def test_a_run_resumed_within_a_range_passes_over_the_rest(messages):
    state = TrainState(iteration=4, samples=8)
    taken = run(state, ranges=((4, 6),), train_iters=8)
    assert taken == [14, 17]
    assert "iterations 5 to 6 " in messages[0]


def test_a_spike_whose_range_ends_beyond_the_run_is_passed_over_by_a_longer_one(messages):
    state = TrainState()
    state.spikes = ((3, 9),)
    assert run(state, ranges=(), train_iters=8) == [0, 2]
    assert state.iteration == 8
    assert "Skipped iterations 3 to 8 due to --spike-policy flag." in messages
    went_on = run(state, ranges=(), train_iters=12)
    whole = run(TrainState(), ranges=())
    assert went_on == whole[9:]
    assert "Skipped iterations 9 to 9 due to --spike-policy flag." in messages
